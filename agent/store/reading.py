"""Read what any layout wrote into what any other needs: wanted ranges only. No torch here.

A want is a range of a layer and the memory for it. Files are read straight into that memory, block
by block, and each block is summed while it is still in the processor's cache. A range that begins
or ends within a block costs the rest of that block, and nothing more.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter

import msgspec

from agent.checksum import crc32c
from agent.store.encoding.format import BLOCK_BYTES, Layer, Manifest, Part, Tensor
from agent.store.errors import Damaged, read_twice
from agent.store.places.sinks import Sink

THREADS = 4


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of a layer from `start` on that shall be read into `into`."""

    layer: str
    start: int
    into: memoryview

    @property
    def end(self) -> int:
        return self.start + self.into.nbytes


class Index:
    """The tensors of a manifest by name; tied tensors by every name that they have."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self.layers = {layer.name: layer for layer in layers}
        self._places: dict[str, tuple[Layer, Tensor]] = {}
        aliases: dict[str, str] = {}
        for layer in self.layers.values():
            aliases.update(layer.aliases)
            self._places.update({tensor.name: (layer, tensor) for tensor in layer.tensors})
        self._aliases = aliases

    def find(self, name: str) -> tuple[Layer, Tensor] | None:
        return self._places.get(name) or self._places.get(self._aliases.get(name, name))

    def want(self, name: str, into: memoryview) -> Want:
        found = self.find(name)
        if found is None:
            raise Damaged(f"the state has no tensor {name}")
        layer, tensor = found
        if into.nbytes != tensor.end - tensor.start:
            raise Damaged(f"{name} has {tensor.end - tensor.start} bytes, not {into.nbytes}")
        return Want(layer=layer.name, start=tensor.start, into=into)


class _Piece(msgspec.Struct, frozen=True):
    """The bytes of a file from `at` on, which belong into `view`."""

    at: int
    view: memoryview

    @property
    def end(self) -> int:
        return self.at + self.view.nbytes


def read(sink: Sink, manifest: Manifest, wants: Iterable[Want], threads: int = THREADS) -> int:
    """Fill every want and return the bytes read.

    Raise `Damaged` if that fails; then the memory holds nonsense. What is damaged is read once more
    before that, because bytes may be spoilt on their way.
    """
    by_layer: dict[str, list[Want]] = defaultdict(list)
    for want in wants:
        if want.into.nbytes:
            by_layer[want.layer].append(want)
    jobs: list[tuple[Part, list[_Piece]]] = []
    parts: Mapping[str, list[Part]] = _parts_of(manifest)
    for layer, wanted in by_layer.items():
        for lane in _lanes(wanted):
            found = ((part, _pieces(part, lane)) for part in parts.get(layer, ()))
            jobs.extend((part, pieces) for part, pieces in found if pieces)

    def filled(job: tuple[Part, list[_Piece]]) -> int:
        return read_twice(lambda: _read_part(sink, *job))

    if threads <= 1 or len(jobs) <= 1:
        return sum(map(filled, jobs))
    with ThreadPoolExecutor(threads, "store-read") as pool:
        return sum(pool.map(filled, jobs))


def _parts_of(manifest: Manifest) -> Mapping[str, list[Part]]:
    parts: dict[str, list[Part]] = defaultdict(list)
    for part in manifest.parts:
        parts[part.layer].append(part)
    return parts


def _lanes(wants: list[Want]) -> list[list[Want]]:
    """Sort wants into lanes without overlap, as a range that is wanted twice is read twice."""
    lanes: list[list[Want]] = []
    for want in sorted(wants, key=attrgetter("start")):
        lane = next((lane for lane in lanes if lane[-1].end <= want.start), None)
        if lane is None:
            lanes.append([want])
        else:
            lane.append(want)
    return lanes


def _pieces(part: Part, wanted: list[Want]) -> list[_Piece]:
    """Return what of `wanted` (in order) lies in this part, in places of its file."""
    pieces = []
    shift = part.header_bytes - part.start
    first = max(bisect_right(wanted, part.start, key=attrgetter("start")) - 1, 0)
    for want in wanted[first:]:
        if want.start >= part.end:
            break
        low, high = max(want.start, part.start), min(want.end, part.end)
        if low < high:
            view = want.into[low - want.start : high - want.start]
            pieces.append(_Piece(low + shift, view))
    return pieces


def _read_part(sink: Sink, part: Part, pieces: list[_Piece]) -> int:
    total, crcs, name = 0, part.crcs(), f"{sink.name}/{part.key}"
    at = 0
    with sink.open(part.key) as read_at:
        # The header is read with its neighbours: that costs nothing, and a flip in it is found.
        for start, end in _spans(pieces, part.file_bytes):
            for low in range(start, end, sink.span_bytes):
                high = min(low + sink.span_bytes, end)
                while at < len(pieces) and pieces[at].end <= low:
                    at += 1
                views = _tile(pieces, at, low, high)
                read_at(low, views)
                _check(views, crcs, low // BLOCK_BYTES, name)
                total += high - low
    return total


def _spans(pieces: list[_Piece], file_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield whole blocks that cover the pieces; neighbours are joined."""
    start = end = 0
    for piece in pieces:
        low = piece.at // BLOCK_BYTES * BLOCK_BYTES
        high = min(-(-piece.end // BLOCK_BYTES) * BLOCK_BYTES, file_bytes)
        if low > end:
            if end > start:
                yield start, end
            start = low
        elif end == start:
            start = low
        end = max(end, high)
    if end > start:
        yield start, end


def _tile(pieces: list[_Piece], first: int, low: int, high: int) -> list[memoryview]:
    """Return memory for the bytes `low .. high - 1` of a file: a spare for unwanted bytes."""
    views, at = [], low
    for index in range(first, len(pieces)):
        piece = pieces[index]
        if piece.at >= high:
            break
        if piece.at > at:
            views.append(memoryview(bytearray(piece.at - at)))
            at = piece.at
        until = min(piece.end, high)
        views.append(piece.view[at - piece.at : until - piece.at])
        at = until
    if at < high:
        views.append(memoryview(bytearray(high - at)))
    return views


def _check(views: list[memoryview], crcs: tuple[int, ...], block: int, name: str) -> None:
    crc, filled = 0, 0
    for view in views:
        at = 0
        while at < view.nbytes:
            taken = view[at : at + BLOCK_BYTES - filled]
            crc, filled, at = crc32c(crc, taken), filled + taken.nbytes, at + taken.nbytes
            if filled == BLOCK_BYTES:
                _compare(crc, crcs, block, name)
                crc, filled, block = 0, 0, block + 1
    if filled:
        _compare(crc, crcs, block, name)


def _compare(crc: int, crcs: tuple[int, ...], block: int, name: str) -> None:
    if crc != crcs[block]:
        start = block * BLOCK_BYTES
        raise Damaged(f"{name}: the block at byte {start} does not have its checksum")
