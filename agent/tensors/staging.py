"""Bytes between a device and the host, through pinned memory.

Copies from the device run on a separate stream, after a mark that was set once the computation of
what they copy had been requested. So neither the host nor the device's later work waits for them.
Code about to overwrite what is being copied makes the device wait for the copies
(`Fetch.hold_back`); code that reads the copies waits on the host (`Fetch.wait`).
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from agent.tensors.device import CPU
from agent.tensors.shards import in_a_row


class Away(msgspec.Struct, frozen=True):
    """Bytes `low .. high - 1` of a tensor on a device, with their values at `mark`."""

    tensor: torch.Tensor
    low: int
    high: int
    mark: torch.Event

    @property
    def nbytes(self) -> int:
        return self.high - self.low

    def flat(self) -> torch.Tensor:
        if not self.tensor.numel():
            return torch.empty(0, dtype=torch.uint8, device=self.tensor.device)
        return in_a_row(self.tensor)[self.low : self.high]


BRING_BYTES, ALIGN_BYTES = 1 << 24, 64
Piece = memoryview | Away  # bytes, in host memory or on a device

_sides: dict[torch.device, torch.Stream] = {}
_making = threading.Lock()


def mark(device: torch.device) -> torch.Event:
    """Mark the work requested so far on this thread's stream of the device."""
    return torch.accelerator.current_stream(device).record_event()


def side_of(device: torch.device) -> torch.Stream:
    """Return the stream of all copies from this device."""
    with _making:
        if device not in _sides:
            _sides[device] = torch.Stream(device)
        return _sides[device]


@contextmanager
def behind(after: torch.Event | None, device: torch.device) -> Iterator[None]:
    """Run copies requested inside concurrently with other work, but not before `after`."""
    if after is None:
        yield
        return
    side = side_of(device)
    with side:
        side.wait_event(after)
        yield


class Fetch:
    """Copies on their way to the host, each into its target."""

    def __init__(self, pieces: Sequence[tuple[Away, torch.Tensor]]) -> None:
        self._device = pieces[0][0].tensor.device
        with side_of(self._device) as side:
            for each in {id(piece.mark): piece.mark for piece, _ in pieces}.values():
                side.wait_event(each)
            flats = [piece.flat() for piece, _ in pieces]
            for flat, (_, target) in zip(flats, pieces, strict=True):
                target.copy_(flat, non_blocking=True)
            self._done = side.record_event()
        # Held until they are copied, so that their memory is not given to other tensors.
        self._held: list[object] = [flats, pieces]

    def hold_back(self) -> None:
        """Make later work on this thread's stream of the device wait for the copies."""
        torch.accelerator.current_stream(self._device).wait_event(self._done)

    def wait(self) -> None:
        """Return when the copies are there."""
        self._done.synchronize()
        self._held = []


def pinned(count: int, device: torch.device) -> torch.Tensor:
    """Return host memory that a device can copy into by itself."""
    with torch.accelerator.device_index(device.index):
        return torch.empty(count, dtype=torch.uint8, device=CPU, pin_memory=True)


def here(pieces: Sequence[Piece]) -> list[memoryview]:
    """Return all pieces in host memory."""
    away = [piece for piece in pieces if isinstance(piece, Away)]
    if not away:
        return [piece for piece in pieces if isinstance(piece, memoryview)]
    room, at = pinned(sum(piece.nbytes for piece in away), away[0].tensor.device), 0
    pairs = []
    for piece in away:
        pairs.append((piece, room[at : at + piece.nbytes]))
        at += piece.nbytes
    Fetch(pairs).wait()
    copies = iter(pairs)
    return [p if isinstance(p, memoryview) else next(copies)[1].numpy().data for p in pieces]


