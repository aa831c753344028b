"""A script looks at its whole model beside the step, where each worker keeps its own layers only."""

from pathlib import Path

import pytest
from crews import Crew, played_alone, until

from agent.messages import BackupHeld, Rewound, WorkerLost

pytestmark = pytest.mark.processes

TOY = Path(__file__).with_name("evaluating_toy.py")
STEPS = 12
LATE_AT = 5


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes]:
    """What the script prints and saves alone, without any manager."""
    return _alone(TOY.read_text(), tmp_path_factory.mktemp("toy"), str(STEPS))


def _alone(script: str, folder: Path, *arguments: str) -> tuple[list[str], bytes]:
    path = folder / "alone.py"
    path.write_text(script)
    return played_alone(path, folder / "alone" / "out.pt", *arguments)


@pytest.mark.parametrize("late", ["1 2 3", "3"])
def test_a_worker_is_lost_while_others_look_at_its_layers(
    crew: Crew, alone: tuple[list[str], bytes], late: str
) -> None:
    """Who asks the lost one, and who is still to ask, has the layers from its twin, and nobody goes on with a
    model that is not whole; where only it is late, some have been answered already and are ahead."""
    out = crew.folder / "out.pt"
    Path(f"{out}.late").write_text(late)
    crew.depth, crew.owned = 2, True
    crew.begin(4, TOY.read_text(), str(STEPS), str(out), backup_every_steps=100)
    crew.reach(LATE_AT + 1)
    until("the first to look", Path(f"{out}.asking").exists)
    victim = crew.ready[3]
    crew.kill(victim)
    until("the loss", lambda: victim in [lost.worker for lost in crew.of(WorkerLost)])
    job = crew.keeper._jobs["job"]
    until(
        "the new layout",
        lambda: job.roster.started and job.roster.layout.generation == crew.generation > 1,
    )
    Path(f"{out}.late").unlink()
    assert crew.completed().step == STEPS
    assert crew.printed() == alone[0]
    assert out.read_bytes() == alone[1]
    assert crew.of(Rewound) == []
    assert len(crew.of(WorkerLost)) == 1


SLOW = """
    world = session._world
    answer = world._handover.pulling.answer

    def late(peer, part):  # of those who stay, to those who leave; these answer one another
        left = Path(f"{out}.left")
        while left.exists() and peer in (names := left.read_text().split()) and world.me not in names:
            if session.replica.version >= LATE_AT + AHEAD:
                break
            time.sleep(0.01)
        answer(peer, part)

    world._handover.pulling.answer = late
"""


LOOKED = """
        if step == LATE_AT:
            Path(f"{out}.looked.{session._world.me}").touch()
"""


@pytest.mark.parametrize("ahead", [2, 3])
def test_who_is_left_out_looks_too_late(crew: Crew, tmp_path: Path, ahead: int) -> None:
    """Two of four are given back while all look at the model, and the other two, whom they ask, do not wait for them: what
    they would see is changed, or nothing that is known any more. That is no mistake of the script, and the job goes on."""
    out = crew.folder / "out.pt"
    script, made = TOY.read_text(), "microbatches=MICROBATCHES)\n"
    script = script.replace("square().mean())\n", "square().mean()) if step == LATE_AT else 1.0\n")
    alone = _alone(script, tmp_path, str(STEPS))
    script = script.replace(made, made + SLOW.replace("AHEAD", str(ahead))).replace(
        "        plateau.step", LOOKED + "        plateau.step"
    )
    Path(f"{out}.late").write_text("2 3")
    Path(f"{out}.hold").write_text(str(LATE_AT + ahead + 1))
    crew.depth, crew.owned = 2, True
    crew.begin(4, script, str(STEPS), str(out))
    crew.reach(LATE_AT + 1)
    until("the first to look", Path(f"{out}.asking").exists)
    with crew._lock:
        left = crew.ready[2:]
        Path(f"{out}.left").write_text(" ".join(left))
        del crew.ready[2:]
        crew.regroup("now")
    job = crew.keeper._jobs["job"]
    until("the new layout", lambda: job.roster.layout.generation == crew.generation)
    Path(f"{out}.late").unlink()
    looked = [Path(f"{out}.looked.{worker}") for worker in left]
    crew._until("those who leave", lambda: all(each.exists() for each in looked))
    Path(f"{out}.hold").unlink()
    assert crew.completed().step == STEPS
    assert out.read_bytes() == alone[1]
    assert crew.of(Rewound) == crew.of(WorkerLost) == []


def _replace(crew: Crew, first: list[str]) -> None:
    """All are lost, and as many come."""
    crew.kill(*first)
    crew.start(len(first))
    until("the others", lambda: len(set(crew.ready) - set(first)) == len(first))


