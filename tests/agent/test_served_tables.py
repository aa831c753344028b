"""Jobs whose tables are served: machines go, the keeper goes, and every rating counts once in every clock."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import served_toy
from crews import Crew, until
from managed import Managed

from agent.messages import (
    CheckpointCopied,
    CheckpointFailed,
    JobCompleted,
    NoticeSeen,
    Paced,
    Progress,
    Recalled,
    Rewound,
    WorkerFailed,
    WorkerLost,
)
from agent.paramserver.live.node import GRAINS
from agent.store.archive import Archive
from agent.store.places.sinks import DiskSink
from cloud.model import Notice

pytestmark = pytest.mark.processes

TOY = Path(served_toy.__file__).read_text()
PAUSE = "0.01"


@pytest.fixture
def managed(redis_process, nursery, tmp_path):
    crew = Managed(redis_process, nursery, tmp_path, rethink_s=3600.0)
    yield crew
    crew.close()


def is_whole(done: JobCompleted, clocks: int) -> None:
    """Every rating counts once in every clock, and tables and objective are those of one process."""
    job = served_toy.job(clocks, 0.0)
    alone = job.run()
    with np.load(done.export_uri) as tables:
        counts = np.bincount(job.application.user, minlength=served_toy.USERS)
        assert (tables["seen"][:, 0] == clocks * counts).all()
        assert np.array_equal(tables["users"], alone.value("users"))
        assert np.array_equal(tables["items"], alone.value("items"))
    assert done.step == clocks
    assert done.loss == pytest.approx(alone.measures[-1] / served_toy.RATINGS, rel=1e-9)


def nodes(crew: Crew) -> set[str]:
    """The workers that take part now."""
    served = crew.keeper._jobs[crew.job]._served
    brain = served.tables.brain if served is not None else None
    return set() if brain is None or brain.begun_s is None else {*brain.nodes} - {"keeper"}


def test_a_warned_and_a_killed_machine_cost_no_rating(managed: Managed) -> None:
    """The manager buys, lays out and replaces as for any job; the keeper holds what is committed."""
    clocks = 60
    managed.submit(TOY, str(clocks), PAUSE, slots_max=3)
    until("three nodes", lambda: len(nodes(managed)) == 3)
    managed.reach(managed.step + 3)
    going = sorted(nodes(managed))[0]
    machine = managed.keeper._jobs[managed.job].roster.members[going].machine_id
    notice = Notice(machine_id=machine, kind="terminate", deadline_s=time.time() + 60)
    managed.keeper.report(NoticeSeen(at_s=time.time(), notice=notice))
    until("the warned one to have left", lambda: going not in nodes(managed))
    assert not managed.keeper._jobs[managed.job]._served.tables.brain.rolls
    managed.reach(managed.step + 3)
    managed.kill(sorted(nodes(managed))[0])
    managed.reach(managed.step + 3)
    is_whole(managed.completed(), clocks)
    assert not managed.of(Rewound)
    assert managed.managed_job.status == "SUCCEEDED", managed.managed_job.because


def test_what_a_grain_takes_is_told_of_every_worker(managed: Managed) -> None:
    """By it the manager learns how types of machines compare."""
    managed.submit(TOY, "100000", PAUSE, slots_max=2)
    until("a pace of both", lambda: [p for p in managed.of(Paced) if len(p.microbatch_s) == 2])
    told = managed.of(Paced)[-1]
    assert min(told.microbatch_s.values()) >= float(PAUSE) / GRAINS


def test_what_each_worker_prints_is_shown(crew: Crew) -> None:
    """A range is computed by one of them, and none leads."""
    at = "users, at_user ="
    script = "print('begun')\n" + TOY.replace(at, f"print('items', lo, 'to', hi)\n        {at}")
    crew.begin(2, script, "3", "0.0")
    crew.completed()
    ranges = {f"items {lo} to {lo + 25}" for lo in range(0, served_toy.RATINGS, 25)}
    until("a line of each range", lambda: {"begun", *ranges} <= set(crew.printed()))


LATE = """
        import agent.session
        if agent.session.world().node.post.name == "w1":
            time.sleep(3 * self.pause_s)
