"""A script with everything that makes a pipeline hard: tied weights, a skip, dropout, buffers, clipping.

usage: deep_toy.py STEPS OUT

If there is a file OUT.hold with a number in it, steps from that number on wait, and OUT.held.STEP.PID is there meanwhile.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from orchestrator import Session

MICROBATCHES = 6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.wide, self.back = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        normed = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.back(self.drop(functional.gelu(self.wide(normed))))


class Tied(nn.Module):
    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = start = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h + start)


def batches(step: int) -> list[dict[str, torch.Tensor]]:
    rows = torch.Generator().manual_seed(step)
    text = torch.randint(0, 32, (MICROBATCHES, 4, 7), generator=rows)
    return [{"x": part[:, :-1], "y": part[:, 1:]} for part in text]


def held(step: int, out: str) -> bool:
    try:
        waits = step >= int(Path(f"{out}.hold").read_text())
    except (FileNotFoundError, ValueError):
        return False
    if waits:
        Path(f"{out}.held.{step}.{os.getpid()}").touch()
    return waits


def main(steps: int, out: str) -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    session = Session(model, optimizer, scheduler, microbatches=MICROBATCHES)

    def loss_of(batch):
        logits = model(batch["x"])
        return functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())

    for step in session.steps(steps):
        while held(step, out):
            time.sleep(0.01)
        result = session.backward(loss_of, batches(step))
        session.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        if session.leader:
            print(f"step {step} loss {result.loss!r}")  # noqa: T201 - as scripts do
    if session.leader:
        torch.save(model.state_dict(), out)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
