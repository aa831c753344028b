"""What Python does at the end of a process, done at the end of a script that a worker runs.

The worker goes on after its script, to hand over what that wrote, and then ends past Python. No torch
here.
"""

import atexit
import gc
import io
import os
import stat
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from agent.errors import WireError


class PastPython(SystemExit):
    """The script's `os._exit`, behind which Python does nothing any more."""


@contextmanager
def ended_like_a_process() -> Iterator[None]:
    """Call what the script registers in `atexit`, and flush the files that it leaves open.

    Not in a process that it forks, nor for a worker that is lost.
    """
    process, given = os.getpid(), list[tuple[object, Callable[[], object]]]()

    def register(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        given.append((func, partial(func, *args, **kwargs)))
        return func

    def unregister(func: object) -> None:
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
            _call(given)
            _flush()
        atexit.register, atexit.unregister = before


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
            with suppress(OSError, ValueError):
                if not each.closed and stat.S_ISREG(os.fstat(each.fileno()).st_mode):
                    each.flush()
