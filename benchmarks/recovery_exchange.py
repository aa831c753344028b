"""How long from a SIGKILL in the middle of an exchange to the next committed step?

    python benchmarks/recovery_exchange.py [--kills 20] [--transports shm tcp nixl] [--mib 0.1 256] [--peer-kills 5]

Three workers exchange gradients of this size: through shared memory (`shm`), through sockets only (`tcp`), or through
NIXL as between hosts (`nixl`), where it has nothing but UCX's own sockets on loopback. With them are a keeper, Redis, and
this process as the manager. One of them is killed at a random moment between its first block and its last; the other two
go on. What is shown is the time from the kill to the next commit, beyond one undisturbed step. A newcomer then takes its
place.

Beside it the same step under torch's gloo, whose group is shrunk by making it anew: two processes see that the third is
gone, leave the group, meet again in one of two, which is prepared for them under a known name, and sum again. They hold
the state of the step, so nothing is loaded; nobody decides who is left, and no step is a transaction.
"""

import argparse
import contextlib
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
from _crew import Commits, Crew, crew_of, machine, spread, until
from injection import Line, Plan
from torch import distributed as dist

from agent.messages import Rewound, WorkerLost
from agent.store.memory import keep_memory

WORKERS = 3
CALM_STEPS = 3
PATIENCE_S = 600.0
LOOK_S = 0.0005
SENT, TAKEN = "step: sums sent", "step: sums taken"

# Both sides train it, a microbatch for each worker; the gradient of such a layer is quick to make.
MODEL = """
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
width = int(({mib} * (1 << 18)) ** 0.5)
model = torch.nn.Linear(width, width, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
data = torch.randn(3, 2, width, generator=torch.Generator().manual_seed(1))
"""

OURS = """
from orchestrator import Session
session = Session(model, optimizer, microbatches=3)
for step in session.steps(1_000_000):
    session.backward(lambda x: model(x).square().mean(), list(data))
    optimizer.step()
"""

# Plays the nursery with workers that have no memory in common: what makes it is left out.
APART = """
import os, pathlib, runpy, sys
from agent.transport import tcp
def refused(*_):
    raise OSError("left out")
tcp.{part} = refused
os.environ["UCX_NET_DEVICES"] = "lo"
sys.argv = sys.argv[2:]
sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Watched:
    """What workers and peers write down on their way through a step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._file, self._rest = path.open("rb"), b""
        self.newest: dict[str, Line] = {}
        self.lasted_s: dict[str, float] = {}  # their last exchanges, as seen here
        self._sent_s: dict[str, float] = {}
        self.seen = list[Line]()  # since it was last emptied

    def look(self) -> list[Line]:
        """Read what is new, and return it."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        now_s = time.monotonic()
        found = [msgspec.json.decode(each, type=Line) for each in lines]
        for line in found:
            self.newest[line.who] = line
            if line.point == SENT:
                self._sent_s[line.who] = now_s
            elif line.point == TAKEN and line.who in self._sent_s:
                self.lasted_s[line.who] = now_s - self._sent_s.pop(line.who)
        self.seen += found
        return found

    def kill_amid(self, who: str, dice: random.Random) -> float:
        """Kill somebody between its first block and its last; return when that was."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            before = self.newest.get(who)
            self.look()
            line = self.newest.get(who)
            if line is None or line.point != SENT or line is before:
                time.sleep(LOOK_S)
                continue
            wait_s = dice.random() * self.lasted_s.get(who, 0.0)
            until_s = time.monotonic() + wait_s
            while time.monotonic() < until_s and self._is_amid(who):
                time.sleep(LOOK_S)
            if not self._is_amid(who):
                continue
            at_s = time.monotonic()
            os.kill(line.pid, signal.SIGKILL)
            return at_s
        raise TimeoutError(f"{who} was in no exchange for {PATIENCE_S:.0f} s")

    def _is_amid(self, who: str) -> bool:
        self.look()
        return self.newest[who].point == SENT

    def close(self) -> None:
        self._file.close()


# --- ours ----------------------------------------------------------------------------------------


def calm(crew: Crew, commits: Commits) -> None:
    """All are there, and their layout has made some steps."""
    until("the workers to be ready", lambda: len(crew.ready) == WORKERS, PATIENCE_S)
    seen = len(commits.seen)

    def steady() -> bool:
        newest = commits.seen[-CALM_STEPS:]
        return len(commits.seen) >= seen + CALM_STEPS and newest[0].generation == crew.generation

    until("some steps under the newest layout", steady, PATIENCE_S)


def ours(mib: float, kills: int, transport: str) -> list[float]:
    taken, dice = list[float](), random.Random(f"{mib} {transport}")
    part = {"tcp": "Own", "nixl": "Theirs"}.get(transport)
    within = (sys.executable, "-c", APART.format(part=part)) if part else ()
    with crew_of(within) as crew, contextlib.closing(Commits(crew)) as commits:
        watched = Watched(crew.folder / "ledger")

        def start(count: int) -> None:
            for _ in range(count):
                name = f"w{crew._serial + 1}"
                plan = Plan(who=name, ledger=str(watched.path))
                crew.start(1, faults=msgspec.json.encode(plan).decode())

        crew.settle = WORKERS
        crew.open(
            MODEL.format(mib=mib) + OURS,
            backup_every_steps=1000,
            checkpoint_every_s=3600.0,
            sums="never",
            transport="nixl" if transport == "nixl" else "sockets",
        )
        start(WORKERS)
        for number in range(kills):
            calm(crew, commits)
            step_s, generation = commits.step_s(CALM_STEPS), crew.generation
            victim = crew.ready[number % WORKERS]
            at_s = watched.kill_amid(victim, dice)
            commit = until(
                "a commit of the new layout",
                lambda generation=generation: commits.after(generation),
                PATIENCE_S,
            )
            taken.append(commit.at_s - at_s - step_s)
            crew.settle = 1
            start(1)
        until("the losses", lambda: len(crew.of(WorkerLost)) == kills)
        assert not crew.of(Rewound), "a committed step was lost"
        watched.close()
    return taken


