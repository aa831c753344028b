"""How the command line and the dashboard communicate with a running house.

They read and write Redis and never call the manager's process, so they work while the manager is
away.
"""

import fcntl
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import redis

from agent.keys import (
    EVENTS,
    INBOX,
    SCRIPTS,
    TRACES_ASKED,
    VIEW,
    job_profile_key,
    log_key,
    metrics_key,
    submitted_key,
    timeline_key,
)
from agent.profile import Profile
from agent.timeline import Timeline
from cloud.clock import ticks
from cloud.errors import Unknown
from orchestrator.errors import OrchestratorError
from orchestrator.events import AnyEvent, ShutdownAsked
from orchestrator.paths import Places, no_room
from orchestrator.redis_client import INBOX_MAX, brief_policy
from orchestrator.validity import flaw_of
from orchestrator.view import Sentence, View

if TYPE_CHECKING:
    from cloud.local.provider import LocalProvider

METRICS_PAGE = 5_000
CLOUD_S_MAX = 30.0
SCRIPTS_MAX = 2000
SCRIPTS_BYTES_MAX = 256 * 1024 * 1024
PARCEL_BYTES_MAX = 72 * 1024 * 1024  # the names of files included


class NotRunning(OrchestratorError):  # noqa: N818 - it names what is the case
    """No house lives in this state directory."""


class Killed(NotRunning):
    """A house lived here and has ended without removing its file."""


class Between(NotRunning):
    """A house holds this state directory and cannot answer, because it starts or ends."""


class Unread(OrchestratorError):  # noqa: N818
    """Too much waits for the manager."""


class Silent(OrchestratorError, redis.ConnectionError):  # noqa: N818
    """Redis does not answer; the message is for a person."""


class NoRoom(Silent):
    """Redis does not answer, and will not before a person makes room on the disk."""


class _Asked(redis.Redis):
    """A Redis client whose errors say why Redis does not answer, as far as that can be seen."""

    state_dir: Path

    def execute_command(self, *words: Any, **options: Any) -> Any:
        try:
            return super().execute_command(*words, **options)  # type: ignore[no-untyped-call]
        except (redis.ConnectionError, redis.TimeoutError) as error:
            if full := no_room(self.state_dir):
                raise NoRoom(full) from error
            line = f"Redis does not answer ({error}); look with: orchestrator check"
            raise Silent(line) from error


class House(msgspec.Struct, frozen=True, kw_only=True):
    """What a running house publishes about itself in `house.json`."""

    pid: int
    life: str = ""  # random, and another one after each `up`
    redis_url: str
    dashboard_url: str
    ray_address: str
    local_cloud: str  # directory of the local cloud's cloud.json, or ""
    deployment: str
    started_at_s: float
    clock_zero_s: float | None = None  # the zero of `cloud.clock` in its processes
    settings: dict[str, str] = {}  # those it was started with, in force until it ends


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A state of a job on the manager's disk, that a job can go on from."""

    step: int
    at_s: float  # when it was written
    state_bytes: int
    uri: str  # `.../JOB#STEP`, for `submit --from`


