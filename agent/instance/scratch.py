"""A folder for as long as this process lives, also if it is killed: whoever makes the next one throws it away.

A folder is locked by the process that it belongs to, and the kernel lets go of the lock when the process and all
that it has forked are gone. So what can be locked is nobody's. The very young may not be locked yet.
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
SWEPT_MAX = 100  # at one go: whoever comes next sweeps on


@contextmanager
def scratch(prefix: str, disk: Path) -> Iterator[Path]:
    """A new folder below `disk`, once those that others have left there are gone."""
    sweep(prefix, disk)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=disk) as name:
        handle = os.open(name, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(name)
        finally:
            os.close(handle)


def sweep(prefix: str, disk: Path) -> None:
    """Throw away what belongs to nobody any more. What cannot be, is no reason not to begin."""
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
