"""Reports to the manager, and lines of scripts: into Redis, in order, not too often.

Training never waits for it. While Redis is away, reports wait here; a report that comes with every
step is replaced by its newest value, numbers of steps go along with those, and printed lines beyond
the bound are counted and dropped. While the manager is away, these newest values wait for it here,
and do not fill its inbox.
Redis keeps each batch's number with its contents: so a batch is sent again if its answer was lost,
and is stored only once.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec
import redis

from agent.keys import (
    INBOX,
    job_profile_key,
    log_key,
    manifest_key,
    metrics_key,
    outbox_key,
    profile_key,
    timeline_key,
)
from agent.messages import (
    BackupHeld,
    CheckpointWritten,
    JobProfiled,
    Logged,
    OutputKept,
    Progress,
    Report,
    StateSeen,
    TablesServed,
)
from agent.output.controls import harmless
from agent.profile import Profile
from agent.timeline import Timeline

log = logging.getLogger(__name__)

LINES_KEPT = 10_000
NUMBERS_KEPT = 100_000  # steps of which the numbers are kept
LINES_WAITING_MAX = 10_000
LINE_CHARS_MAX = 4_000
REPORTS_WAITING_MAX = 100_000
MANIFESTS_KEPT = 100
UNREAD_MAX = 1_000  # reports in the inbox of a manager that reads them
NEWEST_S = 0.25
RETRY_S = 0.1
BATCH_MAX = 1_000
NUMBER_KEPT_S = 30 * 24 * 3600  # no keeper sleeps so long and then sends a batch again
PROFILE_KEPT_S = 30 * 24 * 3600
TIMELINE_KEPT_S = 24 * 3600

# Only the newest report of these counts.
Newest = Progress | BackupHeld | OutputKept | Logged | StateSeen | TablesServed
Command = tuple[str | bytes | int, ...]  # its name, its key, and the rest

_TAKE = """
if tonumber(redis.call('GET', KEYS[1]) or 0) >= tonumber(ARGV[1]) then return 0 end
local at = 3
for i = 2, #KEYS do
  local last = at + 1 + tonumber(ARGV[at + 1])
  redis.call(ARGV[at], KEYS[i], unpack(ARGV, at + 2, last))
  at = last + 1
