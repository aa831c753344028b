"""A place of its own in each file that a data set has opened, for every process that fetches.

Forked processes share one place in a file that was open before, so one that seeks and then reads
would now and then read what another has sought. Torch's own loader leaves that to the person.
"""

import contextlib
import fcntl
import os
import stat
from collections.abc import Mapping
from pathlib import Path

OPEN = Path("/proc/self/fd")


def places() -> dict[int, int]:
    """Return where this process stands in each file that it can only read, by its number."""
    found = dict[int, int]()
    for each in [*OPEN.iterdir()] if OPEN.is_dir() else ():
        with contextlib.suppress(OSError):  # it is closed by now
            number = int(each.name)
            kind = fcntl.fcntl(number, fcntl.F_GETFL)
            only_read = kind & os.O_ACCMODE == os.O_RDONLY and not kind & os.O_PATH
            if only_read and stat.S_ISREG(os.fstat(number).st_mode):
                found[number] = os.lseek(number, 0, os.SEEK_CUR)
    return found


def take_own_places(places: Mapping[int, int]) -> None:
    """Open these files anew, each at the place that it had before this process was forked.

    What has read a part of it ahead, as a file of Python has, goes on from there.
    """
    for number, place in places.items():
        with contextlib.suppress(OSError):  # it may not be opened again
            own = os.open(OPEN / str(number), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.lseek(own, place, os.SEEK_SET)
                os.dup2(own, number, os.get_inheritable(number))
            finally:
                os.close(own)
