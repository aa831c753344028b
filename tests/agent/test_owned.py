"""A model that fits into no worker whole: the manager has each keep the layers of its own stages only."""

import os
import signal
from pathlib import Path

import pytest
from crews import Crew, played_alone, until
from managed import Managed

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

WIDE = Path(__file__).with_name("wide.py")
STEPS, HELD_AT = 30, 10
PATIENCE_S = 120.0


def test_a_newcomer_trains_with_the_rate_that_the_script_has_set(
    crew: Crew, tmp_path: Path
) -> None:
    """Its layers come in the middle of a step, for which the script has set the learning rate already."""
    alone = played_alone(WIDE, tmp_path / "alone" / "out.pt", str(STEPS))
    out = tmp_path / "out.pt"
    crew.depth, crew.owned = 2, True
    workers = crew.begin(2, WIDE.read_text(), str(STEPS), str(out))
    for step, gone in ((7, workers[1]), (14, workers[0])):
        crew.reach(step)
        crew.kill(gone)
        crew.start(1)
    assert crew.completed().step == STEPS
    assert set(crew.printed()) <= set(alone[0])
    assert out.read_bytes() == alone[1]


def test_the_manager_has_workers_keep_their_own_stages_where_the_whole_does_not_fit(
    tight: Managed, tmp_path: Path
) -> None:
    """Three workers, one is lost: the rest are a chain that keeps half each, and end with the bits of one process."""
    alone = played_alone(WIDE, tmp_path / "alone" / "out.pt", str(STEPS))
    out, hold = tmp_path / "out.pt", tmp_path / "out.pt.hold"
    hold.write_text(str(HELD_AT))
    tight.submit(WIDE.read_text(), str(STEPS), str(out), slots_min=2, slots_max=3)
    job = until("a measured job", lambda: _measured(tight), PATIENCE_S)
    assert job.layouts.profile.memory_bytes == tight.kind.memory_bytes
    until("the held step", lambda: tight.managed_job.progress.step >= HELD_AT, PATIENCE_S)
    os.kill(tight.pids[job.layouts.current.workers[1]], signal.SIGKILL)
    until("owned stages", lambda: tight.layouts[-1].layout.owned, PATIENCE_S)
    assert tight.layouts[-1].layout.depth > 1
    assert "each keeps its own stages only" in tight.layouts[-1].because
    hold.unlink()
    until("the end", lambda: tight.managed_job.status == "SUCCEEDED", PATIENCE_S)
    printed = tight.printed()
    assert printed == alone[0]
    assert out.read_bytes() == alone[1]


def _measured(crew: Managed):
    job = crew.managed_job
    return job if job.layouts.profile is not None and job.layouts.current is not None else None
