"""Tensors from worker to worker: the one seam between the executor and the wires.

`send` never waits; what is sent belongs to the channel and is not written to any more. `receive`
waits for exactly one parcel, `wait` for any of several. Strides travel with a tensor,
because for the same numbers in another order an operator may pick another kernel, with other bits.
"""

import threading
import time
from collections.abc import Collection
from typing import Protocol

import msgspec
import torch

from agent.errors import WireError

Key = tuple[str, str]  # peer, tag


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of one message.

    A tensor may be missing; `plain` is what msgpack can encode, and types and devices.
    """

    tensors: tuple[torch.Tensor | None, ...]
    plain: object = None


class Channel(Protocol):
    """Point-to-point connections of one worker. Tags are used once in a step."""

    def send(self, peer: str, tag: str, parcel: Parcel) -> None: ...

    def ready(self, peer: str, tag: str) -> bool: ...

    def receive(self, peer: str, tag: str) -> Parcel: ...

    def wait(self, wanted: Collection[Key]) -> None:
        """Return when one of them is ready."""


class Exchange:
    """A meeting place for workers of one process: the channel without a wire."""

    def __init__(self, patience_s: float = 60.0) -> None:
        self._changed = threading.Condition()
        self._held: dict[tuple[str, str, str], Parcel] = {}  # from, to, tag
        self._patience_s = patience_s
        self._broken = ""

    def channel(self, worker: str) -> "Local":
        return Local(self, worker)

    def put(self, source: str, target: str, tag: str, parcel: Parcel) -> None:
        with self._changed:
            if (source, target, tag) in self._held:
                raise WireError(f"{source} sent {tag} to {target} twice")
            self._held[source, target, tag] = parcel
            self._changed.notify_all()

    def break_off(self, why: str) -> None:
        """Wake all waiting workers, because nothing more will come."""
        with self._changed:
            self._broken = why
            self._changed.notify_all()

    def has(self, source: str, target: str, tag: str) -> bool:
        return (source, target, tag) in self._held

    def take(self, source: str, target: str, tag: str) -> Parcel:
        self.await_any(target, [(source, tag)])
        with self._changed:
            return self._held.pop((source, target, tag))

    def await_any(self, target: str, wanted: Collection[Key]) -> None:
        deadline_s = time.monotonic() + self._patience_s
        with self._changed:
            while not any((peer, target, tag) in self._held for peer, tag in wanted):
                left_s = deadline_s - time.monotonic()
                if self._broken or left_s <= 0 or not self._changed.wait(left_s):
                    raise WireError(
                        f"{target} waits for {sorted(wanted)} in vain: "
                        f"{self._broken or f'nothing came for {self._patience_s} s'}"
                    )


class Local:
    """One worker's end of an `Exchange`."""

    def __init__(self, exchange: Exchange, worker: str) -> None:
        self._exchange, self._worker = exchange, worker

    def send(self, peer: str, tag: str, parcel: Parcel) -> None:
        self._exchange.put(self._worker, peer, tag, parcel)

    def ready(self, peer: str, tag: str) -> bool:
        return self._exchange.has(peer, self._worker, tag)

    def receive(self, peer: str, tag: str) -> Parcel:
        return self._exchange.take(peer, self._worker, tag)

    def wait(self, wanted: Collection[Key]) -> None:
        self._exchange.await_any(self._worker, wanted)
