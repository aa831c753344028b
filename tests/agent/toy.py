"""A small script as a person would write one.

usage: toy.py STEPS PAUSE_S OUT

If there is a file OUT.hold with a number in it, steps from that number on wait.
"""

import sys
import time
from pathlib import Path

import torch

from orchestrator import Session

steps, pause_s, out = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(64, 4)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
session = Session(model, optimizer, scheduler, microbatches=6)
data = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))


def batches(step: int) -> list[torch.Tensor]:
    rows = torch.Generator().manual_seed(step)
    return [data[torch.randint(0, 256, (8,), generator=rows)] for _ in range(6)]


def held(step: int) -> bool:
    hold = Path(f"{out}.hold")
    try:
        return step >= int(hold.read_text())
    except (FileNotFoundError, ValueError):
        return False


def loss_of(x: torch.Tensor) -> torch.Tensor:
    time.sleep(pause_s)
    while held(session.step):
        time.sleep(0.01)
    return model(x).square().mean()


for step in session.steps(steps):
    result = session.backward(loss_of, batches(step))
    session.clip_grad_norm_(1.0)
    optimizer.step()
    scheduler.step()
    if session.leader:
        print(f"step {step} loss {result.loss!r}")  # noqa: T201 - as scripts do
if session.leader:
    torch.save(model.state_dict(), out)
