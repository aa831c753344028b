"""Time as a value that is handed in. Only `SystemClock` asks the machine what time it is."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Seconds since the epoch, never going back."""

    def now_s(self) -> float: ...


class SystemClock:
    """Wall-clock seconds that never go back and never stand still.

    A wall clock that jumps ahead is followed; of one that is set back only the pace is taken, so that
    nothing that is due waits for an hour because somebody corrected the time.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, ticks: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall, self._ticks = wall, ticks
        self._latest_s, self._tick_s = wall(), ticks()

    def now_s(self) -> float:
        tick_s = self._ticks()
        self._latest_s = max(self._latest_s + tick_s - self._tick_s, self._wall())
        self._tick_s = tick_s
        return self._latest_s


class VirtualClock:
    """Time that moves only when it is told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance_to(self, at_s: float) -> None:
        self._now_s = max(self._now_s, at_s)


def utc_s(moment: datetime) -> float:
    """Seconds since 1970. Clouds mean UTC, also where they do not say so."""
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
