"""States on disk, and the model on its own when the job is done. No torch here.

A checkpoint is one file in safetensors form (see `agent.shards`) and a manifest beside it. The manifest
is linked into place last and only if no other is there: it exists exactly when the file behind it is
complete, and of two writers of the same step one wins. What is read is checked against its
manifest (length, crc32c); a checkpoint that fails is set aside and the one before it is used.
"""

import hashlib
import json
import logging
import os
import struct
import uuid
from collections.abc import Iterable
from pathlib import Path

import msgspec

from agent.errors import CheckpointError
from agent.wire import Buffer, crc32c

log = logging.getLogger(__name__)

KEEP = 2
CHUNK_BYTES = 1 << 23


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    version: int
    generation: int
    file: str
    header_bytes: int
    total_bytes: int
    crc32c: int


class Saved(msgspec.Struct, frozen=True):
    """A whole state in memory: `header + body` are a safetensors file."""

    manifest: Manifest
    header: bytes
    body: memoryview


def write(
    directory: Path, job: str, version: int, generation: int, header: bytes, body: Buffer
) -> Path:
    """Write a checkpoint and its manifest; keep the newest `KEEP`. Returns the manifest's path."""
    directory.mkdir(parents=True, exist_ok=True)
    name = f"{version:010d}-{uuid.uuid4().hex[:8]}.safetensors"
    crc = put(directory / name, [header, body])
    manifest = Manifest(
        job=job,
        version=version,
        generation=generation,
        file=name,
        header_bytes=len(header),
        total_bytes=len(header) + memoryview(body).nbytes,
        crc32c=crc,
    )
    path = directory / f"{version:010d}.json"
    draft = path.with_suffix(f".{uuid.uuid4().hex[:8]}.part")
    try:
        put(draft, [msgspec.json.format(msgspec.json.encode(manifest), indent=2)])
        os.link(draft, path)
    except FileExistsError:
        (directory / name).unlink()
        return path  # another writer was first; it wrote the same state
    except OSError as error:
        (directory / name).unlink(missing_ok=True)
        raise CheckpointError(f"{path}: {error}") from error
    finally:
        draft.unlink(missing_ok=True)
    _sync(directory)
    _prune(directory)
    return path


def put(path: Path, pieces: Iterable[Buffer]) -> int:
    """Write a whole file or none; its crc32c. The disk has it when this returns."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    crc = 0
    try:
        with draft.open("wb") as file:
            for piece in pieces:
                view = memoryview(piece)
                for start in range(0, view.nbytes, CHUNK_BYTES):
                    crc = crc32c(crc, view[start : start + CHUNK_BYTES])
                    file.write(view[start : start + CHUNK_BYTES])
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    _sync(path.parent)
    return crc


def newest(directory: Path) -> Saved | None:
    """The newest checkpoint that is whole. Those that are not are renamed, and said."""
    for path in sorted(directory.glob("*.json"), reverse=True):
        try:
            return _read(path)
        except CheckpointError as error:
            log.warning("a checkpoint is set aside: %s", error)
            path.rename(path.with_suffix(".bad"))
    return None


def _read(path: Path) -> Saved:
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        data = memoryview((path.parent / manifest.file).read_bytes())
    except (msgspec.MsgspecError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if data.nbytes != manifest.total_bytes:
        raise CheckpointError(
            f"{manifest.file} has {data.nbytes} bytes, its manifest says {manifest.total_bytes}"
        )
    if crc32c(0, data) != manifest.crc32c:
        raise CheckpointError(f"{manifest.file} does not have the checksum of its manifest")
    split = manifest.header_bytes
    return Saved(manifest=manifest, header=bytes(data[:split]), body=data[split:])


def _prune(directory: Path) -> None:
    """Older manifests go before their files, so that no manifest ever points at nothing."""
    manifests = sorted(directory.glob("*.json"))[:-KEEP]
    for path in manifests:
        path.unlink(missing_ok=True)
    kept = {path.stem for path in directory.glob("*.json")}
    for path in directory.glob("*.safetensors"):
        if manifests and path.name.split("-")[0] <= manifests[-1].stem not in kept:
            path.unlink(missing_ok=True)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


Weights = dict[str, tuple[str, list[int], memoryview]]  # name -> type, shape, bytes


def weights_of(header: bytes, body: memoryview, prefix: str = "model/") -> Weights:
    """The tensors of one object of a state, under the names that its state_dict gives them."""
    entries = json.loads(header[8:])
    weights = {}
    for name, entry in entries.items():
        if name.startswith(prefix):
            start, end = entry["data_offsets"]
            weights[name.removeprefix(prefix)] = (entry["dtype"], entry["shape"], body[start:end])
    return weights


def digest(weights: Weights) -> str:
    """Names, types, shapes and bytes: equal if and only if the weights are."""
    total = hashlib.sha256()
    for name in sorted(weights):
        dtype, shape, data = weights[name]
        total.update(f"{name} {dtype} {list(shape)}\n".encode())
        total.update(data)
    return total.hexdigest()


def export(path: Path, weights: Weights) -> None:
    """A plain safetensors file, as any other tool reads it."""
    entries: dict[str, object] = {}
    at = 0
    for name, (dtype, shape, data) in weights.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + data.nbytes]}
        at += data.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    put(path, [struct.pack("<Q", len(text)), text, *(data for _, _, data in weights.values())])
