"""A script as a person would write it for whatever accelerator there is: tied weights, batch norm, dropout, clipping.

usage: device_toy.py plain|scaled|unbuilt STEPS OUT

`scaled` is half precision with a scaled loss, and everything on the device if nothing is said. `unbuilt` is `plain` with a
model that is handed over unbuilt.
If there is a file OUT.hold with a number in it, steps from that number on wait.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from orchestrator import Session, unbuilt

MICROBATCHES = 6
DEVICE = torch.accelerator.current_accelerator().type


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
    def __init__(self, width: int = 16, blocks: int = 3) -> None:
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
    text = torch.randint(0, 32, (MICROBATCHES, 4, 7), generator=rows, device="cpu")
    return [{"x": part[:, :-1], "y": part[:, 1:]} for part in text]


def held(step: int, out: str) -> bool:
    try:
        return step >= int(Path(f"{out}.hold").read_text())
    except (FileNotFoundError, ValueError):
        return False


def save(model: nn.Module, out: str, leader: bool) -> None:
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    if leader:
        torch.save(state, out)


def main(kind: str, steps: int, out: str) -> None:
    torch.manual_seed(0)
    make = unbuilt if kind == "unbuilt" else lambda build: build()
    model = make(lambda: Tied().to(DEVICE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    half = kind == "scaled"
    if half:
        torch.set_default_device(DEVICE)
    # The first scales are far too large, and it grows again every few steps.
    scaler = torch.amp.GradScaler(DEVICE, 2.0**24, growth_interval=3, enabled=half)
    session = Session(model, optimizer, scheduler, scaler, microbatches=MICROBATCHES)

    def loss_of(batch):
        with torch.autocast(DEVICE, torch.float16, enabled=half):
            logits = model(batch["x"].to(DEVICE))
            return functional.cross_entropy(logits.flatten(0, 1), batch["y"].to(DEVICE).flatten())

    for step in session.steps(steps):
        while held(step, out):
            time.sleep(0.01)
        result = session.backward(loss_of, batches(step))
        if half:
            scaler.unscale_(optimizer)
        session.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        if not half:  # which skips steps, and torch would warn of the order
            scheduler.step()
        if session.leader:
            print(f"step {step} loss {result.loss!r}")  # noqa: T201 - as scripts do
        if kind == "unbuilt" and step == steps - 1:  # behind the loop nobody has all of it
            save(model, out, session.leader)
    if kind != "unbuilt":
        save(model, out, session.leader)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
