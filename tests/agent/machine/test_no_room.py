"""A machine whose disk takes no files says so, and the script is not blamed."""

from pathlib import Path
from typing import Any

import pytest
from crews import Crew, Nursery

from agent import messages

pytestmark = pytest.mark.processes

TRAINS = """
import torch
from orchestrator import Session
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=1)
for step in session.steps(3):
    session.backward(lambda x: model(x).sum(), [torch.ones(2, 4)])
    optimizer.step()
"""


def test_worker_whose_files_find_no_room_is_lost_by_its_machine(
    redis_process: Any, tmp_path: Path
) -> None:
    """No file can grow beyond 20 bytes there. The next machine trains the job to its end."""
    full, roomy = Nursery(tmp_path, ("prlimit", "--fsize=20")), Nursery(tmp_path)
    crew = Crew(redis_process, full, tmp_path)
    try:
        (worker,) = crew.begin(1, TRAINS)
        (lost,) = crew._until("the loss", lambda: crew.of(messages.WorkerLost))
        said = (
            f"m1 does not take the files that come with the script, in {tmp_path}: File too large."
        )
        assert (lost.worker, lost.cause) == (worker, "machine")
        assert lost.detail.startswith(said)
        assert "larger disks" in lost.detail
        crew._until("the log", lambda: any(line.startswith(said) for line in crew.printed()))
        crew.nursery = roomy
        crew.start(1)
        assert crew.completed().step == 3
    finally:
        crew.close()
        full.close()
        roomy.close()
