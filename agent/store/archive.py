"""The versions of one job in one sink: which exist, count, and may go. No torch here.

Everything is decided by files that are created once and never changed. So no lock and no
compare-and-swap is needed, and a writer that was thought dead can do no harm whenever it wakes up:

* a *claim* (g) gives generation g to one writer, whatever version it goes on from;
* a *manifest* (version v, generation g) is created only when all its parts have settled;
* a *fence* (g', v') says that generation g' went on from version v': manifests of older generations
  that are newer than v' are void;
* a *floor* (g', v') says that what lies below v' may be gone: older manifests up to generation
  g' are void. It is created before anything is deleted.

So a manifest that counts never points at a missing part, even if a slow writer creates one late.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import msgspec

from agent.errors import CheckpointError
from agent.faults import passing
from agent.store.encoding.format import (
    BAD,
    CLAIMS,
    FENCES,
    FLOORS,
    MANIFESTS,
    PARTS,
    File,
    Layer,
    Manifest,
    Part,
    block_crcs,
    decode,
    encode,
    folder_of,
)
from agent.store.errors import Damaged, Outdated, Unavailable, read_twice
from agent.store.places.sinks import DRAFT, Sink

log = logging.getLogger(__name__)

KEEP = 2
TRIES = 16  # manifests that are read before the job is said to have none
BAD_KEPT = 16
_PART = re.compile(rf"{PARTS}/(\d{{10}})/.+")
_NUMBERED = re.compile(r"(\d{10})-(\d{10})\.json")


class Mark(msgspec.Struct, frozen=True, order=True):
    """A version of a generation, as in the name of a manifest, fence or floor."""

    version: int
    generation: int

    def key(self, folder: str) -> str:
        return f"{folder}/{self.version:010d}-{self.generation:010d}.json"


def counts(manifest: Mark, fences: Iterable[Mark], floors: Iterable[Mark]) -> bool:
    """Whether a manifest is part of the job's one history."""
    fenced = any(
        fence.generation > manifest.generation and fence.version < manifest.version
        for fence in fences
    )
    return not fenced and not any(
        floor.generation >= manifest.generation and floor.version > manifest.version
        for floor in floors
    )


def write_parts(sink: Sink, files: Iterable[File]) -> tuple[Part, ...]:
    """Put files one after the other, so that no more than one need exist at a time."""
    parts: list[Part] = []
    try:
        for file in files:
            parts.append(file.part)
            sink.put(file.part.key, file.pieces)
        sink.settle()
    except Exception:
        # Half a share is useless, least of all on a disk that is full.
        with suppress(CheckpointError):
            sink.delete([part.key for part in parts])
        raise
    return tuple(parts)


def assemble(
    job: str,
    version: int,
    generation: int,
    layers: Iterable[Layer],
    parts: Iterable[Part],
    redo: int = 0,
) -> Manifest:
    """Return one manifest of what all holders wrote, or raise `Damaged` if it is not whole."""
    known: dict[str, Layer] = {}
    for layer in layers:
        if known.setdefault(layer.name, layer) != layer:
            raise Damaged(f"{job} version {version}: two holders disagree about layer {layer.name}")
    distinct = {(part.layer, part.start, part.end): part for part in parts if part.end > part.start}
    try:
        return Manifest(
            job=job,
            version=version,
            generation=generation,
            layers=tuple(sorted(known.values(), key=lambda layer: layer.name)),
            parts=tuple(sorted(distinct.values(), key=lambda part: (part.layer, part.start))),
            redo=redo,
        )
    except ValueError as error:
        raise Damaged(f"{job} version {version} is not whole: {error}") from error


