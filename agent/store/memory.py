"""Memory for whole states, and copying bytes into it. No torch here.

The first touch of ordinary memory costs a fault for every 4 KiB, which is slower than reading the
state from the page cache. Huge pages cause 512 times fewer faults; where there are none, the same
code gets ordinary pages.
"""

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

CHUNK_BYTES = 1 << 26
ALIGN_BYTES = 64
PIECE_BYTES = 1 << 23
PAGE_BYTES = mmap.PAGESIZE
MALLOC = {-1: 1 << 30, -2: 1 << 26, -3: 1 << 25}  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD
RESIDENT = Path("/proc/self/statm")
CONTAINER_MAX = Path("/sys/fs/cgroup/memory.max")
RETURNING_BYTES_MIN = 1 << 16  # smaller areas are not kept for reuse


def keep_memory() -> None:
    """Keep freed memory, because a step frees what the next one takes again.

    Otherwise each page taken again is zeroed first. glibc's own settings give the end of the heap
    back at 128 KiB, and map every large allocation.
    """
    set_malloc(MALLOC)


def set_malloc(settings: Mapping[int, int]) -> None:
    """Set when the C library gives freed memory back to the system: see mallopt(3)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library has none
        for setting, nbytes in settings.items():
            mallopt(setting, nbytes)


def return_memory() -> None:
    """Give freed memory back to the machine after work that does not come again soon."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # another C library has none
        trim(0)


def resident_bytes() -> int:
    """Return the memory that this process has now; 0 if that is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(RESIDENT.read_text().split()[1]) * PAGE_BYTES
    return 0


def machine_bytes() -> int:
    """Return the memory of this machine, used or not, or of the container if that has less."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no limit, or "max"
        found = min(found, int(CONTAINER_MAX.read_text()))
    return found


def ordinary(count: int) -> memoryview:
    return np.empty(count, dtype=np.uint8).data


class Arena:
    """Memory in chunks that is never freed piece by piece: it is freed with its last view."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk = memoryview(b"")
        self._used = 0

    @classmethod
    def touched(cls, count: int) -> "Arena":
        """Return an arena with `count` bytes that were touched already."""
        arena = cls()
        arena._chunk = _map(max(arena._chunk_bytes, count))
        touch(arena._chunk[:count])
        return arena

    def take(self, count: int) -> memoryview:
        """Return `count` writable bytes, aligned for every type."""
        if self._used + count > self._chunk.nbytes:
            self._chunk = _map(max(self._chunk_bytes, count))
            self._used = 0
        view = self._chunk[self._used : self._used + count]
        self._used += -(-count // ALIGN_BYTES) * ALIGN_BYTES
        return view


def fresh(count: int) -> memoryview:
    """Return `count` writable bytes in a separate mapping."""
    return _map(count) if count else memoryview(bytearray())


def touch(memory: memoryview) -> None:
    """Touch every page of the memory, so that it has pages. Other threads go on meanwhile."""
    np.frombuffer(memory, dtype=np.uint8)[::PAGE_BYTES] = 0


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy with numpy, because other threads go on meanwhile; copying slices blocks them."""
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


class Again:
    """Memory that is used again, because its first touch costs more than copying into it."""

    def __init__(self) -> None:
        self._idle: memoryview | None = None

    def take(self, count: int, make: Callable[[int], memoryview] = fresh) -> memoryview:
        idle, self._idle = self._idle, None
        if idle is None or not count <= idle.nbytes <= 2 * count:
            return make(count)
        return idle[:count]

    def give(self, memory: memoryview) -> None:
        """Give memory back that no reader needs any more."""
        self._idle = memory


class Returning:
    """Memory that is reused after its last view is gone, by a request for the same size.

    Its first touch costs more than what is received into it. Memory that was not used between one
    `rest` and the next is freed.
    """

    def __init__(self, make: Callable[[int], memoryview] = fresh) -> None:
        self._make = make
        self._idle: dict[int, list[memoryview]] = defaultdict(list)

    def take(self, count: int) -> memoryview:
        if count < RETURNING_BYTES_MIN:
            return ordinary(count)
        idle = self._idle[count]
        try:
            area = idle.pop()
        except IndexError:
            area = self._make(count)
        array = np.frombuffer(area, dtype=np.uint8)
        weakref.finalize(array, idle.append, area).atexit = False
        return array.data

    def rest(self) -> None:
        """Free idle memory. Call it before much memory comes back that will be needed soon."""
        for idle in list(self._idle.values()):
            idle.clear()


