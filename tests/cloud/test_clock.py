"""A clock that somebody sets does not stop, turn back or bring forward what is due."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud.clock import ZERO_VARIABLE, SystemClock


class Hands:
    def __init__(self) -> None:
        self.wall_s, self.tick_s = 1000.0, 5.0

    def clock(self, environment: Mapping[str, str] = {}) -> SystemClock:
        return SystemClock(lambda: self.wall_s, lambda: self.tick_s, environment)

    def pass_time(self, seconds: float) -> None:
        self.wall_s += seconds
        self.tick_s += seconds


@pytest.mark.parametrize("set_by_s", [-3600, 3600])
def test_a_clock_that_is_set_goes_on_at_its_pace(set_by_s: float):
    """An hour back or ahead costs nothing: ten seconds later it is ten seconds later."""
    hands = Hands()
    clock = hands.clock()
    hands.wall_s += set_by_s
    hands.pass_time(10)
    assert clock.now_s() == 1010.0


def test_processes_of_one_house_have_one_clock():
    """Who begins after the clock was set counts from where the others do."""
    hands = Hands()
    first = hands.clock()
    hands.wall_s += 3600
    hands.pass_time(10)
    second = hands.clock({ZERO_VARIABLE: repr(first.zero_s)})
    assert first.now_s() == second.now_s() == 1010.0


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6)), max_size=50))
def test_it_never_goes_back_and_never_stands_still(moves: list[tuple[float, float]]):
    """Whatever is done to the wall clock, the time that has passed is added."""
    hands = Hands()
    clock = hands.clock()
    latest_s = clock.now_s()
    for passed_s, jump_s in moves:
        hands.pass_time(passed_s)
        hands.wall_s += jump_s
        now_s = clock.now_s()
        assert now_s == pytest.approx(latest_s + passed_s, abs=1e-3)
        latest_s = now_s
