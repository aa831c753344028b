"""What does a commit cost where the way to the manager's machine is narrow?

    sudo python benchmarks/overhead_link.py [--gbit 1 2.5] [--width 1200] [--steps 40]

Two workers are on one side of a virtual link, keeper and Redis on the other: a network namespace of its own, with a
token bucket on what goes to the keeper, which is what a small machine has of a network. Between the workers is none. The same model is trained by
DistributedDataParallel of torch, which keeps nothing anywhere, by a crew whose steps wait for their sums
("always"), and by one that may do without ("auto", as the product does by itself).

Both workers train on one thread each, and share the cores with keeper and Redis. Only root may make a namespace.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from _crew import Commits, crew_of, machine, spread, until

from agent.messages import BackupHeld, SumsKept

BODY = """
def model_of(width):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

def microbatches(width, rows):
    return torch.randn(4 * rows, width, generator=torch.Generator().manual_seed(1)).chunk(4)
"""

OURS = (
    """
import json, sys
import torch
from torch import nn
from orchestrator import Session
"""
    + BODY
    + """
width, rows = json.loads(sys.argv[1])
model = model_of(width)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
session = Session(model, optimizer, microbatches=4, deterministic=False)
for step in session.steps(1_000_000):
    session.backward(lambda x: (model(x) - x).square().mean(), microbatches(width, rows))
    optimizer.step()
"""
)

TORCH = (
    """
import json, sys, time
import torch
from torch import nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
"""
    + BODY
    + """
store, rank, settings = sys.argv[1:]
rank, (width, rows, steps) = int(rank), json.loads(settings)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model = DistributedDataParallel(model_of(width))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
took = []
for step in range(steps):
    begun_s = time.perf_counter()
    mine = microbatches(width, rows)[2 * rank : 2 * rank + 2]
    with model.no_sync():
        ((model(mine[0]) - mine[0]).square().mean() / 2).backward()
    ((model(mine[1]) - mine[1]).square().mean() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    took.append(time.perf_counter() - begun_s)
if rank == 0:
    print(json.dumps(took))
dist.destroy_process_group()
"""
)

SPACE = f"link-{os.getpid()}"
NEAR, FAR = "10.203.77.1", "10.203.77.2"
SETTLED = 12  # steps at the beginning that do not count


@contextmanager
def narrow(gbit: float) -> Iterator[None]:
    """A namespace for the workers, which send so much to us."""
    ends = (f"a{os.getpid()}", f"b{os.getpid()}")
    there = ["ip", "-n", SPACE]
    bucket = ["tbf", "rate", f"{gbit * 1000:.0f}mbit", "burst", "256kb", "latency", "20ms"]
    _run("ip", "netns", "add", SPACE)
    try:
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        _run("ip", "link", "set", ends[1], "netns", SPACE)
        _run("ip", "addr", "add", f"{NEAR}/30", "dev", ends[0])
        _run("ip", "link", "set", ends[0], "up")
        _run(*there, "addr", "add", f"{FAR}/30", "dev", ends[1])
        _run(*there, "link", "set", ends[1], "up")
        _run(*there, "link", "set", "lo", "up")
        _run("ip", "netns", "exec", SPACE, "tc", "qdisc", "add", "dev", ends[1], "root", *bucket)
        yield
    finally:
        _run("ip", "netns", "del", SPACE)  # and with it the link


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()} (only root may make a namespace)")


def by_torch(width: int, rows: int, steps: int) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="ddp-") as name:
        settings = json.dumps([width, rows, SETTLED + steps])
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", TORCH, f"{name}/store", str(rank), settings],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        said = [rank.communicate()[0] for rank in ranks]
    return list(json.loads(said[0])[SETTLED:])


def by_us(sums: str, width: int, rows: int, steps: int) -> tuple[list[float], str]:
    """Of what steps take, in seconds; and what became of the state."""
    with crew_of(("ip", "netns", "exec", SPACE), NEAR) as crew:
        commits = Commits(crew)
        try:
            crew.begin(2, OURS, json.dumps([width, rows]), sums=sums)
            until("the first steps", lambda: crew.step > SETTLED, patience_s=600)
            since = len(commits.seen)
            until("the steps", lambda: len(commits.seen) > since + steps, patience_s=600)
            at_s = [one.at_s for one in commits.seen[since:]]
        finally:
            commits.close()
        kept = all(said.kept for said in crew.of(SumsKept))
        newest = max(backup.step for backup in crew.of(BackupHeld))
        behind = "nothing" if kept else f"{crew.step - newest} steps"
    return [b - a for a, b in itertools.pairwise(at_s)], behind


def show(name: str, took_s: Sequence[float], peer_s: float, behind: str = "all") -> float:
    middle_s = sorted(took_s)[len(took_s) // 2]
    print(f"    {name:24} {spread(took_s):24}  {middle_s / (peer_s or middle_s):5.2f}    {behind}")
    return middle_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 2.5])
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--rows", type=int, default=128, help="of a microbatch")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    begun_s, size = time.monotonic(), (options.width, options.rows, options.steps)
    numbers = 4 * options.width * (options.width + 1)
    print(
        f"sums of {4 * numbers / 1e6:.0f} MB, a state of {12 * numbers / 1e6:.0f} MB; ms per step, median (10th .. 90th\n"
        "percentile); of torch's; what is trained again if all machines go at once"
    )
    for gbit in options.gbit:
        print(
            f"{gbit:g} Gbit/s to the manager's machine: a sum takes {32 * numbers / gbit / 1e6:.0f} ms at best"
        )
        with narrow(gbit):
            peer_s = show("DDP, nothing is kept", by_torch(*size), 0.0)
            for sums in ("always", "auto"):
                took_s, behind = by_us(sums, *size)
                show(f"ours, sums = {sums}", took_s, peer_s, behind)
    print(f"{machine()}; took {time.monotonic() - begun_s:.0f} s")


if __name__ == "__main__":
    main()
