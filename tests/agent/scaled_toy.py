"""Half precision with a scaled loss, as a person would write it.

usage: scaled_toy.py STEPS OUT

The first scales are far too large, and it grows again every few steps: some steps overflow and are skipped.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn

from orchestrator import Session

steps, out = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
session = Session(model, optimizer, scaler, microbatches=4)
data = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


def loss_of(x):
    with torch.autocast("cpu", torch.float16):
        return model(x).square().mean()


for step in session.steps(steps):
    while Path(f"{out}.hold").exists() and step >= int(Path(f"{out}.hold").read_text() or 0):
        time.sleep(0.01)
    result = session.backward(loss_of, data.split(16))
    scaler.unscale_(optimizer)
    session.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
    if session.leader:
        print(f"step {step} loss {result.loss!r} scale {scaler.get_scale()}")  # noqa: T201 - as scripts do
if session.leader:
    torch.save(model.state_dict(), out)
