"""A state on its way: which bytes of which layers a message carries. No torch here.

Each holder of a layer sends its share. The form of a layer (its tensors, and what is no tensor) is
sent by one of them, so that holders whose clocks or counters differ do not disagree.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from agent.checksum import Buffer
from agent.errors import WireError
from agent.store.encoding.format import Layer, Manifest, Part
from agent.store.errors import Damaged
from agent.store.memory import copy_bytes
from agent.store.places.sinks import Sink
from agent.store.reading import Want, read
from cloud.ranges import Count, Name

MUCH = 4  # an extent of at least 1 / MUCH of a batch is a batch by itself


class Extent(msgspec.Struct, frozen=True):
    """`size` bytes of a layer from `start` on; the layer has `of` bytes in all."""

    layer: Name
    start: Count
    size: Count
    of: Count


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What a payload contains: these extents, end to end; and the forms of some layers."""

    forms: tuple[Layer, ...]
    extents: tuple[Extent, ...]


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """Where the bytes of layers lie: the store, the manifest's key in it, and their parts."""

    place: Name
    manifest: Name
    parts: tuple[Part, ...]

    def only(self, layers: Iterable[Layer]) -> "Stored":
        """Return the parts of these layers."""
        names = {layer.name for layer in layers}
        kept = tuple(part for part in self.parts if part.layer in names)
        return msgspec.structs.replace(self, parts=kept)


def whole(layers: Iterable[Layer]) -> tuple[Extent, ...]:
    """Return extents of every byte of these layers."""
    sizes = ((layer.name, layer.layer_bytes) for layer in layers)
    return tuple(Extent(name, 0, size, size) for name, size in sizes if size)


def batches(extents: Iterable[Extent], bytes_max: int) -> Iterator[tuple[Extent, ...]]:
    """Yield the same bytes in order, in batches of at most `bytes_max`; cut larger extents.

    An extent that fills much of a batch is a batch by itself, because bytes of a single layer land
    in their place, and others are copied there.
    """
    batch, room = list[Extent](), bytes_max
    for extent in extents:
        at, end = extent.start, extent.start + extent.size
        while at < end:
            size = min(end - at, bytes_max)
            much = MUCH * size >= bytes_max
            if batch and (much or size > room):
                yield tuple(batch)
                batch, room = [], bytes_max
            piece = Extent(extent.layer, at, size, extent.of)
            at += size
            if much:
                yield (piece,)
            else:
                batch.append(piece)
                room -= size
    if batch:
        yield tuple(batch)


def cut_up(payload: memoryview, extents: Iterable[Extent]) -> list[tuple[Extent, memoryview]]:
    """Return each extent with its bytes."""
    found, at = [], 0
    for extent in extents:
        found.append((extent, payload[at : at + extent.size]))
        at += extent.size
    if at != payload.nbytes:
        raise WireError(f"{at} bytes of layers are announced, and {payload.nbytes} have come")
    return found


class Gathered:
    """Shares as they arrived, each in separate memory: a newcomer reads its state from them."""

    def __init__(self) -> None:
        self.layers: dict[str, Layer] = {}
        self._pieces: dict[str, list[tuple[int, memoryview]]] = defaultdict(list)

    def add(self, share: Share, payload: memoryview) -> None:
        self.layers.update({layer.name: layer for layer in share.forms})
        for extent, data in cut_up(payload, share.extents):
            self._pieces[extent.layer].append((extent.start, data))

    def read(self, wants: Iterable[Want]) -> int:
        """Fill every want, and return the bytes. What was sent was checked on its way."""
        total = 0
        for want in wants:
            filled = 0
            for start, data in self._pieces.get(want.layer, ()):
                low, high = max(want.start, start), min(want.end, start + data.nbytes)
                if low < high:
                    into = want.into[low - want.start : high - want.start]
                    copy_bytes(data[low - start : high - start], into)
                    filled += high - low
            if filled != want.into.nbytes:
                raise Damaged(
                    f"layer {want.layer}: {filled} of the {want.into.nbytes} bytes from "
                    f"{want.start} on have come"
                )
            total += filled
        return total


class Distant(Gathered):
    """Layers in a store, which are read straight into the memory where they are wanted."""

    def __init__(self, layers: Iterable[Layer], stored: Stored, sink: Sink) -> None:
        super().__init__()
        self.layers.update({layer.name: layer for layer in layers})
        self._sink = sink
        held = tuple(self.layers.values())
        self._parts = Manifest(job="", version=0, generation=0, layers=held, parts=stored.parts)

    def read(self, wants: Iterable[Want]) -> int:
        return read(self._sink, self._parts, wants)


def bodies(layers: Iterable[Layer], held: Mapping[str, Buffer]) -> list[Buffer]:
    """Return the payload for `whole(layers)`."""
    return [held[layer.name] for layer in layers if layer.layer_bytes]
