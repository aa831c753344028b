"""A script looks at its whole model beside the step, where each worker keeps its own layers only."""

from pathlib import Path

import pytest
from crews import Crew, played_alone, until

from agent.messages import Rewound, WorkerLost

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
