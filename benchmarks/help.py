"""How long does a step take if one of four workers is late, and what does help within the step save?

    python benchmarks/help.py [--steps 40] [--pause 0.02]

Four workers share 16 microbatches, each of which takes `--pause` seconds of sleep, as of a device that computes, and
a little arithmetic; so two cores do for four workers. Patterns of lateness:

    nobody      all take the same
    x2, x5      one worker takes so many times as long, in all steps
    in turn     in each step another worker takes 5 times as long: no division of the shares fits

Beside each other: torch's DistributedDataParallel over gloo with the same microbatches and sleeps, which waits as all
synchronous training does; ours with stragglers="wait", and with stragglers="flexrr". The layout stays as it is, so what
the manager does about a worker that is late for long does not help here. The ideal is all work divided by all speeds.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from _crew import Commits, crew_of, machine, spread, until

WORKERS, MICROBATCHES, WARM_STEPS = 4, 16, 8
PATIENCE_S = 300.0

BODY = """
import sys, time
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = torch.randn(16, 256, generator=torch.Generator().manual_seed(1)).chunk(16)
pause_s, pattern = float(sys.argv[1]), sys.argv[2]

def nap(me, step):
    late = step % 4 if pattern == "turn" else 0
    time.sleep(pause_s * (5.0 if pattern == "turn" else float(pattern)) ** (me == late))
"""

OURS = """
import os
from pathlib import Path
from orchestrator import Session
session = Session(model, optimizer, microbatches=16, stragglers=sys.argv[3])
me = None

def number():
    # The first process that asks is 0, and so on.
    for place in range(64):
        try:
            os.close(os.open(f"{sys.argv[4]}.{place}", os.O_CREAT | os.O_EXCL))
            return place
        except FileExistsError:
            pass

def loss_of(x):
    global me
    me = number() if me is None else me
    nap(me, session.step)
    return (model(x) - x).square().mean()

for step in session.steps(1_000_000):
    session.backward(loss_of, data)
    optimizer.step()
"""

DDP = """
import torch.distributed as dist
from contextlib import nullcontext
from torch.nn.parallel import DistributedDataParallel
rank = int(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + sys.argv[4], rank=rank, world_size=4)
ddp, share = DistributedDataParallel(model), data[4 * rank : 4 * rank + 4]
for step in range(int(sys.argv[5])):
    began_s = time.monotonic()
    for number, x in enumerate(share):
        with nullcontext() if number == 3 else ddp.no_sync():
            nap(rank, step)
            ((ddp(x) - x).square().mean() / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(time.monotonic() - began_s, flush=True)
"""


class Pattern(NamedTuple):
    name: str
    argument: str
    speeds: float  # all workers' together, in those of a worker that is not late


PATTERNS = (
    Pattern("nobody", "1", 4.0),
    Pattern("x2", "2", 3.5),
    Pattern("x5", "5", 3.2),
    Pattern("in turn", "turn", 3.2),
)


def ours(pattern: Pattern, pause_s: float, how: str, steps: int) -> list[float]:
    with crew_of() as crew:
        crew.begin(WORKERS, BODY + OURS, str(pause_s), pattern.argument, how, f"{crew.folder}/me")
        until("all to work", lambda: len(crew.ready) == WORKERS, PATIENCE_S)
        commits = Commits(crew)
        try:
            generation = crew.generation
            until(
                "enough steps",
                lambda: (
                    sum(one.generation == generation for one in commits.seen) > steps + WARM_STEPS
                ),
                PATIENCE_S,
            )
            at_s = [one.at_s for one in commits.seen if one.generation == generation]
        finally:
            commits.close()
    return [b - a for a, b in itertools.pairwise(at_s[-steps - 1 :])]


def ddp(pattern: Pattern, pause_s: float, steps: int) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="help-") as folder:
        script = Path(folder, "train.py")
        script.write_text(BODY + DDP)
        meeting, count = f"{folder}/meeting", str(steps + WARM_STEPS)
        command = [sys.executable, str(script), str(pause_s), pattern.argument]
        processes = [
            subprocess.Popen(
                [*command, str(rank), meeting, count],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(WORKERS)
        ]
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    return [float(line) for line in said[0].split()][-steps:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.02)
    asked = parser.parse_args()
    print(
        f"{machine()}; {WORKERS} workers, {MICROBATCHES} microbatches of {asked.pause * 1e3:g} ms"
    )
    print("ms a step: median (10th .. 90th percentile), and the median in multiples of the ideal")
    for pattern in PATTERNS:
        ideal_s = asked.pause * MICROBATCHES / pattern.speeds
        print(f"{pattern.name}: ideal {ideal_s * 1e3:.0f}", flush=True)
        rows = {
            "DDP": ddp(pattern, asked.pause, asked.steps),
            "wait": ours(pattern, asked.pause, "wait", asked.steps),
            "flexrr": ours(pattern, asked.pause, "flexrr", asked.steps),
        }
        for name, taken in rows.items():
            times = statistics.median(taken) / ideal_s
            print(f"    {name:7} {spread(taken):28} {times:5.2f}", flush=True)


if __name__ == "__main__":
    main()