class Client:
    """Reads what the manager publishes; posts what a person asks for."""

    def __init__(self, house: House, state_dir: Path) -> None:
        self._house, self._state_dir = house, state_dir
        store = cast(_Asked, _Asked.from_url(house.redis_url, **brief_policy()))
        store.state_dir = state_dir
        self._redis: redis.Redis = store

    @classmethod
    def connect(cls, state_dir: Path) -> "Client":
        """Find the house that lives in this state directory."""
        places = Places(state_dir)
        try:
            house = msgspec.json.decode(places.house.read_bytes(), type=House)
        except (OSError, ValueError) as error:
            if _held(places.lock):
                raise Between(
                    f"a manager is just starting or ending in {places.state_dir}; look again in a moment"
                ) from error
            raise NotRunning(
                f"nothing is running in {places.state_dir}; start it with: orchestrator up"
            ) from error
        if not (Path(f"/proc/{house.pid}").exists() and _held(places.lock)):
            raise Killed(
                f"the manager in {places.state_dir} has ended without saying so (pid {house.pid}); "
                "start it again with: orchestrator up"
            )
        return cls(house, places.state_dir)

    def house(self) -> House:
        return self._house

    def ahead_s(self) -> float:
        """Return how far the house's clock is ahead of the wall clock.

        The wall clock may have been set since the house started.
        """
        zero_s = self._house.clock_zero_s
        return 0.0 if zero_s is None else zero_s + ticks() - time.time()

    def view(self) -> View | None:
        """Return the newest view, or None before the manager has published one we can read."""
        data: Any = self._redis.get(VIEW)
        try:
            return msgspec.json.decode(data, type=View) if data else None
        except ValueError:
            return None  # a manager of another version wrote it; ours replaces it once it is up

    def post(self, event: AnyEvent) -> None:
        """Put an event into the manager's durable inbox."""
        post(self._redis, event)

    def is_asked_to_end(self) -> bool:
        """Return whether a request to this house to end waits for its manager."""
        rows: Any = self._redis.xrange(INBOX)
        wanted = (b"ShutdownAsked", self._house.life.encode())
        return any(all(word in row[b"e"] for word in wanted) for _, row in rows)

    def sentences(self, after: str = "0", count: int = 1000) -> list[tuple[str, Sentence]]:
        """Return what happened and why after the given id, oldest first."""
        rows: Any = self._redis.xrange(EVENTS, min=_after(after), count=count)
        return [(key.decode(), msgspec.json.decode(row[b"e"], type=Sentence)) for key, row in rows]

    def logs(
        self, job: str, after: str = "0", block_ms: int | None = None, count: int = 1000
    ) -> list[tuple[str, str, str]]:
        """Return lines that the job's workers printed as (id, worker, line), oldest first."""
        answer: Any = self._redis.xread({log_key(job): after}, count=count, block=block_ms)
        return [
            (key.decode(), row[b"worker"].decode(), row[b"line"].decode(errors="replace"))
            for _, rows in answer or []
            for key, row in rows
        ]

    def last_lines(self, job: str, before: str, count: int) -> list[tuple[str, str, str]]:
        """Return the last lines before an id, or of all if it is ""; the oldest first."""
        most = f"({before}" if before else "+"
        rows: Any = self._redis.xrevrange(log_key(job), max=most, count=count)
        return [
            (key.decode(), row[b"worker"].decode(), row[b"line"].decode(errors="replace"))
            for key, row in reversed(rows)
        ]

    def metrics(self, job: str) -> dict[int, dict[str, float]]:
        """Return what the job's script has logged, by step; of a repeated step, the last run."""
        found: dict[int, dict[str, float]] = {}
        after = "0"
        while page := self.logged(job, after):
            after = page[-1][0]
            found |= {step: numbers for _, step, numbers in page}
        return dict(sorted(found.items()))

    def logged(self, job: str, after: str) -> list[tuple[str, int, dict[str, float]]]:
        """Return what was logged after an id, a page of it, as (id, step, numbers), oldest first."""
        rows: Any = self._redis.xrange(metrics_key(job), min=_after(after), count=METRICS_PAGE)
        return [
            (
                key.decode(),
                int(row[b"step"]),
                msgspec.msgpack.decode(row[b"numbers"], type=dict[str, float]),
            )
            for key, row in rows
        ]

    def ask_timeline(self, job: str) -> None:
        """Have the timeline of one of the next steps recorded, and delete the earlier one."""
        self._redis.delete(timeline_key(job))
        self._redis.sadd(TRACES_ASKED, job)

    def timeline(self, job: str) -> Timeline | None:
        data: Any = self._redis.get(timeline_key(job))
        return msgspec.json.decode(data, type=Timeline) if data else None

    def profile(self, job: str) -> Profile | None:
        """Return the measured profile of the job's model, or None if there is none."""
        data: Any = self._redis.get(job_profile_key(job))
        return msgspec.json.decode(data, type=Profile) if data else None

    def checkpoints(self, job: str) -> list[Checkpoint]:
        """Return the sound states of a job on the disk, the newest first."""
        from agent.errors import CheckpointError
        from agent.store.archive import Archive
        from agent.store.places.sinks import DiskSink

        folder = Places(self._state_dir).checkpoints / job
        if not folder.is_dir():
            return []
        found: list[Checkpoint] = []
        with suppress(CheckpointError, OSError):  # it is being pruned; what was found is there
            for one in Archive(DiskSink(folder), job, ours=False).sound():
                found.append(
                    Checkpoint(
                        step=one.version,
                        at_s=(folder / one.key).stat().st_mtime,
                        state_bytes=one.state_bytes,
                        uri=f"{folder.resolve().as_uri()}#{one.version}",
                    )
                )
        return found

    def put_script(self, data: bytes) -> str:
        """Store a script with its other files under their SHA-256, and return that."""
        if len(data) > PARCEL_BYTES_MAX:
            raise ValueError(f"{len(data):,} bytes; at most {PARCEL_BYTES_MAX:,} can be sent")
        sha = hashlib.sha256(data).hexdigest()
        self._redis.set(submitted_key(sha), data)
        self._redis.zadd(SCRIPTS, {sha: time.time()})
        self._forget_scripts(sha)
        return sha

    def has_script(self, sha: str) -> bool:
        """Return whether the script is stored intact; a damaged one would fail on every worker."""
        data = cast("bytes | None", self._redis.get(submitted_key(sha)))
        return data is not None and hashlib.sha256(data).hexdigest() == sha

    def _forget_scripts(self, newest: str) -> None:
        """Delete the oldest stored scripts that no unfinished job needs, down to the limits.

        A job that trains does not depend on this store, because its keeper has a copy. What waits in
        the inbox may need one, too; it is read before the view, because what leaves it comes there.
        """
        rows: Any = self._redis.xrange(INBOX)
        waiting = b"".join(row[b"e"] for _, row in rows)
        view = self.view()
        if view is None:
            return  # without a view the jobs are unknown
        live = (job for job in view.jobs if not job.ended_at_s or job.id.encode() in waiting)
        needed = {newest, *(job.script_sha for job in live)}
        found: Any = self._redis.zrevrange(SCRIPTS, 0, -1)
        stored = [name.decode() for name in found]
        asked = self._redis.pipeline(transaction=False)
        for sha in stored:
            asked.strlen(submitted_key(sha))
        kept, kept_bytes = 0, 0
        for sha, size in zip(stored, asked.execute(), strict=True):
            is_needed = sha in needed or sha.encode() in waiting
            if is_needed or (kept < SCRIPTS_MAX and kept_bytes + size <= SCRIPTS_BYTES_MAX):
                kept, kept_bytes = kept + 1, kept_bytes + size
            else:
                self._redis.delete(submitted_key(sha))
                self._redis.zrem(SCRIPTS, sha)


