"""A place of its own in each file that a data set has opened, for every process that fetches.

Forked processes share one place in a file that was open before, so one that seeks and then reads
would now and then read what another has sought. Torch's own loader leaves that to the person.
"""

import contextlib
import fcntl
import os
import stat
from pathlib import Path

OPEN = Path("/proc/self/fd")


def take_own_places() -> None:
    """Open anew, at the same place, the files that this process can only read."""
    for each in [*OPEN.iterdir()] if OPEN.is_dir() else ():
        with contextlib.suppress(OSError):  # it is closed, or may not be opened again
            _open_anew(int(each.name))


def _open_anew(number: int) -> None:
    kind = fcntl.fcntl(number, fcntl.F_GETFL)
    only_read = kind & os.O_ACCMODE == os.O_RDONLY and not kind & os.O_PATH
    if not (only_read and stat.S_ISREG(os.fstat(number).st_mode)):
        return
    own = os.open(OPEN / str(number), os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.lseek(own, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(own, number, os.get_inheritable(number))
    finally:
        os.close(own)
