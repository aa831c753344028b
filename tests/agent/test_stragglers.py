"""One worker stutters: it gets fewer microbatches, is left out, is tried again, and the numbers never change."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from crews import Nursery, RedisProcess, until
from managed import Managed

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

STUTTER = Path(__file__).with_name("stutter.py")
STEPS, PAUSE_S = 100_000, 0.02  # it is looked at, not waited for
QUICK = {"doubt_s": 1.0, "ease_s": 3.0, "probe_s": 3.0, "morph_s": 0.01, "rethink_s": 3600.0}


@pytest.fixture
def managed(redis_process: RedisProcess, nursery: Nursery, tmp_path: Path) -> Iterator[Managed]:
    crew = Managed(redis_process, nursery, tmp_path, **QUICK)
    yield crew
    crew.close()


PATIENCE_S = 180.0  # with workers that wait for a core


def share_of(crew: Managed, worker: str) -> int | None:
    """Its microbatches in the layout that works; None if it is left out."""
    job = crew.managed_job
    if job.layouts.current is None or job.layouts.acknowledged != job.layouts.generation:
        return None
    return next((r.count for r in job.layouts.current.replicas if worker in r.workers), 0)


def test_a_stuttering_worker_gets_fewer_is_left_out_and_comes_back(
    managed: Managed, tmp_path: Path
) -> None:
    """Real workers under the manager's own decisions: three take 12 microbatches; one becomes four times, then
    thirty times as slow, then recovers. Every loss on the way is that of the script alone.
    """
    out = tmp_path / "out"
    slow_file = tmp_path / "out.slow"
    # A pipeline plays what was recorded of the loss, without its pauses.
    shape = {"slots_min": 2, "slots_max": 3, "depth": 1}
    managed.submit(STUTTER.read_text(), str(STEPS), str(PAUSE_S), str(out), **shape)
    until("three workers", lambda: _all_in(managed), PATIENCE_S)
    slow = managed.managed_job.layouts.current.workers[1]
    slow_file.write_text(f"{managed.pids[slow]} 4")
    until("fewer microbatches", lambda: share_of(managed, slow) in (1, 2), PATIENCE_S)
    slow_file.write_text(f"{managed.pids[slow]} 30")
    until("it is left out", lambda: share_of(managed, slow) == 0, PATIENCE_S)
    slow_file.unlink()
    until("it is back", lambda: (share_of(managed, slow) or 0) >= 3, PATIENCE_S)
    said = "\n".join(managed.sentences)
    assert f"{slow} takes" in said
    assert f"{slow} is left out" in said
    assert f"{slow} is tried again" in said
    _losses_are_those_alone(managed, out)


def _all_in(crew: Managed) -> bool:
    layout = crew.managed_job.layouts.current if crew.job in crew.state.jobs else None
    if layout is None or crew.managed_job.layouts.acknowledged != layout.generation:
        return False
    return len(layout.replicas) == 3


def _losses_are_those_alone(crew: Managed, out: Path) -> None:
    printed = crew.printed()
    alone = crew.nursery.play([str(STUTTER), str(len(printed)), "0", str(out)], out.parent)
    assert printed == alone.splitlines()
