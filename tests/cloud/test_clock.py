"""A clock that somebody sets does not stop or turn back what is due."""

from hypothesis import given
from hypothesis import strategies as st

from cloud.clock import SystemClock


class Hands:
    def __init__(self) -> None:
        self.wall_s, self.tick_s = 1000.0, 5.0

    def clock(self) -> SystemClock:
        return SystemClock(lambda: self.wall_s, lambda: self.tick_s)

    def pass_time(self, seconds: float) -> None:
        self.wall_s += seconds
        self.tick_s += seconds


def test_a_clock_that_is_set_back_goes_on_at_its_pace():
    """An hour back costs nothing: ten seconds later it is ten seconds later."""
    hands = Hands()
    clock = hands.clock()
    hands.wall_s -= 3600
    hands.pass_time(10)
    assert clock.now_s() == 1010.0


def test_a_clock_that_jumps_ahead_is_followed():
    """After a correction forward, times agree with those of everybody else again."""
    hands = Hands()
    clock = hands.clock()
    hands.wall_s += 3600
    assert clock.now_s() == 4600.0
    hands.wall_s -= 3600
    hands.pass_time(1)
    assert clock.now_s() == 4601.0


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6)), max_size=50))
def test_it_never_goes_back_and_never_stands_still(moves: list[tuple[float, float]]):
    """Whatever is done to the wall clock, at least the time that has passed is added."""
    hands = Hands()
    clock = hands.clock()
    latest_s = clock.now_s()
    for passed_s, jump_s in moves:
        hands.pass_time(passed_s)
        hands.wall_s += jump_s
        now_s = clock.now_s()
        assert now_s >= latest_s + passed_s - 1e-3
        latest_s = now_s
