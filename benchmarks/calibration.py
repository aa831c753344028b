"""How long does it take until a model is measured, by one worker, by two, by three?

Each is a job of its own: real workers with a keeper, whose leader measures the model in its first step and hands parts
of it to the others. Timed is what they share, from the first look at the sections to the last part, on the leader:
its wall time, and its thread's own processor time, which is the wall time where each worker has a core of its own.
Turns of 1, 2 and 3 workers follow each other, so that a slow moment falls on all of them; given are medians of turns
and of the gains within a turn. A gain cannot be larger than the number of workers, nor, in wall time, of cores.

    python benchmarks/calibration.py [turns] [blocks of the model]
"""

import os
import statistics
import sys
from typing import NamedTuple

from _crew import crew_of, machine, until

from agent.messages import JobProfiled

WORKERS = (1, 2, 3)
SCRIPT = """
import time

import torch
import torch.nn.functional as F
from torch import nn

from orchestrator import Session
from agent import session as ours
from agent.calibration import section_times
from agent.calibration import measurement

profile_of = measurement.profile_of
tasks = 0


class Counting(section_times.Gauge):
    def do(self, task):
        global tasks
        tasks += 1
        return super().do(task)


def timed(recording, things, model, left, check, opened):
    begun = []

    def note(plan, board):
        begun[:] = time.monotonic(), time.thread_time()
        opened(plan, board)

    wall_s, own_s = time.monotonic(), time.thread_time()
    found = profile_of(recording, things, model, left, check, note)
    now = time.monotonic(), time.thread_time()
    first = begun[0] - wall_s, begun[1] - own_s
    print("TIMED", now[0] - wall_s, now[1] - own_s, *first, tasks, len(found.sections), flush=True)
    return found


section_times.Gauge = measurement.calibrate.Gauge = Counting
measurement.profile_of = timed


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.back(F.gelu(self.wide(self.norm(x))))


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(512, 256), *(Block(256) for _ in range(BLOCKS)), nn.Linear(256, 512))
optimizer = torch.optim.AdamW(model.parameters())
session = Session(model, optimizer, microbatches=6)


def loss_of(pair):
    return F.cross_entropy(model(pair[0]).flatten(0, 1), pair[1].flatten())


for step in session.steps(100_000):
    words = torch.randint(0, 512, (6, 2, 2, 128), generator=torch.Generator().manual_seed(step))
    session.backward(loss_of, words)
    optimizer.step()
"""


class Timed(NamedTuple):
    """Of one calibration: seconds of the leader, those of them before others could help, and its tasks."""

    wall_s: float
    own_s: float
    first_wall_s: float
    first_own_s: float
    tasks: float
    sections: float


def calibrated(workers: int, blocks: int) -> Timed:
    with crew_of() as crew:
        crew.begin(workers, SCRIPT.replace("BLOCKS", str(blocks)))
        until("a profile", lambda: crew.of(JobProfiled), 600.0)
        (line,) = until("the times", lambda: [p for p in crew.printed() if p.startswith("TIMED")])
        return Timed(*map(float, line.split()[1:]))


def main() -> None:
    turns, blocks = int((sys.argv[1:2] or ["7"])[0]), int((sys.argv[2:3] or ["8"])[0])
    cores = os.cpu_count() or 1
    print(machine())
    found = [[calibrated(workers, blocks) for workers in WORKERS] for _ in range(turns)]
    print(f"{blocks} blocks, {found[0][0].sections:.0f} sections, {turns} turns\n")
    print(
        "workers   wall    own   of it alone   tasks of the leader   gain wall (limit)   gain own (limit)"
    )
    for n, workers in enumerate(WORKERS):
        each = [turn[n] for turn in found]
        wall, own = (statistics.median(turn[0][k] / turn[n][k] for turn in found) for k in (0, 1))
        wall_s, own_s, _, alone_s, tasks, _ = (
            statistics.median(v) for v in zip(*each, strict=True)
        )
        limit = min(workers, cores)
        print(
            f"{workers:7}{wall_s:6.2f} s{own_s:5.2f} s{alone_s:12.2f} s{tasks:22.0f}"
            f"{wall:10.2f} of {limit} ({wall / limit:.0%}){own:9.2f} of {workers} ({own / workers:.0%})"
        )
    print(machine())


if __name__ == "__main__":
    main()
