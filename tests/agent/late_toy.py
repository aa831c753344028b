"""A script whose late workers are helped, and that notes which process has computed which microbatch.

usage: late_toy.py STEPS PAUSE_S OUT

A file OUT.late holds the process ids that are late, each of whose microbatches takes TIMES as long.
"""

import os
import sys
import time
from pathlib import Path

import torch

from orchestrator import Session

TIMES, MICROBATCHES = 12, 12
steps, pause_s, out = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 64),
    torch.nn.BatchNorm1d(64),
    torch.nn.Dropout(0.1),
    torch.nn.ReLU(),
    torch.nn.Linear(64, 4),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = Session(model, optimizer, microbatches=MICROBATCHES, stragglers="flexrr")
data = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))


def is_late() -> bool:
    try:
        return str(os.getpid()) in Path(f"{out}.late").read_text().split()
    except FileNotFoundError:
        return False


def batches(step: int) -> list[tuple[int, torch.Tensor]]:
    rows = torch.Generator().manual_seed(step)
    return [(m, data[torch.randint(0, 256, (8,), generator=rows)]) for m in range(MICROBATCHES)]


def loss_of(microbatch: tuple[int, torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    number, x = microbatch
    time.sleep(pause_s * (TIMES if is_late() else 1))
    if isinstance(number, int):  # and not recorded for a pipeline
        with Path(f"{out}.who").open("a") as who:
            who.write(f"{session.step} {number} {os.getpid()}\n")
    y = model(x)
    return y.square().mean(), {"largest": y.abs().max().item()}


for step in session.steps(steps):
    result = session.backward(loss_of, batches(step))
    session.clip_grad_norm_(1.0)
    optimizer.step()
    if session.leader:
        print(f"step {step} loss {result.loss!r} largest {result['largest']!r}")  # noqa: T201 - as scripts do
if session.leader:
    torch.save(model.state_dict(), out)
