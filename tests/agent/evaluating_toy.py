"""A script that looks at its whole model before and behind every step, and does with the result what scripts do.

usage: evaluating_toy.py STEPS OUT

Behind step 5 whoever has one of the places in OUT.late, counted over the layout's workers, waits until that file is
gone. OUT.asking is there when the first of the others is about to look. If there is a file OUT.hold with a number in it,
steps from that number on wait.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn

from orchestrator import Session

MICROBATCHES = 4
LATE_AT = 5


def held(step: int, out: str) -> bool:
    try:
        return step >= int(Path(f"{out}.hold").read_text())
    except (FileNotFoundError, ValueError):
        return False


def wait_if_late(group, out: str) -> None:
    late = Path(f"{out}.late")
    try:
        places = late.read_text().split()
    except FileNotFoundError:
        return
    if str(group.layout.workers.index(group.me)) in places:
        while late.exists():
            time.sleep(0.01)
    Path(f"{out}.asking").touch()


def main(steps: int, out: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.1, patience=0, threshold=0
    )
    session = Session(model, optimizer, plateau, microbatches=MICROBATCHES)
    x = torch.randn(MICROBATCHES, 8, 16, generator=torch.Generator().manual_seed(99))

    def loss_of(batch):
        return (model(batch) - batch.sin()).square().mean()

    for step in session.steps(steps):
        while held(step, out):
            time.sleep(0.01)
        with torch.no_grad():
            before = float((model(x) - x.sin()).square().mean())
        result = session.backward(loss_of, list(x))
        optimizer.step()
        if step == LATE_AT:
            wait_if_late(session._world, out)
        with torch.no_grad():
            found = float((model(x) - x.sin()).square().mean())
        plateau.step(found)
        if session.leader:
            rate = optimizer.param_groups[0]["lr"]
            print(f"step {step} from {before!r} loss {result.loss!r} then {found!r} rate {rate!r}")  # noqa: T201 - as scripts do
    if session.leader:
        torch.save(model.state_dict(), out)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
