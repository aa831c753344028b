"""A worker that comes in without files that the job has kept is lost, and its script is not blamed."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from crews import Crew, played_alone, until

from agent import messages
from agent.keeper.admission import WITHOUT_FILES

pytestmark = pytest.mark.processes

STEPS = 60
# Its storage is told of all that an earlier step wrote only while there is a file for it.
REWRITES = f"""
import os, sys, time
from pathlib import Path
import torch
from agent.output.kept import Kept
from agent.output.sender import Sending
from orchestrator import Session

hold, stored, out = map(Path, sys.argv[1:])
flush, listed = Sending.flush, Kept.listed


def listed_if_let(kept, step, *, awaited):
    if awaited:
        hold.with_name("asks").touch()
        while hold.with_name("unanswered").exists():
            time.sleep(0.002)
    return listed(kept, step, awaited=awaited)


if hold.parent.exists():
    Sending.flush = lambda sending, patience_s: stored.exists() and flush(sending, patience_s)
    Kept.listed = listed_if_let
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
session = Session(model, optimizer)


def held(step):
    try:
        return step >= int(hold.read_text())
    except FileNotFoundError:
        return False


def loss_of(x):
    while held(session.step):
        time.sleep(0.002)
    return model(x).square().mean()


def go_on_from_file(step):
    if step:
        assert int(Path("before.txt").read_text()) == step - 1
    Path("draft.txt").write_text(str(step))
    os.replace("draft.txt", "before.txt")


for step in session.steps({STEPS}):
    go_on_from_file(step)
    session.backward(loss_of, [torch.full((2, 4), 1.0 + i) for i in range(4)])
    optimizer.step()
    optimizer.zero_grad()
if session.leader:
    torch.save(model.state_dict(), out)
"""
READS, TRAINS = "    go_on_from_file(step)\n", "    optimizer.step()\n"
READS_LATE = REWRITES.replace(READS, "").replace(TRAINS, TRAINS + READS)
READ = """    if step:
        assert int(Path("before.txt").read_text()) == step - 1
"""
LOOKS = """    known = Path("before.txt")
    before = int(known.read_text()) if known.exists() else -1
    optimizer.param_groups[0]["lr"] = 0.01 / (step - before)
"""
LOOKS_FIRST = REWRITES.replace(READ, LOOKS)
WITHOUT = "it came into the job without the files that earlier steps wrote"


def why_lost(crew: Crew, worker: str) -> list[str]:
    crew._well()
    return [lost.detail for lost in crew.of(messages.WorkerLost) if lost.worker == worker]


def lost_without_files(crew: Crew, worker: str) -> bool:
    return any(WITHOUT in why and "before.txt" in why for why in why_lost(crew, worker))


@dataclass
class Scene:
    """A job that waits in its third step, and what it comes to alone."""

    crew: Crew
    hold: Path
    stored: Path
    out: Path
    weights: bytes

    def begin(self, count: int, script: str = REWRITES) -> list[str]:
        self.crew.hold(self.hold, 3)
        self.stored.touch()
        argv = map(str, (self.hold, self.stored, self.out))
        workers = self.crew.begin(count, script, *argv)
        self.crew.reach(3)
        return workers

    def ends_alike(self) -> None:
        assert self.crew.completed().step == STEPS
        assert self.out.read_bytes() == self.weights


@pytest.fixture
def scene(crew: Crew) -> Scene:
    script, alone, run = (crew.folder / name for name in ("train.py", "alone", "run"))
    script.write_text(REWRITES)
    nowhere = str(crew.folder / "nowhere" / "hold")
    alone.mkdir()
    run.mkdir()
    _, weights = played_alone(script, alone / "out.pt", nowhere, nowhere, cwd=alone)
    return Scene(crew, run / "hold", run / "stored", crew.folder / "out.pt", weights)


def test_worker_that_lacks_a_file_is_lost_and_the_job_goes_on(scene: Scene) -> None:
    """One in the middle of a step that has rewritten the file; one in its proof."""
    crew, hold, stored = scene.crew, scene.hold, scene.stored
    workers = scene.begin(2)
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
    scene.ends_alike()
    assert sorted(crew.ready) == sorted(workers)


def test_leader_that_is_replaced_stores_what_its_successor_reads(scene: Scene) -> None:
    """The only worker of a job goes as another one comes, as after a notice."""
    crew = scene.crew
    (first,) = scene.begin(1)
    with crew.on_hold():
        (second,) = crew.start(1)
        crew.let_in(scene.hold, second)
        crew.ready.remove(first)
    scene.hold.unlink()
    scene.ends_alike()
    assert crew.of(messages.WorkerLost) == []


def test_newcomer_without_its_files_is_no_holder(scene: Scene) -> None:
    """All others are lost once it has the state, and before it has the files that belong to it."""
    crew, unanswered = scene.crew, scene.hold.with_name("unanswered")
    others = scene.begin(2, READS_LATE)
    with crew.on_hold():
        (third,) = crew.start(1)
        crew.let_in(scene.hold, third)
        unanswered.touch()
        scene.stored.unlink()
    scene.hold.unlink()
    until("its question", scene.hold.with_name("asks").exists)
    crew.kill(*others)
    until("their loss", lambda: crew.ready == [third])
    unanswered.unlink()
    scene.stored.touch()
    crew.start(1)
    scene.ends_alike()


@pytest.mark.parametrize("backup_at", [3, 13])
def test_worker_that_differs_without_its_files_is_lost(scene: Scene, backup_at: int) -> None:
    """Its script looks whether there is a file, and trains otherwise if there is none: in its proof, or once it has joined."""
    crew, hold, stored = scene.crew, scene.hold, scene.stored
    workers = scene.begin(2, LOOKS_FIRST)
    stored.unlink()
    crew.hold(hold, backup_at + 2)
    held = lambda: [told.step for told in crew.of(messages.BackupHeld)]  # noqa: E731
    until("the backup", lambda: max(held(), default=0) >= backup_at)
    crew.reach(backup_at + 2)
    (third,) = crew.start(1)
    crew.step_on(hold, "the loss", lambda: WITHOUT_FILES in why_lost(crew, third), third)
    stored.touch()
    hold.unlink()
    scene.ends_alike()
    assert sorted(crew.ready) == sorted(workers)
