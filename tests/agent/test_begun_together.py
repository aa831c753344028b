"""Workers that begin a job together, and come to its first step before anybody knows its microbatches."""

from pathlib import Path

import pytest
from crews import Crew, ends_alike, played_alone, until

from agent.messages import WorkerFailed, WorkerLost

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


SETS = f"""
import sys
import torch
from orchestrator import Session

torch.manual_seed(0)
model = torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
optimizer = torch.optim.MADE
session = Session(model, optimizer)
session.state["rates"] = []
for step in session.steps({STEPS}):
    rows = list(torch.randn(6, 2, 2, 3, 3, generator=torch.Generator().manual_seed(step)))
    session.state["rates"].append(0.1 / (step + 1))
    optimizer.param_groups[0]["lr"] = session.state["rates"][-1]

    def closure():
        optimizer.zero_grad()
        return session.backward(lambda x: model(x).square().mean(), rows)

    loss = STEPPED
    if session.leader:
        print(f"step {{step}} loss {{float(loss)!r}} {{len(session.state['rates'])}}")
if session.leader:
    torch.save(model.state_dict(), sys.argv[1])
"""
PLAIN = "loss = closure(); optimizer.step()"


@pytest.mark.parametrize(
    ("made", "stepped"),
    [
        ("AdamW(model.parameters())", PLAIN),
        ("LBFGS(model.parameters(), max_iter=3)", "loss = optimizer.step(closure)"),
    ],
)
def test_what_is_set_before_the_first_backward_stays_on_every_worker(
    crew: Crew, tmp_path: Path, made: str, stepped: str
) -> None:
    """The state of the one that all begin with is of the boundary before. LBFGS has its own in hand already, and asks for
    gradients as the script has them."""
    script = SETS.replace("MADE", made).replace("loss = STEPPED", stepped)
    (tmp_path / "train.py").write_text(script)
    alone = played_alone(tmp_path / "train.py", tmp_path / "alone" / "out.pt")
    crew.begin(3, script, str(tmp_path / "out.pt"))
    ends_alike(crew, alone, STEPS, besides=("the model was not measured",))
    assert crew.of(WorkerLost) == []


TWO_LOOPS = f"""
import torch
from orchestrator import Session

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters())
session = Session(model, optimizer, steps={STEPS})


def train(step):
    rows = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(step))
    result = session.backward(lambda x: model(x).square().mean(), list(rows))
    optimizer.step()
    optimizer.zero_grad()


for step in session.steps(1):
    train(step)
for step in session.steps({STEPS - 1}):
    train(step + 1)
"""


def test_a_loop_of_one_step_is_not_left_before_that_step_is_done(crew: Crew) -> None:
    crew.begin(3, TWO_LOOPS)
    assert crew.completed().step == STEPS
    assert crew.of(WorkerLost) == []


EPOCHS = """
import torch
from orchestrator import Session

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters())
session = Session(model, optimizer)
for epoch in session.epochs(2, range(2)):
    for item in session.each([1.0, 2.0]):
        rows = [torch.full((4,), item + at) for at in range(6)]
        session.backward(lambda x: model(x).square().mean(), rows)
        optimizer.step()
        optimizer.zero_grad()
        session.state[str(epoch)] = True
    session.state[str(epoch)]
"""


def test_an_epoch_s_end_finds_what_its_steps_have_made(crew: Crew) -> None:
    crew.begin(3, EPOCHS)
    assert crew.completed().step == 4
    assert crew.of(WorkerLost) == []


def test_a_file_of_a_first_step_that_counted_for_nothing_is_gone_when_it_is_done_again(
    crew: Crew,
) -> None:
    crew.begin(3, SCRIPT.replace("pass", "if step == 0: open('lines.txt', 'x').write('begun')"))
    assert crew.completed().step == STEPS
    assert crew.of(WorkerFailed) == []