"""


def test_the_next_keeper_goes_on_from_what_the_disk_has(mortal: Crew) -> None:
    """The keeper is killed, and then all workers: newcomers go on from the newest clock on the disk.

    Before that one worker is late, and what it has given to the other is told with each clock.
    """
    clocks, at = 40, "time.sleep(self.pause_s)"
    workers = mortal.begin(2, TOY.replace(at, f"{at}{LATE}"), str(clocks), PAUSE)
    mortal.reach(8)
    said = mortal.of(Progress)[-1]
    assert 0 < said.given < said.computed
    mortal.keeper.kill()
    mortal.keeper.start()
    mortal.reach(mortal.step + 5)
    mortal.kill(*workers)
    mortal.start(2)
    is_whole(mortal.completed(), clocks)
    assert not mortal.of(Rewound)


def test_a_job_that_ends_before_a_worker_is_back_is_in_its_archive(mortal: Crew) -> None:
    """The keeper knows of tables by its workers; where it started again and none came, by the disk."""
    workers = mortal.begin(2, TOY, "1000", PAUSE)
    mortal.reach(6)
    mortal.keeper.kill()
    mortal.kill(*workers)
    mortal.keeper.start()
    step = mortal.close_job()
    archive = Archive(DiskSink(mortal.folder / "checkpoints" / mortal.job), mortal.job, ours=False)
    until("the last clock in the archive", lambda: archive.newest() is not None)
    assert archive.newest().version >= step


def test_what_a_keeper_holds_outlives_its_folder(crew: Crew) -> None:
    """Taken away while the job runs, and again while no worker is left: the next clock is written anew."""
    clocks, folder = 40, crew.folder / "checkpoints" / crew.job / "tables"
    workers = crew.begin(2, TOY, str(clocks), PAUSE)
    crew.reach(6)
    folder.rename(crew.folder / "first")
    crew.reach(crew.step + 6)
    crew.kill(*workers)
    job = crew.keeper._jobs[crew.job]
    until("no worker to be left", lambda: not job.roster.members)
    tables = job._served.tables
    copies = tables._copies.server.replicas.values()
    until(
        "the clock to be on the disk",
        lambda: all(copy.committed == tables._reached.clock for copy in copies),
    )
    folder.rename(crew.folder / "second")
    crew.start(2)
    is_whole(crew.completed(), clocks)
    assert not crew.of(Rewound)


def test_a_disk_that_takes_no_clock_is_said_and_waited_for(crew: Crew) -> None:
    clocks, folder = 40, crew.folder / "checkpoints" / crew.job / "tables"
    crew.begin(2, TOY, str(clocks), PAUSE)
    crew.reach(6)
    folder.rename(crew.folder / "away")
    folder.touch()
    (failed,) = until("a word of it", lambda: crew.of(CheckpointFailed))
    assert str(folder) in failed.error
    folder.unlink()
    is_whole(crew.completed(), clocks)


CUT = """
import agent.session
cut = []
def cut_when(clock):
    post = agent.session.world().node.post
    if clock == 6 and post.name == "w1" and not cut:
        cut.extend(post._out.values())
        for outbox in cut:
            outbox._connection._sock.shutdown(2)
"""


def test_a_connection_that_breaks_between_two_that_live_costs_one_of_them(crew: Crew) -> None:
    """Both go on hearing the keeper, and neither can go on: one is lost, and the job ends whole."""
    clocks = 20
    at = "time.sleep(self.pause_s)"
    crew.begin(
        2,
        TOY.replace(at, f"{at}; cut_when(params.clock)").replace("USERS, ", f"{CUT}\nUSERS, ", 1),
        str(clocks),
        PAUSE,
    )
    is_whole(crew.completed(), clocks)
    (lost,) = crew.of(WorkerLost)
    assert lost.cause == "connection"
    assert "broke" in lost.detail


def test_a_worker_that_declares_other_data_is_named(crew: Crew, tmp_path: Path) -> None:
    """A file that is longer on one machine: its blocks would be other items, some of them twice."""
    first = f"""
try:
    open({str(tmp_path / "first")!r}, "x")
    RATINGS = 1200
except FileExistsError:
    RATINGS = 1201
"""
    script = TOY.replace("\n\ndef small", f"\n{first}\n\ndef small", 1)
    crew.begin(2, script, "1000", PAUSE)
    (failed,) = until("the failure", lambda: crew.of(WorkerFailed))
    assert failed.kind == "setup"
    assert "has other items than the first worker of the job" in failed.detail


def test_a_keeper_without_a_disk_goes_on_from_object_storage(mortal: Crew) -> None:
    """Keeper, workers and disk are lost; the next keeper finds the tables where other states are."""
    clocks = 60
    workers = mortal.begin(2, TOY, str(clocks), PAUSE, checkpoint_every_s=0.2)
    until("a copy", lambda: mortal.of(CheckpointCopied))
    mortal.keeper.kill()
    mortal.kill(*workers)
    shutil.rmtree(mortal.folder / "checkpoints")
    mortal.keeper.start()
    mortal.start(2)
    is_whole(mortal.completed(), clocks)
    assert "object storage" in mortal.of(Recalled)[0].because
