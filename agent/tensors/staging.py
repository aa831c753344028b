"""Bytes between a device and the host, through pinned memory.

Copies from the device run on a separate stream, after a mark that was set once the computation of
what they copy had been requested. So neither the host nor the device's later work waits for them.
Code about to overwrite what is being copied makes the device wait for the copies
(`Fetch.hold_back`); code that reads the copies waits on the host (`Fetch.wait`).
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
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
