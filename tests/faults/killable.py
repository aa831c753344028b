"""A small script as a person would write one; with a pause, so that there is time to kill somebody.

usage: killable.py STEPS PAUSE_S OUT
"""

import sys
import time

import torch

from orchestrator import Session

steps, pause_s, out = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(64, 4)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = Session(model, optimizer, microbatches=6)
data = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))


def batches(step: int) -> list[torch.Tensor]:
    rows = torch.Generator().manual_seed(step)
    return [data[torch.randint(0, 256, (8,), generator=rows)] for _ in range(6)]


def loss_of(x: torch.Tensor) -> torch.Tensor:
    time.sleep(pause_s)
    return model(x).square().mean()


for step in session.steps(steps):
    session.backward(loss_of, batches(step))
    optimizer.step()
    optimizer.zero_grad()
if session.leader:
    torch.save(model.state_dict(), out)
