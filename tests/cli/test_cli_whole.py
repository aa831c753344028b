"""The whole product from the command line: a real house, real Ray nodes, a real script, real ends."""

import tempfile
from pathlib import Path

import pytest
from conftest import Shell

from orchestrator.supervisor import processes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

SCRIPT = """
import sys
import torch
from orchestrator import Session

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=2)
if "--raise" in sys.argv:
    raise ValueError("on purpose")
for step in session.steps(20):
    session.backward(lambda x: (model(x) - 1).square().mean(), [torch.ones(3, 4), torch.zeros(3, 4)])
    optimizer.step()
print("this was all")
"""


@pytest.fixture(scope="module")
def folder():
    """With a space and a letter that Ray does not take, and so short that only that is in the way."""
    with tempfile.TemporaryDirectory(prefix="\N{GREEK SMALL LETTER MU} ", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def real(folder):
    """`up`, and after the tests `down`: then nothing carries our mark any more."""
    shell = Shell(folder)
    shell.script("train.py", SCRIPT)
    try:
        assert shell.ended(shell.start("up", "--json")).json["was_up"] is False
        yield shell
        down = shell("down", "--json")
        assert (down.code, down.json["was_up"]) == (0, True)
        assert processes.marked(shell.places.identity) == []
        assert not shell.places.run.is_symlink()
    finally:
        processes.sweep(shell.places.identity)
        shell.close()


def test_a_real_script_is_trained_to_its_end(real):
    """Bought, booted, trained, given back: exit code 0, every step committed, the words in the log."""
    answer = real("submit", "train.py", "--follow", "--json", "--slots-max", "2")
    assert answer.code == 0, answer.out
    job = answer.json["job"]
    assert (job["status"], job["step"], job["steps_lost"]) == ("SUCCEEDED", 20, 0)
    assert "this was all" in real("logs", job["id"]).out
    assert real("cost", "--json").json["cost"]["spent_usd"] > 0


def test_a_real_script_that_raises_shows_its_own_traceback(real):
    """With the line of the script itself, and exit code 100."""
    answer = real("submit", "train.py", "--follow", "--slots-max", "1", "--", "--raise")
    assert answer.code == 100, answer.out
    assert 'raise ValueError("on purpose")\nValueError: on purpose\n' in answer.out
    assert "Traceback (most recent call last):" in answer.out


def test_a_real_script_of_several_files_is_trained(real):
    """Its modules go along, and what is named; the manager's own modules of such names are in nobody's way. What fails in
    another file is told by that file's name.
    """
    real.script("cloud.py")  # whatever lies beside the script
    (real.folder / "lib").mkdir()
    real.script(
        "lib/several.py",
        SCRIPT.replace("import sys", "import sys\nfrom wide import WIDTH\nWIDTH()"),
    )
    real.script("lib/wide.py", "def WIDTH():\n    assert open('conf.txt').read() == '7'\n")
    real.script("conf.txt", "7")
    answer = real("submit", "lib/several.py", "--with", "conf.*", "--follow", "--slots-max", "1")
    assert answer.code == 0, answer.out
    assert "goes along 2 files, " in answer.out
    answer = real("submit", "lib/several.py", "--follow", "--slots-max", "1")
    assert answer.code == 100, answer.out
    assert 'File "lib/wide.py", line 2, in WIDTH' in answer.out
