"""Write what the keeper holds of a job as a version of an archive, and read it back.

The state goes into the archive layer by layer, and the sums that follow it as one more layer, in
which each sum is a separate part. So a version is complete at the newest committed step, and
writing it needs nothing from the workers. No torch here.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

import msgspec

from agent.errors import CheckpointError
from agent.keeper import proofs
from agent.keeper.storage.backup import Backup, LoggedSum, Room, Saved
from agent.store.archive import Archive, Mark, assemble, whole, write_parts
from agent.store.encoding.format import SUMS, File, Layer, Manifest, Part, file_of, lay_out
from agent.store.errors import Damaged, Full, read_twice
from agent.store.memory import ordinary
from agent.store.reading import Want, read
from agent.store.shares import Stored

log = logging.getLogger(__name__)

T = TypeVar("T")

SAMPLED = 8


def sums_layer(redo: tuple[LoggedSum, ...]) -> Layer:
    """Return the form of the sums: their steps, and what each of them contributed to."""
    forms = [(f"{SUMS}/{logged.step:010d}", "U8", (logged.body.nbytes,)) for logged in redo]
    return lay_out(SUMS, forms, json.dumps({"present": [logged.present.hex() for logged in redo]}))


def _files(saved: Saved) -> Iterator[File]:
    backup = saved.backup
    for layer in backup.layers:
        if size := layer.layer_bytes:
            yield file_of(layer, saved.reached, 0, size, [backup.bodies[layer.name]])
    yield from _sums(saved)


def _sums(saved: Saved) -> Iterator[File]:
    form = sums_layer(saved.redo)
    for tensor, logged in zip(form.tensors, saved.redo, strict=True):
        yield file_of(form, saved.reached, tensor.start, tensor.end, [logged.body])


def of_shards(archive: Archive, mark: Mark, saved: Saved, parts: Iterable[Part]) -> Manifest:
    """Write the manifest of a state that workers have written, and what follows it.

    A sample of blocks has to have its checksums.
    """
    layers = (*saved.backup.layers, *((sums_layer(saved.redo),) if saved.redo else ()))
    written = [*parts]
    with _undone(archive.discard, written):
        written += write_parts(archive.sink, _sums(saved))
        manifest = msgspec.structs.replace(
            assemble(archive.job, mark.version, mark.generation, layers, written, len(saved.redo)),
            records=saved.records,
            proof=len(saved.redo),
            sharded=True,
        )
        _sample(archive, manifest)
    with _undone(archive.withdraw, manifest):
        made = archive.commit(manifest)
    return manifest if made else archive.read(mark)


@contextmanager
def _undone(undo: Callable[[T], object], what: T) -> Iterator[None]:
    """Undo what was written if the rest of it fails, because nobody would ever delete it."""
    try:
        yield
    except CheckpointError:
        with suppress(CheckpointError):
            undo(what)
        raise


def _sample(archive: Archive, manifest: Manifest) -> None:
    """Read the last block of some parts."""
    step = max(1, len(manifest.parts) // SAMPLED)
    for part in manifest.parts[::step]:
        want = Want(layer=part.layer, start=part.end - 1, into=memoryview(bytearray(1)))
        read(archive.sink, manifest, [want])


def save(archive: Archive, generation: int, saved: Saved) -> Manifest:
    """Write a version, and delete versions beyond those that the archive keeps.

    If the version is there already, it is not written again, also if another writer wrote it.
    """
    mark = Mark(saved.reached, generation)
    if (written := _written(archive, mark)) is not None:
        return written
    try:
        manifest = _write(archive, generation, saved)
    except Full:
        if not _made_room(archive, generation):
            raise
        manifest = _write(archive, generation, saved)
    prune(archive, generation)
    return manifest


def prune(archive: Archive, generation: int) -> None:
    """Delete versions beyond those that the archive keeps. What is newer is there in any case."""
    try:
        archive.prune(generation)
    except CheckpointError as error:
        log.warning("%s: what is old is still there: %s", archive.job, error)


def sweep(archive: Archive, generation: int) -> None:
    """Delete what no manifest names, when no writer is at work."""
    try:
        archive.sweep(generation)
    except CheckpointError as error:
        log.warning("%s: what nobody needs is still there: %s", archive.job, error)


def _write(archive: Archive, generation: int, saved: Saved) -> Manifest:
    """Write all of it or nothing, because remains of failed attempts are never deleted."""
    parts = write_parts(archive.sink, _files(saved))
    sums = (sums_layer(saved.redo),) if saved.redo else ()
    layers = (*saved.backup.layers, *sums)
    manifest = msgspec.structs.replace(
        assemble(archive.job, saved.reached, generation, layers, parts, redo=len(saved.redo)),
        records=saved.records,
        proof=min(len(saved.redo), proofs.commits_of(saved.records)),
    )
    with _undone(archive.withdraw, manifest):
        made = archive.commit(manifest)
    return manifest if made else archive.read(Mark(saved.reached, generation))


def _made_room(archive: Archive, generation: int) -> bool:
    """Delete what we left on the disk and no reader needs. Return whether there was any."""
    went = False
    for clear in (archive.sweep, archive.prune):
        try:
            went |= clear(generation)
        except CheckpointError as error:
            log.warning("%s: what nobody needs is still there: %s", archive.job, error)
    return went


def _written(archive: Archive, mark: Mark) -> Manifest | None:
    """Return what is there of this version, if every byte of it is: memory may be given up for it."""
    if mark not in archive.marks():
        return None
    try:
        manifest = archive.read(mark)
        for part in manifest.parts:
            read_twice(partial(whole, archive.sink, part))
    except Damaged as error:
        archive.set_aside(mark, str(error))
        return None
    return manifest


def stored_of(archive: Archive, manifest: Manifest) -> Stored:
    parts = tuple(part for part in manifest.parts if part.layer != SUMS)
    return Stored(place=archive.sink.name, manifest=manifest.key, parts=parts)


def load(archive: Archive, manifest: Manifest, room: Room = ordinary) -> Saved:
    """Load a version into memory, or raise `Damaged`; workers read a sharded state themselves.

    Each layer and each sum gets separate memory of `room`, as if it came from workers.
    """
    base, redo = manifest.version - manifest.redo, list[LoggedSum]()
    layers = () if manifest.sharded else manifest.state
    bodies = {layer.name: room(layer.layer_bytes) for layer in layers}
    wants = [Want(layer=name, start=0, into=body) for name, body in bodies.items()]
    if manifest.redo:
        (form,) = (layer for layer in manifest.layers if layer.name == SUMS)
        present = [bytes.fromhex(text) for text in json.loads(form.values)["present"]]
        if not len(form.tensors) == len(present) == manifest.redo:
            raise Damaged(f"version {manifest.version}: {manifest.redo} sums are announced")
        for step, (tensor, bits) in enumerate(zip(form.tensors, present, strict=True), base):
            redo.append(LoggedSum(step, bits, room(tensor.end - tensor.start)))
            wants.append(Want(layer=SUMS, start=tensor.start, into=redo[-1].body))
    read(archive.sink, manifest, wants)
    backup = Backup(
        generation=manifest.generation,
        version=base,
        layers=manifest.state,
        bodies=bodies,
        stored=stored_of(archive, manifest) if manifest.sharded else None,
    )
    return Saved(backup, tuple(redo), manifest.records)


def saved_beginning(saved: Saved) -> Saved:
    """Return what a proof needs of a version in memory; see `beginning`."""
    return msgspec.structs.replace(saved, redo=saved.redo[: proofs.commits_of(saved.records)])


def beginning(manifest: Manifest) -> Manifest:
    """Return what a proof needs of a version: the state, and the sums of the step after it.

    Its files are among those of the whole version.
    """
    count = manifest.proof
    sums = tuple(layer for layer in manifest.layers if layer.name == SUMS and count)
    cut = tuple(_first(layer, count) for layer in sums)
    end = cut[0].layer_bytes if cut else 0
    parts = tuple(part for part in manifest.parts if part.layer != SUMS or part.end <= end)
    return msgspec.structs.replace(
        manifest,
        version=manifest.version - manifest.redo + count,
        layers=(*manifest.state, *cut),
        parts=parts,
        redo=count,
    )


def _first(form: Layer, count: int) -> Layer:
    present = json.loads(form.values)["present"][:count]
    return msgspec.structs.replace(
        form, tensors=form.tensors[:count], values=json.dumps({"present": present})
    )
