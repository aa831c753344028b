"""Memory that the workers of one host read from each other, so that a block crosses no socket.

A segment is an anonymous file that only its owner can write: the owner maps it, and then seals it
against every later writable mapping, and against a change of its size. So what a token says over an
authenticated connection is enough: the bytes need no tag, because nobody else could have put them
there. The file has no name, and is gone with the last process that has it open.

A slot is used again when its readers have freed it. If a reader was given up before that, the slot
is never used again, because that reader may not know and copy late; a spare slot takes its place.
So bytes never change while anybody may read them. Without a free slot, the socket is the way.
"""

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from agent.errors import WireError
from agent.protocol import Lying, Segment
from agent.store.memory import address_of

Tagging = Callable[[int, memoryview], bytes]

SLOTS, SLOT_BYTES = 16, 4 << 20
SPARES = 48  # they take no memory until they are written
NONCE_BYTES = 32
START = mmap.PAGESIZE  # of the slots; the nonce comes before them
F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; not among Python's constants
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE


def start_of(there: Lying, slots: int, slot_bytes: int) -> int:
    """Return where these bytes begin in a segment of so many slots."""
    if there.slot >= slots or there.count > slot_bytes:
        raise WireError(f"no slot {there.slot} with {there.count} bytes in the peer's segment")
    return START + there.slot * slot_bytes


class Loan:
    """Slots in use, one after the other: what lies there, and who has not read it yet."""

    __slots__ = ("copied", "name", "readers", "slots", "spoilt", "there")

    def __init__(self, there: Lying, slots: int, name: Hashable, reader: str) -> None:
        self.there, self.name, self.readers = there, name, {reader}
        self.slots = range(there.slot, there.slot + slots)
        self.copied, self.spoilt = False, False  # spoilt: a reader was given up

    def can_serve(self, peer: str, *, tagged: bool) -> bool:
        """Return whether a further peer may read it, which needs a tag or not."""
        return self.copied and peer not in self.readers and (not tagged or bool(self.there.tag))


