"""A copy of this worker's share of the state, taken while the next step computes.

Between two updates of an optimizer nothing writes to the state: forward and backward only read it. So a
snapshot begins when a step is done, copies in the background, piece by piece, and only what is
not copied when the next update is about to write is copied at once, by both threads. Each of the R
holders of a layer copies and writes 1/R of it. On an accelerator the copies run on a stream of their
own into pinned memory, and it is the device that waits, not the host.

The same background thread then hands the copy to `deliver`, which writes it to the sinks. It stays in
host memory as well: it is what a peer that lost everything is given, so it is kept until the next one
is complete. While one snapshot is being delivered no other begins: a slow sink makes snapshots
rarer, never a step slower.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec
import torch

from agent.store.format import ALIGN_BYTES, File, Layer, file_of, share
from agent.store.layers import Collected, Group, LiveLayer, block_of, collect
from agent.store.memory import fresh
from agent.tensors.device import CPU
from agent.tensors.shards import Stateful, in_a_row
from agent.tensors.staging import Away, Fetch, pinned

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 23
WAIT_S = 600.0
_TRIES = 4
Phase = Literal["idle", "warming", "planning", "copying", "delivering", "closed"]
_NO_MEMORY = torch.empty(0, dtype=torch.uint8, device=CPU)


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one layer in host memory."""

    layer: Layer
    start: int
    end: int
    data: memoryview


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What this worker holds of one version in host memory."""

    version: int
    generation: int
    shares: tuple[Share, ...]

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(share.layer for share in self.shares)

    def file(self, piece: Share) -> File:
        """Its checksums are computed here, so ask for one file after the other."""
        return file_of(piece.layer, self.version, piece.start, piece.end, [piece.data])


Holding = Callable[[str], tuple[int, int]]  # layer -> how many hold it, and which of them we are
Deliver = Callable[[Snapshot], None]


def alone(layer: str) -> tuple[int, int]:  # noqa: ARG001 - whichever layer it is
    """One worker holds every layer."""
    return 1, 0


class _Order(msgspec.Struct, frozen=True):
    """A snapshot that has been asked for."""

    version: int
    generation: int
    collected: Collected


class _Copy(msgspec.Struct, frozen=True):
    """Bytes of a live tensor, and where they go: `low .. high - 1` of one on the host."""

    source: torch.Tensor | Away
    low: int
    high: int
    target: torch.Tensor

    def perform(self) -> None:
        assert isinstance(self.source, torch.Tensor)
        self.target.copy_(in_a_row(self.source)[self.low : self.high])


class Snapshotter:
    """Takes snapshots of some objects and hands each to `deliver`, which may take its time.

    One thread calls `begin`, and updates the state only after `before_update`. The optimizers among
    the objects call that themselves; whoever changes parameters in another way calls it first.
    """

    def __init__(
        self,
        objects: Mapping[str, Stateful],
        deliver: Deliver,
        holding: Holding = alone,
        group: Group = block_of,
    ) -> None:
        self.failure: Exception | None = None
        self.newest: Snapshot | None = None
        self._objects, self._deliver, self._holding, self._group = objects, deliver, holding, group
        self._memories = [_NO_MEMORY, _NO_MEMORY]
        self._changed = threading.Condition()
        self._phase: Phase = "idle"
        self._order: _Order | None = None
        self._needed = 0
        self._copies: deque[_Copy] = deque()
        self._unfinished = 0
        self._device: torch.device | None = None  # where the newest state is, if not on the CPU
        self._fetch: Fetch | None = None
        self._hooks = [
            thing.register_step_pre_hook(lambda *_: self.before_update())
            for thing in objects.values()
            if isinstance(thing, torch.optim.Optimizer)
        ]
        self._thread = threading.Thread(target=self._run, name="snapshot", daemon=True)
        self._thread.start()

    def begin(self, version: int, generation: int) -> bool:
        """Start a snapshot of the state as it is now. False: not now, ask again at the next step.

        That is while the last one is on its way, and while memory for the first is being readied."""
        if self._busy():
            return False
        collected = collect(self._objects, self._group)
        sizes = collected.sizes().items()
        needed = sum(_aligned(end - at) for at, end in (self._range(*item) for item in sizes))
        self._device = collected.device
        if self._memories[1].numel() < needed:
            return self._ask("warming", needed, None)
        return self._ask("planning", needed, _Order(version, generation, collected))

    def take(self, version: int, generation: int) -> None:
        """Snapshot the state as it is now, and return when it may change again."""
        for _ in range(_TRIES):
            if self.begin(version, generation):
                return self.before_update()
            self._wait(lambda: not self._busy())
        raise TimeoutError(f"version {version}: other snapshots came first {_TRIES} times")

    def _busy(self) -> bool:
        return self._phase != "idle"

    def _ask(self, phase: Phase, needed: int, order: _Order | None) -> bool:
        with self._changed:
            if self._phase == "closed":
                return False
            self._phase, self._needed, self._order = phase, needed, order
            self._changed.notify_all()
        return order is not None

    def _range(self, layer: str, layer_bytes: int) -> tuple[int, int]:
        return share(layer_bytes, *self._holding(layer))

    def before_update(self) -> None:
        """Return when the state may be written to: copy what is left, and wait for what is at work."""
        if self._phase not in ("planning", "copying"):
            return
        self._wait(lambda: self._phase != "planning")
        self._copy_all()
        self._wait(lambda: not self._unfinished)
        if self._fetch is not None:
            self._fetch.hold_back()

    def wait(self, wait_s: float = WAIT_S) -> None:
        """Return when the last snapshot that began is delivered; raise what went wrong with it."""
        self._wait(lambda: self._phase in ("idle", "closed"), wait_s)
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """No more snapshots; the one under way is finished first."""
        self._wait(lambda: self._phase in ("idle", "closed"))
        self._set("closed")
        for hook in self._hooks:
            hook.remove()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wait(lambda: self._phase in ("warming", "planning", "closed"), None)
            order = self._order
            try:
                if self._phase == "closed":
                    return
                if order is None:
                    self._warm()
                else:
                    self._take(order)
                    self.failure = None
            except Exception as error:  # this thread's edge: training goes on, and is told
                self.failure = error
                log.warning("a snapshot failed: %s", error)
            self._set("idle")

    def _warm(self) -> None:
        """The first touch of memory is slower than many copies, so it is no step's business."""
        for at in (1, 0):
            self._memories[at] = _NO_MEMORY  # the old goes before the new comes
            if self._device is not None:
                self._memories[at] = pinned(self._needed, self._device)
            elif self._needed:
                self._memories[at] = torch.frombuffer(fresh(self._needed), dtype=torch.uint8)
                self._memories[at].zero_()

    def _take(self, order: _Order) -> None:
        with torch.no_grad():
            shares, copies = self._plan(order.collected.finish())
            far = [(copy.source, copy.target) for copy in copies if isinstance(copy.source, Away)]
            self._fetch = Fetch(far) if far else None
            with self._changed:
                self._copies.extend(copy for copy in copies if not isinstance(copy.source, Away))
                self._unfinished = len(self._copies)
                self._phase = "copying"
                self._changed.notify_all()
            self._copy_all()
        self._wait(lambda: not self._unfinished)
        if self._fetch is not None:
            self._fetch.wait()
        self._set("delivering")
        snapshot = Snapshot(version=order.version, generation=order.generation, shares=shares)
        self.newest = snapshot
        self._deliver(snapshot)

    def _plan(self, live: Sequence[LiveLayer]) -> tuple[tuple[Share, ...], list[_Copy]]:
        self._memories.reverse()  # the other one holds the newest snapshot
        shares, copies, at = [], [], 0
        for item in live:
            start, end = self._range(item.form.name, item.form.layer_bytes)
            target = self._memories[0][at : at + end - start]
            data = target.numpy().data.toreadonly()
            shares.append(Share(layer=item.form, start=start, end=end, data=data))
            copies.extend(_copies_of(item, start, end, target))
            at += _aligned(end - start)
        return tuple(shares), copies

    def _copy_all(self) -> None:
        while self._copies:
            try:
                copy = self._copies.popleft()
            except IndexError:
                return  # the other thread took the last one
            copy.perform()
            with self._changed:
                self._unfinished -= 1
                if not self._unfinished:
                    self._changed.notify_all()

    def _set(self, phase: Phase) -> None:
        with self._changed:
            if self._phase != "closed":
                self._phase = phase
            self._changed.notify_all()

    def _wait(self, happened: Callable[[], bool], wait_s: float | None = WAIT_S) -> None:
        with self._changed:
            if not self._changed.wait_for(happened, wait_s):
                raise TimeoutError(f"a snapshot was {self._phase} for more than {wait_s} s")


def _aligned(count: int) -> int:
    return -(-count // ALIGN_BYTES) * ALIGN_BYTES


def _copies_of(layer: LiveLayer, start: int, end: int, target: torch.Tensor) -> list[_Copy]:
    """The share `start .. end - 1` of a layer, in pieces small enough to be shared by two threads."""
    copies = []
    for entry, tensor in zip(layer.form.tensors, layer.tensors, strict=True):
        low, high = max(entry.start, start), min(entry.end, end)
        if low < high and layer.mark is not None and not tensor.is_cpu:
            away = Away(tensor, low - entry.start, high - entry.start, layer.mark)
            copies.append(_Copy(away, 0, 0, target[low - start : high - start]))
            continue
        # A tensor that does not lie end to end is laid out once, not once per piece.
        step = PIECE_BYTES if tensor.is_contiguous() else max(high - low, 1)
        for first in range(low, high, step):
            last = min(first + step, high)
            place = target[first - start : last - start]
            copies.append(_Copy(tensor, first - entry.start, last - entry.start, place))
    return copies
