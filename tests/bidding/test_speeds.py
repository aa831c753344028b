"""How a job's measurements of machine types turn into speeds."""

import pytest

from bidding.markets.observations import ALIKE_MAX, Speeds

STATED = {"a": 1.0, "b": 2.0, "c": 5.0}


def seen(**part_s: tuple[float, ...]) -> Speeds:
    speeds = Speeds()
    for kind, times in part_s.items():
        for n, each_s in enumerate(times):
            speeds = speeds.saw(kind, f"{kind}{n}", each_s, STATED)
    return speeds


def test_a_single_type_is_as_fast_as_stated_whatever_it_takes():
    assert seen(a=(7.0, 7.0, 7.0)).factors == {}


def test_two_types_compare_as_measured_and_keep_the_mean_of_what_is_stated():
    factors = seen(a=(1.0, 1.0), b=(0.2, 0.2)).factors
    assert 2.0 * factors["b"] / factors["a"] == pytest.approx(5.0)
    assert factors["a"] * factors["b"] == pytest.approx(1.0)
    assert "c" not in factors


def test_one_machine_and_a_straggler_among_two_do_not_count():
    assert seen(a=(1.0, 1.0), b=(5.0,)).factors == {}
    assert seen(a=(1.0, 1.0), b=(0.5, 50.0)).factors == {}
    assert seen(a=(1.0, 1.0), b=(50.0, 0.5)).factors == {}


def test_noise_moves_no_factor():
    speeds = seen(a=(1.0, 1.0), b=(0.2, 0.2))
    again = speeds
    for each_s in (0.21, 0.19, 0.2, 0.22):
        again = again.saw("b", "b1", each_s, STATED)
    assert again.factors == speeds.factors


def test_newest_machines_of_a_type_replace_the_oldest():
    """As a type is on another host later, or the cloud's image changes."""
    speeds = seen(a=(1.0, 1.0), b=(0.2,) * ALIKE_MAX + (0.5,) * ALIKE_MAX)
    assert len(speeds.seen["b"]) == ALIKE_MAX
    assert 2.0 * speeds.factors["b"] / speeds.factors["a"] == pytest.approx(2.0, rel=0.11)


def test_a_type_that_is_not_sold_any_more_and_a_broken_clock_change_little():
    speeds = seen(a=(1.0, 1.0), b=(1e-9, 1e-9))
    assert max(speeds.factors.values()) <= 20.0
    gone = speeds.saw("gone", "gone0", 1.0, STATED).saw("gone", "gone1", 1.0, STATED)
    assert gone.factors == speeds.factors
