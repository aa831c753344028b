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
    return played_alone(TOY, tmp_path_factory.mktemp("alone") / "out.pt", str(STEPS))


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


@pytest.mark.parametrize("backup_every", [LATE_AT, 100])
def test_all_are_lost_and_those_who_come_look_at_what_they_catch_up_with(
    crew: Crew, alone: tuple[list[str], bytes], backup_every: int
) -> None:
    """Before the first step they have nothing but the backup between them, and behind each step that they apply again what
    others of the chain have: a schedule goes by what the script finds there."""
    out = crew.folder / "out.pt"
    hold = Path(f"{out}.hold")
    hold.write_text(str(LATE_AT))
    crew.depth, crew.owned = 2, True
    first = crew.begin(4, TOY.read_text(), str(STEPS), str(out), backup_every_steps=backup_every)
    newest = LATE_AT if backup_every == LATE_AT else 0
    until("the backup", lambda: newest in [held.step for held in crew.of(BackupHeld)])
    crew.reach(LATE_AT)
    crew.kill(*first)
    crew.settle = 4
    crew.start(4)
    until("the others", lambda: len(set(crew.ready) - set(first)) == 4)
    hold.unlink()
    assert crew.completed().step == STEPS
    printed = crew.printed()
    assert set(printed) <= set(alone[0])
    assert alone[0][-1] in printed
    assert out.read_bytes() == alone[1]
    assert crew.of(Rewound) == []
    assert {lost.worker for lost in crew.of(WorkerLost)} == set(first)
