"""Scripts that keep something for themselves: whoever joins behind them is named, and never takes part."""

from pathlib import Path

import pytest
from crews import Crew, ends_alike, played_alone, until

from agent.messages import BackupHeld, JobCompleted, WorkerFailed

pytestmark = pytest.mark.processes

SCRIPT = """
import pathlib, sys, time, torch
from orchestrator import Session
torch.manual_seed(0)
hidden = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh()
model = torch.nn.Sequential(*hidden, torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
session = Session(model, optimizer, microbatches=2)
hold, mine = pathlib.Path(sys.argv[1]), 0
for step in session.steps(14):
    data = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(step))
    result = session.backward(lambda x: LOSS, list(data))
    STATE
    optimizer.step()
    optimizer.zero_grad()
    mine += 1
    while step >= 6 and hold.exists():
        time.sleep(0.01)
if session.leader:
    torch.save(model.state_dict(), sys.argv[2])
"""
PLAIN = {"LOSS": "model(x).square().mean()", "STATE": "pass"}
HAZARDS = {
    "gradient": (
        "LOSS",
        "(model(x).square().mean() + 0 * model[0].register_buffer('b', torch.ones(())) if 0 else "
        "(lambda y: (y + mine * (y - y.detach())))(model(x).square().mean()))",
        "the gradient of layer",
    ),
    "state": ("STATE", "optimizer.param_groups[0]['lr'] = 0.1 / (1 + mine)", "the state of"),
    "buffer": ("STATE", "model[1].momentum = 0.1 + 0.01 * mine", "the buffers of layer 1"),
}


def script(**lines: str) -> str:
    text = SCRIPT
    for name, line in {**PLAIN, **lines}.items():
        text = text.replace(name, line)
    return text


def test_a_script_that_keeps_nothing_is_proven(crew: Crew, tmp_path: Path) -> None:
    """A newcomer, and another behind the loss of all; the weights are those of one process."""
    (tmp_path / "train.py").write_text(script())
    hold = tmp_path / "hold"
    alone = played_alone(tmp_path / "train.py", tmp_path / "alone" / "out.pt", str(hold))
    hold.touch()
    first = crew.begin(1, script(), str(hold), str(tmp_path / "out.pt"))
    crew.reach(6)
    second = crew.start(1)
    until("the newcomer", lambda: set(second) <= set(crew.ready))
    crew.kill(*first, *second)
    crew.start(1)
    hold.unlink()
    ends_alike(crew, alone, 14)


@pytest.mark.parametrize(
    ("kind", "all_lost"), [("gradient", False), ("state", True), ("buffer", False)]
)
def test_what_a_script_keeps_is_named(
    crew: Crew, tmp_path: Path, kind: str, all_lost: bool
) -> None:
    """Whether others are there or not: the job fails with a line, and nobody goes on with other weights."""
    name, line, says = HAZARDS[kind]
    hold = tmp_path / "hold"
    hold.touch()
    workers = crew.begin(1, script(**{name: line}), str(hold), str(tmp_path / "out.pt"))
    crew.reach(6)
    if all_lost:  # of the first step alone nothing could be seen that changes from step to step
        until("a later state", lambda: any(held.step for held in crew.of(BackupHeld)))
        crew.kill(*workers)
    (newcomer,) = crew.start(1)
    (failed,) = until("the refusal", lambda: crew.of(WorkerFailed))
    assert (failed.worker, failed.kind) == (newcomer, "refused")
    assert says in failed.detail and "\n" not in failed.detail
    assert "does not keep them: mine." in failed.detail
    assert newcomer not in crew.ready


OWN = """
class Own(torch.nn.Sequential):
    calls = 0
class Plain(torch.optim.SGD):
    def step(self):
        self.seen = getattr(self, "seen", 0) + 1
        super().step()
model = Own(*hidden, torch.nn.Linear(8, 1))
optimizer = Plain(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=2)
"""


def test_a_count_that_a_class_of_the_script_keeps_is_named(crew: Crew, tmp_path: Path) -> None:
    """The object is given to the session; its `state_dict` leaves the count out."""
    hold = tmp_path / "hold"
    hold.touch()
    line = "model.calls += 1; optimizer.param_groups[0]['lr'] = 0.1 / (model.calls + mine)"
    text = script(STATE=line)
    begin, end = text.index("model = "), text.index("hold, mine")
    text = text[:begin] + OWN + text[end:]
    crew.begin(1, text, str(hold), str(tmp_path / "out.pt"))
    crew.reach(6)
    crew.start(1)
    (failed,) = until("the refusal", lambda: crew.of(WorkerFailed))
    assert (
        "does not keep them: Own.calls, Plain.seen, mine." in failed.detail
        and "\n" not in failed.detail
    )


def test_what_shows_in_the_last_step_is_named(crew: Crew, tmp_path: Path) -> None:
    """No step behind it compares what workers have come to."""
    hold, waits = tmp_path / "hold", "while hold.exists() and step >= int(hold.read_text()):"
    line = "optimizer.param_groups[0]['lr'] = 0.1 / (1 + mine * (step == 39))"
    text = script(STATE=line).replace("steps(14)", "steps(40)")
    text = text.replace("while step >= 6 and hold.exists():", waits)
    crew.hold(hold, 6)
    crew.begin(1, text, str(hold), str(tmp_path / "out.pt"))
    crew.reach(6)
    crew.let_in(hold, *crew.start(1))
    crew.hold(hold, 100)
    (failed, *_) = until("the refusal", lambda: crew.of(WorkerFailed))
    assert failed.kind == "refused"
    assert "step 39: the state of layer" in failed.detail
    assert not crew.of(JobCompleted)
