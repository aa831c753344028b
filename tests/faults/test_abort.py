"""A script that aborts its process in the same step every time, on a real local cloud."""

import pytest
from houses import RunningHouse

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

ABORTS = """
import os

import torch

from orchestrator import Session

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=4)


def loss_of(x):
    return model(x).square().mean()


for step in session.steps(10):
    print(f"begins {step}")
    if step == 3:
        os.abort()
    session.backward(loss_of, [torch.full((1, 4), float(number)) for number in range(4)])
    optimizer.step()
    optimizer.zero_grad()
"""


def test_script_that_aborts_in_a_step_fails_with_its_signal_and_last_lines(new_house) -> None:
    """Two machines show that it is the script: its failures are counted, and no pool is left alone."""
    house: RunningHouse = new_house()
    house.start()
    house.submit(ABORTS, slots_max=1, max_failures=1)
    job = house.ended(200.0)
    assert job.status == "FAILED", house.told()
    assert "SIGABRT near step 3 on 2 machines at train.py, line 20 in <module>" in job.because
    assert "begins 3 (the 2nd failure, and max_failures allows 1)" in job.because
    view = house.client().view()
    assert len({machine.id for machine in view.machines}) == 2, house.told()
    assert not [pool for pool in view.pools if pool.blocked_because]
