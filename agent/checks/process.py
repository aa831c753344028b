"""The one process of a worker: what a script forks from it takes no part in the training."""

import mmap
import os

from agent.errors import Misuse

FORKED = (
    "a process that the script forked (os.fork, multiprocessing) loops over the session's steps; it is no worker, so "
    "nobody would hear of what it trains: loop in the script's own process, and leave other work to those it forks"
)


class OwnProcess:
    """The process that this is made in. What it forks can say that it misused the session."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._misused = mmap.mmap(-1, 1)  # shared with all processes that are forked

    def check(self) -> None:
        """Raise `Misuse` in a forked process, and from then on in the process it is forked from."""
        if os.getpid() != self._pid:
            self._misused[0] = 1
        if self._misused[0]:
            raise Misuse(FORKED)
