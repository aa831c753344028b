"""What Python does at the end of a process, done at the end of a script that a worker runs.

The worker goes on after its script, to hand over what that wrote, and then ends past Python. No torch
here.
"""

import atexit
import gc
import io
import os
import stat
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import ParamSpec, TypeVar

from agent.errors import WireError

P = ParamSpec("P")
R = TypeVar("R")

THREADS_S = 20.0  # one that never ends would hold the machine; the keeper waits a little longer


class PastPython(SystemExit):
    """The script's `os._exit`, behind which Python does nothing any more."""


@contextmanager
def ended_like_a_process() -> Iterator[None]:
    """Wait for threads that the script leaves, call its `atexit`, and flush files left open.

    Not in a process that it forks, nor for a worker that is lost.
    """
    process, given = os.getpid(), list[tuple[object, Callable[[], object]]]()
    known = {*threading.enumerate()}

    def register(func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Callable[P, R]:
        given.append((func, partial(func, *args, **kwargs)))
        return func

    def unregister(func: Callable[..., object], /) -> None:
        given[:] = [each for each in given if each[0] != func]
        before[1](func)

    before = atexit.register, atexit.unregister
    atexit.register, atexit.unregister = register, unregister
    past = False
    try:
        yield
    except (PastPython, WireError):
        past = True
        raise
    finally:
        if os.getpid() == process and not past:
            _wait_for_threads(known)
            _call(given)
            _flush()
        atexit.register, atexit.unregister = before


def _wait_for_threads(known: set[threading.Thread]) -> None:
    """Let work that was given to pools be done, and threads end that are no daemons."""

    def wait() -> None:
        for each in gc.get_objects():
            if issubclass(type(each), ThreadPoolExecutor):
                each.shutdown()
        for thread in {*threading.enumerate()} - known:
            if not thread.daemon:
                thread.join()

    waiting = threading.Thread(target=wait, name="script's threads", daemon=True)
    waiting.start()
    waiting.join(THREADS_S)


def _call(given: list[tuple[object, Callable[[], object]]]) -> None:
    """Call the newest first; one may register others."""
    while given:
        _, call = given.pop()
        try:
            call()
        except Exception:  # the others are called all the same
            traceback.print_exc()
        except SystemExit:
            pass


def _flush() -> None:
    """Flush every open file that is no pipe, whose reader might be waited for."""
    for each in gc.get_objects():
        if issubclass(type(each), io.IOBase):
            with suppress(Exception):  # a class of the script's may answer anything
                if not each.closed and stat.S_ISREG(os.fstat(each.fileno()).st_mode):
                    each.flush()
