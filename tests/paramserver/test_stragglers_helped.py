"""Work flows away from slow workers: how near a clock comes to perfectly balanced work."""

import pytest

from agent.paramserver.help import Settings
from agent.paramserver.virtual.stragglers import (
    Disrupted,
    PowerLaw,
    SlowWorker,
    Uneven,
    simulate,
)

WITHOUT = Settings(size=0)


def small(pattern, **more):
    return simulate(pattern, **({"machines": 8, "each": 4, "clocks": 16} | more))


def test_without_stragglers_nothing_is_given_away():
    """Answer 9: reports as many as helpees, and the time of BSP."""
    outcome = small(SlowWorker(0.0), clocks=5)
    assert outcome.given == 0
    assert outcome.messages == 4
    assert outcome.clock == pytest.approx(small(SlowWorker(0.0), clocks=5, slack=0).clock, rel=0.01)


def test_slow_workers_cost_hardly_more_than_the_ideal():
    """Answer 10, small: the order of BSP, SSP and FlexRR; the table is the benchmark's."""
    bsp = small(SlowWorker(4.0), slack=0, settings=WITHOUT)
    ssp = small(SlowWorker(4.0), settings=WITHOUT)
    flex = small(SlowWorker(4.0))
    assert bsp.clock >= 2
    assert flex.clock < ssp.clock < bsp.clock
    assert flex.clock <= 1.12 * flex.ideal


def test_uneven_work_is_evened_out():
    """Answer 12: machines that have much and little work are neighbours."""
    assert small(Uneven(), slack=0, settings=WITHOUT, clocks=5).clock == pytest.approx(
        1.5, rel=0.02
    )
    outcome = small(Uneven())
    assert outcome.clock <= 1.05
    assert 0.15 < outcome.given < 0.3


def test_a_power_law_of_times_is_evened_out():
    """Answer 13, small."""
    bsp = small(PowerLaw(7), slack=0, settings=WITHOUT)
    assert small(PowerLaw(7)).clock < 0.75 * bsp.clock


def test_a_group_of_none_is_ssp_and_large_pieces_are_worse():
    """Answer 11."""
    none, one, four = (small(SlowWorker(4.0), settings=Settings(size=size)) for size in (0, 1, 4))
    assert four.clock < one.clock < none.clock
    assert none.given == 0
    large = small(PowerLaw(4), settings=Settings(first=0.15, next=0.3))
    assert small(PowerLaw(4)).clock < large.clock


def test_disturbed_machines_leave_the_share_of_time_that_the_ideal_says():
    """Answer 14: machines at a third of their speed for a fifth of the time; 1 / (1 - 0.2 * 2/3) = 1.154."""
    outcome = small(Disrupted(2.0), clocks=60)
    assert outcome.ideal == pytest.approx(1.154, rel=0.05)
    assert outcome.clock <= 1.05 * outcome.ideal
    assert outcome.clock < 0.8 * small(Disrupted(2.0), clocks=60, slack=0, settings=WITHOUT).clock
