"""What a process that a script has forked lets go of, because it is no worker.

It would keep open what must break when its worker dies, and could act in the worker's name.
"""

import os
import weakref
from typing import Protocol


class Shared(Protocol):
    def let_go(self) -> None:
        """Close this in the present process only; a process that shares it keeps it."""


_here: weakref.WeakSet[Shared] = weakref.WeakSet()


def let_go_in_forks(shared: Shared) -> None:
    """Have every process that is forked from this one let go of it."""
    _here.add(shared)


def _forked() -> None:
    for shared in list(_here):
        shared.let_go()


os.register_at_fork(after_in_child=_forked)
