"""How many files and sockets this process may have open, and some that are held in reserve."""

import contextlib
import os
import resource


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return what holds from now on.

    Shells set 1024, and a stranger can open as many connections. Processes that are started from
    here inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # some systems cap it below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
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
