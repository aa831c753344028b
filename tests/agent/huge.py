"""A script whose state is large beside all else that a process has.

usage: huge.py built|unbuilt [HOLD]

Everyone says on standard error what it took beyond what its process had when it began. In its last step it waits as
long as there is a file HOLD.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn

from orchestrator import Session, unbuilt

WIDTH, LAYERS, STEPS = 1448, 16, 3


def layers() -> nn.Module:
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)]
    )


def told(name: str) -> int:
    """By the kernel, in kB. What `getrusage` says would be as much as the parent has that this was started from."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main(how: str, *hold: str) -> None:
    began_kb = told("VmRSS")
    torch.manual_seed(0)
    model = unbuilt(layers) if how == "unbuilt" else layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(model, optimizer, microbatches=2)
    x = torch.randn(2, 1, WIDTH)

    def loss_of(row):
        return (model(row) - row).square().mean()

    for step in session.steps(STEPS):
        while step == STEPS - 1 and any(Path(path).exists() for path in hold):
            time.sleep(0.01)
        result = session.backward(loss_of, list(x))
        optimizer.step()
        if session.leader:
            print(f"step {step} loss {result.loss!r}")  # noqa: T201 - as scripts do
    print(f"took {(told('VmHWM') - began_kb) // 1024} MB", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
