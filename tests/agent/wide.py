"""A script whose state is weights and little else, so that a worker's memory is a matter of its layers, and
which sets its learning rate itself.

usage: wide.py STEPS OUT

If there is a file OUT.hold with a number in it, steps from that number on wait.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn

from orchestrator import Session

MICROBATCHES, WIDTH, LAYERS = 4, 128, 4
# Weights, gradients, twice for Adam, and two sums of gradients, as four microbatches are added up.
STATE_BYTES = 4 * 6 * LAYERS * (WIDTH * WIDTH + WIDTH)


def batches(step: int) -> list[torch.Tensor]:
    rows = torch.Generator().manual_seed(step)
    return list(torch.randn(MICROBATCHES, 2, WIDTH, generator=rows))


def held(step: int, out: str) -> bool:
    try:
        return step >= int(Path(f"{out}.hold").read_text())
    except (FileNotFoundError, ValueError):
        return False


def main(steps: int, out: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = Session(model, optimizer, microbatches=MICROBATCHES)

    def loss_of(batch):
        return (model(batch) - batch).square().mean()

    for step in session.steps(steps):
        while held(step, out):
            time.sleep(0.01)
        for group in optimizer.param_groups:  # by hand, and before the step
            group["lr"] = 1e-3 * (1 + step % 3)
        result = session.backward(loss_of, batches(step))
        session.clip_grad_norm_(1.0)
        optimizer.step()
        if session.leader:
            print(f"step {step} loss {result.loss!r}")  # noqa: T201 - as scripts do
    if session.leader:
        torch.save(model.state_dict(), out)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