@pytest.mark.parametrize("backup_every", [LATE_AT, 100])
def test_all_are_lost_and_those_who_come_look_at_what_they_catch_up_with(
    crew: Crew, alone: tuple[list[str], bytes], backup_every: int
) -> None:
    """They have nothing but the backup between them at first, and behind each step that they apply again what
    others of the chain have: a schedule goes by what the script finds there."""
    out = crew.folder / "out.pt"
    hold = Path(f"{out}.hold")
    hold.write_text(str(LATE_AT))
    crew.depth, crew.owned = 2, True
    first = crew.begin(4, TOY.read_text(), str(STEPS), str(out), backup_every_steps=backup_every)
    least = 1 if backup_every == LATE_AT else 0
    until(
        "the backup", lambda: max((held.step for held in crew.of(BackupHeld)), default=-1) >= least
    )
    crew.reach(LATE_AT)
    _replace(crew, first)
    hold.unlink()
    assert crew.completed().step == STEPS
    printed = crew.printed()
    assert set(printed) <= set(alone[0])
    assert alone[0][-1] in printed
    assert out.read_bytes() == alone[1]
    assert crew.of(Rewound) == []
    assert {lost.worker for lost in crew.of(WorkerLost)} == set(first)


BEFORE = "        with torch.no_grad():\n            before"
DAWDLES = """        world = session._world
        if world.entered and world.me in world.layout.workers[1::2]:
            time.sleep(0.05)
"""


def test_who_applies_steps_again_waits_for_who_still_looks(crew: Crew, tmp_path: Path) -> None:
    """All are lost, and those who come apply steps again. Of each chain one is faster, and its half of the model would be
    of the next version before the other, whose script looks at it once a step, has asked for it."""
    out = crew.folder / "out.pt"
    script = TOY.read_text().replace("plateau.step(found)", "plateau.step(before)")
    behind = script.index("        with torch.no_grad():\n            found")
    script = script[:behind] + script[script.index("        plateau.step") :]
    script = script.replace(" then {found!r}", "")
    alone = _alone(script, tmp_path, str(STEPS))
    hold = Path(f"{out}.hold")
    hold.write_text(str(LATE_AT))
    crew.depth, crew.owned = 2, True
    script = script.replace(BEFORE, DAWDLES + BEFORE)
    first = crew.begin(4, script, str(STEPS), str(out), backup_every_steps=100)
    crew.reach(LATE_AT)
    _replace(crew, first)
    hold.unlink()
    assert crew.completed().step == STEPS
    assert set(crew.printed()) <= set(alone[0])
    assert out.read_bytes() == alone[1]
    assert crew.of(Rewound) == []


SAVES = """
import sys, time, torch
from pathlib import Path
from torch import nn
from orchestrator import Session

out = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=4)
for step in session.steps(6):
    session.backward(lambda batch: model(batch).square().mean(), [torch.ones(2, 8)] * 4)
    optimizer.step()
    leads = session.leader
    Path(f"{out}.at.{step}").touch()
    while not leads and step == AT and Path(f"{out}.late").exists():
        time.sleep(0.01)
    state = model.state_dict()
    if WHO:
        torch.save(state, f"{out}.{step}")
torch.save(model.state_dict(), out)
"""


@pytest.mark.parametrize(("at", "who"), [(2, "session.leader"), (5, "leads")])
def test_what_a_leader_saves_of_a_model_that_is_lost_under_its_hands_is_saved_by_the_next(
    crew: Crew, tmp_path: Path, at: int, who: str
) -> None:
    """It asks for layers whose only owner dies. Nothing is saved of what is not there, and nothing is left out."""
    script = SAVES.replace("AT", str(at)).replace("WHO", who)
    _alone(script, tmp_path)
    out = crew.folder / "out.pt"
    late = Path(f"{out}.late")
    late.touch()
    crew.depth, crew.owned = 2, True
    workers = crew.begin(2, script, str(out))
    crew._until("the step", Path(f"{out}.at.{at}").exists)
    crew.kill(crew.ready[1])  # who does not lead: who is ready first does
    crew._until("the losses", lambda: {lost.worker for lost in crew.of(WorkerLost)} == {*workers})
    late.unlink()
    crew.start(2)
    assert crew.completed().step == 6
    for step in range(6):
        saved, right = Path(f"{out}.{step}"), tmp_path / "alone" / f"out.pt.{step}"
        assert saved.read_bytes() == right.read_bytes(), step
    assert crew.of(Rewound) == []


COPIES = """
    if session.leader and step in (2, 4):
        torch.save(model if step == 2 else copy.deepcopy(model), f"{out}.{step}")
"""


def test_a_copy_of_the_model_is_whole(crew: Crew, tmp_path: Path) -> None:
    """Who copies or pickles a module asks for its parameters past its state."""
    script = SAVES[: SAVES.index("    leads =")] + COPIES + "torch.save(model.state_dict(), out)\n"
    script = script.replace("import sys,", "import copy, sys,")
    _alone(script, tmp_path)
    out = crew.folder / "out.pt"
    crew.depth, crew.owned = 2, True
    crew.begin(2, script, str(out))
    assert crew.completed().step == 6
    for step in (2, 4):
        saved, right = Path(f"{out}.{step}"), tmp_path / "alone" / f"out.pt.{step}"
        assert saved.read_bytes() == right.read_bytes(), step
