"""A script whose process may not have as much memory as its model's weights alone take.

usage: huge.py built|unbuilt OUT

Everyone says on standard error what it had at most, in MB beyond what it began with.
"""

import resource
import sys
import threading
from pathlib import Path

import torch
from torch import nn

from agent import Session, unbuilt

WIDTH, LAYERS, STEPS = 2896, 16, 3
WEIGHTS_BYTES = 4 * LAYERS * WIDTH * WIDTH
ROOM_BYTES = int(0.9 * WEIGHTS_BYTES)


def grown() -> int:
    """Memory that this process can write to, by the kernel's count."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))


def model() -> nn.Module:
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)]
    )


def main(how: str) -> None:
    threading.stack_size(1 << 20)  # it is counted as well
    most = grown() + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    began_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.manual_seed(0)
    built = unbuilt(model) if how == "unbuilt" else model()
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    session = Session(built, optimizer, microbatches=2)
    x = torch.randn(2, 1, WIDTH)
    for step in session.steps(STEPS):
        for row in session.share(list(x)):
            session.backward((built(row) - row).square().mean())
        optimizer.step()
        if session.leader:
            print(f"step {step} loss {session.loss!r}")  # noqa: T201 - as scripts do
        peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began_kb
        print(f"step {step} peak {peak_kb / 1024:.0f} MB", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
