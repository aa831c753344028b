"""What do the commit protocol, heartbeats and a backup after every step cost, against all of it off?

    python benchmarks/overhead.py [--step-ms 30 100 300] [--width 256 800] [--pairs 20] [--every 1] [--sums auto]

The worker of a crew takes turns with itself: some steps as one of the crew (commits by the keeper into Redis, the sum
of every step to the keeper's memory, with `--sums auto` only where that takes less than a fiftieth of a step, and the whole state as often as the keeper asks for it, which is after every step
unless the one before is still on its way; with `--every 10`, as in a job that says nothing of it, after every tenth), and as many in a world of one, where none of that exists. It is one process,
since two that compute the same differ by as much as the bound from one start to the next. The first step of a turn counts for neither: what the one before leaves behind is paid where it belongs.
Heartbeats go on in both; what they take of a processor is measured on its own, and added.

Part of what is waited for is the disk: Redis answers when a commit is on it. How long that takes is measured apart.

The worker trains on one thread; its other threads, the keeper and Redis have the other cores, as the keeper and Redis have a
machine of their own in a job. The microbatches are scaled until a step takes as long as asked when all of it is off.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _crew import Crew, crew_of, machine, spread, until

from agent.keeper.commits import Commit, RedisCommitLog

SCRIPT = """
import json, statistics, sys, time
import torch
from torch import nn
from orchestrator import Session
from agent.net.link import BEAT_S
from agent.protocol import Beat
from agent.world import Alone

class Turns:
    # The crew, or nobody else. Of the steps between its own the crew hears nothing.
    def __init__(self, crew):
        self.crew, self.alone, self.on, self.states = crew, Alone(), True, 0
        self.send, crew._snapshots.send_state = crew._snapshots.send_state, self.sent
    def sent(self, *state, final):
        self.states += 1
        self.send(*state, final=final)
    def __getattr__(self, name):
        return getattr(self.crew if self.on else self.alone, name)
    evidence = property(lambda self: self.crew.evidence, lambda self, value: setattr(self.crew, "evidence", value))
    def settle(self):
        self.crew.settle()
    def turn(self, session, on):
        if self.on and not on:
            self.at = session.replica.version, session.replica.step
            self.alone.boundary(session.replica, session._loop.facts)
        if on and not self.on:
            session.replica.version, session.replica.step = self.at
        self.on = on

class Step:
    # From the begin of a step's body to that of the next.
    def __init__(self):
        self.clocks = time.perf_counter(), time.thread_time(), time.process_time()
    def taken(self):
        return [now - then for now, then in zip(Step().clocks, self.clocks)]

def helped():
    # Processor seconds that the keeper and Redis have had: the kernel's clock of another process.
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in helpers)

def course():
    # What comes next, in the crew or not; what it took is sent back.
    for _ in range(6):
        yield True, microbatches(128)  # the first is recorded and measured
    sent = Step()
    for _ in range(1000):
        session._world.crew.link.send(Beat(microbatch_s=0.0))
    print(json.dumps(["beats", sent.taken()[2] / 1000 / BEAT_S]), file=log)
    for step_s in asked:
        data = yield from scaled(step_s)
        for pair in range(pairs):
            for on in (True, False) if pair % 2 else (False, True):
                yield on, data
                taken, states, before = [], session._world.states, helped()
                for _ in range(turn):
                    taken.append((yield on, data))
                print(json.dumps([step_s, on, taken, session._world.states - states, helped() - before]), file=log)
    print(json.dumps(["end"]), file=log)
    while True:
        yield False, microbatches(4)

def scaled(step_s):
    # By processor time: others may use the machine, too.
    rows = 128
    for _ in range(8):
        data, taken = microbatches(rows), []
        for _ in range(8):
            taken.append((yield False, data)[1])
        taken_s = statistics.median(taken[2:])
        if abs(taken_s / step_s - 1) < 0.05:
            break
        rows = max(1, round(rows * step_s / taken_s))
    return data

def microbatches(rows):
    return torch.randn(4 * rows, width, generator=torch.Generator().manual_seed(1)).chunk(4)

