"""How many files and sockets this process may have open, and some that are held in reserve."""

import contextlib
import os
import resource

WANTED = 65_536  # some systems allow a thousand million, and old programs walk all of them


def raise_limit() -> int:
    """Raise the soft limit of open files as far as is wanted, and return what holds now.

    Shells set 1024, and a stranger can open as many connections. Processes that are started from
    here inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may refuse it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limit()


def limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Reserve:
    """Descriptors that are kept open only so that they can be given up when none is left."""

    def __init__(self, count: int) -> None:
        self._count, self._held = count, list[int]()
        self.fill()

    def fill(self) -> None:
        """Take descriptors until the reserve is whole, or none is left."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def give(self) -> bool:
        """Give one up for the caller to use, and return whether there was one."""
        if self._held:
            os.close(self._held.pop())
            return True
        return False

    def close(self) -> None:
        while self.give():
            pass
