"""Workers come, go and die; the losses and the weights are those of an undisturbed run."""

import random
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
from crews import Crew, ends_alike, held_back, played_alone, seeds, until

from agent.keeper.layouts import RECONNECT_S
from agent.keeper.roster import SILENT_S
from agent.keys import OPEN_JOBS
from agent.messages import (
    CheckpointCopied,
    CheckpointFailed,
    CheckpointWritten,
    JobCompleted,
    Recalled,
    Regrouped,
    Rewound,
    WorkerLost,
    WorkerReady,
)

pytestmark = pytest.mark.processes

TOY = Path(__file__).with_name("toy.py")
STEPS = 36


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes]:
    """What the script prints and saves alone, without any manager."""
    return played_alone(TOY, tmp_path_factory.mktemp("alone") / "out.pt", str(STEPS), "0")


def begin(crew: Crew, count: int, pause_s: float = 0.008, **options: object) -> list[str]:
    arguments = (str(STEPS), str(pause_s), str(crew.folder / "out.pt"))
    return crew.begin(count, TOY.read_text(), *arguments, **options)


def test_job_with_one_worker_left_goes_on(crew: Crew, alone: tuple[list[str], bytes]) -> None:
    """A worker is killed by SIGKILL, and the others commit on; then two of three go at once, and the last has it all."""
    with held_back(crew, STEPS - 2):
        first, second, third, _ = begin(crew, 4)
        crew.reach(8)
        crew.kill(first)
        until("the loss", lambda: crew.of(WorkerLost))
        crew.reach(min(crew.step + 4, STEPS - 2))
        crew.kill(second, third)
    ends_alike(crew, alone, STEPS)
    lost = [(lost.worker, lost.cause) for lost in crew.of(WorkerLost)]
    assert lost[0] == (first, "connection")
    assert {worker for worker, _ in lost[1:]} == {second, third}
    assert len(crew.of(Regrouped)) >= 3


def test_job_without_workers_goes_on_with_new_ones(
    crew: Crew, alone: tuple[list[str], bytes]
) -> None:
    """Nobody is left: newcomers load the keeper's backup and apply the logged sums again. They are killed while they
    do, too, and before the first backup could grow old."""
    workers = begin(crew, 2, backup_every_steps=7)
    for step in (1, 9, 10, 17, 26):
        crew.reach(step)
        crew.kill(*workers)
        workers = crew.start(2)
    ends_alike(crew, alone, STEPS)


def test_who_holds_the_state_is_lost_outside_the_layout(
    crew: Crew, alone: tuple[list[str], bytes]
) -> None:
    """The manager knows of a loss before the keeper, which still asks the lost one to hand its state over.

    Whoever waits for that state hears nothing of the loss by itself: the manager is told to ask again.
    """
    (first,) = begin(crew, 1)
    crew.reach(8)
    with crew.on_hold():
        crew.start(2)
        until("two newcomers", lambda: len(crew.ready) == 3)
        crew.kill(first, how=signal.SIGSTOP)
        crew.ready.remove(first)
    ends_alike(crew, alone, STEPS)
    assert [(lost.worker, lost.owed_state) for lost in crew.of(WorkerLost)] == [(first, True)]


