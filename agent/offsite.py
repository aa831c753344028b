"""Copies of a job's versions in a place that outlives this machine. No torch here.

A copy runs on a thread of its own, one at a time, and only the newest version is copied: a store that is
slow or away makes copies rarer and is reported, and nothing waits for it. What is copied is the state
alone. The sums beside it would be several times as many bytes, for the few steps that they save.
"""

import logging
import threading
import time
from collections.abc import Callable

import msgspec

from agent.errors import CheckpointError
from agent.messages import CheckpointCopied, CopyFailed, Report
from agent.store.archive import Archive, copy
from agent.store.format import SUMS, Manifest
from agent.store.objects import open_sink
from agent.store.sinks import Sink

log = logging.getLogger(__name__)

TRIES = 3
PAUSE_S = 5.0


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """Where copies go, and how often: `url` is the folder or store that holds a folder per job."""

    url: str
    every_s: float

    def archive(self, job: str) -> Archive:
        return Archive(open_place(f"{self.url.rstrip('/')}/{job}"), job)


def open_place(place: str) -> Sink:
    """The sink at a path or URI; whatever it is that cannot be opened is a `CheckpointError`."""
    try:
        return open_sink(place)
    except CheckpointError:
        raise
    except Exception as error:  # the edge to a store's own library, which has errors of many kinds
        raise CheckpointError(f"{place} cannot be opened: {error}") from error


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
        self._lock = threading.Lock()
        self._working: Manifest | None = None
        self._next: Manifest | None = None
        self._target: Archive | None = None
        self._generation = 0
        self._copied = -1

    def offer(self, manifest: Manifest, since: int, *, last: bool) -> None:
        """This version lies in the source now; it is copied if it is time, the last one in any case.

        `since` is the version that this job's keeper went on from."""
        now_s = time.monotonic()
        with self._lock:
            if not last and now_s < self._due_s:
                return
            self._due_s = now_s + self._every_s
            self._next = manifest
            self._pin()
            if self._working is not None:
                return  # who is at work takes it next
            self._working = manifest
        threading.Thread(target=self._work, args=(since,), name="copy", daemon=True).start()

    def _pin(self) -> None:
        """What is being copied, or is next, must not go meanwhile."""
        wanted = [one.version for one in (self._working, self._next) if one is not None]
        self._source.pinned = min(wanted, default=None)

    def _work(self, since: int) -> None:
        while (manifest := self._take()) is not None:
            self._attempt(manifest, since)

    def _take(self) -> Manifest | None:
        with self._lock:
            self._working, self._next = self._next, None
            self._pin()
            return self._working

    def _attempt(self, manifest: Manifest, since: int) -> None:
        """A few tries; then the next version is waited for."""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE_S)
            try:
                return self._copy(manifest, since)
            except Exception as error:
                # Whatever it is, no memory for one: nothing would ever be copied again by a thread that ended.
                log.warning("%s: version %d: %r", self._job, manifest.version, error)
                if not attempt:
                    self._say_failed(manifest.version, str(error) or type(error).__name__)
        return None

    def _say_failed(self, step: int, why: str) -> None:
        self._report(CopyFailed(at_s=time.time(), job=self._job, step=step, error=why))

    def _copy(self, manifest: Manifest, since: int) -> None:
        version = manifest.version - manifest.redo
        if version == self._copied:
            return
        if self._target is None:
            target = self._opened()
            self._generation = target.take_over(since)
            self._target = target
        parts = tuple(part for part in manifest.parts if part.layer != SUMS)
        state = msgspec.structs.replace(
            manifest,
            version=version,
            generation=self._generation,
            layers=manifest.state,
            parts=parts,
            redo=0,
        )
        copy(state, self._source.sink, [self._target])
        self._target.prune()
        self._copied = version
        self._report(
            CheckpointCopied(
                at_s=time.time(),
                job=self._job,
                step=version,
                state_bytes=state.state_bytes,
                uri=f"{self._target.sink.name}/{state.key}",
            )
        )
