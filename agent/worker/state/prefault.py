"""A newcomer takes the memory of its first step before it reports that it is ready.

The first touch of a page costs more than what is then done with it, and most of all on a virtual
machine that never had that page before. In the first step of a layout every worker waits for the
slowest, so the memory is touched while the others train on.
"""

import threading
from pathlib import Path

from agent.net.mesh import STATE
from agent.protocol import Part
from agent.replica import Replica
from agent.store.memory import ALIGN_BYTES, Arena, fresh, touch

SHARES_MAX = 1024  # shares of a state, each of which begins aligned
MEMORY = Path("/proc/meminfo")
RESERVE = 8  # touch memory in advance only while 1/RESERVE of it stays free
STEP_FACTOR = 4  # a step holds gradients of two microbatches and two sums


class Landing:
    """The memory where shares of a state arrive.

    No byte of it is used twice, so a late share of an older layout does no harm.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = memoryview(b"")

    def make(self, state_bytes: int) -> None:
        self._left = fresh(state_bytes + SHARES_MAX * ALIGN_BYTES)
        touch(self._left)

    def place(self, part: Part, count: int) -> memoryview | None:
        with self._lock:
            if part.tag != STATE or count > self._left.nbytes:
                return None
            found, used = self._left[:count], -(-count // ALIGN_BYTES) * ALIGN_BYTES
            self._left = self._left[used:]
            return found

    def clear(self) -> None:
        with self._lock:
            self._left = memoryview(b"")


def warm(replica: Replica, landing: Landing, state_bytes: int) -> None:
    """Prepare memory for a state of `state_bytes`, if the machine has memory to spare.

    0 bytes mean that the size is not known.
    """
    beside = max(state_bytes - replica.state_bytes, 0)  # what an optimizer holds beside the weights
    sum_bytes = replica.space.total_bytes / replica.space.exchanged  # as large as the gradients
    needed = int(state_bytes + beside + STEP_FACTOR * sum_bytes)
    if not state_bytes or replica.unbuilt or not has_room(needed):
        return
    landing.make(state_bytes)
    replica.warm(Arena.touched(beside + beside // ALIGN_BYTES))


def has_room(count: int) -> bool:
    """Return whether memory would remain to spare with `count` bytes less; yes if unknown."""
    try:
        lines = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines())
        available, total = (int(lines[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError):
        return True
    return (available - (count >> 10)) * RESERVE > total
