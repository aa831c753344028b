"""Each kind of script as a job: a worker joins, one is killed, then all are; the bits are those of one process.

Steps are held by a file, so that every event falls between two known steps, however fast a machine is.
"""

import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from crews import Crew, until
from kinds import KINDS, PLAYED, Player, port

from agent.messages import WorkerFailed

pytestmark = pytest.mark.processes

# Before the script: its loss functions wait from the place on that a file names, and say that they do. Not outside of
# session.backward: a worker gives its state to others there. It hears of another layout between two microbatches.
HELD = """
import os as _os, pathlib as _pathlib, time as _time
from agent.session import Session as _Session
_hold, _backward = _pathlib.Path({hold!r}), _Session.backward
def _held(self, loss_of, *batch, **options):
    def waits(*parts):
        if self.{place} >= int(_hold.read_text()):
            _hold.with_name(f"{{self.{place}}}.{{_os.getpid()}}").touch()
        while self.{place} >= int(_hold.read_text()):
            self._world.check()
            _time.sleep(0.005)
        return loss_of(*parts)
    return _backward(self, waits, *batch, **options)
_Session.backward = _held
"""
# After it: what is registered, from the worker that leads.
KEPT = """
import os as _os, torch as _torch
from agent.session import made as _made
def _kept(session, path):
    objects = session.replica.objects.items()
    modules = {{key: thing.state_dict() for key, thing in objects if isinstance(thing, _torch.nn.Module)}}
    _torch.save({{**modules, "state": dict(session.state)}}, path + ".part")
    _os.replace(path + ".part", path)
if _made()[0].leader:
    _kept(_made()[0], {out!r})
"""
RELEASED = 1 << 30
ENOUGH_S = 0.3  # of rest, after which a worker that joins waits for one more step


def has_work(pid: int) -> bool:
    """Return whether a thread of a process runs, or would if it had a processor."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            if stat.read_text().rpartition(")")[2].split()[0] in "RD":
                return True
    return False


class Held:
    """A job whose script waits where it is told to: in a step, or in a phase of one."""

    def __init__(self, crew: Crew, source: str, place: str = "step") -> None:
        self.crew, self.hold, self.out = crew, crew.folder / "hold", crew.folder / "out.pt"
        self.step = 0
        self._source = HELD.format(hold=str(self.hold), place=place) + source
        self._source += KEPT.format(out=str(self.out))

    def begin(self, step: int) -> str:
        self._until(step)
        (first,) = self.crew.begin(1, self._source, backup_every_steps=2)
        self._waits(first)
        return first

    def go(self, *workers: str, steps: int = 1) -> None:
        """Do so many steps, until these wait for the next."""
        self._until(self.step + steps)
        self._waits(*workers)

    def release(self) -> None:
        self._until(RELEASED)

    def joins(self, *inside: str) -> list[str]:
        """Start another; those inside go on step by step until there is one that it can prove."""
        workers = self.crew.start(1)
        members = self.crew.keeper._jobs["job"].roster.members
        for worker in workers:
            self._well(lambda worker=worker: worker in members and members[worker].ready, worker)
        while not self._ready(workers) and inside:
            self.go(*inside)
            self._rest(workers)
        self._well(lambda: self._ready(workers), f"{workers} to be ready")
        return workers

    def _rest(self, workers: list[str]) -> None:
        """Wait until they are ready, or have had nothing to do for a while: then they need a step."""
        busy_s = time.monotonic()

        def rests() -> bool:
            nonlocal busy_s
            if any(has_work(self.crew.pids[worker]) for worker in workers):
                busy_s = time.monotonic()
            return self._ready(workers) or time.monotonic() > busy_s + ENOUGH_S

        self._well(rests, f"{workers} to be ready or at rest")

    def _ready(self, workers: list[str]) -> bool:
        """Return whether they are ready, and the layout that has them was asked for."""
        with self.crew._lock:
            return {*workers} <= {*self.crew.ready}

    def _until(self, step: int) -> None:
        """Steps from this one on wait."""
        part = self.hold.with_name("hold.part")
        part.write_text(str(step))
        part.replace(self.hold)
        self.step = step

    def _waits(self, *workers: str) -> None:
        for worker in workers:
            here = self.hold.with_name(f"{self.step}.{self.crew.pids[worker]}")
            self._well(here.exists, f"{worker} in step {self.step}")

    def _well(self, look: Callable[[], object], what: str) -> None:
        def well() -> object:
            failed = self.crew.of(WorkerFailed)
            assert not failed, failed[0].detail
            return look()

        until(what, well)


@pytest.mark.parametrize("kind", PLAYED)
def test_a_port_is_elastic(kind, crew, player, tmp_path):
    ends_alike(port(kind), crew, player, tmp_path, KINDS[kind].counts)


def test_a_replacement_finds_the_job_in_a_later_epoch(crew, player, tmp_path):
    """All are lost at the end of the first epoch: what they prove lies in it, and what is to do lies behind."""
    source = port("early_stopping").replace("batch_size=8", "batch_size=16")
    ends_alike(source, crew, player, tmp_path)


def test_a_replacement_that_proves_the_first_step_of_an_epoch_begins_it_again(
    crew, player, tmp_path
):
    """It goes back to the state before that step, which is from before `model.train()` and the like. It ends the epoch on
    what it had until then, where the code at an epoch's end finds what the steps have made."""
    done, ends = "        optimizer.step()\n", "    model.eval()\n"
    source = port("unfreezing").replace(
        done, f"{done}        session.state[str(epoch)] = loss.loss\n"
    )
    source = source.replace(ends, f"{ends}    session.state[str(epoch)]\n")
    ends_alike(source, crew, player, tmp_path, begin=5)


