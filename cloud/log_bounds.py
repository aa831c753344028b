"""How large the logs of other processes may grow."""

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LOG_BYTES_MAX = 8 << 20
OLD = ".old"


def bound_logs(logs: Iterable[Path], bytes_max: int = LOG_BYTES_MAX) -> None:
    """Empty each log that has grown beyond this, and keep its last part beside it, in `NAME.old`.

    The processes that write a log keep it open, so it is emptied in its place. What one writes
    between copy and cut is lost. On a full disk nothing is kept.
    """
    for log in logs:
        if log.suffix != OLD:
            with suppress(OSError):  # it has just gone
                _bound(log, bytes_max)


def _bound(log: Path, bytes_max: int) -> None:
    handle = os.open(log, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        # Not the size: a program that does not append leaves a hole where a log was emptied.
        if not stat.S_ISREG(found.st_mode) or found.st_blocks * 512 <= bytes_max:
            return
        half = bytes_max // 2
        last = os.pread(handle, half, max(0, found.st_size - half))
        with suppress(OSError):
            old = log.with_name(log.name + OLD)
            old.unlink(missing_ok=True)
            with old.open("xb") as kept:
                kept.write(last)
        os.ftruncate(handle, 0)
    finally:
        os.close(handle)
