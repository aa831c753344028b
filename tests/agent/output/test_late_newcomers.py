"""A worker that comes while a job ends waits for that end, and is not sent away again and again."""

import pytest
from crews import Crew, until

from agent import messages

pytestmark = pytest.mark.processes

GOES_ON = """
import pathlib, sys, time
import torch
from orchestrator import Session

model = torch.nn.Linear(4, 1)
session = Session(model)
for step in session.steps(3):
    session.backward(lambda x: model(x).mean(), [torch.ones(2, 4)] * 2)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
"""


def test_newcomer_in_the_tail_of_a_job_waits_for_its_end(crew: Crew) -> None:
    """A worker is lost there, and the manager, which learns of that alone, starts one in its place."""
    go = crew.folder / "go"
    crew.begin(2, GOES_ON, str(go), tail_s=1000.0)
    job = crew.keeper._jobs[crew.job]
    stored = lambda: job._ending._stored is not None  # noqa: E731
    until("the result to be stored", stored)
    crew.kill("w2")
    until("its loss", lambda: job.roster.finishing == {"w1"})
    (newcomer,) = crew.start(1)
    until("the newcomer", lambda: newcomer in job.roster.members)
    go.touch()
    assert crew.completed().step == 3
    assert newcomer in job.roster.members
    assert not job.roster.is_gone(newcomer)
    assert crew.of(messages.WorkerLost) == []