STAGES = """
import torch
from orchestrator import Session

model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
optimizer = torch.optim.Adam(model.parameters())
session = Session(model, optimizer, microbatches=4)
data = session.data([torch.full((8,), float(at)) for at in range(32)], batch_size=8)
for epoch in session.epochs(6):
    for batch in data:
        session.backward(lambda x: model(x).square().mean(), batch)
        optimizer.step()
        optimizer.zero_grad()
        session.state[str(epoch)] = True
    session.state[str(epoch)]
"""


@pytest.mark.parametrize("lost_at", [9, 10])
def test_replacements_that_keep_their_own_stages_begin_an_epoch_again(crew, lost_at):
    """All are lost shortly after its first step, which the next ones prove; of the whole state they get little back."""
    crew.depth, crew.owned = 2, True
    job = Held(crew, STAGES)
    job._until(lost_at)
    workers = crew.begin(2, job._source, backup_every_steps=2)
    job._waits(workers[0])
    crew.kill(*workers)
    until("the loss", lambda: not crew.ready)
    crew.start(2)
    job.release()
    crew.completed()


def test_a_replacement_that_proves_the_last_step_of_a_loop_stays_in_it(crew, player, tmp_path):
    """It goes back to the state before that step, which no later loop of the script can do again."""
    source = port("pretrained").replace("batch_size=32", "batch_size=14")
    ends_alike(source, crew, player, tmp_path, begin=3)


def test_a_gan_survives_losses_in_any_phase(crew, player, tmp_path):
    """Two networks of one module list, three backward calls a step, and a loss in phase after phase."""
    source, draw = port("gan_parts"), random.Random(3)
    alone = player.play(source, tmp_path / "alone")
    job = Held(crew, source, place="replica.version")
    workers = [job.begin(4)]
    for lost in ("one", "all", "one", "one", "all", "one"):
        while len(workers) < 2:
            workers += job.joins(*workers)
        job.go(*workers, steps=draw.randrange(1, 4))
        gone = workers if lost == "all" else [draw.choice(workers)]
        for worker in gone:
            crew.kill(worker)
        until("the loss", lambda gone=gone: not {*gone} & {*crew.ready})
        workers = [worker for worker in workers if worker not in gone]
        if lost == "one":
            job.go(*workers, steps=draw.randrange(1, 3))
    job.release()
    crew.completed()
    torch.testing.assert_close(
        torch.load(job.out, weights_only=False), alone["registered"], rtol=0.0, atol=0.0
    )


def test_a_gan_whose_leader_alone_draws_samples_is_stopped(crew):
    """A forward in train mode moves the averages of a batch norm, here on one worker only."""
    step = "        opt_g.step()\n"
    alone = f"{step}        if session.leader:\n            nets[0](noise(4))\n"
    job = Held(crew, port("gan_parts").replace(step, alone))
    first = job.begin(2)
    with pytest.raises(AssertionError, match="the state of layer 0 is another on w2 than on w1"):
        job.joins(first)


def test_a_worker_that_cannot_come_to_where_the_job_is_ends_it_with_the_reason(crew):
    """Else each that is bought would be lost alike, and none would ever join."""
    between = "for p in net.decoder.parameters():\n"
    job = Held(crew, port("pretrained").replace(between, f"print(loss)\n{between}"))
    first = job.begin(7)
    with pytest.raises(
        AssertionError, match=r"'loss' is not defined\n.*belongs into session.state"
    ):
        job.joins(first)


def ends_alike(
    source: str, crew: Crew, player: Player, tmp_path: Path, counts: str = "step", begin: int = 2
) -> None:
    """From one worker to two, to the newcomer alone, to nobody, to another."""
    alone = player.play(source, tmp_path / "alone")
    job = Held(crew, source, counts)
    first = job.begin(begin)
    (second,) = job.joins(first)
    job.go(first, second)
    crew.kill(first)
    until("the loss", lambda: first not in crew.ready)
    job.go(second, steps=2)
    crew.kill(second)
    until("the loss of all", lambda: not crew.ready)
    job.joins()
    job.release()
    crew.completed()
    ended = torch.load(job.out, weights_only=False)
    torch.testing.assert_close(ended, alone["registered"], rtol=0.0, atol=0.0, equal_nan=True)
