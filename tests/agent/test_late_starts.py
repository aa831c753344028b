"""A worker that comes to its first step when the job is further does that step for nothing, and takes part after it."""

from pathlib import Path

import pytest
from crews import Crew, until

from agent.messages import CheckpointWritten, Rewound, WorkerLost

pytestmark = pytest.mark.processes

ENDLESS = 1 << 30
STRICT = """
import os, pathlib, sys, time
import torch
from orchestrator import Session

folder = pathlib.Path(sys.argv[1])
hold, me = folder / "hold", os.getpid()


class Strict(torch.optim.SGD):
    def step(self):
        assert all(p.grad is not None for group in self.param_groups for p in group["params"])
        super().step()


torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = Strict(model.parameters(), lr=0.1, momentum=0.9)
session = Session(model, optimizer)


def loss_of(x):
    while session.step >= int(hold.read_text()):
        session._world.check()
        time.sleep(0.005)
    return model(x).square().mean()


(folder / f"{me}.came").touch()
while not (folder / f"{me}.go").exists():
    time.sleep(0.005)
for step in session.steps(40):
    x = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(step))
    session.backward(loss_of, list(x))
    optimizer.step()
    optimizer.zero_grad()
"""


STOPS = """
import sys
import torch
from orchestrator import Session

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer)
for step in session.steps(40):
    x = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(step))
    result = session.backward(lambda x: model(x).square().mean(), list(x))
    if not result.loss < 1e9:
        sys.exit("the loss is no number")
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_that_ends_without_a_loss_is_resumed_by_a_keeper_that_was_told_its_microbatches(
    mortal: Crew,
) -> None:
    """A worker that does not know them does its first step for nothing, and has no loss then."""
    mortal.begin(1, STOPS)
    mortal.reach(8)
    mortal.close_job()
    until("its version on the disk", lambda: mortal.of(CheckpointWritten))
    mortal.keeper.kill()
    mortal.keeper.address = ""  # one without a job may listen anywhere
    mortal.keeper.start()
    mortal.begin(1, STOPS, microbatches=4)
    assert mortal.completed().step == 40
    assert mortal.of(Rewound) == mortal.of(WorkerLost) == []


def test_an_optimizer_that_wants_each_gradient_has_zeros_there(crew: Crew, tmp_path: Path) -> None:
    """Only the call in the loop says how many microbatches there are, so the worker cannot know where the job is before."""
    hold = tmp_path / "hold"
    crew.hold(hold, 3)
    crew.settle = 1
    crew.open(STRICT, str(tmp_path))
    first, late = crew.start(2)
    for worker in (first, late):
        until(f"{worker}", (tmp_path / f"{crew.pids[worker]}.came").exists)
    (tmp_path / f"{crew.pids[first]}.go").touch()
    crew.reach(3)
    (tmp_path / f"{crew.pids[late]}.go").touch()
    crew.let_in(hold, late)
    assert crew.of(WorkerLost) == []
    crew.hold(hold, ENDLESS)
    crew.completed()
