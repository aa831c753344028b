"""Time as a value that is handed in. Only `SystemClock` asks the machine what time it is."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since the epoch, never going back."""

    def now_s(self) -> float: ...


class SystemClock:
    """Wall-clock seconds that never go back: a clock set back stands still until time catches up."""

    def __init__(self) -> None:
        self._latest_s = 0.0

    def now_s(self) -> float:
        self._latest_s = max(self._latest_s, time.time())
        return self._latest_s


class VirtualClock:
    """Time that moves only when it is told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance_to(self, at_s: float) -> None:
        self._now_s = max(self._now_s, at_s)
