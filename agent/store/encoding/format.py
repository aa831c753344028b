"""How a state lies in a store. No torch here.

A *layer* is a named group of tensors (parameters with their optimizer state) laid end to end,
widest type first, so that every tensor is aligned to its size. Each of the R holders of a layer
writes one *part*: a range of the layer's bytes, which may begin or end in the middle of a tensor.
A part is one plain safetensors file: a tensor that lies in it whole has its name and shape, a
piece of one is flat and named `tensor[first:last]`, in elements. A *manifest* names the layers and
parts of one version and holds a crc32c for every block of every file, so that a range is verified
without reading the rest. The manifest has a checksum too.
"""

import json
import math
import re
import struct
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from agent.checksum import Buffer, crc32c
from agent.store.errors import Damaged, Unknown
from cloud.ranges import Count, Name, Text

FORMAT = 2  # changes when software that does not know of a change would misread a version
FORMAT_OF_PACKED_SUMS = 1  # in a sum the tensors lay end to end
BLOCK_BYTES = 1 << 18  # small enough that a block is still in the processor's cache when summed
ALIGN_BYTES = 64
ITEM_BYTES = {
    "C64": 8,
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
SUMS = "~sums"  # the layer of the sums that follow the state; no module has such a name
REST = "~rest"  # the layer of all that belongs to no module's name
MANIFESTS, PARTS, FENCES, FLOORS, BAD = "manifests", "parts", "fences", "floors", "bad"
CLAIMS = "claims"


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a layer and the range of the layer's bytes that it has."""

    name: Name
    dtype: Name
    shape: tuple[Count, ...]
    start: Count
    end: Count

    def __post_init__(self) -> None:
        expected = math.prod(self.shape) * ITEM_BYTES.get(self.dtype, -1)
        if self.end - self.start != expected or expected < 0 or self.start < 0:
            raise ValueError(
                f"{self.name}: {self.dtype} {list(self.shape)} cannot be {self.start}..{self.end}"
            )


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """`values` is JSON of all but the tensors; `aliases` are further names of tied tensors."""

    name: Name
    tensors: tuple[Tensor, ...]
    values: Text = "{}"
    aliases: tuple[tuple[Name, Name], ...] = ()

    def __post_init__(self) -> None:
        at = 0
        for tensor in self.tensors:
            if tensor.start != at:
                raise ValueError(f"{self.name}: {tensor.name} starts at {tensor.start}, not {at}")
            at = tensor.end

    @property
    def layer_bytes(self) -> int:
        return self.tensors[-1].end if self.tensors else 0


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes `start .. end - 1` of a layer in one file, with a crc32c (u32, LE) per block."""

    layer: Name
    start: Count
    end: Count
    key: Name
    header_bytes: Count
    file_bytes: Count
    blocks: bytes

    def __post_init__(self) -> None:
        count = -(-self.file_bytes // BLOCK_BYTES)
        inside = 0 <= self.start <= self.end
        if not inside or self.file_bytes != self.header_bytes + self.end - self.start:
            raise ValueError(f"{self.key}: {self.start}..{self.end} in {self.file_bytes} bytes")
        if len(self.blocks) != 4 * count:
            raise ValueError(f"{self.key}: {len(self.blocks) // 4} checksums for {count} blocks")

    def crcs(self) -> tuple[int, ...]:
        return struct.unpack(f"<{len(self.blocks) // 4}I", self.blocks)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One whole version of a state. It exists only when everything that it names is there.

    The tensors are those of version `version - redo`; the layer `SUMS` holds the summed gradients
    of the `redo` steps from there to `version`, which were committed and are to be applied again.
    `records` are the records of the first of them, by which a worker can prove itself, and `proof`
    is how many sums that takes; versions that were written by earlier software have none.
    `sharded` says that workers wrote the parts of the state, and read them.
    """

    job: str
    version: int
    generation: int
    layers: tuple[Layer, ...]
    parts: tuple[Part, ...]
    block_bytes: int = BLOCK_BYTES
    redo: int = 0
    records: bytes = b""
    proof: int = 0
    sharded: bool = False
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT and (self.format != FORMAT_OF_PACKED_SUMS or self.redo):
            raise ValueError(f"version {self.version}: format {self.format}, known is {FORMAT}")
        if self.block_bytes != BLOCK_BYTES:
            raise ValueError(f"version {self.version}: blocks of {self.block_bytes} bytes")
        if not 0 <= self.redo <= self.version:
            raise ValueError(f"version {self.version} cannot have {self.redo} sums before it")
        if not 0 <= self.proof <= self.redo:
            raise ValueError(
                f"version {self.version}: {self.proof} of {self.redo} sums are a proof"
            )
        parts = defaultdict(list)
        for part in self.parts:
            parts[part.layer].append(part)
        for layer in self.layers:
            _check_cover(layer, parts.pop(layer.name, []))
        if parts:
            raise ValueError(f"version {self.version}: parts of unknown layers {sorted(parts)}")

    @property
    def key(self) -> str:
        return manifest_key(self.version, self.generation)

    @property
    def state(self) -> tuple[Layer, ...]:
        """The layers of the model, its optimizer and all other state."""
        return tuple(layer for layer in self.layers if layer.name != SUMS)

    @property
    def state_bytes(self) -> int:
        return sum(layer.layer_bytes for layer in self.state)


class _Envelope(msgspec.Struct, frozen=True, kw_only=True):
    crc32c: int
    manifest: msgspec.Raw


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A part that is ready to be written: the file is its pieces, end to end."""

    part: Part
    pieces: tuple[Buffer, ...]


def folder_of(part: Part) -> int:
    """Return the version in whose folder a part lies."""
    return int(part.key.split("/")[1])


def share(total: int, holders: int, index: int) -> tuple[int, int]:
    """Return the range of holder `index` when `total` bytes are shared out among `holders`."""
    units = -(-total // ALIGN_BYTES)
    low, high = (units * at // holders * ALIGN_BYTES for at in (index, index + 1))
    return min(low, total), min(high, total)


def lay_out(
    name: str,
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    values: str = "{}",
    aliases: Mapping[str, str] | None = None,
) -> Layer:
    """Return a layer of these (name, dtype, shape), widest type first and otherwise in order."""
    at, placed = 0, []
    for tensor, dtype, shape in sorted(tensors, key=lambda item: -ITEM_BYTES[item[1]]):
        size = math.prod(shape) * ITEM_BYTES[dtype]
        placed.append(Tensor(name=tensor, dtype=dtype, shape=tuple(shape), start=at, end=at + size))
        at += size
    return Layer(
        name=name,
        tensors=tuple(placed),
        values=values,
        aliases=tuple((aliases or {}).items()),
    )


def file_of(layer: Layer, version: int, start: int, end: int, pieces: Sequence[Buffer]) -> File:
    """Return the part `start .. end - 1` of a layer as a safetensors file of `pieces`."""
    entries: dict[str, object] = {"__metadata__": {"layer": layer.name, "version": str(version)}}
    for tensor in layer.tensors:
        low, high = max(tensor.start, start), min(tensor.end, end)
        if low < high or (low == high and tensor.start == tensor.end and start <= low < end):
            name, shape = tensor.name, list(tensor.shape)
            if (low, high) != (tensor.start, tensor.end):
                item = ITEM_BYTES[tensor.dtype]
                first, last = (low - tensor.start) // item, (high - tensor.start) // item
                name, shape = f"{name}[{first}:{last}]", [last - first]
            places = [low - start, high - start]
            entries[name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": places}
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % ALIGN_BYTES)
    header = struct.pack("<Q", len(text)) + text
    file_bytes = len(header) + sum(memoryview(piece).nbytes for piece in pieces)
    slug = re.sub(r"[^A-Za-z0-9_-]+", "_", layer.name)[:60]
    part = Part(
        layer=layer.name,
        start=start,
        end=end,
        key=f"{PARTS}/{version:010d}/{slug}-{start:012d}-{uuid.uuid4().hex[:12]}.safetensors",
        header_bytes=len(header),
        file_bytes=file_bytes,
        blocks=block_crcs((header, *pieces)),
    )
    return File(part=part, pieces=(header, *pieces))


def block_crcs(pieces: Iterable[Buffer]) -> bytes:
    """Return the crc32c of every block of the pieces laid end to end."""
    crcs, crc, filled = [], 0, 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        at = 0
        while at < view.nbytes:
            taken = view[at : at + BLOCK_BYTES - filled]
            crc, filled, at = crc32c(crc, taken), filled + taken.nbytes, at + taken.nbytes
            if filled == BLOCK_BYTES:
                crcs.append(crc)
                crc, filled = 0, 0
    if filled:
        crcs.append(crc)
    return struct.pack(f"<{len(crcs)}I", *crcs)


def encode(manifest: Manifest) -> bytes:
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Envelope(crc32c=crc32c(0, body), manifest=msgspec.Raw(body)))


def decode(data: bytes, key: str) -> Manifest:
    """Return the manifest in `data`.

    Raise `Damaged` if a single byte of it has changed. Raise `Unknown` if it is sound but cannot be
    read, because newer software wrote it, and a caller that took it for damaged would delete it.
    """
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
    except ValueError as error:
        raise Damaged(f"{key}: this is no manifest: {error}") from error
    body = bytes(envelope.manifest)
    if crc32c(0, body) != envelope.crc32c:
        raise Damaged(f"{key}: the manifest does not have its own checksum")
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except ValueError as error:
        what = "is sound, but not of a kind that this version of the software can read"
        raise Unknown(f"{key} {what}; start the version that wrote it: {error}") from error
    if manifest.key != key:
        raise Damaged(f"{key} holds the manifest {manifest.key}")
    return manifest


def manifest_key(version: int, generation: int) -> str:
    return f"{MANIFESTS}/{version:010d}-{generation:010d}.json"


def _check_cover(layer: Layer, parts: list[Part]) -> None:
    at = 0
    for part in sorted(parts, key=lambda part: (part.start, part.end)):
        if part.start != at:
            raise ValueError(f"layer {layer.name}: byte {at} is followed by byte {part.start}")
        at = part.end
    if at != layer.layer_bytes:
        raise ValueError(f"layer {layer.name}: {at} of {layer.layer_bytes} bytes are there")