def there(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of host memory on the device, without waiting for it."""
    room = pinned(memory.numel(), device)
    room.copy_(memory)
    return room.to(device, non_blocking=True)


def bring(payload: memoryview, into: torch.Tensor) -> None:
    """Copy bytes into a tensor of bytes; to a device piece by piece through pinned memory."""
    size = payload.nbytes
    if into.is_cpu:
        np.copyto(into.numpy(), np.frombuffer(payload, np.uint8))  # other threads go on meanwhile
        return
    room = pinned(min(size, BRING_BYTES), into.device)
    for low in range(0, size, BRING_BYTES):
        piece = payload[low : low + BRING_BYTES]
        np.copyto(room[: piece.nbytes].numpy(), np.frombuffer(piece, np.uint8))
        into[low : low + piece.nbytes].copy_(room[: piece.nbytes])


# --- blocks ---------------------------------------------------------------------------------------

Then = Callable[[list[memoryview]], object]


class Flat(Protocol):
    """What blocks are of: bytes in a row, on a device or in host memory."""

    flat: torch.Tensor

    def memory(self, start: int, end: int) -> memoryview: ...


class Block(NamedTuple):
    """Bytes `start .. end - 1`. No reference to a tensor is kept for those in host memory."""

    of: Flat
    start: int
    end: int

    def there(self) -> torch.Tensor:
        return self.of.flat[self.start : self.end]

    def here(self) -> memoryview:
        return self.of.memory(self.start, self.end)

    @property
    def size(self) -> int:
        return self.end - self.start


class Lanes(Protocol):
    """How blocks of a device's tensors come to host memory and back, in order and without waiting.

    What is done with a block goes on in `then`, which the owner of the lanes calls by `advance`.
    """

    def follow(self) -> None:
        """Let later copies see what this thread has requested of the device so far."""

    def room(self, key: Hashable, size: int) -> torch.Tensor:
        """Return host memory, the same for the same key."""

    def out(
        self, key: Hashable, blocks: Sequence[Block], then: Then, *, inward: bool = False
    ) -> None:
        """Call `then` with these bytes in host memory, which stay there until `key` is used again.

        They are as they are once what was followed is done, and the `inward` work.
        """

    def landing(self, key: Hashable, into: Block) -> memoryview:
        """Return the host memory in which the bytes of `into` may be received."""

    def inward(self) -> AbstractContextManager[object]:
        """Return a context whose work on the device sees what has been brought there."""

    def near(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a copy of host memory on the device, or that memory; only inside `inward`."""

    def into(self, key: Hashable, into: Block, then: Callable[[], object]) -> None:
        """Bring what has landed into its place, and call `then`."""

    def mark(self) -> torch.Event | None:
        """Mark the inward work so far, if it is done on a device."""

    @property
    def due(self) -> bool:
        """Whether `advance` has something to do."""

    @property
    def busy(self) -> bool:
        """Whether copies are on their way, so that `wait` returns."""

    def advance(self) -> None:
        """Go on with the blocks whose copies are there."""

    def wait(self) -> None:
        """Return when the oldest copies are there. They wait for the device, and for no peer."""

    def settle(self) -> None:
        """Return when nothing is copied any more; what was to be done then is not done."""

    def rejoin(self) -> None:
        """Let what this thread requests from now on see all inward work."""


class _Rooms:
    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make, self._rooms = make, dict[Hashable, torch.Tensor]()

    @property
    def room_bytes(self) -> int:
        return sum(room.numel() for room in self._rooms.values())

    def room(self, key: Hashable, size: int) -> torch.Tensor:
        room = self._rooms.get(key)
        if room is None or room.numel() < size:
            room = self._rooms[key] = self._make(max(-(-size // ALIGN_BYTES), 1) * ALIGN_BYTES)
        return room[:size]


class Direct(_Rooms):
    """Of a device that is the host: no copies."""

    due = busy = False

    def follow(self) -> None:
        return None

    def out(
        self,
        key: Hashable,  # noqa: ARG002
        blocks: Sequence[Block],
        then: Then,
        *,
        inward: bool = False,  # noqa: ARG002
    ) -> None:
        then([block.here() for block in blocks])

    def landing(self, key: Hashable, into: Block) -> memoryview:  # noqa: ARG002
        return into.here()

    def inward(self) -> AbstractContextManager[object]:
        return nullcontext()

    def near(self, memory: torch.Tensor) -> torch.Tensor:
        return memory

    def into(self, key: Hashable, into: Block, then: Callable[[], object]) -> None:  # noqa: ARG002
        then()

    def mark(self) -> None:
        return None

    def advance(self) -> None:
        return None

    def wait(self) -> None:
        return None

    def settle(self) -> None:
        return None

    def rejoin(self) -> None:
        return None


class _Copies(NamedTuple):
    done: torch.Event
    then: Callable[[], object]
    held: object  # until they are done, so that their memory is not given to other tensors


class Staged(_Rooms):
    """Through pinned rooms, by one stream of the device for each direction.

    So copies go both ways at a time, while the device computes.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(partial(pinned, device=device))
        self._device = device
        self._away, self._home = torch.Stream(device), torch.Stream(device)
        self._outs, self._ins = deque[_Copies](), deque[_Copies]()

    def follow(self) -> None:
        seen = mark(self._device)
        self._away.wait_event(seen)
        self._home.wait_event(seen)

    def out(
        self, key: Hashable, blocks: Sequence[Block], then: Then, *, inward: bool = False
    ) -> None:
        room, at, found = self.room(key, sum(block.size for block in blocks)), 0, []
        if inward:
            self._away.wait_event(self.mark())
        with self._away as away:
            for block in blocks:
                target = room[at : at + block.size]
                target.copy_(block.there(), non_blocking=True)
                found.append(target.numpy().data)
                at += block.size
            done = away.record_event()
        self._outs.append(_Copies(done, lambda: then(found), blocks))

    def landing(self, key: Hashable, into: Block) -> memoryview:
        return self.room(key, into.size).numpy().data

    def inward(self) -> AbstractContextManager[object]:
        return self._home

    def settle(self) -> None:
        self._away.synchronize()
        self._home.synchronize()
        self._outs.clear()
        self._ins.clear()

    def near(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.to(self._device, non_blocking=True)

    def into(self, key: Hashable, into: Block, then: Callable[[], object]) -> None:
        with self._home as home:
            into.there().copy_(self.room(key, into.size), non_blocking=True)
            self._ins.append(_Copies(home.record_event(), then, into))

    def mark(self) -> torch.Event:
        return self._home.record_event()

    @property
    def due(self) -> bool:
        return any(lane and lane[0].done.query() for lane in (self._outs, self._ins))

    @property
    def busy(self) -> bool:
        return bool(self._outs or self._ins)

    def advance(self) -> None:
        for lane in (self._outs, self._ins):
            while lane and lane[0].done.query():
                lane.popleft().then()

    def wait(self) -> None:
        lane = self._outs or self._ins
        if lane:
            lane[0].done.synchronize()

    def rejoin(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self.mark())
