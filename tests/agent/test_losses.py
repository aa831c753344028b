"""Workers come, go and die; the losses and the weights are those of an undisturbed run."""

import subprocess
import sys
from pathlib import Path

import pytest
from crews import Crew

from agent.messages import Regrouped, WorkerLost

pytestmark = pytest.mark.processes

TOY = Path(__file__).with_name("toy.py")


def undisturbed(steps: int, out: Path) -> list[str]:
    """What the script prints alone, without any manager."""
    out.parent.mkdir()
    done = subprocess.run(
        [sys.executable, str(TOY), str(steps), "0", str(out)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_one_of_three_is_killed(crew: Crew, tmp_path: Path) -> None:
    """A worker is killed by SIGKILL; the others commit on, and nothing differs from a run alone."""
    first, *_ = crew.begin(3, TOY.read_text(), "30", "0.005", str(tmp_path / "out.pt"))
    crew.reach(8)
    crew.kill(first)
    crew.completed()
    lost = crew.of(WorkerLost)
    assert [report.worker for report in lost] == [first]
    assert crew.of(Regrouped)
    assert (tmp_path / "out.pt").exists()
    alone = undisturbed(30, tmp_path / "alone" / "out.pt")
    assert set(crew.printed()) <= set(alone)
    assert (tmp_path / "out.pt").read_bytes() == (tmp_path / "alone" / "out.pt").read_bytes()
