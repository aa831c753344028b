"""What a script sets and keeps beside its weights is there for a worker that joins later: the bits are those of one process."""

from pathlib import Path

import pytest
from crews import Crew, played_alone, until

from agent.messages import WorkerLost

pytestmark = pytest.mark.processes

STEPS = 24
SCRIPT = f"""
import os
import sys
import torch
from torch import nn
from orchestrator import Session
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self, ins, outs):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(ins, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, outs))
        self.register_buffer("scale", torch.ones(outs), persistent=False)
    def forward(self, x):
        return self.net(x) * self.scale

class Average:
    def __init__(self, model, decay):
        self.model, self.decay, self.count = model, decay, 0
        self.shadow = {{name: param.detach().clone() for name, param in model.named_parameters()}}
    def update(self):
        self.count += 1
        for name, param in self.model.named_parameters():
            self.shadow[name].lerp_(param.detach(), 1 - self.decay)

maker, judge = Net(4, 4), Net(4, 1)
makes = torch.optim.Adam(maker.parameters(), lr=1e-2)
judges = torch.optim.Adam(judge.parameters(), lr=1e-2)
average = Average(maker, 0.9)
session = Session(makes, maker, judge, judges, average, microbatches=4)

def batches(step):
    rows = torch.Generator().manual_seed(step)
    return [torch.randn(4, 4, generator=rows) for _ in range(4)]

def judged(x):
    return (judge(x).square() - judge(maker(x).detach())).mean()

def made(x):
    return judge(maker(x)).mean(), {{"size": maker(x).abs().mean().item()}}

for step in session.steps({STEPS}):
    if step == 3:
        # Once, and no worker that joins later runs it.
        maker.net[1].eval()
        judge.net[0].requires_grad_(False)
        maker.scale.mul_(0.5)
        judge.scale = torch.full((1,), 2.0)
    if step == 18:
        judge.net[0].requires_grad_(True)
    best = session.state.get("best", 9e9)
    factor = 1.0 if session.state.get("stale", 0) < 3 else 0.5
    for group in makes.param_groups:
        group["lr"] = 1e-2 * factor
    session.backward(judged, batches(step))
    judges.step(); judges.zero_grad()
    result = session.backward(made, batches(step))
    makes.step(); makes.zero_grad(); judges.zero_grad()
    average.update()
    with torch.no_grad():
        maker.net[3].bias.add_(average.shadow["net.3.bias"], alpha=0.01 * average.count)
    session.state["best"] = min(best, result.loss)
    session.state["stale"] = 0 if result.loss < best else session.state.get("stale", 0) + 1
    session.state.setdefault("history", []).append((step, result.loss, result["size"]))
    if session.leader:
        print(f"step {{step}} loss {{result.loss!r}}")
if session.leader:
    assert len(session.state["history"]) == {STEPS}
    torch.save({{**maker.state_dict(), **{{f"judge.{{k}}": v for k, v in judge.state_dict().items()}}}}, sys.argv[1] + ".part")
    os.replace(sys.argv[1] + ".part", sys.argv[1])
"""


def test_a_joining_worker_has_what_was_set_once(crew: Crew, tmp_path: Path) -> None:
    """A step has two phases, and what is reached are phases. All that were there from the start are killed one after the other."""
    (tmp_path / "train.py").write_text(SCRIPT)
    alone = played_alone(tmp_path / "train.py", tmp_path / "alone" / "out.pt")
    workers = crew.begin(2, SCRIPT, str(tmp_path / "out.pt"))
    crew.reach(10)
    crew.start(1)
    crew.kill(workers[0])
    crew.reach(24)
    crew.start(1)
    crew.kill(workers[1])
    crew.completed()
    lines, weights = alone
    printed = [line for line in crew.printed() if line.startswith("step")]
    assert set(printed) <= set(lines)
    until("the weights", (tmp_path / "out.pt").exists)
    assert (tmp_path / "out.pt").read_bytes() == weights


def test_the_keeper_is_killed_between_two_commits_of_a_step(mortal: Crew, tmp_path: Path) -> None:
    """The next one has no state, and gets none before the step has ended: it commits the rest of the step without one."""
    slow = SCRIPT.replace("def made(x):", "def made(x):\n    time.sleep(0.04)").replace(
        "import sys", "import sys\nimport time"
    )
    (tmp_path / "train.py").write_text(slow)
    lines, weights = played_alone(tmp_path / "train.py", tmp_path / "alone" / "out.pt")
    mortal.begin(2, slow, str(tmp_path / "out.pt"))
    for step in (9, 21, 33):
        mortal.reach(step)
        until("the middle of a step", lambda: mortal.step % 2)
        mortal.keeper.kill()
        assert mortal.step % 2
        mortal.keeper.start()
    mortal.completed()
    assert mortal.of(WorkerLost) == []
    printed = [line for line in mortal.printed() if line.startswith("step")]
    assert set(printed) <= set(lines)
    until("the weights", (tmp_path / "out.pt").exists)
    assert (tmp_path / "out.pt").read_bytes() == weights


def test_a_job_that_was_closed_in_the_middle_of_a_step_goes_on_there(
    crew: Crew, tmp_path: Path
) -> None:
    """Its workers have applied the first commit of the step again, and compute the second one; one of them leads."""
    waits = "    while sys.argv[2:] and session.step == 12 and os.path.exists(sys.argv[2]):\n        time.sleep(0.01)\n"
    script = SCRIPT.replace("def made(x):\n", f"def made(x):\n{waits}").replace(
        "import sys", "import sys\nimport time"
    )
    (tmp_path / "train.py").write_text(script)
    lines, weights = played_alone(tmp_path / "train.py", tmp_path / "alone" / "out.pt")
    hold = tmp_path / "hold"
    hold.touch()
    crew.begin(1, script, str(tmp_path / "out.pt"), str(hold))
    crew.reach(25)
    until("what it has printed", lambda: lines[11] in crew.printed())
    assert crew.close_job() == 25
    hold.unlink()
    crew.begin(2, script, str(tmp_path / "out.pt"), str(hold))
    crew.completed()
    printed = [line for line in crew.printed() if line.startswith("step")]
    assert sorted(printed) == sorted(lines)
    until("the weights", (tmp_path / "out.pt").exists)
    assert (tmp_path / "out.pt").read_bytes() == weights
