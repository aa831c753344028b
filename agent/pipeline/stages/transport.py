"""The channel over the mesh: tensors as frames between machines.

A separate thread sends, and the mesh's threads receive, so both overlap with computing. A frame is

    places of the tensors, and what is plain (msgpack, in `Part.extra`) | tensors, each on 64 bytes

A tensor that fills its memory is sent in its memory order and given back with the same strides.
Tensors begin on 64 bytes on arrival as well, like all that torch allocates, because a matrix
product may round otherwise. What was on a device is on the receiver's device again; it is copied
off its device while that goes on computing.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import msgspec
import torch

from agent.errors import WireError
from agent.net.mesh import Mesh
from agent.net.wire import ALIGN_BYTES
from agent.pipeline.stages.channel import Key, Parcel
from agent.protocol import Part
from agent.tensors.device import CPU, where
from agent.tensors.shards import bytes_of
from agent.tensors.staging import Away, Piece, here, mark, there

QUEUED_MAX = 4096
Event = torch.Event | None
T = TypeVar("T")
DTYPE, DEVICE = 1, 2  # msgpack extension codes, used among what is plain


def _say(value: object) -> msgspec.msgpack.Ext:
    """Encode what msgpack cannot: types and devices.

    A device is sent without its number, because the receiver has its own.
    """
    match value:
        case torch.dtype():
            return msgspec.msgpack.Ext(DTYPE, _name(value).encode())
        case torch.device():
            return msgspec.msgpack.Ext(DEVICE, value.type.encode())
    raise NotImplementedError(f"{type(value).__name__} crosses no cut")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _hear(code: int, data: memoryview) -> object:
    name = str(data, "ascii")
    return getattr(torch, name) if code == DTYPE else torch.device(name)


_encode = msgspec.msgpack.Encoder(enc_hook=_say).encode


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor lies in a frame; `dense` says that its strides can be had without a copy.

    An axis along which all elements are the same is sent once, and expanded to `whole` again.
    `away` says that the tensor was on a device.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    dense: bool
    whole: tuple[int, ...]
    away: bool = False


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    places: tuple[Place | None, ...]
    plain: Any


_decode = msgspec.msgpack.Decoder(Manifest, ext_hook=_hear).decode


class MeshChannel:
    """Sends and receives under one generation. `changed` is the mesh's.

    A wait ends when what is awaited has come, when `check` or `watch` raises, or when patience is
    over. A broken connection is waited for like one that is not there yet.
    """

    def __init__(
        self,
        mesh: Mesh,
        changed: threading.Condition,
        generation: int,
        *,
        device: torch.device = CPU,
        patience_s: float = 60.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._mesh, self._changed, self._generation = mesh, changed, generation
        self._device, self._patience_s, self._check = device, patience_s, check
        self._queue: queue.Queue[tuple[str, str, Parcel, Event] | None] = queue.Queue(QUEUED_MAX)
        self.watch: Callable[[], None] = nothing  # raises if what is awaited will not come
        self._broken: WireError | None = None
        self._thread = threading.Thread(target=self._deliver, name="pipeline-send", daemon=True)
        self._thread.start()

    def send(self, peer: str, tag: str, parcel: Parcel) -> None:
        if self._broken is not None:
            raise self._broken
        try:
            self._queue.put_nowait((peer, tag, parcel, asked_for(parcel)))
        except queue.Full:
            raise WireError(
                f"{QUEUED_MAX} messages are queued already: {peer} takes none"
            ) from None

    def ready(self, peer: str, tag: str) -> bool:
        return self._key(peer, tag) in self._mesh.mailbox

    def receive(self, peer: str, tag: str) -> Parcel:
        self.wait([(peer, tag)])
        with self._changed:
            extra, payload = self._mesh.mailbox.pop(self._key(peer, tag))
        return unpack(extra, payload, self._device)

    def wait(self, wanted: Collection[Key]) -> None:
        keys = [self._key(peer, tag) for peer, tag in wanted]

        def look() -> bool:
            self.watch()
            return any(key in self._mesh.mailbox for key in keys)

        with self._changed:
            self._await(
                look,
                lambda: f"{sorted(wanted)} did not come",
                self._check,
            )

    def break_off(self, why: str) -> None:
        """Wake all waiting threads, because nothing more will come and nothing more is sent."""
        with self._changed:
            self._broken = self._broken or WireError(why)
            self._changed.notify_all()
        with contextlib.suppress(queue.Full):  # if it is full, the sending thread need not be woken
            self._queue.put_nowait(None)

    def close(self) -> None:
        """Return when all that was sent is on its way."""
        if self._broken is None:
            self._queue.put(None)
        self._thread.join(self._patience_s)

    def _await(
        self, look: Callable[[], T | None], complaint: Callable[[], str], check: Callable[[], None]
    ) -> T:
        """Wait until `look` finds something, and return it. The caller holds the lock."""
        deadline_s = time.monotonic() + self._patience_s
        while not (found := look()):
            if self._broken is not None:
                raise self._broken
            check()
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._changed.wait(left_s):
                raise WireError(f"{complaint()} within {self._patience_s} s")
        return found

    def _key(self, peer: str, tag: str) -> tuple[str, int, int, str]:
        return peer, self._generation, 0, tag

    def _deliver(self) -> None:
        while (item := self._queue.get()) is not None and self._broken is None:
            peer, tag, parcel, behind = item
            try:
                extra, pieces = pack(parcel, behind)
                part = Part(generation=self._generation, step=0, tag=tag, extra=extra)
                self._hand_over(peer, part, pieces)
            except Exception as error:  # no other code would notice it
                self.break_off(f"{tag} did not reach {peer}: {error}")
            del item, parcel

    def _hand_over(self, peer: str, part: Part, pieces: list[memoryview]) -> None:
        while True:
            with self._changed:
                connection = self._await(
                    lambda: self._mesh.connection(peer), lambda: f"{peer} did not connect", nothing
                )
            try:
                connection.send(part, *pieces)
            except WireError:
                self._mesh.drop(peer, connection)
            else:
                return


def nothing() -> None:
    """Check nothing, as in sending, which goes on during interruptions and ends with the channel."""


def asked_for(parcel: Parcel) -> Event:
    """Return a mark after which the tensors are computed, or None if they are not on a device."""
    device = where(parcel.tensors)
    return None if device == CPU else mark(device)


def pack(parcel: Parcel, behind: Event) -> tuple[bytes, list[memoryview]]:
    """Return the frame of a parcel, without copying tensors that fill their memory."""
    places: list[Place | None] = []
    pieces: list[Piece] = []
    at = 0
    for tensor in parcel.tensors:
        if tensor is None:
            places.append(None)
            continue
        once = _once(tensor.detach().resolve_conj().resolve_neg())
        away = not once.is_cpu
        lying, dense = _as_it_lies(once)
        dtype, shape, whole = _name(once.dtype), tuple(once.shape), tuple(tensor.shape)
        places.append(Place(dtype, shape, tuple(once.stride()), at, dense, whole, away))
        padding = -once.nbytes % ALIGN_BYTES
        if away:
            assert behind is not None
            pieces.append(Away(lying, 0, once.nbytes, behind))
        else:
            pieces.append(bytes_of(lying))
        pieces.append(memoryview(bytes(padding)))
        at += once.nbytes + padding
    return _encode(Manifest(tuple(places), parcel.plain)), here(pieces)


def unpack(extra: bytes, payload: memoryview, device: torch.device) -> Parcel:
    """Return the parcel of a frame. This is the inverse of `pack`."""
    manifest = _decode(extra)
    if payload:
        memory = torch.frombuffer(payload, dtype=torch.uint8)
    else:
        memory = torch.empty(0, dtype=torch.uint8, device=CPU)
    if memory.data_ptr() % ALIGN_BYTES:
        memory = memory.clone()
    near = memory
    if device != CPU and any(place is not None and place.away for place in manifest.places):
        near = there(memory, device)
    tensors = tuple(
        None if place is None else _laid_out(place, near if place.away else memory)
        for place in manifest.places
    )
    return Parcel(tensors=tensors, plain=manifest.plain)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _as_it_lies(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Return the elements in the order of memory, and whether they fill it.

    If they do not, the tensor is returned unchanged and has to be laid out.
    """
    order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride()[axis])
    lying = tensor.permute(order)
    if lying.is_contiguous():
        return lying, True
    return tensor, False


def _laid_out(place: Place, memory: torch.Tensor) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, place.dtype)
    count = torch.Size(place.shape).numel()
    flat = memory[place.start : place.start + count * dtype.itemsize].view(dtype)
    if place.dense:
        tensor = flat.as_strided(place.shape, place.stride)
    else:
        tensor = torch.empty_strided(place.shape, place.stride, dtype=dtype, device=memory.device)
        tensor.copy_(flat.view(place.shape))
    return tensor.expand(place.whole)