log = open(sys.argv[1], "w", buffering=1)
width, pairs, turn, asked, helpers = json.loads(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
session = Session(model, optimizer, microbatches=4)
world = Turns(session._world)
session._loop.world, begun, after = world, [None], course().send
for _ in session.steps(1_000_000):
    on, data = after(begun[0] and begun[0].taken())
    session._world.turn(session, on)
    begun[:] = [Step()]
    session.backward(lambda x: (model(x) - x).square().mean(), data)
    optimizer.step()
"""
TURN = 4  # steps that count, at least
WRITES = 200


class Taken(NamedTuple):
    """Of a step: seconds, and processor seconds of the script's thread and of the whole worker."""

    wall_s: float
    own_s: float
    all_s: float


class Pair(NamedTuple):
    off: list[Taken]
    on: list[Taken]
    states: int  # that were sent meanwhile
    helped_s: float  # processor seconds that a step has had more from the keeper and Redis

    def cost(self, clock: int) -> float:
        """The mean over a turn: a state may come with some of its steps only."""
        on, off = (
            statistics.fmean(taken[clock] for taken in steps) for steps in (self.on, self.off)
        )
        return on - off


def written_s(client: Any) -> list[float]:
    """What it takes until a commit is written down."""
    log, took_s = RedisCommitLog(client), []
    term, _ = log.take("another")
    for version in range(1, WRITES + 1):
        time.sleep(0.005)  # as steps come
        begun_s = time.perf_counter()
        log.write("another", term, Commit(generation=1, version=version, loss=0.5))
        took_s.append(time.perf_counter() - begun_s)
    return took_s


def measured(
    width: int, pairs: int, asked_s: Sequence[float], every: int, sums: str
) -> tuple[float, list[float], list[list[Pair]]]:
    """The part of a processor that heartbeats take, what a commit does, and the pairs of turns for each length of a step."""
    with tempfile.TemporaryDirectory(prefix="overhead-") as name, crew_of() as crew:
        log = Path(name) / "log"
        log.touch()
        helpers = [crew.keeper.process.pid, crew.redis.process.pid]
        settings = json.dumps([width, pairs, max(TURN, every), asked_s, helpers])
        crew.begin(1, SCRIPT, str(log), settings, backup_every_steps=every, sums=sums)
        until("the last turn", lambda: over(crew, log), patience_s=3600)
        wrote_s = written_s(crew.client)
        (_, beats), *turns, _ = [json.loads(line) for line in log.read_text().splitlines()]
    found = []
    for step_s in asked_s:
        off, on = (
            [turn[2:] for turn in turns if turn[:2] == [step_s, which]] for which in (False, True)
        )
        found.append(
            [
                Pair(_taken(a), _taken(b), states, (had_on - had_off) / len(a))
                for (a, _, had_off), (b, states, had_on) in zip(off, on, strict=True)
            ]
        )
    return beats, wrote_s, found


def _taken(steps: list[list[float]]) -> list[Taken]:
    return [Taken(*step) for step in steps]


def over(crew: Crew, log: Path) -> bool:
    failed = [
        report for report in crew.reports if type(report).__name__ in ("WorkerFailed", "WorkerLost")
    ]
    assert not failed, failed[0]
    time.sleep(0.5)
    return log.read_text().endswith('["end"]\n')


def show(pairs: list[Pair], beats: float) -> None:
    off, on = ([taken.wall_s for pair in pairs for taken in pair[which]] for which in (0, 1))
    step_s = statistics.median(off)
    costs = sorted(pair.cost(0) / step_s + beats for pair in pairs)
    low, middle, high = (costs[len(costs) * part // 4] for part in (1, 2, 3))
    own, all_ = (statistics.median(pair.cost(clock) for pair in pairs) * 1e3 for clock in (1, 2))
    helped = statistics.median(pair.helped_s for pair in pairs) * 1e3
    states = statistics.fmean(pair.states / len(pair.on) for pair in pairs)
    print(
        f"    {spread(off):24}  {spread(on):24}  {middle:6.1%} ({low:.1%} .. {high:.1%})"
        f"     {own:5.2f}  {all_:5.2f}  {helped:5.2f}     {states:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[30.0, 100.0, 300.0])
    parser.add_argument("--width", type=int, nargs="+", default=[256, 800])
    parser.add_argument("--pairs", type=int, default=20, help="of turns")
    parser.add_argument(
        "--every", type=int, default=1, help="how often a state is asked for; in a job 10"
    )
    parser.add_argument("--sums", choices=("always", "auto"), default="auto", help="as job.sums")
    options = parser.parse_args()
    begun_s = time.monotonic()
    print(
        "ms per step, median (10th .. 90th percentile); what it costs, median (quarter .. three\n"
        "quarters) of the pairs of turns, bound 2 %; ms of processor time more, of the script's thread,\n"
        "of the whole worker, and of keeper and Redis, which are on its cores here; and states sent per step"
    )
    for width in options.width:
        asked_s = [ms / 1e3 for ms in options.step_ms]
        beats, wrote_s, found = measured(width, options.pairs, asked_s, options.every, options.sums)
        print(
            f"a state of {12 * 4 * (width + 1) * width / 1e6:.1f} MB; heartbeats {beats:.2%}; to write a commit down "
            f"takes {spread(wrote_s)} ms"
        )
        for pairs in found:
            show(pairs, beats)
    print(f"{machine()}; took {time.monotonic() - begun_s:.0f} s")


if __name__ == "__main__":
    main()
