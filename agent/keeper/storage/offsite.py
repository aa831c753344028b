"""Copies of a job's versions in a place that outlives this machine. No torch here.

Copies run on a separate thread, one at a time, and only the newest version is copied. So if the
store is slow or away, copies become rarer and that is reported, but nothing waits for it. A copy
has the state, and the sums of the one step by which a worker proves itself. All sums would be
several times as many bytes, and would save only a few steps.

Copies are made of the files on the disk. A version that the disk has not taken is copied from
memory, so a full disk does not stop them.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from agent.errors import CheckpointError
from agent.keeper.storage import versions
from agent.keeper.storage.backup import Backup, Saved
from agent.messages import CheckpointCopied, CopyFailed, Report
from agent.store.archive import Archive, Mark, copy, marks_in
from agent.store.encoding.format import MANIFESTS, Manifest, Part
from agent.store.places.objects import open_place
from cloud.clock import CLOCK

log = logging.getLogger(__name__)

TRIES = 3
PAUSE_S = 5.0


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """Where copies go, and how often: `url` is the place that holds a folder per job."""

    url: str
    every_s: float

    def place(self, job: str) -> str:
        return f"{self.url.rstrip('/')}/{job}"

    def archive(self, job: str) -> Archive:
        return Archive(open_place(self.place(job)), job)


def earlier(url: str) -> Archive:
    """Open the archive of an earlier job at `.../JOB` or `.../JOB#STEP`, for reading only."""
    place = url.partition("#")[0].rstrip("/")
    return Archive(open_place(place), place.rpartition("/")[2], ours=False)


def branched_from(place: str, urls: Iterable[str]) -> set[int]:
    """Return the versions at a place that jobs with these URLs begin from."""
    here = (url for url in urls if url.partition("#")[0].rstrip("/") == place)
    steps: set[int | None] = set()
    for url in here:
        with contextlib.suppress(CheckpointError):  # its job is refused when it is read
            steps.add(step_in(url))
    return {step for step in steps if step is not None}


def step_in(url: str) -> int | None:
    """Return the step that `.../JOB#STEP` names; None, which is the newest, for `.../JOB`."""
    _, marked, step = url.partition("#")
    if not marked:
        return None
    if not (step.isascii() and step.isdigit()):
        raise CheckpointError(f"{url}: after # comes the number of a step")
    return int(step)


class CopyOffer(msgspec.Struct, frozen=True):
    """A version in the source or only in memory; the version that this job's keeper went on from."""

    version: Manifest | Saved
    since: int
    last: bool

    @property
    def generation(self) -> int:
        return 0 if isinstance(self.version, Saved) else self.version.generation

    @property
    def reached(self) -> int:
        version = self.version
        return version.reached if isinstance(version, Saved) else version.version


class Begun(msgspec.Struct, frozen=True):
    """A generation in the source, and the version that this job's keeper went on from."""

    generation: int  # 0 for a version that is in memory only
    since: int


