"""Segments that workers of other machines read through NIXL, past the processor of their owner.

NIXL reads over InfiniBand, over RoCE, or over what else UCX finds. The connection between two
workers stays. It says how a segment is reached, what lies in it, and which slots are free again.
Such a network protects memory only by the fact that nobody else is on it. So the token that crosses
the connection carries a tag of the bytes: these are read into memory of our own, and go on from
there if the tag is right.

NIXL writes its own lists of addresses as pickles; here an address is a number in a message.
"""

import hmac
import importlib
import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from agent.errors import Altered, WireError
from agent.net.frames import PayloadTag
from agent.protocol import Lying, Segment
from agent.store.memory import address_of
from agent.transport.segment import SLOT_BYTES, Own, Tagging, start_of

PACKAGES = ("nixl_cu12", "nixl_cu13")
ROOMS, SPARE_ROOMS = 4, 12  # reads at once, and how many may be given up before they have ended
MEET_S = 8.0  # in which the first bytes of a peer must be read
WAIT_S = 0.01
POLLS_AT_ONCE = 64
POLL_S = 0.0002

log = logging.getLogger(__name__)
Room = np.ndarray[Any, np.dtype[np.uint8]]


class Reach:
    """What this worker reads the memory of its peers with, and what they reach its own by."""

    def __init__(self, worker: str, secret: str, own: Own) -> None:
        """Raise `OSError` if NIXL is not there or does not start."""
        self._secret = secret.encode()
        self._lock = threading.Lock()  # of the agent
        area = mmap.mmap(-1, (ROOMS + SPARE_ROOMS) * SLOT_BYTES)
        area.madvise(mmap.MADV_DONTFORK)
        self._rooms = np.frombuffer(area, dtype=np.uint8)
        self._free, self._spares = list(range(ROOMS)), list(range(ROOMS, ROOMS + SPARE_ROOMS))
        self._usable = ROOMS  # free, or read into now
        self._changed = threading.Condition()  # of the three
        self._newest: dict[bytes, Remote] = {}  # meeting with a peer
        try:
            nixl = _package()
            # The same worker may come again, and is another one for NIXL.
            name = f"{worker}-{secrets.token_hex(8)}"
            self._agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
            for memory in (own.memory, self._rooms.data):
                self._agent.register_memory([(address_of(memory), memory.nbytes, 0, "")], "DRAM")
            reach = self._agent.get_agent_metadata()
        except Exception as error:
            raise OSError(f"NIXL does not start ({error})") from error
        own.open(reach, self._tagging(own.said.nonce))

    def theirs(self, said: Segment, gone: Callable[[], bool]) -> "Remote":
        """Return the segment of a peer when its first bytes have been read.

        Raise `OSError` if it cannot be reached. Then NIXL goes on to know the peer: UCX ends this
        process if a connection that is still being made is taken back.
        """
        if not self._spares:
            raise OSError("the rooms that are left are for the peers that are read from now")
        until_s = time.monotonic() + MEET_S

        def over() -> bool:
            return gone() or time.monotonic() > until_s

        try:
            with self._lock:
                name = self._agent.add_remote_agent(said.reach)
            with self.read(name, said.address, len(said.nonce), over) as nonce:
                found_nonce = bytes(nonce)
        except Exception as error:
            raise OSError(f"NIXL does not reach it ({error})") from error
        if found_nonce != said.nonce:
            raise OSError("NIXL reaches another process there")
        with self._lock:
            found = self._newest[name] = Remote(self, name, said, self._tagging(said.nonce))
        return found

    def leave(self, name: bytes, left: "Remote") -> None:
        """Forget a peer, unless it has been met again meanwhile."""
        with suppress(Exception), self._lock:  # NIXL may know already that the peer is gone
            if self._newest.get(name) is left:
                del self._newest[name]
                self._agent.remove_remote_agent(name)

    @contextmanager
    def read(
        self, name: bytes, address: int, count: int, gone: Callable[[], bool]
    ) -> Iterator[Room]:
        """Give what lies at this address of a peer, as long as the caller uses it."""
        number, over = self._take_room(gone), False
        room = self._rooms[number * SLOT_BYTES :][:count]
        try:
            self._transfer(name, address, room, gone)
            over = True
            yield room
        finally:
            with self._changed:
                if over:
                    self._free.append(number)
                else:
                    self._replace()
                self._changed.notify_all()

    def _replace(self) -> None:
        """Give up a room for ever, because the network may still write to it; take a spare one."""
        if not self._spares:
            self._usable -= 1
            return
        self._free.append(self._spares.pop())
        if not self._spares:
            log.warning("many reads through NIXL were given up: the next peers' go over sockets")

    def close(self) -> None:
        with self._lock:
            self._agent = None

    def _tagging(self, nonce: bytes) -> Tagging:
        """Return what tags the bytes of a segment, by their serial number in it."""
        key = hmac.digest(self._secret, b"segment" + nonce, "sha256")

        def tag(serial: int, data: memoryview) -> bytes:
            made = PayloadTag(key, serial.to_bytes(12, "little"))
            made.add(data)
            return made.result()

        return tag

    def _take_room(self, gone: Callable[[], bool]) -> int:
        with self._changed:
            while not self._free:
                if gone():
                    raise WireError("the peer is gone")
                if not self._usable:
                    raise WireError("every room to read into was given up")
                self._changed.wait(WAIT_S)
            return self._free.pop()

    def _transfer(self, name: bytes, address: int, room: Room, gone: Callable[[], bool]) -> None:
        with _told(), self._lock:
            here = self._agent.get_xfer_descs([(address_of(room.data), room.nbytes, 0)], "DRAM")
            there = self._agent.get_xfer_descs([(address, room.nbytes, 0)], "DRAM")
            handle = self._agent.initialize_xfer("READ", here, there, name)
            state = self._agent.transfer(handle)
        polls = 0
        try:
            while state == "PROC":
                if gone():
                    raise WireError("the peer is gone")
                polls += 1
                time.sleep(0 if polls < POLLS_AT_ONCE else POLL_S)
                with _told(), self._lock:
                    state = self._agent.check_xfer_state(handle)
        finally:
            with suppress(Exception), self._lock:  # it may not be over, and its room is given up
                self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise WireError(f"NIXL has not read it: {state}")


