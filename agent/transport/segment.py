"""Memory that the workers of one host read from each other, so that a block crosses no socket.

A segment is an anonymous file that only its owner can write: the owner maps it, and then seals it
against every later writable mapping, and against a change of its size. So what a token says over an
authenticated connection is enough: the bytes need no tag, because nobody else could have put them
there. The file has no name, and is gone with the last process that has it open.

A slot is used again when its reader has freed it, or was given up. A reader that was given up may
not know that yet. So the number of what lies in a slot stands in front of the segment, and changes
before its bytes do; the reader compares it after its copy.
"""

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Hashable, Sequence

import numpy as np

from agent.errors import WireError
from agent.protocol import Lying, Segment

SLOTS, SLOT_BYTES = 16, 4 << 20
NONCE_BYTES = 32
F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; not among Python's constants
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE


def _start(slots: int) -> int:
    """Return where the slots begin: after the nonce and the serial of each slot."""
    head = NONCE_BYTES + 8 * slots
    return -(-head // mmap.PAGESIZE) * mmap.PAGESIZE


class Loan:
    """A slot in use: what lies there, and who has not read it yet."""

    __slots__ = ("copied", "name", "readers", "there")

    def __init__(self, there: Lying, name: Hashable, reader: str) -> None:
        self.there, self.name, self.readers = there, name, {reader}
        self.copied = False


class Own:
    """The segment of this worker."""

    def __init__(self, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        """Raise `OSError` where the system has no such files."""
        self.slot_bytes, self._start = slot_bytes, _start(slots)
        self._lock = threading.Lock()
        self._free, self._serial = list(range(slots)), 0
        self._lent: dict[int, Loan] = {}  # by slot
        self._slot_of: dict[Hashable, int] = {}
        self._file = os.memfd_create("blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        size = self._start + slots * slot_bytes
        os.ftruncate(self._file, size)
        area = mmap.mmap(self._file, size)
        area.madvise(mmap.MADV_DONTFORK)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, SEALS)
        self._bytes = np.frombuffer(area, dtype=np.uint8)
        self._serials = self._bytes[NONCE_BYTES : NONCE_BYTES + 8 * slots].view(np.uint64)
        nonce = os.urandom(NONCE_BYTES)
        self._bytes[:NONCE_BYTES] = np.frombuffer(nonce, dtype=np.uint8)
        self.said = Segment(
            process=os.getpid(), file=self._file, nonce=nonce, slots=slots, slot_bytes=slot_bytes
        )

    def put(self, peer: str, pieces: Sequence[memoryview], name: Hashable) -> Lying | None:
        """Copy these into a slot for a peer; None if no slot is free, or they do not fit.

        If they lie there already under this name, for a different peer, they are not copied again.
        """
        count = sum(piece.nbytes for piece in pieces)
        with self._lock:
            known = self._lent.get(self._slot_of.get(name, -1))
            if known is not None and known.copied and peer not in known.readers:
                known.readers.add(peer)
                return known.there
            if not self._free or count > self.slot_bytes:
                return None
            slot, self._serial = self._free.pop(), self._serial + 1
            there = Lying(slot, self._serial, count)
            loan = self._lent[slot] = Loan(there, name, peer)
            self._slot_of[name] = slot
        self._serials[slot] = there.serial
        at = self._start + slot * self.slot_bytes
        for piece in pieces:
            np.copyto(self._bytes[at : at + piece.nbytes], np.frombuffer(piece, dtype=np.uint8))
            at += piece.nbytes
        with self._lock:
            loan.copied = True
            self._release(loan)  # the peer may have been given up meanwhile
        return there

    def free(self, peer: str, there: Lying) -> None:
        """Note that a peer has read what it was given."""
        with self._lock:
            loan = self._lent.get(there.slot)
            if loan is not None and loan.there == there:
                loan.readers.discard(peer)
                self._release(loan)

    def give_up(self, peer: str) -> None:
        """Free all that lies there for a peer."""
        with self._lock:
            for loan in list(self._lent.values()):
                loan.readers.discard(peer)
                self._release(loan)

    def _release(self, loan: Loan) -> None:
        """Use a slot again, if nobody reads it and nobody writes it."""
        if loan.copied and not loan.readers:
            slot = loan.there.slot
            del self._lent[slot]
            if self._slot_of.get(loan.name) == slot:
                del self._slot_of[loan.name]
            self._free.append(slot)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)


class Theirs:
    """The segment of a peer, which can be read here and not written."""

    def __init__(self, said: Segment) -> None:
        """Raise `OSError` if it is out of reach: of another host, or of another user."""
        self._slot_bytes, self._start = said.slot_bytes, _start(said.slots)
        size = self._start + said.slots * said.slot_bytes
        path = f"/proc/{said.process}/fd/{said.file}"
        if not os.readlink(path).startswith("/memfd:"):
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
        self._serials = self._bytes[NONCE_BYTES : NONCE_BYTES + 8 * said.slots].view(np.uint64)
        if bytes(self._bytes[:NONCE_BYTES]) != said.nonce:
            raise OSError("another process has this number")

    def take(self, there: Lying, into: memoryview) -> None:
        """Copy what lies there."""
        at = self._start + there.slot * self._slot_bytes
        if there.slot >= self._serials.size or there.count > self._slot_bytes:
            raise WireError(f"no slot {there.slot} with {there.count} bytes in the peer's segment")
        np.copyto(np.frombuffer(into, dtype=np.uint8), self._bytes[at : at + there.count])
        if int(self._serials[there.slot]) != there.serial:
            raise WireError("the peer has given this worker up, and its segment is used again")
