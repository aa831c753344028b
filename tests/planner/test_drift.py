"""Heartbeats against predictions."""

import pytest
from blocks import make_profile

from orchestrator.planner import cost_model, drift, plan_book
from orchestrator.planner.drift import DriftWatch
from orchestrator.planner.search import Task

PROFILE, TASK = make_profile(6), Task(global_batch=48)
NARROW = plan_book.best(PROFILE, Task(global_batch=48, width_max=1), 3)
WIDE = plan_book.best(PROFILE, Task(global_batch=48, depth_max=1), 3)


def after(plan, factor: float, steps: int, watch: DriftWatch | None = None) -> DriftWatch:
    watch = watch or DriftWatch()
    for _ in range(steps):
        watch = drift.observe(watch, plan, factor * plan.step_s)
    return watch


def test_steps_as_predicted_change_nothing():
    """Within the tolerance, and while there are few steps, the profile is kept."""
    assert drift.judge(after(NARROW, 1.04, 100)).advice == "keep"
    assert drift.judge(after(NARROW, 2.0, drift.WINDOW - 1)).advice == "keep"


def test_a_slower_machine_is_refitted():
    """Both kinds of layouts are slower alike: all times are scaled, and predictions hold again."""
    watch = after(WIDE, 1.3, 40, after(NARROW, 1.3, 40))
    verdict = drift.judge(watch)
    assert verdict.advice == "refit"
    assert verdict.factor == pytest.approx(1.3)
    again = drift.refit(PROFILE, verdict.factor)
    plan = plan_book.best(again, Task(global_batch=48, width_max=1), 3)
    assert plan.step_s == pytest.approx(1.3 * NARROW.step_s, rel=0.02)


def test_a_slower_network_is_measured_again():
    """Only layouts with a reduction are slower: one factor cannot say why."""
    verdict = drift.judge(after(WIDE, 1.5, 40, after(NARROW, 1.0, 40)))
    assert verdict.advice == "measure"
    assert "1.00 times" in verdict.because
    assert "1.50 times" in verdict.because


def test_one_slow_step_is_no_drift():
    """A hiccup fades within a window."""
    watch = drift.observe(after(NARROW, 1.0, 40), NARROW, 1.8 * NARROW.step_s)
    assert drift.judge(after(NARROW, 1.0, 10, watch)).advice == "keep"


def test_a_refitted_ring_gives_the_step_that_was_measured():
    """Scaled until it is measured again: the wide plan is then predicted as it was seen, the narrow one as before."""
    again = drift.refit_ring(PROFILE, WIDE, 1.2)
    assert plan_book.best(again, Task(global_batch=48, width_max=1), 3).step_s == NARROW.step_s
    wide = plan_book.best(again, Task(global_batch=48, depth_max=1, width_max=3), 3)
    assert wide.step_s >= WIDE.step_s
    exact = plan_book.exact(cost_model.tables(again), Task(global_batch=48), WIDE)
    assert exact.step_s == pytest.approx(1.2 * WIDE.step_s, rel=0.02)


@pytest.mark.parametrize("plan", [NARROW, WIDE])
def test_what_is_not_computing_is_told_from_what_is(plan):
    """Steps take half as long again, and microbatches a tenth: the plan is then predicted to take what it took."""
    busy_s = 1.1 * plan.cost.busy_s
    computing, overhead_s = drift.apart(plan, PROFILE.overhead_s, 1.5, busy_s)
    assert computing == pytest.approx(1.1)
    again = drift.refit(PROFILE, computing, overhead_s)
    exact = plan_book.exact(cost_model.tables(again), Task(global_batch=48), plan)
    assert exact.step_s == pytest.approx(1.5 * plan.step_s, rel=0.02)


@pytest.mark.parametrize("busy", [0.0, 1.45, 1.55, 9.0])
def test_without_news_of_microbatches_all_is_scaled(busy):
    """Nobody has told; or what they told is about what the step says; or it cannot be."""
    busy_s = busy * NARROW.cost.busy_s
    found = drift.apart(NARROW, PROFILE.overhead_s, 1.5, busy_s)
    assert found == (1.5, 1.5 * PROFILE.overhead_s)


@pytest.mark.parametrize("plan", [NARROW, WIDE])
def test_what_every_step_takes_besides_is_taken_back_when_it_goes(plan):
    """Something else holds every step up for a while: what is believed of the plan is what the profile predicts then, and
    the next look finds the profile as it was."""
    busy_s = plan.cost.busy_s
    computing, overhead_s = drift.apart(plan, PROFILE.overhead_s, 10.0, busy_s)
    again = drift.refit(PROFILE, computing, overhead_s)
    held_up = drift.believed(plan, 10.0, computing)
    exact = plan_book.exact(cost_model.tables(again), Task(global_batch=48), plan)
    assert held_up.step_s == pytest.approx(exact.step_s, rel=0.01)
    found = drift.apart(held_up, overhead_s, 0.1, busy_s)
    assert found == (pytest.approx(1.0), pytest.approx(PROFILE.overhead_s, abs=0.01 * plan.step_s))


def test_a_step_is_never_reckoned_to_take_more_besides_than_it_takes():
    """Though the plan says less than the profile it stands beside."""
    _, overhead_s = drift.apart(NARROW, 9 * NARROW.step_s, 0.93, 1.6 * NARROW.cost.busy_s)
    assert overhead_s <= 0.93 * NARROW.step_s


def test_a_ring_that_was_refitted_is_the_ring_in_what_is_believed():
    believed = drift.believed(WIDE, 1.2, 1.0, ring=True)
    assert believed.step_s == pytest.approx(1.2 * WIDE.step_s)
    assert believed.cost.reduce_s - WIDE.cost.reduce_s == pytest.approx(0.2 * WIDE.step_s)
    assert drift.apart(believed, PROFILE.overhead_s, 1.0, WIDE.cost.busy_s)[0] == 1.0
