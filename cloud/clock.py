"""Time as a value that is handed in. Only `SystemClock` asks the machine for the time."""

import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Protocol

ZERO_VARIABLE = "SPOT_CLOCK_ZERO"
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


def ticks() -> float:
    """Return the seconds since this machine booted, sleep included; this clock is never set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Clock(Protocol):
    """Seconds since the epoch, never going back."""

    def now_s(self) -> float: ...


class SystemClock:
    """Wall-clock seconds that never go back, never stand still and never jump.

    The wall clock is read once, and elapsed time is counted from then on, so setting the wall clock
    changes neither a wait nor a cost. Processes that inherit `ZERO_VARIABLE` count from the same
    moment.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        ticks: Callable[[], float] = ticks,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        told = environment.get(ZERO_VARIABLE)
        self._ticks = ticks
        self.zero_s = float(told) if told else wall() - ticks()

    def now_s(self) -> float:
        return self.zero_s + self._ticks()


CLOCK = SystemClock()  # of this process


class VirtualClock:
    """Time that moves only by `advance_to`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance_to(self, at_s: float) -> None:
        self._now_s = max(self._now_s, at_s)


def utc_s(moment: datetime) -> float:
    """Return seconds since 1970; a time without a zone is UTC, which is what clouds mean."""
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
