"""Workers that begin a job together, and come to its first step before anybody knows its microbatches."""

import pytest
from crews import Crew, until

from agent.messages import WorkerFailed

pytestmark = pytest.mark.processes

STEPS = 4
SCRIPT = f"""
import torch
from orchestrator import Session

torch.manual_seed(0)
model = torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(4, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), foreach=False)
session = Session(model, optimizer)
session.state["sums"] = torch.zeros(2)
for step in session.steps({STEPS}):
    pass
    rows = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(step))
    result = session.backward(lambda x: model(x).square().mean(), list(rows))
    optimizer.step()
    optimizer.zero_grad()
    session.state["sums"] += result.loss
"""


def test_a_state_that_comes_in_the_first_step_is_no_change_of_the_script(crew: Crew):
    """Some tensors, such as a rate, are written to when they are loaded."""
    crew.begin(2, SCRIPT)
    assert crew.completed().step == STEPS


def test_a_model_changed_before_the_first_backward_is_refused_where_a_state_comes(crew: Crew):
    changed = SCRIPT.replace("pass", "model.bias.data.add_(1.0)")
    crew.begin(2, changed)
    (failed, *_) = until("the refusal", lambda: crew.of(WorkerFailed))
    assert failed.kind == "refused"
    assert "'bias' was changed before session.backward" in failed.detail
