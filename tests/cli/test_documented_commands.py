"""Every command line that README.md and docs/tutorial.md show is typed here, and works."""

import re
import shlex
import signal
from pathlib import Path

import msgspec
import pytest
from test_cli_docs import ROOT, typed_in_blocks
from test_left_behind import version
from test_plan import measured

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

DOCUMENTS = ("README.md", "docs/tutorial.md")
SCRIPT, WAITS = "train.py", "print('wait')\n"
# A person waits minutes for a month of a thousand machines; two hours of five show the same.
SHORTER = {"--days 30 --instances 1000": "--days 0.1 --instances 5"}
# Sentences name these, and have a line with what they need elsewhere.
NAMED = ("orchestrator plan", "orchestrator tools simulate")
# A job of the played machines stores nothing, so what another goes on from is made by hand.
STORED = "train-stored"


def lines(document: str) -> list[str]:
    """What a person would type: the lines of blocks, and what stands between backticks."""
    text = (ROOT / document).read_text()
    between = [" ".join(each.split()) for each in re.findall(r"`(orchestrator [^`]*)`", text)]
    every = [line.partition(" #")[0].rstrip() for line in typed_in_blocks(text) + between]
    return [line for line in every if line not in NAMED]


def words(line: str) -> list[str]:
    for long, short in SHORTER.items():
        line = line.replace(long, short)
    line = line.replace("checkpoints/JOB", f"checkpoints/{STORED}")
    return shlex.split(line.replace("$PWD", str(Path.cwd())))[1:]


def rank(line: str) -> int:
    """In which order: what looks ahead, what trains, what looks at it, what disturbs it, the end."""
    for place, kinds in enumerate(
        (
            ("init", "check", "up"),
            ("submit", "rehearse"),
            ("tools profile",),
            ("plan",),
            (),
            ("tools drill",),
            ("cancel",),
            ("resume",),
            ("down",),
        )
    ):
        if line.startswith(tuple(f"orchestrator {kind}" for kind in kinds)):
            return place
    return 4


def test_every_line_that_the_documents_show_works(own_house, until, monkeypatch):
    """One house for all of them, and for what takes machines away a job that still trains."""
    monkeypatch.chdir(own_house.folder)
    (script,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/tutorial.md").read_text(), re.DOTALL
    )
    for place in (Path(SCRIPT), Path("src") / SCRIPT, Path("mypackage") / SCRIPT):
        place.parent.mkdir(exist_ok=True)
        place.write_text(script)
    for place in (Path("conf/a.yaml"), Path("data/a.csv")):
        place.parent.mkdir()
        place.write_text("1\n")
    version(own_house.places.checkpoints, 20, job=STORED)
    every = dict.fromkeys(line for document in DOCUMENTS for line in lines(document))
    assert len(every) > 25
    taken: set[str] = set()
    for line in sorted(every, key=rank):
        if rank(line) == 2:
            job = own_house("submit", SCRIPT, "--follow", "--json").json["id"]
            profile = msgspec.json.encode(measured(memory=2000.0))
            own_house.client()._redis.set(f"orch:job:profile:{job}", profile)
        if rank(line) == 5:
            another_is_held(own_house, until, taken)
        if "--watch" in line:
            watched(own_house, words(line))
            continue
        drills = rank(line) == 5  # whose document names the machines
        answer = own_house(*words(line), *(("--json",) if drills else ()))
        assert answer.code == 0, f"{line}: {answer.err or answer.out}"
        taken |= set(answer.json["machines"]) if drills else set()
        assert "Traceback" not in answer.out + answer.err, line


def another_is_held(house, until, taken: set[str]) -> None:
    """A job trains, on a machine that no drill before has taken."""
    if not any(job.ended_at_s is None for job in house.client().view().jobs):
        house.script("wait.py", WAITS)
        assert house("submit", "wait.py", "--json").code == 0
    until(
        lambda: {one.id for one in house.client().view().machines if one.state == "ready"} - taken
    )


def watched(house, typed: list[str]) -> None:
    """Redrawn until Ctrl-C, which is how a person ends it."""
    process = house.start(*typed)
    assert process.stdout.readline() != ""
    process.send_signal(signal.SIGINT)
    assert house.ended(process).code == 130