class Remote:
    """The segment of a peer that is read over the network."""

    def __init__(self, reach: Reach, name: bytes, said: Segment, tag: Tagging) -> None:
        self._reach, self._name, self._said, self._tag = reach, name, said, tag

    def take(self, there: Lying, into: memoryview, gone: Callable[[], bool]) -> None:
        """Copy what lies there, if it is what its owner has put there."""
        at = start_of(there, self._said.slots, self._said.slot_bytes)
        with self._reach.read(self._name, self._said.address + at, there.count, gone) as found:
            if not hmac.compare_digest(there.tag, self._tag(there.serial, found.data)):
                raise Altered("what was read from its memory has another tag")
            np.copyto(np.frombuffer(into, dtype=np.uint8), found)

    def close(self) -> None:
        self._reach.leave(self._name, self)


def _package() -> Any:
    """Return NIXL for whichever CUDA it is here."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # of a peer that is gone we say enough
    os.environ.setdefault("UCX_HANDLE_ERRORS", "none")  # a script that crashes leaves its own word
    for name in PACKAGES:
        with suppress(ImportError):
            return importlib.import_module(name)
    raise ImportError(f"none of the packages {' and '.join(PACKAGES)} is here")


@contextmanager
def _told() -> Iterator[None]:
    """Tell an error of NIXL as one of the connection."""
    try:
        yield
    except Exception as error:
        raise WireError(f"NIXL: {error or type(error).__name__}") from error
