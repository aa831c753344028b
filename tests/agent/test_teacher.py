"""A teacher that the session does not know of, beside a student that is cut: the bits are those of one process."""

from pathlib import Path

import pytest
from crews import Crew, ends_alike_in_two

pytestmark = pytest.mark.processes

STEPS = 20
SCRIPT = f"""
import sys
import torch
from torch.nn import functional
from orchestrator import Session
torch.manual_seed(0)
def layers(*drops):
    return [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(p)) for p in drops]
model = torch.nn.Sequential(*layers(0.1, 0.1, 0.1, 0.1))
teacher, noisy = (torch.nn.Sequential(*layers(0.5, 0.5)) for _ in range(2))
teacher.eval()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = Session(model, optimizer, microbatches=4)
def batches(step):
    rows = torch.Generator().manual_seed(step)
    return [torch.randn(4, 8, generator=rows) for _ in range(4)]
def loss_of(x):
    with torch.no_grad():
        wanted = asked(x)
    return functional.mse_loss(model(x), wanted)
for step in session.steps({STEPS}):
    asked = (teacher, noisy)[step // 4 % 2]
    result = session.backward(loss_of, batches(step))
    optimizer.step()
    if session.leader:
        print(f"step {{step}} loss {{result.loss!r}}")
if session.leader:
    torch.save(model.state_dict(), sys.argv[1])
"""


def test_a_teacher_beside_the_session(crew: Crew, tmp_path: Path) -> None:
    """One is asked at the end, another one drops half of what it has and is asked in its turn. Who asks it is killed,
    and a newcomer has teachers of its own."""
    ends_alike_in_two(crew, SCRIPT, tmp_path, STEPS)
