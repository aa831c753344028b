"""A script that takes its time for every microbatch, and several times as long where it is told to.

usage: stutter.py STEPS PAUSE_S OUT

A file OUT.slow holds the process id of the worker that is slow, and how many times as long it takes.
"""

import os
import sys
import time
from pathlib import Path

import torch

from orchestrator import Session

steps, pause_s, out = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
session = Session(model, optimizer, microbatches=12)
data = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))


def slowness() -> float:
    try:
        pid, times = Path(f"{out}.slow").read_text().split()
    except (FileNotFoundError, ValueError):
        return 1.0
    return float(times) if int(pid) == os.getpid() else 1.0


def loss_of(x: torch.Tensor) -> torch.Tensor:
    time.sleep(pause_s * slowness())
    return model(x).square().mean()


for step in session.steps(steps):
    result = session.backward(loss_of, [data[(step + m) % 200 :][:8] for m in range(12)])
    optimizer.step()
    if session.leader:
        print(f"step {step} loss {result.loss!r}")  # noqa: T201 - as scripts do