def test_joins_and_leaves_every_few_steps(crew: Crew, alone: tuple[list[str], bytes]) -> None:
    """Planned changes at step boundaries, by which nobody is interrupted."""
    hold = crew.folder / "out.pt.hold"
    hold.write_text("4")
    workers = begin(crew, 2)
    while (step := int(hold.read_text())) < 28:
        crew.reach(step)
        (newcomer,) = crew.start(1)
        crew.let_in(hold, newcomer)
        workers.append(newcomer)
        crew.hold(hold, int(hold.read_text()) + 2)
        if len(workers) > 3:
            crew.leave(workers.pop(0))
    hold.unlink()
    ends_alike(crew, alone, STEPS)
    assert crew.of(WorkerLost) == []


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_chaos(crew: Crew, alone: tuple[list[str], bytes], seed: int) -> None:
    """Kills, stops, joins, leaves and exchanges, drawn from a seed, at any moment.

    Of some losses the keeper knows first, of others the manager.
    """
    dice = random.Random(seed)
    # Whoever leads and is killed behind the last step's commit saves nothing, and nobody does so again.
    (hold := crew.folder / "out.pt.hold").write_text(str(STEPS - 1))
    workers = begin(crew, 3, backup_every_steps=dice.randint(2, 12))
    at = 0
    while (at := max(at, crew.step) + dice.randint(1, 6)) < STEPS - 2:
        crew.reach(at)
        crew.settle = 1
        what = dice.choice(["kill", "kill", "stop", "known", "exchange", "join", "leave", "all"])
        inside = [w for w in crew.ready if w in workers]
        if what == "all":
            crew.kill(*workers)
            workers = crew.start(dice.randint(1, 3))
        elif what == "exchange":
            workers = exchange(crew, dice, workers)
        elif what == "join" or len(inside) < 2:
            workers += crew.start(1)
        elif what == "leave":
            crew.leave(inside[0])
            workers.remove(inside[0])
        else:
            victim = dice.choice(inside)
            workers.remove(victim)
            if what == "known":
                with crew.on_hold():
                    crew.ready.remove(victim)
            crew.kill(victim, how=signal.SIGSTOP if what == "stop" else signal.SIGKILL)
    hold.unlink()
    ends_alike(crew, alone, STEPS)


def exchange(crew: Crew, dice: random.Random, workers: list[str]) -> list[str]:
    """Newcomers take the place of all others, who are killed or stopped while they hand over the state."""
    with crew.on_hold():
        newcomers = crew.start(dice.randint(1, 2))
        until("newcomers", lambda: set(newcomers) <= set(crew.ready) or crew.of(JobCompleted))
        crew.ready[:] = [worker for worker in crew.ready if worker in newcomers]
    for worker in workers:
        crew.kill(worker, how=dice.choice([signal.SIGKILL, signal.SIGSTOP]))
    return newcomers


def test_the_keeper_is_killed_and_then_with_a_worker(
    mortal: Crew, alone: tuple[list[str], bytes]
) -> None:
    """The workers hold the state; a new keeper at the same address carries on with them. Who does not come back to it is
    lost; those who do hold everything."""
    first, *_ = begin(mortal, 3)
    for step in (5, 13):
        mortal.reach(step)
        mortal.keeper.kill()
        mortal.keeper.start()
    mortal.reach(22)
    assert mortal.of(WorkerLost) == []
    mortal.keeper.kill()
    mortal.kill(first)
    mortal.keeper.start()
    ends_alike(mortal, alone, STEPS)
    lost = mortal.of(WorkerLost)
    assert [each.worker for each in lost] == [first], lost


def test_a_worker_that_comes_late_to_a_restarted_keeper_is_waited_for(
    mortal: Crew, alone: tuple[list[str], bytes]
) -> None:
    """It stands still for longer than workers usually take. The others, whose connections to it hold, have come."""
    late, *_ = begin(mortal, 3)
    mortal.reach(12)
    mortal.keeper.kill()
    mortal.kill(late, how=signal.SIGSTOP)
    mortal.keeper.start()
    back_s = time.monotonic() + 2 * RECONNECT_S
    until("its time to be over", lambda: time.monotonic() >= back_s)
    mortal.kill(late, how=signal.SIGCONT)
    ends_alike(mortal, alone, STEPS)
    assert mortal.of(WorkerLost) == []


def test_keeper_and_all_workers_are_killed(mortal: Crew, alone: tuple[list[str], bytes]) -> None:
    """Only the disk is left: the job goes back to its checkpoint, says so, and ends with the same bits."""
    workers = begin(mortal, 2, backup_every_steps=5)
    mortal.reach(12)
    mortal.keeper.write_checkpoint("job")
    saved = until("the checkpoint", lambda: mortal.of(CheckpointWritten))[0]
    assert saved.step >= 11  # Redis has a commit a moment before the keeper goes on
    mortal.reach(saved.step + 6)
    mortal.keeper.kill()
    mortal.kill(*workers)
    committed = mortal.step
    mortal.keeper.start()
    mortal.start(2)
    done = mortal.completed()
    (rewound,) = mortal.of(Rewound)
    assert (rewound.from_step, rewound.to_step) == (committed, saved.step)
    assert done.step == STEPS
    assert (mortal.folder / "out.pt").read_bytes() == alone[1]


