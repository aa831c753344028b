"""What part of a step does the running proof take: digests of what is shown, and microbatches computed twice?

    python benchmarks/proof.py [--step-ms 30 100] [--width 256 800] [--rounds 5]

Two workers of a real crew train with keeper and Redis. Whatever is done for the proof alone is timed where it is done, by the
processor time of its thread, so that other programs of the machine do not count: on the script's thread, which a step waits for, and
beside it. A round is 125 steps, in which each worker computes one of its two microbatches twice, as in a long job; it is compared
with the processor time of the script's thread in the same steps without the proof. The first 520 steps count for nothing: more is shown in them.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from _crew import crew_of, machine, until
from torch import nn

SCRIPT = """
import json, sys, threading, time
import torch
from torch import nn
from orchestrator import Session
from agent.proof.evidence import Evidence
from agent.proof.samples import Samples
from agent.step import Step

took, inside = {"digests": 0.0, "twice": 0.0, "beside": 0.0}, threading.local()

def timed(kind, where, name):
    # The outermost call on a thread counts.
    inner = getattr(where, name)
    def outer(*given, **named):
        if getattr(inside, "timed", False):
            return inner(*given, **named)
        inside.timed, began = True, time.thread_time()
        try:
            return inner(*given, **named)
        finally:
            inside.timed = False
            own = threading.current_thread() is thread
            took[kind if own else "beside"] += time.thread_time() - began
    setattr(where, name, outer)

thread = threading.current_thread()
timed("twice", Step, "_compute_aside")
for name in ("look_beside", "sample", "settle"):
    timed("digests", Evidence, name)
for name in ("reached", "computed"):
    timed("digests", Samples, name)

path, width, rows, skipped, steps, rounds = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
session = Session(model, optimizer, microbatches=4)
data = torch.randn(4 * rows, width, generator=torch.Generator().manual_seed(1)).chunk(4)
log = open(path, "a", buffering=1)
for step in session.steps(1_000_000):
    if step >= skipped and (step - skipped) % steps == 0:
        if step > skipped:
            print(json.dumps([time.thread_time() - began, took]), file=log)
        began, took = time.thread_time(), dict.fromkeys(took, 0.0)
        if step == skipped + steps * rounds:
            print(json.dumps("end"), file=log)
    session.backward(lambda x: (model(x) - x).square().mean(), data)
    optimizer.step()
"""
WORKERS = 2
SKIPPED, STEPS = 520, 125  # no power of two lies in what counts, up to the fourth round


class Round(NamedTuple):
    """Processor seconds of one worker: its script's thread, and what of that, and beside it, is for the proof."""

    all_s: float
    digests_s: float
    twice_s: float
    beside_s: float

    def share(self, part_s: float) -> float:
        return part_s / (self.all_s - self.digests_s - self.twice_s)


def rows_for(width: int, step_s: float) -> int:
    """How long a microbatch has to be that two of them take as long as asked on one thread."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    rows = 64
    for _ in range(6):
        data, taken = torch.randn(rows, width), []
        for _ in range(8):
            began_s = time.thread_time()
            (model(data) - data).square().mean().backward()
            taken.append(2 * (time.thread_time() - began_s))
        rows = max(1, round(rows * step_s / statistics.median(taken[2:])))
    return rows


def measured(width: int, rows: int, rounds: int) -> list[Round]:
    with tempfile.TemporaryDirectory(prefix="proof-") as name, crew_of() as crew:
        log = Path(name) / "log"
        log.touch()
        words = [str(log), *map(str, (width, rows, SKIPPED, STEPS, rounds))]
        crew.begin(WORKERS, SCRIPT, *words)

        def over() -> bool:
            crew._well()
            time.sleep(0.2)
            return log.read_text().count('"end"') == WORKERS

        until("the last round", over, patience_s=3600)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [
        Round(all_s, took["digests"], took["twice"], took["beside"])
        for all_s, took in (line for line in lines if line != "end")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[30.0, 100.0])
    parser.add_argument("--width", type=int, nargs="+", default=[256, 800])
    parser.add_argument("--rounds", type=int, default=3, help="of 125 steps, at most 4")
    options = parser.parse_args()
    print("of a step's processor time, median (least .. most) of workers and rounds; bound 1 %")
    print(
        "   state     ms  digests                computed twice    both  beside the script's thread"
    )
    for width in options.width:
        for step_ms in options.step_ms:
            rounds = measured(width, rows_for(width, step_ms / 1e3), options.rounds)
            mean_ms = statistics.median(r.all_s for r in rounds) / STEPS * 1e3
            digests, beside = ([r.share(r[part]) for r in rounds] for part in (1, 3))
            # The others wait for the one worker that computes again.
            twice = WORKERS * statistics.fmean(r.share(r.twice_s) for r in rounds)
            both = statistics.median(digests) + twice
            state = f"{12 * 4 * (width + 1) * width / 1e6:.1f} MB"
            print(
                f"{state:>8} {mean_ms:6.1f}  {_spread(digests)}  {twice:14.2%}  {both:6.2%}  {_spread(beside)}",
                flush=True,
            )
    print(machine())


def _spread(shares: list[float]) -> str:
    return f"{statistics.median(shares):.2%} ({min(shares):.2%} .. {max(shares):.2%})"


if __name__ == "__main__":
    main()
