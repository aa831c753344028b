"""Detect that the script's thread hangs in code of ours, while heartbeats go on.

Other workers wait for such a worker as they do for a busy one, so a busy one must never be taken
for it. Heartbeats are counted instead of seconds, because all of a machine may stand still. A
heartbeat counts only if the thread

* is inside of `unaided`, which is work of ours between the script's actions, and not inside of
  `aided` within it. There the thread waits for others, sends, or waits for a device to do the
  script's work;
* runs code of ours, because a script-defined or library `state_dict` may take as long as it likes;
* is where it was at the heartbeat before, and has had no processor since, because a thread that
  computes, copies or reads has had some.

No torch here.
"""

import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
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
    """Watches the thread that makes it. Other threads that run the same code are not watched."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._at: object | None = None  # a new object whenever it begins something
        self._before: tuple[object, int] | None = None
        self._beats = 0

    def unaided(self) -> AbstractContextManager[None]:
        """Mark work of ours that needs no other worker."""
        return _Within(self, unaided=True)

    def aided(self) -> AbstractContextManager[None]:
        """Mark a part of unaided work that does wait for others, a send or a device."""
        return _Within(self, unaided=False)

    def begin(self, *, unaided: bool) -> tuple[object | None] | None:
        """Begin something on the watched thread; return what it did before, or None on others."""
        if threading.get_ident() != self._thread:
            return None
        before, self._at = self._at, object() if unaided else None
        return (before,)

    def end(self, before: tuple[object | None] | None) -> None:
        if before is not None:
            self._at = None if before[0] is None else object()

    def beat(self) -> int:
        """Take a heartbeat. Return at how many of them in a row nothing has happened."""
        at, now = self._at, None
        if at is not None and self._in_ours():
            now = at, time.clock_gettime_ns(self._clock)
        self._beats = self._beats + 1 if now is not None and now == self._before else 0
        self._before = now
        return self._beats

    def _in_ours(self) -> bool:
        """Whether the thread runs code of ours, or Python's own called from ours."""
        frame = sys._current_frames().get(self._thread)
        while frame is not None and _is_pythons(frame):
            frame = frame.f_back
        return frame is not None and frame.f_code.co_filename.startswith(OURS)


class _Within:
    """What `Stuck` watches, entered several times in every step."""

    __slots__ = ("_before", "_stuck", "_unaided")

    def __init__(self, stuck: Stuck, *, unaided: bool) -> None:
        self._stuck, self._unaided = stuck, unaided

    def __enter__(self) -> None:
        self._before = self._stuck.begin(unaided=self._unaided)

    def __exit__(self, *_: object) -> None:
        self._stuck.end(self._before)


def _is_pythons(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(PYTHONS) and not any(part in file for part in (OURS, *INSTALLED))


def unaided(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
    """Mark all that a method does as unaided."""

    @wraps(method)
    def watched(self: W, /, *args: P.args, **named: P.kwargs) -> R:
        with self.unaided():
            return method(self, *args, **named)

    return watched