def test_the_disk_is_lost_with_the_keeper_and_all_workers(
    mortal: Crew, alone: tuple[list[str], bytes]
) -> None:
    """Only the copy elsewhere is left: the job goes on from it, says so, and ends with the same bits."""
    workers = begin(mortal, 2, backup_every_steps=5, checkpoint_every_s=0.2)
    until("a copy", lambda: [copy for copy in mortal.of(CheckpointCopied) if copy.step >= 10])
    mortal.keeper.kill()
    mortal.kill(*workers)
    shutil.rmtree(mortal.folder / "checkpoints")
    committed = mortal.step
    mortal.keeper.start()
    mortal.start(2)
    mortal.completed()
    (recalled,) = mortal.of(Recalled)
    assert "from object storage" in recalled.because
    assert recalled.step in {copy.step for copy in mortal.of(CheckpointCopied)}
    again = [(each.from_step, each.to_step) for each in mortal.of(Rewound)]
    assert again == [(committed, recalled.step)] * (recalled.step < committed)
    assert (mortal.folder / "out.pt").read_bytes() == alone[1]


def test_redis_is_killed(crew: Crew, alone: tuple[list[str], bytes]) -> None:
    """Commits wait for Redis; when it is back, every acknowledged one is there. However long that takes: the worker whose
    word is waited with is not silent, though nobody listens to it meanwhile."""
    begin(crew, 2)
    for step, away_s in ((6, 0.0), (16, 2 * SILENT_S)):
        crew.reach(step)
        crew.redis.kill()
        back_s = time.monotonic() + away_s
        until("it to be back", lambda back_s=back_s: time.monotonic() >= back_s)
        crew.redis.start()
        assert crew.step >= step
    ends_alike(crew, alone, STEPS)
    assert crew.of(WorkerLost) == []


def test_the_disk_is_full(mortal: Crew, alone: tuple[list[str], bytes]) -> None:
    """A checkpoint that does not fit is reported, training goes on, and the next one is tried."""
    pid = mortal.keeper.process.pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
    begin(mortal, 2, backup_every_steps=3, checkpoint_every_s=0.1)
    failed = until("the failure", lambda: mortal.of(CheckpointFailed))[0]
    assert "File too large" in failed.error
    mortal.reach(failed.step + 3)
    folder = mortal.folder / "checkpoints" / "job"
    until("nothing half-written to be left", lambda: not list(folder.glob("parts/*")))
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    until("a checkpoint", lambda: mortal.of(CheckpointWritten))
    ends_alike(mortal, alone, STEPS)


def test_a_job_is_closed_whose_result_does_not_fit_on_the_disk(
    mortal: Crew, alone: tuple[list[str], bytes]
) -> None:
    """All its steps are committed, and the keeper alone holds what they led to: it keeps it, and once there is
    room the job that was opened again ends with it."""
    pid = mortal.keeper.process.pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
    begin(mortal, 1, pause_s=0.0)
    until("the result", lambda: [it for it in mortal.of(CheckpointFailed) if it.step == STEPS])
    mortal.keeper.close_job("job")
    until("the close", lambda: not mortal.client.exists(OPEN_JOBS))
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    mortal.ready.clear()
    begin(mortal, 1, pause_s=0.0)
    ends_alike(mortal, alone, STEPS)


def test_a_job_is_closed_and_opened_again(crew: Crew, alone: tuple[list[str], bytes]) -> None:
    """What was committed before the end is on the disk, so that a resumed job loses nothing."""
    begin(crew, 2, backup_every_steps=8)
    crew.reach(13)
    committed = crew.close_job()
    begin(crew, 2)
    crew.reach(committed + 1)
    ends_alike(crew, alone, STEPS)
    assert len({ready.worker for ready in crew.of(WorkerReady)}) == 4
