"""What do the commit protocol, heartbeats and a backup after every step cost, against all of it off?

    python benchmarks/overhead.py [--rounds 6] [--steps 30] [--step-ms 100]

One script, twice: as a worker of a crew (commits by the keeper into Redis, heartbeats, the sum of every step and the whole state
of every step to the keeper's memory), and alone, where the session is a world of one and none of that exists. The two
take turns: while one steps, the other waits at a gate. The model is scaled until its step takes about as long as asked.
Both run on one thread; the keeper and Redis have the other cores, as they have a machine of their own in a job.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _crew import crew_of, machine, spread, until

SCRIPT = """
import sys, time
from pathlib import Path
import torch
from torch import nn
from agent import Session
gate, log, rows = Path(sys.argv[1]), open(sys.argv[2], "a", buffering=1), int(sys.argv[3])
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
data = torch.randn(rows, 256, generator=torch.Generator().manual_seed(1))
session = Session(model, optimizer, microbatches=4)
def allowed():
    return int(gate.read_text() or 0)
begun_s = None
for step in session.steps(1_000_000):
    if begun_s is not None:
        print(step - 1, time.perf_counter() - begun_s, file=log)
    # Its step is over, background work aside; what follows is not measured until the gate opens.
    while step >= allowed():
        time.sleep(0.02)
    begun_s = time.perf_counter()
    for x in session.share(data.chunk(4)):
        session.backward((model(x) - x).square().mean())
    optimizer.step()
"""
ROWS_AT_FIRST = 512
WARM_STEPS = 5


class Runner:
    """One of the two, as far as its gate is open."""

    def __init__(self, folder: Path, name: str) -> None:
        self.gate, self.log = folder / f"{name}.gate", folder / f"{name}.log"
        self.gate.write_text("0")
        self.log.touch()
        self.opened = 0

    def argv(self, rows: int) -> list[str]:
        return [str(self.gate), str(self.log), str(rows)]

    def times(self) -> list[float]:
        lines = [line.split() for line in self.log.read_text().split("\n")[:-1]]
        return [float(line[1]) for line in lines]

    def step(self, count: int) -> list[float]:
        """The seconds that each of the next steps took."""
        self.opened += count
        draft = self.gate.with_suffix(".draft")
        draft.write_text(str(self.opened))
        draft.rename(self.gate)
        until(f"step {self.opened}", lambda: len(self.times()) >= self.opened)
        return self.times()[-count:]


def alone(folder: Path, name: str, rows: int) -> tuple[Runner, subprocess.Popen]:
    script, runner = folder / "train.py", Runner(folder, name)
    script.write_text(SCRIPT)
    return runner, subprocess.Popen([sys.executable, str(script), *runner.argv(rows)])


def rows_for(folder: Path, step_s: float) -> int:
    """How many rows a step must have to take that long here."""
    runner, process = alone(folder, "scale", ROWS_AT_FIRST)
    try:
        runner.step(WARM_STEPS)
        taken_s = statistics.median(runner.step(WARM_STEPS))
    finally:
        process.kill()
        process.wait()
    return max(4, 4 * round(ROWS_AT_FIRST * step_s / taken_s / 4))


def measure(
    folder: Path, rounds: int, steps: int, rows: int
) -> tuple[list[float], list[float], list[float]]:
    """Seconds per step without and with, and the ratio of the medians of each round."""
    without, with_, ratios = [], [], []
    plain, process = alone(folder, "plain", rows)
    try:
        with crew_of() as crew:
            full = Runner(folder, "full")
            crew.begin(1, SCRIPT, *full.argv(rows), backup_every_steps=1)
            for runner in (plain, full):
                runner.step(WARM_STEPS)
            for number in range(rounds):
                # Of each pair of rounds, either begins once.
                order = (plain, full) if number % 2 else (full, plain)
                taken = {runner: runner.step(steps) for runner in order}
                without += taken[plain]
                with_ += taken[full]
                ratios.append(statistics.median(taken[full]) / statistics.median(taken[plain]))
    finally:
        process.kill()
        process.wait()
    return without, with_, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=30, help="per round, of each")
    parser.add_argument("--step-ms", type=float, default=100.0)
    options = parser.parse_args()
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="overhead-") as name:
        folder = Path(name)
        rows = rows_for(folder, options.step_ms / 1e3)
        without, with_, ratios = measure(folder, options.rounds, options.steps, rows)
    print("seconds per step in ms; median (10th .. 90th percentile)")
    print(f"    all of it off                              {spread(without)}")
    print(f"    commits, heartbeats, a backup every step   {spread(with_)}")
    cost = statistics.median(ratios) - 1
    low, high = min(ratios) - 1, max(ratios) - 1
    print(f"    costs {cost:.1%} of a step, rounds from {low:.1%} to {high:.1%}; bound 2 %")
    print(f"{machine()}; took {time.monotonic() - begun_s:.0f} s")


if __name__ == "__main__":
    main()
