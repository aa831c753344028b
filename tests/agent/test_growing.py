"""A model whose loop becomes another on the way, where each worker keeps its own layers only."""

from pathlib import Path

import pytest
from crews import Crew, ends_alike, played_alone, until

pytestmark = pytest.mark.processes

STEPS, HELD_AT = 12, 7
SCRIPT = f"""
import sys, time
from pathlib import Path
import torch
from orchestrator import Session
torch.manual_seed(0)
class Growing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 16)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(4)])
        self.heads = torch.nn.ModuleList([torch.nn.Linear(16, 1) for _ in range(5)])
        self.depth = 0
    def forward(self, x):
        h = torch.tanh(self.first(x))
        for block in self.blocks[: self.depth]:
            h = torch.tanh(block(h))
        return self.heads[self.depth](h)
model = Growing()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
session = Session(model, optimizer, microbatches=4)
hold = Path(sys.argv[1] + ".hold")
def loss_of(x):
    return (model(x) - x.sum(1, keepdim=True)).square().mean()
for step in session.steps({STEPS}):
    while step >= {HELD_AT} and hold.exists():
        time.sleep(0.01)
    model.depth = step // 3
    data = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(step))
    result = session.backward(loss_of, list(data))
    optimizer.step()
    if session.leader:
        print(f"step {{step}} loss {{result.loss!r}}")
if session.leader:
    torch.save(model.state_dict(), sys.argv[1])
"""


def test_all_are_lost_and_the_logged_steps_are_of_other_layers(crew: Crew, tmp_path: Path) -> None:
    """What is wanted of a logged sum was asked for with the layers of the step before, and these are others by then."""
    (tmp_path / "train.py").write_text(SCRIPT)
    alone = played_alone(tmp_path / "train.py", tmp_path / "alone" / "out.pt")
    hold = Path(f"{crew.folder / 'out.pt'}.hold")
    hold.touch()
    crew.depth, crew.owned = 2, True
    first = crew.begin(2, SCRIPT, str(crew.folder / "out.pt"), backup_every_steps=100)
    crew.reach(HELD_AT)
    crew.kill(*first)
    crew.start(2)
    until("the others", lambda: len(set(crew.ready) - set(first)) == 2)
    hold.unlink()
    ends_alike(crew, alone, STEPS)
