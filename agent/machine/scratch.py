"""A folder that lives as long as its process; the next process removes a killed one's.

A folder is locked by the process that it belongs to, and the kernel releases the lock when the
process and all that it has forked are gone. So a folder that can be locked belongs to no process,
unless it is so young that it may not be locked yet.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

YOUNG_S = 60.0
SWEPT_MAX = 100  # removed at one go; the next process removes more


@contextmanager
def scratch(prefix: str, disk: Path) -> Iterator[Path]:
    """Make a new folder below `disk`, after removing abandoned ones there."""
    sweep(prefix, disk)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=disk) as name:
        handle = os.open(name, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(name)
        finally:
            os.close(handle)


def sweep(prefix: str, disk: Path) -> None:
    """Remove folders that belong to no process any more.

    A folder that cannot be removed is no reason not to begin, so errors are ignored.
    """
    old = [path for path in disk.glob(f"{prefix}*") if _is_old(path)]
    for path in old[:SWEPT_MAX]:
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


def _is_old(path: Path) -> bool:
    with suppress(OSError):
        found = path.lstat()
        return found.st_uid == os.getuid() and time.time() - found.st_mtime > YOUNG_S
    return False