class Elsewhere(Protocol):
    """Copies that a device makes by itself."""

    def hold_back(self) -> None: ...

    def wait(self) -> None: ...


class Lying(Protocol):
    """Bytes in any place. A device must copy what is not a `memoryview`."""

    @property
    def nbytes(self) -> int: ...


Far = Callable[[Sequence[tuple[Any, memoryview]]], Elsewhere]


class Copying:
    """A copy of bytes into `whole`, end to end, that several threads can work on.

    The first thread with time finds the sources; each then copies the next piece. Bytes on a
    device are left to `far`, and `room` then makes memory that a device can write to.
    """

    def __init__(
        self,
        sources: Callable[[], Sequence[Lying]],
        again: Again,
        far: Far | None = None,
        room: Callable[[int], memoryview] = fresh,
    ) -> None:
        self._sources, self._again = sources, again
        self._far, self._room = far, room
        self._elsewhere: Elsewhere | None = None
        self._begun, self._beginning = False, threading.Lock()
        self._left = deque[tuple[memoryview, int]]()  # pieces and their places, in order
        self._flying, self._changed = set[int](), threading.Condition()

    def begin(self) -> None:
        """Find the sources, and copy nothing yet."""
        with self._beginning:
            if self._begun:
                return
            sources = self._sources()
            count, at = sum(source.nbytes for source in sources), 0
            self.whole, away = self._again.take(count, self._room), list[tuple[Any, memoryview]]()
            del self._sources  # and with it all that they are found from
            for source in sources:
                if not isinstance(source, memoryview):
                    away.append((source, self.whole[at : at + source.nbytes]))
                    at += source.nbytes
                    continue
                for start in range(0, source.nbytes, PIECE_BYTES):
                    piece = source[start : start + PIECE_BYTES]
                    self._left.append((piece, at))
                    at += piece.nbytes
            if away and self._far is not None:
                self._elsewhere = self._far(away)
            self._begun = True

    @property
    def left_bytes(self) -> int:
        """How many bytes no thread has begun to copy."""
        with self._changed:
            return sum(source.nbytes for source, _ in self._left)

    def reach(self, count: int) -> None:
        """Return when the first `count` bytes are copied; leave the others for later."""
        self._copy(count)
        if self._elsewhere is not None:
            self._elsewhere.wait()

    def finish(self) -> None:
        """Copy all pieces that no thread copies yet; return when all are done."""
        self.begin()
        self.reach(self.whole.nbytes)

    def let_change(self) -> None:
        """Return when this thread may change the sources.

        Its changes on a device come after the copies that the device still makes.
        """
        self.begin()
        self._copy(self.whole.nbytes)
        if self._elsewhere is not None:
            self._elsewhere.hold_back()

    def give_up(self) -> None:
        """Copy no more, because nobody will read it."""
        with self._changed:
            self._left.clear()

    def _copy(self, count: int) -> None:
        self.begin()
        while (piece := self._take(count)) is not None:
            source, at = piece
            copy_bytes(source, self.whole[at : at + source.nbytes])
            with self._changed:
                self._flying.discard(at)
                self._changed.notify_all()
        with self._changed:
            self._changed.wait_for(lambda: all(at >= count for at in self._flying))

    def _take(self, count: int) -> tuple[memoryview, int] | None:
        with self._changed:
            if not self._left or self._left[0][1] >= count:
                return None
            piece = self._left.popleft()
            self._flying.add(piece[1])
            return piece


def give_back(memory: memoryview, first: int, last: int) -> None:
    """Give the pages between these bytes back to the machine; nobody reads them any more."""
    area = memory.obj
    first, last = -(-first // PAGE_BYTES) * PAGE_BYTES, last // PAGE_BYTES * PAGE_BYTES
    if isinstance(area, mmap.mmap) and first < last:
        area.madvise(mmap.MADV_DONTNEED, first, last - first)


def _map(count: int) -> memoryview:
    area = mmap.mmap(-1, count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            area.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return memoryview(area)  # a kernel without huge pages
    return memoryview(area)