@asynccontextmanager
async def local_cloud(house: House) -> AsyncIterator["LocalProvider"]:
    """Open the local cloud that the house owns; raise `CloudError` if it is not there."""
    from cloud.local.provider import LocalProvider

    try:
        cloud = LocalProvider.at(Path(house.local_cloud), house.deployment, CLOUD_S_MAX)
    except (OSError, ValueError, KeyError) as error:
        raise Unknown(f"the local cloud is not there ({error}); the house restarts it") from None
    try:
        yield cloud
    finally:
        await cloud.close()


def post(store: "redis.Redis", event: AnyEvent) -> None:
    """Put an event into the durable inbox; the manager reads it now, or when it is back.

    Raises ValueError with one line for an event that the manager would refuse. Raises `Unread` if
    the inbox is full, because to drop the oldest event would lose what somebody else has asked for.
    """
    if flaw := flaw_of(event):
        raise ValueError(f"{type(event).__name__} would be refused: {flaw}")
    if store.xlen(INBOX) >= INBOX_MAX and not isinstance(event, ShutdownAsked):
        raise Unread(
            f"{INBOX_MAX:,} messages wait for the manager, which reads none: `orchestrator check` "
            "says what is wrong; then try again"
        )
    store.xadd(INBOX, {"e": msgspec.json.encode(event)})


def _held(lock: Path) -> bool:
    """Return whether a house holds the lock.

    The pid in `house.json` is not enough: after a restart of the machine it may be reused.
    """
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _after(key: str) -> str:
    return "-" if key in {"0", "-"} else f"({key}"