end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return 1
"""


class Out(Protocol):
    """Where a job sends its reports: the outbox, or a test."""

    def report(self, report: Report) -> None: ...

    def lines(self, job: str, worker: str, lines: tuple[str, ...]) -> None: ...

    def numbers(self, job: str, step: int, numbers: dict[str, float]) -> None: ...

    def flush(self, patience_s: float) -> bool: ...

    def profile(self, key: str) -> Profile | None: ...

    def timeline(self, timeline: Timeline) -> None: ...


class Outbox:
    def __init__(self, client: Any) -> None:
        self._client = client
        self._take = client.register_script(_TAKE)
        self._key, self._number = outbox_key(secrets.token_hex(8)), 0
        self._changed = threading.Condition()
        self._reports: deque[Report] = deque(maxlen=REPORTS_WAITING_MAX)
        self._newest: dict[tuple[type, str], Newest] = {}  # of each kind and job
        self._newest_due_s = 0.0
        self._lines: deque[tuple[str, str, str]] = deque()
        self._numbers: deque[tuple[str, int, dict[str, float]]] = deque(maxlen=LINES_WAITING_MAX)
        self._timelines: dict[str, Timeline] = {}  # the newest of every job
        self._dropped = 0
        self._said = 0
        self._delivered = 0
        self._read = True  # the inbox, by the manager
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def report(self, report: Report) -> None:
        with self._changed:
            if isinstance(report, Newest):
                waiting = self._has_newest
                self._newest[type(report), report.job] = report
                if waiting:
                    return  # the delivering thread knows when these are due
            else:
                self._fold_newest()  # what happened before is reported before
                self._queue(report)
            self._changed.notify_all()

    def lines(self, job: str, worker: str, lines: tuple[str, ...]) -> None:
        with self._changed:
            for line in lines:
                if len(self._lines) >= LINES_WAITING_MAX:
                    self._dropped += 1
                else:
                    self._lines.append((job, worker, harmless(line[:LINE_CHARS_MAX])))
                    self._said += 1
            self._changed.notify_all()

    def numbers(self, job: str, step: int, numbers: dict[str, float]) -> None:
        """Queue the numbers of a step; beyond the bound, the oldest are dropped."""
        with self._changed:
            waiting = self._has_newest
            self._said += len(self._numbers) < LINES_WAITING_MAX
            self._numbers.append((job, step, numbers))
            if not waiting:
                self._changed.notify_all()

    def timeline(self, timeline: Timeline) -> None:
        with self._changed:
            self._said += timeline.job not in self._timelines
            self._timelines[timeline.job] = timeline
            self._changed.notify_all()

    def profile(self, key: str) -> Profile | None:
        """Return what was measured before under this key, if Redis has it and answers."""
        try:
            data = self._client.get(profile_key(key))
            return msgspec.json.decode(data, type=Profile) if data else None
        except (redis.RedisError, ValueError) as error:
            log.warning("no profile %s: %s", key, error)
            return None

    def flush(self, patience_s: float) -> bool:
        """Wait until everything queued so far is in Redis. Return whether it is."""
        deadline_s = time.monotonic() + patience_s
        with self._changed:
            self._fold_newest()
            self._newest_due_s = 0.0
            self._changed.notify_all()
            said = self._said
            while self._delivered < said:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._closed:
                    return False
                self._changed.wait(left_s)
            return True

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(5.0)

    def _queue(self, report: Report) -> None:
        """Queue a report; beyond the bound, the oldest is dropped."""
        self._said += len(self._reports) < REPORTS_WAITING_MAX
        self._reports.append(report)

    def _fold_newest(self) -> None:
        for report in self._newest.values():
            self._queue(report)
        self._newest.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._due():
                    left_s = self._newest_due_s - time.monotonic()
                    self._changed.wait(max(left_s, 0.001) if self._has_newest else None)
                if self._closed:
                    return
                if self._has_newest and time.monotonic() >= self._newest_due_s:
                    self._newest_due_s = time.monotonic() + NEWEST_S
                    if self._read:
                        self._fold_newest()
                reports, lines = list(self._reports), list(self._lines)
                timelines = list(self._timelines.values())
                self._reports.clear()
                self._lines.clear()
                numbers = list(self._numbers)
                self._numbers.clear()
                self._timelines.clear()
                dropped, self._dropped = self._dropped, 0
                said = len(reports) + len(lines) + len(numbers) + len(timelines)
            if dropped:
                job, worker, _ = lines[-1]
                lines.append((job, worker, f"... {dropped} lines were dropped"))
            self._deliver(list(_commands(reports, lines, numbers, timelines)))
            if reports or not self._read:
                with contextlib.suppress(redis.RedisError):
                    self._read = self._client.xlen(INBOX) < UNREAD_MAX
            with self._changed:
                self._delivered += said
                self._changed.notify_all()

    def _due(self) -> bool:
        newest = self._has_newest and time.monotonic() >= self._newest_due_s
        return bool(self._reports or self._lines or self._timelines) or newest

    @property
    def _has_newest(self) -> bool:
        """Whether there is something that comes with every step."""
        return bool(self._newest or self._numbers)

    def _deliver(self, commands: Sequence[Command]) -> None:
        """Send commands in batches, each until Redis takes it."""
        for start in range(0, len(commands), BATCH_MAX):
            batch = commands[start : start + BATCH_MAX]
            self._number += 1
            keys = [self._key, *(key for _, key, *_ in batch)]
            words: list[Any] = [self._number, NUMBER_KEPT_S]
            for name, _, *rest in batch:
                words += [name, len(rest), *rest]
            while not self._closed:
                try:
                    self._take(keys=keys, args=words)
                    break
                except redis.RedisError as error:
                    log.warning("Redis does not take reports: %s", error)
                    time.sleep(RETRY_S)


def _commands(
    reports: Sequence[Report],
    lines: Sequence[tuple[str, str, str]],
    numbers: Sequence[tuple[str, int, dict[str, float]]],
    timelines: Sequence[Timeline],
) -> Iterable[Command]:
    for report in reports:
        yield "XADD", INBOX, "*", "e", msgspec.json.encode(report)
        if isinstance(report, CheckpointWritten):
            yield from _manifest(report)
        elif isinstance(report, JobProfiled):
            yield from _profile(report)
    for timeline in timelines:
        data = msgspec.json.encode(timeline)
        yield "SET", timeline_key(timeline.job), data, "EX", TIMELINE_KEPT_S
    for job, worker, line in lines:
        kept = ("MAXLEN", "~", LINES_KEPT)
        yield "XADD", log_key(job), *kept, "*", "worker", worker, "line", line
    for job, step, of_step in numbers:
        kept = ("MAXLEN", "~", NUMBERS_KEPT)
        said = msgspec.msgpack.encode(of_step)  # JSON has no infinity
        yield "XADD", metrics_key(job), *kept, "*", "step", step, "numbers", said


def _profile(report: JobProfiled) -> Iterable[Command]:
    """Store a profile for later jobs with the same key, and for queries about this job."""
    data = msgspec.json.encode(report.profile)
    for key in (profile_key(report.profile.key), job_profile_key(report.job)):
        yield "SET", key, data, "EX", PROFILE_KEPT_S


def _manifest(report: CheckpointWritten) -> Iterable[Command]:
    """Store where the job's checkpoints are, newest first."""
    key = manifest_key(report.job)
    yield "LPUSH", key, msgspec.json.encode(report)
    yield "LTRIM", key, 0, MANIFESTS_KEPT - 1
