"""A recording that a later step is not of: the job goes on in one piece, and ends with the same bits."""

from pathlib import Path

import pytest
from crews import Crew, ends_alike, played_alone

from agent.messages import WorkerReady

pytestmark = pytest.mark.processes

STEPS = 12
SCRIPT = f"""
import sys
import torch
from orchestrator import Session
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = Session(model, optimizer, microbatches=2)
def batches(step):
    rows = torch.Generator().manual_seed(step)
    return [torch.randn(4 if step < 8 else 3 + each, 8, generator=rows) for each in range(2)]
def loss_of(x):
    for layer in model if len(x.shape) + len(list(x)) > 5 else [*model][::-1]:
        x = layer(x)
    return x.square().sum()
for step in session.steps({STEPS}):
    result = session.backward(loss_of, batches(step))
    optimizer.step()
    if session.leader:
        print(f"step {{step}} loss {{result.loss!r}}")
if session.leader:
    torch.save(model.state_dict(), sys.argv[1])
"""


def test_other_shapes_in_a_later_step_end_the_depth_and_not_the_job(
    crew: Crew, tmp_path: Path
) -> None:
    """The first steps can be cut and are played with depth 2; microbatches of two sizes come after these."""
    script, alone = tmp_path / "train.py", tmp_path / "alone" / "out.pt"
    script.write_text(SCRIPT)
    alone.parent.mkdir()
    by_hand = played_alone(script, alone)
    crew.depth = 2
    crew.begin(2, script.read_text(), str(tmp_path / "out.pt"))
    ends_alike(crew, by_hand, STEPS)
    assert crew.depth == 1
    told = [report.uncuttable for report in crew.of(WorkerReady) if report.uncuttable]
    assert "asks how large its inputs are" in told[-1]
