"""Loops that refuse to compute with what is not a number, where each worker keeps its own layers only."""

from pathlib import Path

import pytest
from crews import Crew, ends_alike_in_two

pytestmark = pytest.mark.processes

STEPS = 20
SCRIPT = f"""
import sys
import torch
from torch.distributions import Categorical, Normal
from orchestrator import Session
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = Session(model, optimizer, microbatches=4)
def batches(step):
    rows = torch.Generator().manual_seed(step)
    return [torch.randn(4 + step % 2, 8, generator=rows) for _ in range(4)]
def loss_of(x):
    logits, mean = model(x).split(4, 1)
    chosen = Categorical(logits=logits)
    taken = chosen.sample()
    wanted = x.gather(1, taken[:, None]).squeeze(1)
    found = Normal(mean, 1.0).log_prob(wanted[:, None]).sum(1)
    return -(chosen.log_prob(taken) * wanted + found).mean()
for step in session.steps({STEPS}):
    result = session.backward(loss_of, batches(step))
    optimizer.step()
    if session.leader:
        print(f"step {{step}} loss {{result.loss!r}}")
if session.leader:
    torch.save(model.state_dict(), sys.argv[1])
"""


def test_what_is_drawn_from_a_distribution(crew: Crew, tmp_path: Path) -> None:
    """A newcomer records the loop before it has any layer: neither the loop's own run nor torch's sampler takes what is
    not a number."""
    ends_alike_in_two(crew, SCRIPT, tmp_path, STEPS)
