"""What the keeper says to the manager, and what scripts print: into Redis, in order, and not too often.

Training never waits for it. While Redis is away, reports wait here; what comes with every step is folded into its
newest value, and printed lines beyond the bound are counted and dropped.
"""

import logging
import threading
import time
from collections import deque
from typing import Any, Protocol

import msgspec
import redis

from agent.messages import BackupHeld, CheckpointWritten, JobProfiled, Progress, Report
from agent.profile import Profile
from agent.timeline import Timeline

log = logging.getLogger(__name__)

INBOX = "orch:inbox"
LINES_KEPT = 10_000
LINES_WAITING_MAX = 10_000
LINE_CHARS_MAX = 4_000
REPORTS_WAITING_MAX = 100_000
MANIFESTS_KEPT = 100
NEWEST_S = 0.25
RETRY_S = 0.1
PROFILE_KEPT_S = 30 * 24 * 3600
TIMELINE_KEPT_S = 24 * 3600


class Out(Protocol):
    """Where a job says what happens: the outbox, or a test."""

    def report(self, report: Report) -> None: ...

    def lines(self, job: str, worker: str, lines: tuple[str, ...]) -> None: ...

    def flush(self, patience_s: float) -> bool: ...

    def profile(self, key: str) -> Profile | None: ...

    def timeline(self, timeline: Timeline) -> None: ...


class Outbox:
    def __init__(self, client: Any) -> None:
        self._client = client
        self._changed = threading.Condition()
        self._reports: deque[Report] = deque(maxlen=REPORTS_WAITING_MAX)
        self._newest: dict[tuple[type, str], Progress | BackupHeld] = {}  # of each kind and job
        self._newest_due_s = 0.0
        self._lines: deque[tuple[str, str, str]] = deque()
        self._timelines: dict[str, Timeline] = {}  # the newest of every job
        self._dropped = 0
        self._said = 0
        self._delivered = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def report(self, report: Report) -> None:
        with self._changed:
            if isinstance(report, Progress | BackupHeld):
                waiting = bool(self._newest)
                self._newest[type(report), report.job] = report
                if waiting:
                    return  # whoever delivers knows when these are due
            else:
                self._fold_newest()  # what happened before is told before
                self._reports.append(report)
                self._said += 1
            self._changed.notify_all()

    def lines(self, job: str, worker: str, lines: tuple[str, ...]) -> None:
        with self._changed:
            for line in lines:
                if len(self._lines) >= LINES_WAITING_MAX:
                    self._dropped += 1
                else:
                    self._lines.append((job, worker, line[:LINE_CHARS_MAX]))
                    self._said += 1
            self._changed.notify_all()

    def timeline(self, timeline: Timeline) -> None:
        with self._changed:
            self._said += timeline.job not in self._timelines
            self._timelines[timeline.job] = timeline
            self._changed.notify_all()

    def profile(self, key: str) -> Profile | None:
        """What was measured before under this key, if Redis has it and says so."""
        try:
            data = self._client.get(f"orch:profile:{key}")
            return msgspec.json.decode(data, type=Profile) if data else None
        except (redis.RedisError, msgspec.DecodeError, ValueError) as error:
            log.warning("no profile %s: %s", key, error)
            return None

    def flush(self, patience_s: float) -> bool:
        """Wait until everything said so far lies in Redis."""
        deadline_s = time.monotonic() + patience_s
        with self._changed:
            self._fold_newest()
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

    def _fold_newest(self) -> None:
        self._reports.extend(self._newest.values())
        self._said += len(self._newest)
        self._newest.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._due():
                    left_s = self._newest_due_s - time.monotonic()
                    self._changed.wait(max(left_s, 0.001) if self._newest else None)
                if self._closed:
                    return
                if self._newest and time.monotonic() >= self._newest_due_s:
                    self._newest_due_s = time.monotonic() + NEWEST_S
                    self._fold_newest()
                reports, lines = list(self._reports), list(self._lines)
                timelines = list(self._timelines.values())
                self._reports.clear()
                self._lines.clear()
                self._timelines.clear()
                dropped, self._dropped = self._dropped, 0
            self._deliver(reports, lines, timelines, dropped)
            with self._changed:
                self._delivered += len(reports) + len(lines) + len(timelines)
                self._changed.notify_all()

    def _due(self) -> bool:
        newest = bool(self._newest) and time.monotonic() >= self._newest_due_s
        return bool(self._reports or self._lines or self._timelines) or newest

    def _deliver(
        self,
        reports: list[Report],
        lines: list[tuple[str, str, str]],
        timelines: list[Timeline],
        dropped: int,
    ) -> None:
        """Until it is done. A batch whose answer got lost is told twice, which does no harm."""
        while not self._closed:
            try:
                pipe = self._client.pipeline(transaction=False)
                for report in reports:
                    pipe.xadd(INBOX, {"e": msgspec.json.encode(report)})
                    if isinstance(report, CheckpointWritten):
                        _add_manifest(pipe, report)
                    elif isinstance(report, JobProfiled):
                        _keep_profile(pipe, report)
                for timeline in timelines:
                    key = f"orch:timeline:{timeline.job}"
                    pipe.set(key, msgspec.json.encode(timeline), ex=TIMELINE_KEPT_S)
                for job, worker, line in lines:
                    _add_line(pipe, job, worker, line)
                if dropped:
                    job, worker, _ = lines[-1]
                    _add_line(pipe, job, worker, f"... {dropped} lines were dropped")
                pipe.execute()
            except redis.RedisError as error:
                log.warning("Redis does not take reports: %s", error)
                time.sleep(RETRY_S)
            else:
                return


def _add_line(pipe: Any, job: str, worker: str, line: str) -> None:
    key = f"orch:log:{job}"
    pipe.xadd(key, {"worker": worker, "line": line}, maxlen=LINES_KEPT, approximate=True)


def _keep_profile(pipe: Any, report: JobProfiled) -> None:
    """For whoever trains the same again, and for whoever asks about this job."""
    data, kept_s = msgspec.json.encode(report.profile), PROFILE_KEPT_S
    pipe.set(f"orch:profile:{report.profile.key}", data, ex=kept_s)
    pipe.set(f"orch:job:profile:{report.job}", data, ex=kept_s)


def _add_manifest(pipe: Any, report: CheckpointWritten) -> None:
    """Where the job's checkpoints are, newest first."""
    key = f"orch:manifest:{report.job}"
    pipe.lpush(key, msgspec.json.encode(report))
    pipe.ltrim(key, 0, MANIFESTS_KEPT - 1)
