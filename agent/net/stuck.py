"""Whether the script's thread hangs in something of ours that needs nobody else, while heartbeats go on.

Others wait for such a worker as they do for one that is busy, so it must never be said of one that is. Counted are
heartbeats, since all of a machine may stand still, and only such in which the thread

* is inside of `unaided`, which is work of ours between what the script does, and in it not inside of `aided`: there it
  waits for others, sends, or waits for what a device was told by the script;
* runs code of ours: a `state_dict` of the script's own, or of a library, may take as long as it likes;
* is where it was at the heartbeat before, and has had no processor since: whoever computes, copies or reads goes on.

No torch here.
"""

import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Concatenate, ParamSpec, Protocol, TypeVar

OURS = f"{Path(__file__).parents[1]}/"
PYTHONS = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
INSTALLED = ("/site-packages/", "/dist-packages/")

P = ParamSpec("P")
R = TypeVar("R")


class Watched(Protocol):
    def unaided(self) -> AbstractContextManager[None]: ...


W = TypeVar("W", bound=Watched)


class Stuck:
    """Of the thread that makes it. Other threads may send by the same code: of these nothing is noted."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._at: object | None = None  # another one whenever it begins something
        self._before: tuple[object, int] | None = None
        self._beats = 0

    def unaided(self) -> AbstractContextManager[None]:
        """What is done inside needs nobody else, and is ours."""
        return self._within(object)

    def aided(self) -> AbstractContextManager[None]:
        """... but for this part of it."""
        return self._within(lambda: None)

    @contextmanager
    def _within(self, begun: Callable[[], object | None]) -> Iterator[None]:
        if threading.get_ident() != self._thread:
            yield
            return
        before, self._at = self._at, begun()
        try:
            yield
        finally:
            self._at = None if before is None else object()

    def beat(self) -> int:
        """A heartbeat; at how many of them in a row nothing has happened."""
        at, now = self._at, None
        if at is not None and self._in_ours():
            now = at, time.clock_gettime_ns(self._clock)
        self._beats = self._beats + 1 if now is not None and now == self._before else 0
        self._before = now
        return self._beats

    def _in_ours(self) -> bool:
        """Whether it is our code that runs there, or Python's own that was called by ours."""
        frame = sys._current_frames().get(self._thread)
        while frame is not None and _is_pythons(frame):
            frame = frame.f_back
        return frame is not None and frame.f_code.co_filename.startswith(OURS)


def _is_pythons(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(PYTHONS) and not any(part in file for part in (OURS, *INSTALLED))


def unaided(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
    """All that a method does."""

    @wraps(method)
    def watched(self: W, /, *args: P.args, **named: P.kwargs) -> R:
        with self.unaided():
            return method(self, *args, **named)

    return watched