class Own:
    """The segment of this worker."""

    def __init__(
        self, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES, spares: int = SPARES
    ) -> None:
        """Raise `OSError` where the system has no such files."""
        self._tag: Tagging | None = None  # if workers of other machines read it as well
        self.slot_bytes, self._lock = slot_bytes, threading.Lock()
        self._free, self._serial = list(range(slots)), 0
        self._spares = list(range(slots, slots + spares))
        slots += spares
        self._lent: dict[int, Loan] = {}  # by the first slot
        self._slot_of: dict[Hashable, int] = {}
        self._file = os.memfd_create("blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        size = START + slots * slot_bytes
        os.ftruncate(self._file, size)
        area = mmap.mmap(self._file, size)
        area.madvise(mmap.MADV_DONTFORK)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, SEALS)
        self._bytes = np.frombuffer(area, dtype=np.uint8)
        nonce = os.urandom(NONCE_BYTES)
        self._bytes[:NONCE_BYTES] = np.frombuffer(nonce, dtype=np.uint8)
        self.said = Segment(
            process=os.getpid(), file=self._file, nonce=nonce, slots=slots, slot_bytes=slot_bytes
        )

    def put(self, peer: str, pieces: Sequence[memoryview], name: Hashable) -> Lying | None:
        """Copy these into as many slots as they need for a peer; None if these are not free.

        If they lie there already under this name, for a different peer, they are not copied again.
        """
        count = sum(piece.nbytes for piece in pieces)
        with self._lock:
            known = self._lent.get(self._slot_of.get(name, -1))
            if known is not None and known.can_serve(peer, tagged=self._tag is not None):
                known.readers.add(peer)
                return known.there
            slots = max(1, -(-count // self.slot_bytes))
            slot = self._take_free(slots)
            if slot is None:
                return None
            self._serial += 1
            there = Lying(slot, self._serial, count)
            loan = self._lent[slot] = Loan(there, slots, name, peer)
            self._slot_of[name] = slot
        at = START + slot * self.slot_bytes
        for piece in pieces:
            np.copyto(self._bytes[at : at + piece.nbytes], np.frombuffer(piece, dtype=np.uint8))
            at += piece.nbytes
        if self._tag is not None:
            tag = self._tag(there.serial, self._bytes[at - count : at].data)
            there = msgspec.structs.replace(there, tag=tag)
        with self._lock:
            loan.there, loan.copied = there, True
            self._release(loan)  # the peer may have been given up meanwhile
        return there

    def _take_free(self, slots: int) -> int | None:
        """Take so many free slots that lie one after the other; return the first of them."""
        if slots == 1:
            return self._free.pop() if self._free else None
        free = sorted(self._free)
        for at in range(len(free) - slots + 1):
            if free[at + slots - 1] - free[at] == slots - 1:
                self._free = free[:at] + free[at + slots :]
                return free[at]
        return None

    def free(self, peer: str, there: Lying) -> None:
        """Note that a peer has read what it was given."""
        with self._lock:
            loan = self._lent.get(there.slot)
            if loan is not None and loan.there == there:
                loan.readers.discard(peer)
                self._release(loan)

    def give_up(self, peer: str) -> None:
        """Wait no longer for a peer, which may still read what lies there for it."""
        with self._lock:
            for loan in list(self._lent.values()):
                loan.spoilt |= peer in loan.readers
                loan.readers.discard(peer)
                self._release(loan)

    def _release(self, loan: Loan) -> None:
        """Use a slot again, or a spare one for it, if nobody reads it and nobody writes it."""
        if loan.copied and not loan.readers:
            slot = loan.there.slot
            del self._lent[slot]
            if self._slot_of.get(loan.name) == slot:
                del self._slot_of[loan.name]
            for each in loan.slots:
                if not loan.spoilt:
                    self._free.append(each)
                elif self._spares:
                    self._free.append(self._spares.pop())

    @property
    def memory(self) -> memoryview:
        return self._bytes.data

    def open(self, reach: bytes, tag: Tagging) -> None:
        """Say how workers of other machines reach it, and tag for them what lies there."""
        self._tag = tag
        self.said = msgspec.structs.replace(
            self.said, reach=reach, address=address_of(self._bytes.data)
        )

    def close(self) -> None:
        """Close the file once: its number belongs to something else after that."""
        with self._lock:
            file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


class Theirs:
    """The segment of a peer, which can be read here and not written."""

    def __init__(self, said: Segment) -> None:
        """Raise `OSError` if it is out of reach: of another host, or of another user."""
        self._slots, self._slot_bytes = said.slots, said.slot_bytes
        size = START + said.slots * said.slot_bytes
        path = Path(f"/proc/{said.process}/fd/{said.file}")
        if not str(path.readlink()).startswith("/memfd:"):
            raise OSError("another file has this number")  # to open a pipe could wait for ever
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            if (
                os.fstat(file).st_size != size
                or fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS != SEALS
            ):
                raise OSError("another file has this number")
            area = mmap.mmap(file, size, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        self._bytes = np.frombuffer(area, dtype=np.uint8)
        if bytes(self._bytes[:NONCE_BYTES]) != said.nonce:
            raise OSError("another process has this number")

    def view(self, there: Lying, done: Callable[[Lying], object]) -> memoryview:
        """Return what lies there without a copy; `done` is called when nobody uses it any more."""
        at = START + there.slot * self._slot_bytes
        if at + there.count > self._bytes.nbytes:
            raise WireError(f"no {there.count} bytes at slot {there.slot} of the peer's segment")
        found = self._bytes[at : at + there.count]
        weakref.finalize(found, done, there).atexit = False
        return found.data

    def close(self) -> None:
        """Nothing: the mapping ends with its last user."""

    def take(self, there: Lying, into: memoryview, _gone: Callable[[], bool] = bool) -> None:
        """Copy what lies there."""
        at = start_of(there, self._slots, self._slot_bytes)
        np.copyto(np.frombuffer(into, dtype=np.uint8), self._bytes[at : at + there.count])
