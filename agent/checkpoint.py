"""States on disk, and the model on its own when the job is done. No torch here.

A checkpoint is one file in safetensors form (see `agent.shards`) and a manifest beside it; the sums of
steps that were committed after that state, if any, lie in a second file. The manifest is linked into place last and only if no other is there: it exists exactly when the file behind it is
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

from agent.backup import Backup, LoggedSum
from agent.errors import CheckpointError
from agent.wire import Buffer, crc32c

log = logging.getLogger(__name__)

KEEP = 2
CHUNK_BYTES = 1 << 23


class LoggedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One sum in the second file; they lie there end to end."""

    step: int
    present: bytes
    sum_bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`version` is the state's; every logged step adds one to it."""

    job: str
    version: int
    generation: int
    file: str
    header_bytes: int
    total_bytes: int
    crc32c: int
    sums_file: str = ""
    sums_crc32c: int = 0
    sums: tuple[LoggedStep, ...] = ()

    @property
    def reached(self) -> int:
        return self.version + len(self.sums)


class Saved(msgspec.Struct, frozen=True):
    """A whole state, and the sums that lead on from it."""

    backup: Backup
    redo: tuple[LoggedSum, ...]

    @property
    def reached(self) -> int:
        return self.backup.version + len(self.redo)


def write(directory: Path, job: str, saved: Saved) -> tuple[Path, Manifest]:
    """Write a checkpoint, then its manifest; keep the newest `KEEP`. The manifest and its path."""
    directory.mkdir(parents=True, exist_ok=True)
    backup, name = saved.backup, f"{saved.reached:010d}-{uuid.uuid4().hex[:8]}"
    crc = put(directory / f"{name}.safetensors", [backup.header, backup.body])
    sums_file = f"{name}.sums" if saved.redo else ""
    sums_crc = put(directory / sums_file, [s.body for s in saved.redo]) if saved.redo else 0
    manifest = Manifest(
        job=job,
        version=backup.version,
        generation=backup.generation,
        file=f"{name}.safetensors",
        header_bytes=len(backup.header),
        total_bytes=backup.state_bytes,
        crc32c=crc,
        sums_file=sums_file,
        sums_crc32c=sums_crc,
        sums=tuple(
            LoggedStep(step=s.step, present=s.present, sum_bytes=s.body.nbytes) for s in saved.redo
        ),
    )
    path = directory / f"{saved.reached:010d}.json"
    _link(path, manifest)
    _sync(directory)
    _prune(directory)
    return path, manifest


def _link(path: Path, manifest: Manifest) -> None:
    """The manifest comes into being whole, and never in place of another."""
    draft = path.with_suffix(f".{uuid.uuid4().hex[:8]}.part")
    try:
        put(draft, [msgspec.json.format(msgspec.json.encode(manifest), indent=2)])
        os.link(draft, path)
    except FileExistsError:
        _discard(path.parent, manifest)  # another writer was first; it wrote the same state
    except OSError as error:
        _discard(path.parent, manifest)
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except CheckpointError:
        _discard(path.parent, manifest)
        raise
    finally:
        draft.unlink(missing_ok=True)


def _discard(directory: Path, manifest: Manifest) -> None:
    for name in (manifest.file, manifest.sums_file):
        if name:
            (directory / name).unlink(missing_ok=True)


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
    except (msgspec.MsgspecError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    data = _checked(path.parent / manifest.file, manifest.total_bytes, manifest.crc32c)
    split = manifest.header_bytes
    backup = Backup(
        generation=manifest.generation,
        version=manifest.version,
        header=bytes(data[:split]),
        body=data[split:],
    )
    redo, at = [], 0
    if manifest.sums:
        size = sum(logged.sum_bytes for logged in manifest.sums)
        sums = _checked(path.parent / manifest.sums_file, size, manifest.sums_crc32c)
        for logged in manifest.sums:
            body = sums[at : at + logged.sum_bytes]
            redo.append(LoggedSum(logged.step, logged.present, body))
            at += logged.sum_bytes
    return Saved(backup, tuple(redo))


def _checked(path: Path, size: int, crc: int) -> memoryview:
    try:
        data = memoryview(bytearray(path.read_bytes()))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    if data.nbytes != size:
        raise CheckpointError(f"{path} has {data.nbytes} bytes, its manifest says {size}")
    if crc32c(0, data) != crc:
        raise CheckpointError(f"{path} does not have the checksum of its manifest")
    return data


def _prune(directory: Path) -> None:
    """Older manifests go before their files, so that no manifest ever points at nothing."""
    manifests = sorted(directory.glob("*.json"))
    for path in manifests[:-KEEP]:
        path.unlink(missing_ok=True)
    kept = {path.stem for path in manifests[-KEEP:]}
    patterns = ("*.safetensors", "*.sums", "*.part")  # a writer that was killed leaves a part
    for path in [path for pattern in patterns for path in directory.glob(pattern)]:
        if path.name.split("-")[0] < min(kept):
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
