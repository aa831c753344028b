"""A loop that goes by what nobody sees it read: it is found out, and what was computed is not other than in one process."""

from pathlib import Path

import pytest
from crews import Crew, ends_alike, played_alone, until

from agent.errors import CannotRecord, Misuse
from agent.messages import WorkerFailed, WorkerReady
from agent.pipeline.doubts import Doubts

STEPS = 12
SCRIPT = f"""
import os, sys, torch
from agent import Session
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = Session(model, optimizer, microbatches=4)
for step in session.steps({STEPS}):
    os.environ["WEIGHT"] = str(SET)
    for x in session.share(list(torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(step)))):
        session.backward(float(os.environ["WEIGHT"]) * model(x).square().mean())
    optimizer.step()
    if session.leader:
        print(f"step {{step}} loss {{session.loss!r}}")
if session.leader:
    torch.save(model.state_dict(), sys.argv[1])
"""


@pytest.mark.processes
def test_what_changes_in_every_step(crew: Crew, tmp_path: Path) -> None:
    """Noticed before anything was computed with it: the job trains in one piece."""
    script = SCRIPT.replace("SET", "1 + 0.1 * step")
    (tmp_path / "train.py").write_text(script)
    alone = played_alone(tmp_path / "train.py", tmp_path / "alone" / "out.pt")
    crew.depth = 2
    crew.begin(2, script, str(crew.folder / "out.pt"))
    ends_alike(crew, alone, STEPS)
    said = [ready.uncuttable for ready in crew.of(WorkerReady)]
    assert any("computes something else than in the step before" in why for why in said)


@pytest.mark.processes
def test_what_changes_at_some_time(crew: Crew) -> None:
    """Steps behind that may have been computed with what was: the job fails, and says which."""
    crew.depth = 2
    crew.begin(2, SCRIPT.replace("SET", "1 + (step >= 5)"), str(crew.folder / "out.pt"))
    failed = until("the failure", lambda: crew.of(WorkerFailed))[0]
    assert "step 7: " in failed.detail
    assert "than in step 3, and steps between" in failed.detail


def test_looked_at_ever_more_seldom() -> None:
    """In the next step, and then twice as many steps later, up to some dozens."""
    doubts, looked = Doubts(lambda: 0.0), list[int]()

    def look(step: int) -> bool:
        looked.append(step)
        return True

    doubts.recorded(0)
    for step in range(300):
        assert doubts.right(step, lambda at=step: look(at), entered=step == 20)
    assert looked == [1, 3, 7, 15, 20, 52, 115, 178, 241]


def test_it_takes_next_to_no_time() -> None:
    """Where a look takes as long as two steps, there are 1024 between; but a layout that begins is looked at."""
    now_s, looked = [0.0], list[int]()
    doubts = Doubts(lambda: now_s[0])

    def look(step: int) -> bool:
        looked.append(step)
        now_s[0] += 0.25
        return True

    doubts.recorded(0)
    for step in range(2500):
        assert doubts.right(step, lambda at=step: look(at), entered=step == 300)
        now_s[0] += 0.125
    assert looked == [1, 3, 7, 15, 31, 63, 300, 1324, 2348]


def test_a_layout_begins_with_what_is_right() -> None:
    """What is recorded anew then has computed nothing wrong; in the middle of one nobody else would record it anew."""
    doubts = Doubts()
    doubts.recorded(0)
    assert doubts.right(0, bool, entered=True)
    assert not doubts.right(1, bool, entered=True)
    doubts.recorded(1)
    with pytest.raises(CannotRecord, match=r"step 2: .* than in the step before"):
        doubts.right(2, bool, entered=False)
    assert not doubts.right(4, bool, entered=True), "nothing was computed by it in step 2"
    doubts.recorded(2)
    assert doubts.right(3, lambda: True, entered=False)
    assert doubts.right(4, bool, entered=False)
    with pytest.raises(Misuse, match=r"step 5: .* than in step 3, and steps between") as caught:
        doubts.right(5, bool, entered=False)
    assert not isinstance(caught.value, CannotRecord)


def test_who_is_sent_back_records_anew() -> None:
    """What is right for a later step may not be for an earlier one."""
    doubts = Doubts()
    doubts.recorded(9)
    assert not doubts.right(7, bool, entered=True)