class Archive:
    """The versions of a job that lie in one sink.

    With `ours` False it only reads: it passes over what is damaged, and changes nothing.
    """

    def __init__(self, sink: Sink, job: str, keep: int = KEEP, *, ours: bool = True) -> None:
        assert keep >= 1, keep
        self.sink = sink
        self.job = job
        self._keep = keep
        self._ours = ours
        self._passed = set[Mark]()
        self._made = set[Mark]()  # by this writer, because a list may lag behind what it lists
        self._damage = list[str]()
        self.pinned: frozenset[int] = frozenset()  # versions whose files are being read
        self.branched = set[int]()  # versions that other jobs begin from, which count until then

    def take_over(self, version: int) -> int:
        """Become the writer that goes on from `version`, in a generation that no writer has had."""
        generation = 0
        for _ in range(TRIES):
            folders = (CLAIMS, MANIFESTS, FENCES, FLOORS)
            marks = [mark for folder in folders for mark in self._marks(folder)]
            # A generation that is taken may not be in the list yet.
            generation = 1 + max((mark.generation for mark in marks), default=generation)
            # The claim decides, because fences of two versions are two files: both would be made.
            if self.sink.create(Mark(0, generation).key(CLAIMS), b"{}"):
                self.sink.create(Mark(version, generation).key(FENCES), b"{}")
                return generation
        raise Unavailable(f"{self.sink.name}: others begin to write {self.job} all the time")

    def commit(self, manifest: Manifest) -> bool:
        """Create the manifest. Raise `Damaged` if a file of it, or then itself, is not there.

        Return False if a different writer has created this version; then our parts are deleted.
        """
        mark = Mark(manifest.version, manifest.generation)
        if not counts(mark, self._marks(FENCES), self._marks(FLOORS)):
            self.discard(manifest.parts)
            raise Outdated(
                f"{self.job}: version {mark.version} of generation {mark.generation} comes too "
                "late: a newer generation, or newer versions, are there"
            )
        if mark in self._marks(BAD):  # its writer writes it again
            self.sink.delete([manifest.key, mark.key(BAD)])
            self._passed.discard(mark)
        data = encode(manifest)
        self.measure(manifest)
        self.sink.create(manifest.key, data)
        # What is there decides: an answer may be lost and the create repeated, or it may be untrue.
        made = read_twice(lambda: self.sink.get(manifest.key)) == data
        if made:
            self._made.add(mark)
        else:
            self.discard(manifest.parts)
        passing("keeper: manifest written")
        return made

    def withdraw(self, manifest: Manifest) -> None:
        """Delete a manifest, and then its parts.

        It may exist although its writer got an error.
        """
        self.sink.delete([manifest.key, *(part.key for part in manifest.parts)])
        self._made.discard(Mark(manifest.version, manifest.generation))

    def discard(self, parts: Iterable[Part]) -> None:
        """Delete what was written for a version that will not be committed."""
        self.sink.delete([part.key for part in parts])

    def marks(self) -> list[Mark]:
        """Return the versions that count, newest first, whether they can be read or not."""
        return self._sound_of(self._manifests())

    def _sound_of(self, manifests: set[Mark]) -> list[Mark]:
        aside = set(self._marks(BAD))
        return [mark for mark in self._counted_of(manifests) if mark not in aside]

    def _counted(self) -> list[Mark]:
        """Return those that count, and those that others than we have set aside."""
        return self._counted_of(self._manifests())

    def _counted_of(self, manifests: set[Mark]) -> list[Mark]:
        fences, floors = self._marks(FENCES), self._marks(FLOORS)
        found = manifests - self._passed
        return sorted((mark for mark in found if counts(mark, fences, floors)), reverse=True)

    def _manifests(self) -> set[Mark]:
        return {*self._marks(MANIFESTS), *self._made}

    def newest(
        self, not_above: int | None = None, passed_over: list[CheckpointError] | None = None
    ) -> Manifest | None:
        """Return the newest version with a sound manifest, and all files there in full length."""
        return next(self.sound(not_above, passed_over), None)

    def sound(
        self, not_above: int | None = None, passed_over: list[CheckpointError] | None = None
    ) -> Iterator[Manifest]:
        """Yield all such versions, newest first, and set the damaged ones aside on the way.

        If one cannot be read now, its error is raised; with `passed_over`, the error is added to
        that, and the version before it is next. If none is sound, those that were set aside before
        are read again: what spoilt them may have been between them and the reader.
        """
        found = False
        for marks in (self.marks, self._counted):
            wanted = () if found else marks()
            for manifest in self._read_each(wanted, not_above, passed_over):
                found = True
                yield manifest

    def _read_each(
        self,
        marks: Sequence[Mark],
        not_above: int | None,
        passed_over: list[CheckpointError] | None,
    ) -> Iterator[Manifest]:
        wanted = [m for m in marks if not_above is None or m.version <= not_above]
        for mark in wanted[:TRIES]:
            try:
                manifest = self.read(mark)
            except Damaged as error:
                self.set_aside(mark, str(error))
            except Unavailable as error:
                if passed_over is None:
                    raise
                passed_over.append(error)
            else:
                yield manifest

    def read(self, mark: Mark) -> Manifest:
        key = mark.key(MANIFESTS)
        manifest = self._decoded(key)
        if manifest.job != self.job:
            raise CheckpointError(f"{key} belongs to job {manifest.job}, not {self.job}")
        self.measure(manifest)
        return manifest

    def _decoded(self, key: str) -> Manifest:
        return read_twice(lambda: decode(self.sink.get(key), key))

    def measure(self, manifest: Manifest) -> None:
        """Raise `Damaged` unless every file of this manifest is there in full length."""
        key, sizes = manifest.key, dict[str, int]()
        for folder in {part.key.rpartition("/")[0] for part in manifest.parts}:
            sizes.update(self.sink.sizes(folder))
        for part in manifest.parts:
            if part.key not in sizes:
                self._look_for(part)
            elif sizes[part.key] != part.file_bytes:
                raise Damaged(
                    f"{key}: {part.key} has {sizes[part.key]} bytes, "
                    f"its manifest says {part.file_bytes}"
                )

    def _look_for(self, part: Part) -> None:
        """Look for the file of a part itself, because a list may lag behind what it lists."""
        with self.sink.open(part.key) as read:
            read_twice(lambda: read(part.file_bytes - 1, [memoryview(bytearray(1))]))

    def set_aside(self, mark: Mark, why: str) -> None:
        """Make a version that cannot be read no longer count, so that the one before is newest.

        It is not deleted, because it may be sound all the same. It goes when newer ones are there.
        """
        log.warning("%s: version %d is set aside: %s", self.job, mark.version, why)
        self._damage.append(f"version {mark.version} is damaged: {why}")
        self._passed.add(mark)
        if self._ours:
            with suppress(CheckpointError):  # where there is no room, or nothing may be changed
                self.sink.create(mark.key(BAD), json.dumps({"why": why}).encode())

    def damage(self) -> list[str]:
        """Return what was set aside since the last call, and why."""
        said, self._damage = self._damage, []
        return said

    def prune(self, generation: int = 0) -> bool:
        """Keep the newest versions, and the branched ones. Return whether files were deleted.

        What a manifest that is kept names is never deleted. The writer of `generation` is not
        superseded by its own fence, though it may not have written a version yet.
        """
        counted = self.marks()
        kept, old = counted[: self._keep], counted[self._keep :]
        if len(kept) < self._keep:
            return False
        branched = [mark for mark in old if mark.version in self.branched]
        lowest = min(mark.version for mark in (*kept, *branched))
        floor = Mark(lowest, max(mark.generation for mark in kept))
        self.sink.create(floor.key(FLOORS), b"{}")
        parts, spared = self._parts(), self._folders(branched)
        # A newer writer of one of these began before, and is seen now; it may be below our floor.
        if self._superseded(max(generation, floor.generation)):
            return False
        written = self.sink.sizes(MANIFESTS)
        listed = set(marks_in(MANIFESTS, written))
        void = listed - set(self._sound_of(listed))
        void |= {*old} - {*branched}  # above the floor where a branched one holds that down
        self.sink.delete([mark.key(MANIFESTS) for mark in sorted(void)])
        self._made -= void
        self.sink.delete([key for key in written if key.endswith(DRAFT)])
        # A part of the kept ones' range that no manifest names may be of a writer still at work.
        below = [
            key
            for key, version in parts.items()
            if version < kept[-1].version and version not in spared
        ]
        self.sink.delete(below)
        self._prune_marks(floor)
        passing("keeper: pruned")
        return bool(below)

    def sweep(self, generation: int) -> bool:
        """Delete parts that no manifest names, or only one that was set aside.

        Return whether there were any. They were left by writers that were killed, because no other
        writer is at work now. An older writer that is still at work unknown to us gets an error,
        because its files are missing.
        """
        parts = self._parts()
        if self._superseded(generation):
            return False
        kept = self._manifests() - set(self._marks(BAD))
        manifests = [self._decoded(mark.key(MANIFESTS)) for mark in sorted(kept)]
        named = {part.key for manifest in manifests for part in manifest.parts}
        self.sink.delete(parts.keys() - named)
        return bool(parts.keys() - named)

    def _parts(self) -> dict[str, int]:
        """Return the versions that parts were written for, by key, except those being read."""
        found = {key: _PART.fullmatch(key) for key in self.sink.sizes(PARTS)}
        versions = {key: int(match[1]) for key, match in found.items() if match}
        return {key: version for key, version in versions.items() if version not in self.pinned}

    def _folders(self, marks: Sequence[Mark]) -> set[int]:
        """Return the versions in whose folders lie parts of these versions."""
        folders = {mark.version for mark in marks}
        for mark in marks:
            key = mark.key(MANIFESTS)
            with suppress(Damaged):  # nobody can begin from it
                folders |= {folder_of(part) for part in self._decoded(key).parts}
        return folders

    def _superseded(self, generation: int) -> bool:
        return any(fence.generation > generation for fence in self._marks(FENCES))

    def _prune_marks(self, floor: Mark) -> None:
        """Delete marks that are implied by the floor, or by the newest fence below it."""
        floors = [mark for mark in self._marks(FLOORS) if mark < floor]
        below = [mark for mark in self._marks(FENCES) if mark.version < floor.version]
        last = max((mark.generation for mark in below), default=0)
        claims = [mark for mark in self._marks(CLAIMS) if mark.generation < floor.generation]
        fences = [mark for mark in below if mark.generation < last]
        written = set(self._marks(MANIFESTS))
        bad = [mark for mark in self._marks(BAD) if mark not in written][:-BAD_KEPT]
        for folder, marks in ((FLOORS, floors), (FENCES, fences), (CLAIMS, claims), (BAD, bad)):
            self.sink.delete([mark.key(folder) for mark in marks])

    def _marks(self, folder: str) -> list[Mark]:
        return marks_in(folder, self.sink.sizes(folder))


def marks_in(folder: str, keys: Iterable[str]) -> list[Mark]:
    """Return the marks that files are named for, and ignore foreign files."""
    matches = [_NUMBERED.fullmatch(key.removeprefix(f"{folder}/")) for key in keys]
    return sorted(Mark(int(found[1]), int(found[2])) for found in matches if found)


def whole(sink: Sink, part: Part) -> bytes:
    """Return all of a file, or raise `Damaged` if any byte of it has changed."""
    data = sink.get(part.key)
    if block_crcs([data]) != part.blocks:
        raise Damaged(f"{sink.name}/{part.key} does not have its checksums")
    return data


def copy(manifest: Manifest, source: Sink, targets: Sequence[Archive]) -> None:
    """Copy a version from one sink into others, reading it once per target."""
    for target in targets:
        present = target.sink.sizes(PARTS)
        for part in manifest.parts:
            if present.get(part.key) != part.file_bytes:
                if part.key in present:  # our sinks never leave half a file, but another tool may
                    target.sink.delete([part.key])
                target.sink.put(part.key, [whole(source, part)])
        target.sink.settle()
        target.commit(manifest)
