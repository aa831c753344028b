"""Schedules against the answers that are known by calculation."""

from collections import Counter
from itertools import product

import msgspec
import numpy as np
import pytest
from blocks import in_flight, simulate, uniform

from agent.layout import Layout, Replica
from agent.schedule import Kind
from orchestrator.planner.errors import ScheduleError
from orchestrator.planner.simulation import schedules, simulator

UNIT = (1.0, 2.0)


def step_s(name: str, stages: int, microbatches: int, **options) -> float:
    schedule = schedules.make(name, stages, microbatches, **options)
    seconds = uniform(schedule.stages, *UNIT)
    return simulate(schedule, simulator.costs(seconds, slowness=np.ones(stages))).step_s


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (8, 32), (5, 7), (16, 3)])
def test_flushing_bubble(name, p, m):
    """With a flush the idle time over the ideal time is (p - 1) / m."""
    ideal = m * sum(UNIT)
    assert step_s(name, p, m) / ideal - 1 == pytest.approx((p - 1) / m)


@pytest.mark.parametrize(("p", "v", "m"), [(4, 2, 8), (4, 3, 12), (8, 2, 8), (2, 4, 6)])
def test_interleaved_bubble(p, v, m):
    """With v chunks a worker the bubble is v times smaller."""
    ideal = m * v * sum(UNIT)
    assert step_s("interleaved", p, m, chunks=v) / ideal - 1 == pytest.approx((p - 1) / m / v)


@pytest.mark.parametrize(("p", "v", "m"), [(4, 2, 8), (4, 3, 12), (8, 2, 16), (2, 4, 6)])
def test_modulo_placement_with_split_backwards_beats_both_halves_of_the_idea(p, v, m):
    """Chunks by modulo and weight-gradients put off: shorter than either alone, and never owing more than p."""
    both = schedules.make("modulo", p, m, chunks=v)
    took_s = step_s("modulo", p, m, chunks=v)
    assert took_s < step_s("interleaved", p, m, chunks=v)
    split = schedules.make("zero-bubble", p, m)
    whole = simulate(split, simulator.costs(uniform(p, v * 1.0, v * 2.0)))
    assert took_s < whole.step_s
    _, owed = in_flight(both)
    assert all(sum(owed[w::p]) <= v * (w + 1) for w in range(p))
    assert all(both.host(stage, 0) == stage % p for stage in range(p * v))


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 8), (6, 40)])
def test_zero_bubble_beats_1f1b_within_its_memory(p, m):
    """Putting off weight-gradients shortens the step, and stage s never owes more than s + 1 of them."""
    split = schedules.make("zero-bubble", p, m)
    seconds = uniform(p, 1.0, 2.0)
    assert simulate(split, simulator.costs(seconds)).step_s < step_s("1f1b", p, m)
    _, owed = in_flight(split)
    assert all(most <= stage + 1 for stage, most in enumerate(owed))


@pytest.mark.parametrize(("p", "m"), [(2, 8), (2, 32), (4, 24), (8, 40)])
def test_eager_waits_for_no_message_and_owes_at_the_end_only(p, m):
    """A message costs 1F1B its time in every microbatch; with twice the forwards ahead it costs something where the
    pipeline fills and drains, however many microbatches there are."""
    seconds, wire = uniform(p, 1.0, 2.0), np.zeros((2, p, 3))
    wire[:, :, 1] = 0.4
    costs = simulator.costs(seconds, wire=wire)

    def late_s(name: str, m: int) -> float:
        return simulate(schedules.make(name, p, m), costs).step_s - step_s(name, p, m)

    assert late_s("1f1b", 2 * m) - late_s("1f1b", m) >= 0.4 * m - 1e-9
    assert late_s("eager", 2 * m) == pytest.approx(late_s("eager", m))
    assert step_s("eager", p, m) < step_s("1f1b", p, m)
    stashed, owed = in_flight(schedules.make("eager", p, m))
    assert stashed[0] == 2 * p - 1
    assert owed[0] <= 1
    assert all(most <= 2 * s + p - 2 for s, most in enumerate(owed[1:], start=1))
    whole = [a for a in schedules.make("eager", p, m).program(p - 1) if a.kind == Kind.BACKWARD]
    assert len(whole) == m - (3 * p - 4)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 3), (3, 100)])
def test_1f1b_in_flight(p, m):
    """Stage r of 1F1B holds at most p - r microbatches; GPipe holds all of them."""
    assert in_flight(schedules.make("1f1b", p, m))[0] == tuple(min(p - r, m) for r in range(p))
    assert in_flight(schedules.make("gpipe", p, m))[0] == (m,) * p


def test_varuna_is_one_unit_shorter():
    """4 stages, 5 microbatches: one unit less than GPipe, and the last stage recomputes nothing."""
    gpipe = step_s("gpipe", 4, 5, recompute=(True,) * 4)
    varuna = step_s("varuna", 4, 5, recompute=(True,) * 4)
    assert gpipe - varuna == 1
    last = schedules.make("varuna", 4, 5, recompute=(True,) * 4).program(3)
    assert Kind.RECOMPUTE not in {action.kind for action in last}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "varuna"])
@pytest.mark.parametrize("asked", [(True, False, True, True), (False, True, False, False)])
def test_each_stage_recomputes_or_does_not(name, asked):
    """As it is said of each; the last stage never does. What the others do is the same."""
    found = schedules.make(name, 4, 6, recompute=asked)
    plain = schedules.make(name, 4, 6)
    for stage in range(4):
        actions = found.program(stage)
        again = [action.microbatch for action in actions if action.kind == Kind.RECOMPUTE]
        few = 5 if name == "gpipe" else 6  # its last one is still there
        assert len(again) == len(set(again)) == (few if asked[stage] and stage < 3 else 0)
        rest = [action for action in actions if action.kind != Kind.RECOMPUTE]
        assert Counter(rest) == Counter(plain.program(stage))


@pytest.mark.parametrize("again", [(), *product((False, True), repeat=3)])
def test_a_chain_that_is_told_no_program_recomputes_where_it_is_said(again):
    """What workers then play is what the planner prices, action by action; another number of words is refused."""
    replicas = (
        Replica(workers=("a", "b", "c"), first=0, count=2),
        Replica(workers=("d", "e", "f"), first=2, count=5),
    )
    layout = Layout(generation=1, microbatches=7, replicas=replicas, recompute=again)
    told = msgspec.json.decode(msgspec.json.encode(layout), type=Layout)
    for replica in replicas:
        played = told.schedule_of(replica)
        priced = schedules.make("1f1b", 3, replica.count, recompute=again)
        assert (played.codes, played.offsets) == (priced.codes, priced.offsets)
    with pytest.raises(ValueError, match="recompute is said of 2 stages, and a chain has 3"):
        msgspec.structs.replace(layout, recompute=(True, False))


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda: schedules.make("1f1b", 0, 4), "both must be at least 1"),
        (lambda: schedules.make("interleaved", 4, 10), "use 8 or 12"),
        (lambda: schedules.make("interleaved", 4, 3), "use 4"),
        (lambda: schedules.make("zigzag", 4, 8), "there is no schedule 'zigzag'; there are gpipe"),
        (
            lambda: schedules.make("1f1b", 4, 6, recompute=(True, False)),
            "of 2 stages, and there are 4",
        ),
    ],
)
def test_refusals_say_what_to_do(ask, answer):
    """What cannot be scheduled is refused with numbers that would do."""
    with pytest.raises(ScheduleError, match=answer):
        ask()
