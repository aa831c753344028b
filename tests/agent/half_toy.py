"""Half precision that goes deep: an autocast around all of the model, and a scale that is too large again and again.

usage: half_toy.py STEPS OUT

What overflows does so in the first layer's gradients first. If there is a file OUT.hold with a number in it, steps from
that number on wait.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from orchestrator import Session


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.back = (nn.Linear(width, width) for _ in range(3))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        h = self.norm(x)
        return x + self.drop(self.back(self.query(h) * self.key(h).relu()))


def held(step: int, out: str) -> bool:
    try:
        return step >= int(Path(f"{out}.hold").read_text())
    except (FileNotFoundError, ValueError):
        return False


def main(steps: int, out: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), *[Block(16) for _ in range(4)], nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=3.0 * 2.0**22, growth_factor=3.0, growth_interval=2
    )
    session = Session(model, optimizer, scaler, microbatches=6)
    data = torch.randn(96, 16, generator=torch.Generator().manual_seed(1)) * 8

    def loss_of(x):
        with torch.autocast("cpu", torch.float16):
            found = model(x)
            return functional.mse_loss(found, x[:, :4].tanh())

    for step in session.steps(steps):
        while held(step, out):
            time.sleep(0.01)
        result = session.backward(loss_of, data.split(16))
        scaler.unscale_(optimizer)
        norm = session.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        if session.leader:
            scale = scaler.get_scale()
            print(f"step {step} loss {result.loss!r} scale {scale!r} norm {float(norm)!r}")  # noqa: T201 - as scripts do
    if session.leader:
        torch.save(model.state_dict(), out)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
