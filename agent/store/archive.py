"""The versions of one job in one sink: which exist, which count, and which may go. No torch here.

Everything is decided by files that are created once and never changed, so no lock and no
compare-and-swap is needed, and a writer that was thought dead can do no harm whenever it wakes up:

* a *claim* (g) makes generation g one writer's, whatever version it goes on from;
* a *manifest* (version v, generation g) is created only when all its parts have settled;
* a *fence* (g', v') says that generation g' went on from version v': manifests of older generations
  that are newer than v' are void;
* a *floor* (g', v') says that what lies below v' may be gone: older manifests up to generation g' are
  void. It is created before anything is deleted.

So a manifest that counts never points at nothing, even if a slow writer creates one late.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import msgspec

from agent.errors import CheckpointError
from agent.faults import passing
from agent.store.errors import Damaged, Outdated, Unavailable
from agent.store.format import (
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
)
from agent.store.sinks import DRAFT, Sink

log = logging.getLogger(__name__)

KEEP = 2
TRIES = 16  # manifests that are looked at before the job is said to have none
BAD_KEPT = 16
_PART = re.compile(rf"{PARTS}/(\d{{10}})/.+")
_NUMBERED = re.compile(r"(\d{10})-(\d{10})\.json")


class Mark(msgspec.Struct, frozen=True, order=True):
    """A version of a generation: what the name of a manifest, fence or floor says."""

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
        # Half a share is of no use to anybody, least of all on a disk that is full.
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
    """One manifest of what all holders wrote, or `Damaged` if that is no whole state."""
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
    """The versions of a job that lie in a sink of its own. Whoever only reads there passes over what is damaged, and
    changes nothing."""

    def __init__(self, sink: Sink, job: str, keep: int = KEEP, *, ours: bool = True) -> None:
        assert keep >= 1, keep
        self.sink = sink
        self.job = job
        self._keep = keep
        self._ours = ours
        self._passed = set[Mark]()
        self._damage = list[str]()
        self.pinned: frozenset[int] = frozenset()  # versions whose files are being read

    def take_over(self, version: int) -> int:
        """Become the writer that goes on from `version`: a generation that nobody has had."""
        generation = 0
        for _ in range(TRIES):
            folders = (CLAIMS, MANIFESTS, FENCES, FLOORS)
            marks = [mark for folder in folders for mark in self._marks(folder)]
            # One that is taken may not be in the list yet.
            generation = 1 + max((mark.generation for mark in marks), default=generation)
            # Fences of two versions are two files: of two who begin at once, both would create theirs.
            if self.sink.create(Mark(0, generation).key(CLAIMS), b"{}"):
                self.sink.create(Mark(version, generation).key(FENCES), b"{}")
                return generation
        raise Unavailable(f"{self.sink.name}: others begin to write {self.job} all the time")

    def commit(self, manifest: Manifest) -> bool:
        """Create the manifest. False: somebody else has written this version; our parts are gone."""
        mark = Mark(manifest.version, manifest.generation)
        if not counts(mark, self._marks(FENCES), self._marks(FLOORS)):
            self.discard(manifest.parts)
            raise Outdated(
                f"{self.job}: version {mark.version} of generation {mark.generation} comes too "
                "late: a newer generation, or newer versions, are there"
            )
        data = encode(manifest)
        # The answer to our own create may have been lost, and the create repeated.
        made = self.sink.create(manifest.key, data) or self.sink.get(manifest.key) == data
        if not made:
            self.discard(manifest.parts)
        passing("keeper: manifest written")
        return made

    def withdraw(self, manifest: Manifest) -> None:
        """It may have come into being although its writer heard of an error: it goes, and then its parts."""
        self.sink.delete([manifest.key, *(part.key for part in manifest.parts)])

    def discard(self, parts: Iterable[Part]) -> None:
        """Delete what was written for a version that will not be committed."""
        self.sink.delete([part.key for part in parts])

    def marks(self) -> list[Mark]:
        """What counts, newest first; whether it can be read is another question."""
        fences, floors = self._marks(FENCES), self._marks(FLOORS)
        found = set(self._marks(MANIFESTS)) - self._passed
        return sorted((mark for mark in found if counts(mark, fences, floors)), reverse=True)

    def newest(
        self, not_above: int | None = None, passed_over: list[CheckpointError] | None = None
    ) -> Manifest | None:
        """The newest version whose manifest is sound and whose files are there, in full length."""
        return next(self.sound(not_above, passed_over), None)

    def sound(
        self, not_above: int | None = None, passed_over: list[CheckpointError] | None = None
    ) -> Iterator[Manifest]:
        """All such versions, newest first. Those that are not are set aside on the way. One that cannot be read now is an
        error; or else that is noted in `passed_over`, and the one before it is next."""
        for mark in self.marks()[:TRIES]:
            if not_above is None or mark.version <= not_above:
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
        manifest = decode(self.sink.get(key), key)
        if manifest.job != self.job:
            raise CheckpointError(f"{key} belongs to job {manifest.job}, not {self.job}")
        sizes: dict[str, int] = {}
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
        return manifest

    def _look_for(self, part: Part) -> None:
        """A list may lag behind what it lists: whether a file is there is asked of the file itself."""
        with self.sink.open(part.key) as read:
            read(part.file_bytes - 1, [memoryview(bytearray(1))])

    def set_aside(self, mark: Mark, why: str) -> None:
        """A version that cannot be read no longer counts; the one before it is the newest then."""
        log.warning("%s: version %d is set aside: %s", self.job, mark.version, why)
        self._damage.append(f"version {mark.version} is damaged: {why}")
        if not self._ours:
            self._passed.add(mark)
            return
        with suppress(CheckpointError):  # where there is no room, or nothing may be changed
            self.sink.create(mark.key(BAD), json.dumps({"why": why}).encode())
            self.sink.delete([mark.key(MANIFESTS)])

    def damage(self) -> list[str]:
        """What was set aside since this was asked last, and why."""
        said, self._damage = self._damage, []
        return said

    def prune(self, generation: int = 0) -> bool:
        """Keep the newest versions. What a manifest that counts names is never deleted. Says whether files went.

        Who has begun `generation` is not somebody newer to itself, though it may not have written anything yet."""
        kept = self.marks()[: self._keep]
        if len(kept) < self._keep:
            return False
        floor = Mark(kept[-1].version, max(mark.generation for mark in kept))
        self.sink.create(floor.key(FLOORS), b"{}")
        parts = self._parts()
        # Whoever is newer and has written one of these has begun before, and is seen now; it may lie below our floor.
        if self._superseded(max(generation, floor.generation)):
            return False
        written = self.sink.sizes(MANIFESTS)
        void = set(marks_in(MANIFESTS, written)) - set(self.marks())
        self.sink.delete([mark.key(MANIFESTS) for mark in sorted(void)])
        self.sink.delete([key for key in written if key.endswith(DRAFT)])
        # What no manifest names at or above the floor may be a writer's who is still at work.
        below = [key for key, version in parts.items() if version < floor.version]
        self.sink.delete(below)
        self._prune_marks(floor)
        passing("keeper: pruned")
        return bool(below)

    def sweep(self, generation: int) -> bool:
        """Delete what no manifest names: of writers that were killed, as nobody else writes now. Whether there was any.

        An older writer that is still at work, though nobody knows of it, hears that its files are missing."""
        parts = self._parts()
        if self._superseded(generation):
            return False
        manifests = [
            decode(self.sink.get(mark.key(MANIFESTS)), mark.key(MANIFESTS))
            for mark in self._marks(MANIFESTS)
        ]
        named = {part.key for manifest in manifests for part in manifest.parts}
        self.sink.delete(parts.keys() - named)
        return bool(parts.keys() - named)

    def _parts(self) -> dict[str, int]:
        """By key, the versions that they were written for; without those that are being read."""
        found = {key: _PART.fullmatch(key) for key in self.sink.sizes(PARTS)}
        versions = {key: int(match[1]) for key, match in found.items() if match}
        return {key: version for key, version in versions.items() if version not in self.pinned}

    def _superseded(self, generation: int) -> bool:
        return any(fence.generation > generation for fence in self._marks(FENCES))

    def _prune_marks(self, floor: Mark) -> None:
        """Older floors say less; of the fences below the floor, the newest generation says it all."""
        floors = [mark for mark in self._marks(FLOORS) if mark < floor]
        below = [mark for mark in self._marks(FENCES) if mark.version < floor.version]
        last = max((mark.generation for mark in below), default=0)
        claims = [mark for mark in self._marks(CLAIMS) if mark.generation < floor.generation]
        fences = [mark for mark in below if mark.generation < last]
        bad = sorted(self._marks(BAD))[:-BAD_KEPT]
        for folder, marks in ((FLOORS, floors), (FENCES, fences), (CLAIMS, claims), (BAD, bad)):
            self.sink.delete([mark.key(folder) for mark in marks])

    def _marks(self, folder: str) -> list[Mark]:
        return marks_in(folder, self.sink.sizes(folder))


def marks_in(folder: str, keys: Iterable[str]) -> list[Mark]:
    """Foreign files are none of ours."""
    matches = [_NUMBERED.fullmatch(key.removeprefix(f"{folder}/")) for key in keys]
    return sorted(Mark(int(found[1]), int(found[2])) for found in matches if found)


def copy(manifest: Manifest, source: Sink, targets: Sequence[Archive]) -> None:
    """Carry a version from one sink into others: the stream is one, the sinks are several."""
    for target in targets:
        present = target.sink.sizes(PARTS)
        for part in manifest.parts:
            if present.get(part.key) != part.file_bytes:
                if part.key in present:  # no sink of ours leaves half a file; another tool may
                    target.sink.delete([part.key])
                data = source.get(part.key)
                if block_crcs([data]) != part.blocks:
                    raise Damaged(f"{source.name}/{part.key} does not have its checksums")
                target.sink.put(part.key, [data])
        target.sink.settle()
        target.commit(manifest)
