"""Gradients that are exchanged in bfloat16: a job ends with the bits of one process, whatever happens to its workers."""

from pathlib import Path

import pytest
from crews import Crew, ends_alike, played_alone
from deep_toy import Tied

from agent.messages import WorkerReady

pytestmark = pytest.mark.processes

STEPS = 20
TOY = Path(__file__).with_name("deep_toy.py").read_text()
SCRIPT = TOY.replace("=MICROBATCHES)", '=MICROBATCHES, exchange="bfloat16")')
TEXTS = {"exact": TOY, "alone": SCRIPT}


def by_itself(folder: Path, text: str) -> tuple[list[str], bytes]:
    folder.mkdir()
    (folder / "train.py").write_text(text)
    return played_alone(folder / "train.py", folder / "out.pt", str(STEPS))


def test_kills_newcomers_and_stages_change_no_bit(crew: Crew, tmp_path: Path) -> None:
    """Three workers, then two, then chains that keep their own layers; all are killed, and what they
    had is made again from the keeper's sums, which are of the same format."""
    exact, alone = (by_itself(tmp_path / name, text) for name, text in TEXTS.items())
    assert exact[1] != alone[1], "a process alone rounds as well"
    crew.depth, crew.owned = 1, True
    arguments = (str(STEPS), str(crew.folder / "out.pt"))
    workers = crew.begin(3, SCRIPT, *arguments, backup_every_steps=4)
    crew.reach(3)
    crew.settle = 1
    crew.kill(workers[1])
    crew.start(2)
    crew.reach(6)
    size = sum(param.nbytes for param in Tied().parameters())
    assert crew.keeper._jobs["job"].vault.sum_bytes < 0.75 * size
    crew.shape(2, "now")
    crew.reach(10)
    assert crew.keeper._jobs["job"].vault.redo[-1].present.endswith(b"\0bfloat16")
    crew.kill(*crew.ready)
    crew.start(2)
    ends_alike(crew, alone, STEPS)
    assert {ready.exchange for ready in crew.of(WorkerReady)} == {"bfloat16"}
