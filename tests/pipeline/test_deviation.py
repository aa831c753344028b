"""What a worker does while its next input is late: something else that is due."""

import playing
import pytest
from playing import MODELS, alone, same_weights, together

from agent.pipeline.stages.channel import Exchange, Parcel
from agent.pipeline.stages.execute import REACH, Counts, Program
from agent.schedule import Kind
from orchestrator.planner.simulation import schedules

STEPS = 2


def late(tag: str, until: str) -> type[Exchange]:
    """An exchange in which a message lies until another one, which comes behind it in the program, was sent."""

    class Late(Exchange):
        def put(self, source: str, target: str, name: str, parcel: Parcel) -> None:
            step, _, what = name.rpartition("/")
            if what == tag and step not in free:
                held[step] = (source, target, name, parcel)
                return
            super().put(source, target, name, parcel)
            if what == until:
                free.add(step)
                if step in held:
                    super().put(*held[step])

    held: dict[str, tuple[str, str, str, Parcel]] = {}
    free: set[str] = set()
    return Late


@pytest.mark.parametrize(
    ("name", "depth", "place", "tags", "order"),
    [
        ("1f1b", 3, 1, ("a1.2", "g0.1"), ((Kind.BACKWARD, 1, 1), (Kind.FORWARD, 1, 2))),
        (
            "zero-bubble",
            3,
            1,
            ("a1.2", "g0.1"),
            ((Kind.INPUT_GRADIENT, 1, 1), (Kind.FORWARD, 1, 2)),
        ),
        ("varuna", 3, 1, ("g1.1", "g0.2"), ((Kind.BACKWARD, 1, 2), (Kind.BACKWARD, 1, 1))),
        ("interleaved", 2, 0, ("a2.1", "a1.2"), ((Kind.FORWARD, 0, 2), (Kind.FORWARD, 2, 1))),
    ],
)
def test_what_is_late_is_overtaken(monkeypatch, name, depth, place, tags, order):
    """The later action is done first, and the bits are the same. In chains, where no forward overtakes another, nothing
    more is stashed or owed than the program does anyway."""
    monkeypatch.setattr(playing, "Exchange", late(*tags))
    factory, draw = MODELS["resnet"]
    losses, expected, own = alone(factory, draw, 6, STEPS)
    found, states, workers = together(
        factory, draw, name, depth, (6,), steps=STEPS, reach=REACH, opener=own.seed_for
    )
    assert found == losses
    assert same_weights(states, expected) == []
    program, counts = Program(schedules.make(name, depth, 6), place), Counts()
    done = [span.action for span in workers[place].executor.spans]
    for action in done:
        counts.count(action.kind)
        assert counts.stashed <= program.stashed_max or name in schedules.MODULO
        assert counts.owed <= program.owed_max
    sooner, later = (next(a for a in done if (a.kind, a.stage, a.microbatch) == o) for o in order)
    assert program.actions.index(later) < program.actions.index(sooner)
    assert done.index(sooner) < done.index(later)