# --- the peer ------------------------------------------------------------------------------------


def peer(rank: int, folder: Path, mib: float, ledger: int) -> None:
    """Train until a neighbour is gone, shrink, and do the step again."""
    keep_memory()  # as our workers do
    known: dict[str, object] = {}
    exec(MODEL.format(mib=mib), known)
    model, optimizer, data = known["model"], known["optimizer"], known["data"]

    def said(point: str) -> None:
        line = msgspec.json.encode(Line(who=str(rank), pid=os.getpid(), point=point))
        os.write(ledger, line + b"\n")

    def met(size: int) -> None:
        store = f"file://{folder}/store{size}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)

    met(WORKERS)
    size = WORKERS
    for step in itertools.count():
        optimizer.zero_grad()
        for x in data[rank::size]:
            (model(x).square().mean() / WORKERS).backward()
        own = model.weight.grad.clone()  # gloo sums in place, and may leave half of a sum there
        said(SENT)
        while not _summed(model.weight.grad):
            dist.destroy_process_group()
            size -= 1
            met(size)
            model.weight.grad.copy_(own)
            for x in data[size + rank :: size]:  # what the lost one had
                (model(x).square().mean() / WORKERS).backward()
            own = model.weight.grad.clone()
            said(SENT)
        said(TAKEN)
        optimizer.step()
        said(f"step {step} of {size}")


def _summed(numbers: torch.Tensor) -> bool:
    """Return whether all have summed. An error that is still held would hold the group open."""
    try:
        dist.all_reduce(numbers)
    except RuntimeError:
        return False
    return True


def gloo(mib: float, kills: int) -> list[float]:
    """Each kill has processes of its own. The last rank is killed, so the others keep theirs."""
    taken, dice = list[float](), random.Random(f"{mib} gloo")
    for _ in range(kills):
        with tempfile.TemporaryDirectory(prefix="gloo-") as name:
            watched = Watched(Path(name) / "ledger")
            with _peers(Path(name), mib, watched), contextlib.suppress(TimeoutError):
                step_s = _steps_s(watched)
                at_s = watched.kill_amid(str(WORKERS - 1), dice)
                _await(watched, lambda line: line.point.endswith(f" of {WORKERS - 1}"))
                taken.append(time.monotonic() - at_s - step_s)
            watched.close()
    return taken


@contextlib.contextmanager
def _peers(folder: Path, mib: float, watched: Watched) -> Iterator[None]:
    ledger = os.open(watched.path, os.O_WRONLY | os.O_APPEND)
    pids = []
    for rank in range(WORKERS):
        pid = os.fork()
        if pid == 0:
            try:
                peer(rank, folder, mib, ledger)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        pids.append(pid)
    os.close(ledger)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # who is gone already is not waited for yet
            os.waitpid(pid, 0)


def _await(watched: Watched, is_meant: Callable[[Line], bool]) -> None:
    """Wait until the first rank writes such a line."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not any(line.who == "0" and is_meant(line) for line in watched.seen):
        if time.monotonic() > deadline_s:
            raise TimeoutError("the peer did not go on")
        time.sleep(LOOK_S)
        watched.seen.clear()
        watched.look()


def _steps_s(watched: Watched) -> float:
    at_s = []
    for step in range(CALM_STEPS + 1):
        _await(watched, lambda line, step=step: _is_past(line, step))
        at_s.append(time.monotonic())
    return statistics.median(b - a for a, b in itertools.pairwise(at_s))


def _is_past(line: Line, step: int) -> bool:
    words = line.point.split()
    return words[-2:-1] == ["of"] and int(words[1]) >= step


# --- the table -----------------------------------------------------------------------------------


def show(name: str, taken: list[float], asked: int) -> None:
    if not taken:
        print(f"{name:<24} none of {asked} went on", flush=True)
        return
    ordered = sorted(taken)
    late = ordered[min(len(ordered) * 95 // 100, len(ordered) - 1)]
    said = f"{spread(taken):>26}   p95 {late * 1e3:.3g}   {len(taken)} of {asked}"
    print(f"{name:<24} {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kills", type=int, default=20, help="of ours, for each size and transport"
    )
    kinds = ["shm", "tcp", "nixl"]
    parser.add_argument("--transports", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--mib", type=float, nargs="+", default=[0.1, 256.0])
    parser.add_argument("--peer-kills", type=int, default=5, help="of the peer, for each size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun_s = time.monotonic()
    print("ms from SIGKILL amid an exchange to the next step, beyond one undisturbed step")
    for mib in options.mib:
        if options.peer_kills:
            found = gloo(mib, options.peer_kills)
            show(f"gloo, made anew, {mib:g} MiB", found, options.peer_kills)
        for transport in options.transports:
            found = ours(mib, options.kills, transport)
            show(f"ours, {transport}, {mib:g} MiB", found, options.kills)
    print(f"{machine()}; took {time.monotonic() - begun_s:.0f} s")


if __name__ == "__main__":
    main()