class Offsite:
    def __init__(
        self,
        job: str,
        source: Archive,
        opened: Callable[[], Archive],
        every_s: float,
        report: Callable[[Report], None],
    ) -> None:
        self._job, self._source, self._opened, self._report = job, source, opened, report
        self._every_s = every_s
        self._due_s = time.monotonic()
        self._lock = threading.Condition()
        self._writing = threading.Lock()  # into the target
        self._working: CopyOffer | None = None
        self._next: CopyOffer | None = None
        self._owed: CopyOffer | None = None  # all tries to copy it have failed
        self._target: Archive | None = None
        self._begun = Begun(-1, 0)  # what is copied under `_generation`
        self._generation = 0
        self._copied = -1

    def offer(self, version: Manifest | Saved, since: int, *, last: bool) -> None:
        """Copy a version, if a copy is due or it is the last one."""
        now_s = time.monotonic()
        with self._lock:
            if not last and now_s < self._due_s:
                return
            self._due_s = now_s + self._every_s
            self._begin(CopyOffer(version, since, last))

    def again(self) -> bool:
        """Try an owed copy once more; return False if none is owed.

        After the last version of a job, no newer one will be offered.
        """
        with self._lock:
            if self._working is None and self._owed is not None:
                self._begin(self._owed)
            return self._working is not None

    def _begin(self, offer: CopyOffer) -> None:
        self._next = offer
        self._pin()
        if self._working is None:  # else the thread that is at work takes it next
            self._working = offer
            threading.Thread(target=self._work, name="copy", daemon=True).start()

    def wait(self, patience_s: float) -> None:
        """Wait until nothing is left to copy, or nothing more is tried."""
        with self._lock:
            self._lock.wait_for(lambda: self._working is None, patience_s)

    def _pin(self) -> None:
        """Keep the archive from deleting what is being copied, or is next."""
        offers = (self._working, self._next)
        self._source.pinned = frozenset(one.reached for one in offers if one is not None)

    def _work(self) -> None:
        while (offer := self._take()) is not None:
            done = self._attempt(offer)
            with self._lock:
                self._owed = None if done else offer

    def _take(self) -> CopyOffer | None:
        with self._lock:
            self._working, self._next = self._next, None
            self._pin()
            self._lock.notify_all()
            return self._working

    def _attempt(self, offer: CopyOffer) -> bool:
        """Try to copy a few times. A failure of one that is owed was reported before."""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE_S)
            try:
                self._copy(offer)
            except Exception as error:
                # Catch everything, even a lack of memory, because if this thread ended there
                # would be no more copies.
                log.warning("%s: version %d: %r", self._job, offer.reached, error)
                if not attempt and offer != self._owed:
                    self._say_failed(offer, str(error) or type(error).__name__)
            else:
                return True
        return False

    def _say_failed(self, offer: CopyOffer, why: str) -> None:
        on_disk = isinstance(offer.version, Manifest)
        self._report(
            CopyFailed(
                at_s=CLOCK.now_s(), job=self._job, step=offer.reached, error=why, on_disk=on_disk
            )
        )

    def _copy(self, offer: CopyOffer) -> None:
        with self._writing:
            target = self._taken_over(Begun(offer.generation, offer.since))
            state = self._copied_to(target, offer.version)
            if offer.last:
                self._sweep(target)
        if state is not None:
            self._report_copied(target, state)

    def _copied_to(self, target: Archive, version: Manifest | Saved) -> Manifest | None:
        """Copy a version; return what was made there, None if it is the newest there already."""
        if isinstance(version, Saved):
            saved = versions.saved_beginning(version)
            if saved.reached == self._copied:
                return None
            state = versions.save(target, self._generation, saved)
        else:
            manifest = versions.beginning(version)
            if manifest.version == self._copied:
                return None
            state = msgspec.structs.replace(manifest, generation=self._generation)
            copy(state, self._source.sink, [target])
            target.prune(self._generation)
        self._copied = state.version
        return state

    def _report_copied(self, target: Archive, state: Manifest) -> None:
        self._report(
            CheckpointCopied(
                at_s=CLOCK.now_s(),
                job=self._job,
                step=state.version,
                state_bytes=state.state_bytes,
                uri=f"{target.sink.name}/{state.key}",
            )
        )

    def commit(self, begun: Begun, saved: Saved, parts: Iterable[Part]) -> Backup:
        """Make what workers have written into the place a version of it; return it as a backup."""
        with self._writing:
            target = self._taken_over(begun)
            mark = Mark(saved.reached, self._generation)
            manifest = versions.of_shards(target, mark, saved, parts)
            self._copied = saved.reached
        self._report_copied(target, manifest)
        return msgspec.structs.replace(saved.backup, stored=versions.stored_of(target, manifest))

    def prune(self, kept: frozenset[int]) -> None:
        """Delete what is old, but nothing in the folders of the versions `kept`."""
        with self._writing:
            if self._target is not None:
                self._target.pinned = kept
                versions.prune(self._target, self._generation)

    def sweep(self) -> None:
        """Delete what killed writers have left, because no worker writes any more."""
        with self._writing:
            if self._target is not None:
                self._sweep(self._target)

    def _sweep(self, target: Archive) -> None:
        target.pinned = frozenset()  # nor does any worker read an older version
        versions.sweep(target, self._generation)

    def set_aside(self, key: str, why: str) -> None:
        """Make a version that workers could not read no longer count."""
        with self._writing:
            for mark in marks_in(MANIFESTS, [key]):
                (self._target or self._opened()).set_aside(mark, why)

    def _taken_over(self, begun: Begun) -> Archive:
        """Return where copies go.

        If the source has a new generation, its keeper began again, and so do the copies.
        """
        if self._target is None:
            self._target = self._opened()
        generation = begun.generation or max(0, self._begun.generation)
        if Begun(generation, begun.since) != self._begun:
            self._generation, self._copied = self._target.take_over(begun.since), -1
            self._begun = begun
        return self._target
