"""A worker that comes in without files that the job has kept is lost, and its script is not blamed."""

import pytest
from crews import Crew, played_alone

from agent import messages

pytestmark = pytest.mark.processes

STEPS = 60
# Its storage is told of all that an earlier step wrote only while there is a file for it.
REWRITES = f"""
import os, sys, time
from pathlib import Path
import torch
from agent.output.sender import Sending
from orchestrator import Session

hold, stored, out = map(Path, sys.argv[1:])
flush = Sending.flush
if hold.parent.exists():
    Sending.flush = lambda sending, patience_s: stored.exists() and flush(sending, patience_s)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
session = Session(model, optimizer)


def loss_of(x):
    while hold.exists() and session.step >= int(hold.read_text()):
        time.sleep(0.002)
    return model(x).square().mean()


for step in session.steps({STEPS}):
    if step:
        assert int(Path("before.txt").read_text()) == step - 1
    Path("draft.txt").write_text(str(step))
    os.replace("draft.txt", "before.txt")
    session.backward(loss_of, [torch.full((2, 4), 1.0 + i) for i in range(4)])
    optimizer.step()
    optimizer.zero_grad()
if session.leader:
    torch.save(model.state_dict(), out)
"""
WITHOUT = "it came into the job without the files that earlier steps wrote"


def lost_without_files(crew: Crew, worker: str) -> bool:
    crew._well()
    of_it = [lost for lost in crew.of(messages.WorkerLost) if lost.worker == worker]
    return any(WITHOUT in lost.detail and "before.txt" in lost.detail for lost in of_it)


def test_worker_that_lacks_a_file_is_lost_and_the_job_goes_on(crew: Crew) -> None:
    """One in the middle of a step that has rewritten the file; one in its proof."""
    script, out = crew.folder / "train.py", crew.folder / "out.pt"
    script.write_text(REWRITES)
    nowhere = str(crew.folder / "nowhere" / "hold")
    alone = crew.folder / "alone"
    alone.mkdir()
    _, weights = played_alone(script, alone / "out.pt", nowhere, nowhere, cwd=alone)
    run = crew.folder / "run"
    run.mkdir()
    hold, stored = run / "hold", run / "stored"
    crew.hold(hold, 3)
    stored.touch()
    workers = crew.begin(2, REWRITES, str(hold), str(stored), str(out))
    crew.reach(3)
    with crew.on_hold():
        (third,) = crew.start(1)
        crew.let_in(hold, third)
        stored.unlink()
        crew.hold(hold, crew.step + 2)
        crew.reach(int(hold.read_text()))
    crew.step_on(hold, "the loss", lambda: lost_without_files(crew, third))
    (fourth,) = crew.start(1)
    crew.step_on(hold, "the loss", lambda: lost_without_files(crew, fourth), fourth)
    stored.touch()
    hold.unlink()
    assert crew.completed().step == STEPS
    assert out.read_bytes() == weights
    assert sorted(crew.ready) == sorted(workers)
