"""The reliable tier: one process beside the manager, to which all jobs' workers connect.

It listens on one port that it keeps over restarts. What it must know again after a restart is in
Redis (open jobs, their layouts, scripts and commits). The state itself is with the workers; if
there are none, it is in the newest checkpoint.
"""

import contextlib
import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import redis

from agent.checksum import seal, unseal
from agent.errors import CheckpointError, RecordError, Unsound, WireError
from agent.keeper.commits import CommitLog, RedisCommitLog
from agent.keeper.job import KeptJob, Standing
from agent.keeper.member import Member
from agent.keeper.outbox import Outbox
from agent.keeper.roster import TICK_S
from agent.keeper.storage.memory_log import move_in, sweep
from agent.keeper.storage.offsite import Offsite
from agent.keeper.storage.retention import note_closed, note_open
from agent.keeper.storage.vault import Place
from agent.keys import (
    KEPT_JOBS,
    OPEN_JOBS,
    PORTS,
    PULSE,
    TRACES_ASKED,
    commit_key,
    script_key,
    submitted_key,
)
from agent.layout import Layout
from agent.messages import (
    AgentLost,
    AnyReport,
    JobCompleted,
    JobOrder,
    NoticeSeen,
    RecordsDamaged,
    When,
)
from agent.net.front import BACKLOG, Front
from agent.net.handshake import KEEPER, Door, job_secret
from agent.net.wire import Connection
from agent.protocol import AgentHello, AnyMessage, Beat, Failed, Heard, Hello, Told
from cloud.clock import CLOCK

log = logging.getLogger(__name__)

BIND_PATIENCE_S = 15.0
CONFIRM_S = 10.0
CLOSED_S = 20.0  # for a job that is opened again while it is being closed
KEPT_MAX = 4
KEPT_S = 60.0
OWING_MAX = 64
ASKED_S = 0.5
AGENT_SILENT_S = 60.0  # it sends a heartbeat many times a second
PORTS_END = 1 << 16
PULSE_S = 5.0


def _port(said: bytes) -> int:
    """Return the port in Redis; 0, for any, if that is none, as callers learn the new one."""
    return int(said) if said.isdigit() and int(said) < PORTS_END else 0


def connect(redis_url: str) -> Any:
    """Return a client that waits, within bounds, for a server that is restarting."""
    from redis.backoff import ExponentialBackoff
    from redis.retry import Retry

    return redis.Redis.from_url(
        redis_url,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.02), retries=20),
        retry_on_error=[redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError],
        socket_timeout=30,
    )


class OpenJob(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an open job that must outlive the keeper's process."""

    order: JobOrder
    layout: Layout | None = None
    completed: JobCompleted | None = None
    closing: bool = False  # until its state is on the disk


class Closed(WireError):  # noqa: N818 - it names what happened
    """The keeper is closed, and its threads are to end."""


class Keeper:
    def __init__(self, client: Any, place: Place, host: str, secret: str) -> None:
        self._client, self._place, self._secret = client, place, secret
        self._closed = threading.Event()
        self._commits: CommitLog = PatientLog(RedisCommitLog(client), self._patiently)
        self._outbox = Outbox(client)
        self._lock = threading.Lock()
        self._jobs: dict[str, KeptJob] = {}
        self._open: dict[str, OpenJob] = {}
        self._kept: dict[str, KeptJob] = {}  # closed, but not on the disk
        self._owing: dict[str, Offsite] = {}  # closed, but not yet copied to remote storage
        self._closing: dict[str, threading.Thread] = {}
        self._connections: set[Connection] = set()
        self._ticked_s = time.monotonic()
        listener = self._listen_again(host)
        self.address = f"{host}:{listener.getsockname()[1]}"
        if place.memory is not None and not move_in(place.memory, place.checkpoints):
            self._place = msgspec.structs.replace(place, memory=None)
        self._reload()
        door = Door(KEEPER, self._secret_of, self._refusal)
        self._front = Front(listener, door, self._serve)
        threading.Thread(target=self._tick, name="keeper-tick", daemon=True).start()
        threading.Thread(target=self._hear_asked, name="keeper-asked", daemon=True).start()
        threading.Thread(target=self._put_away, name="keeper-kept", daemon=True).start()

    def _listen_again(self, host: str) -> socket.socket:
        """Listen on the port of the previous keeper; the first keeper takes any."""
        # The port is stored per house, so that two houses on one Redis do not fight over it.
        house = str(self._place.checkpoints.resolve())
        port = _port(self._client.hget(PORTS, house) or b"")
        deadline_s = time.monotonic() + BIND_PATIENCE_S
        while True:
            try:
                listener = socket.create_server((host, port), backlog=BACKLOG)
                break
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(TICK_S)  # the previous keeper is about to end
        self._client.hset(PORTS, house, listener.getsockname()[1])
        return listener

    def _reload(self) -> None:
        records = self._client.hgetall(KEPT_JOBS) | self._client.hgetall(OPEN_JOBS)
        for field, data in records.items():
            name = field.decode(errors="replace")
            try:
                record = _opened(name, data)
                self._make(record, self._script(record.order))
            except RecordError as error:
                self._let_go(name, error)
        # Only now is it known what branches begin from, which no close may prune.
        for name, record in dict(self._open).items():
            if record.closing:
                self.close_job(name)
            elif record.completed is not None:
                self._outbox.report(record.completed)
            elif record.layout is not None:
                self._jobs[name].restore(record.layout)
        if self._place.memory is not None:
            sweep(self._place.memory, {field.decode(errors="replace") for field in records})

    def _script(self, order: JobOrder) -> bytes:
        """Return the script as it was submitted, which Redis has under two keys."""
        keys = script_key(order.job), submitted_key(order.script_sha)
        for script in map(self._client.get, keys):
            if script is not None and order.script_sha in ("", hashlib.sha256(script).hexdigest()):
                return bytes(script)
        raise RecordError(f"{' and '.join(keys)} in Redis are damaged, or gone")

    def _let_go(self, name: str, error: RecordError) -> None:
        """Give a job with damaged records up, until a person resumes it.

        The report is sent first, because if it is lost the next keeper finds and reports the same.
        """
        self._report_damage(name, error)
        if self._outbox.flush(CONFIRM_S):
            self._commits.strike(name)
            self._strike(name)

    def _report_damage(self, name: str, error: RecordError) -> None:
        log.error("%s: %s", name, error)
        self._outbox.report(RecordsDamaged(at_s=CLOCK.now_s(), job=name, error=str(error)))

    def _make(self, record: OpenJob, script: bytes) -> KeptJob:
        name = record.order.job
        job = KeptJob(
            record.order,
            script,
            self._commits,
            self._outbox,
            self._place,
            self._completed,
        )
        if record.layout is not None and job.history.first:
            raise RecordError(f"{commit_key(name)} in Redis is gone")
        with self._lock:
            self._jobs[name], self._open[name] = job, record
        self._spare()
        return job

    def _spare(self) -> set[str]:
        """Keep the versions that open jobs begin from, until these are closed.

        Return their URLs.
        """
        with self._lock:
            urls = {record.order.from_url for record in self._open.values()}
            for job in (*self._jobs.values(), *self._kept.values()):
                job.vault.spare(urls)
        return urls

    # --- what the manager says --------------------------------------------------------------------

    def open_job(self, order: JobOrder, script: bytes | None = None) -> None:
        """Open a job with the script that was submitted, unless `script` is given.

        Without it nothing can be trained, and the manager has to know before it pays for machines.
        """
        self._wait_closed(order.job)
        if self._job(order.job) is not None:
            return
        if script is None:
            try:
                script = self._script(order)
            except RecordError as error:
                self._report_damage(order.job, error)
                return
        note_open(self._client, order.job)
        self._client.set(script_key(order.job), script)
        record = OpenJob(order=order)
        self._save(record)
        self._client.hdel(KEPT_JOBS, order.job)
        with self._lock:
            kept = self._kept.pop(order.job, None)
            self._owing.pop(order.job, None)  # a different job object makes copies now
        if kept is None:
            try:
                self._make(record, script)
            except RecordError as error:
                self._let_go(order.job, error)
        else:
            kept.reopen()
            with self._lock:
                self._jobs[order.job] = kept
            self._spare()

    def regroup(self, name: str, layout: Layout, when: When) -> None:
        """Start a layout, and write it down first so that the next keeper knows of it."""
        job = self._job(name)
        if job is None or job.closed:
            return
        record = self._open[name]
        if record.layout is None or layout.generation > record.layout.generation:
            self._save(msgspec.structs.replace(record, layout=layout))
        job.regroup(layout, when)

    def write_checkpoint(self, name: str) -> None:
        job = self._jobs.get(name)
        if job is not None:
            job.write_checkpoint()

    def hold(self, name: str, step: int | None) -> None:
        """Commit nothing from this step of the script on, until a different or no step is given."""
        self._jobs[name].hold(step)

    def standing(self, name: str) -> Standing:
        return self._jobs[name].standing()

    def close_job(self, name: str) -> None:
        """Close a job on a separate thread, so that no other job waits for its state.

        Until it is written, Redis has the job, so that before ending us one can see that we are
        not in the middle of it.
        """
        with self._lock:
            if name not in self._jobs or name in self._closing:
                return
            thread = threading.Thread(
                target=self._close_beside, args=(name,), name="close", daemon=True
            )
            self._closing[name] = thread
            thread.start()

    def _close_beside(self, name: str) -> None:
        with contextlib.suppress(Closed):
            self._close(name)

    def _close(self, name: str) -> None:
        """Close a job. If the disk does not take it, keep it in memory.

        That is for the next keeper, or in case the job is opened again.
        """
        job = self._jobs[name]
        record = msgspec.structs.replace(self._open[name], closing=True)
        self._patiently(self._save)(record)
        job.close()
        try:
            away = job.put_away()
        except Exception:
            log.exception("%s could not be put on the disk", name)
            away = False
        if away:
            self._patiently(self._strike)(name)
        else:
            self._patiently(self._keep)(record)
        with self._lock:
            if not away:
                self._kept[name] = job
                while len(self._kept) > KEPT_MAX:
                    self._kept.pop(next(iter(self._kept))).vault.leave()
            else:
                self._owe(name, job)
            del self._jobs[name], self._open[name], self._closing[name]
        urls, folder = self._spare(), self._place.checkpoints
        self._patiently(note_closed)(self._client, folder, name, CLOCK.now_s(), urls)

    def _put_away(self) -> None:
        """Keep trying to write closed jobs that the disk did not take, and to copy owed ones.

        Such a job ends with us, or with the machine.
        """
        while not self._closed.wait(KEPT_S):
            with self._lock:
                kept = dict(self._kept)
                self._owing = {name: owes for name, owes in self._owing.items() if owes.again()}
            for name, job in kept.items():
                if job.fenced or not job.closed:
                    continue
                try:
                    away = job.put_away()
                except Exception:
                    log.exception("%s could not be put on the disk", name)
                    continue
                with self._lock:
                    gone = away and self._kept.get(name) is job
                    if gone:
                        del self._kept[name]
                        self._owe(name, job)
                if gone:
                    with contextlib.suppress(Closed):
                        self._patiently(self._client.hdel)(KEPT_JOBS, name)

    def _owe(self, name: str, job: KeptJob) -> None:
        """Note a job that is on the disk but perhaps not yet in remote storage."""
        if job.vault.offsite is None or job.fenced:
            return
        self._owing[name] = job.vault.offsite
        while len(self._owing) > OWING_MAX:
            self._owing.pop(next(iter(self._owing)))

    def _keep(self, record: OpenJob) -> None:
        self._save(record, KEPT_JOBS)
        self._client.hdel(OPEN_JOBS, record.order.job)

    def _strike(self, name: str) -> None:
        self._client.hdel(OPEN_JOBS, name)
        self._client.hdel(KEPT_JOBS, name)
        self._client.delete(script_key(name))

    def _wait_closed(self, name: str) -> None:
        with self._lock:
            thread = self._closing.get(name)
        if thread is not None:
            thread.join(CLOSED_S)
            if thread.is_alive():
                raise CheckpointError(f"{name} is being closed and cannot be opened again yet")

    def _job(self, name: str) -> KeptJob | None:
        """Return an open job; reopen one that a newer keeper took, as it is requested here."""
        job = self._jobs.get(name)
        if job is not None and job.fenced and name not in self._closing:
            job.reopen()
        return job

    def _save(self, record: OpenJob, key: str = OPEN_JOBS) -> None:
        self._client.hset(key, record.order.job, seal(msgspec.json.encode(record)))
        with self._lock:
            self._open[record.order.job] = record

    def report(self, report: AnyReport) -> None:
        """Send an agent's report to the manager, and a notice also to the machine's workers."""
        self._outbox.report(report)
        if isinstance(report, NoticeSeen) and report.notice.kind == "terminate":
            with self._lock:
                jobs = list(self._jobs.values())
            for job in jobs:
                job.notice(report.notice.machine_id, report.notice.deadline_s)

    def _completed(self, report: JobCompleted) -> None:
        record = self._open.get(report.job)
        with contextlib.suppress(Closed):
            if record is not None and not record.closing:
                self._patiently(self._save)(msgspec.structs.replace(record, completed=report))
            self._outbox.report(report)

    def _patiently(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Repeat `call` while Redis is away, until this keeper closes, which ends the thread."""

        def patient(*arguments: Any) -> Any:
            while not self._closed.is_set():
                try:
                    return call(*arguments)
                except redis.RedisError as error:
                    log.warning("Redis does not take commits: %s", error)
                    self._closed.wait(TICK_S)
            raise Closed("this keeper is closed")

        return patient

    def close(self) -> None:
        """End all threads, and leave everything to the next keeper, as if we had been killed."""
        self._closed.set()
        self._front.close()
        self._outbox.flush(1.0)
        self._outbox.close()
        with self._lock:
            connections, closing = list(self._connections), list(self._closing.values())
            jobs = [*self._jobs.values(), *self._kept.values()]
        for job in jobs:
            job.forsake()
        for connection in connections:
            connection.close()
        for thread in closing:
            thread.join(CLOSED_S)

    # --- connections ------------------------------------------------------------------------------

    def _secret_of(self, job: str) -> str:
        return job_secret(self._secret, job) if job else self._secret

    def _refusal(self, job: str) -> str:
        return "nobody here knows that job" if job and job not in self._jobs else ""

    def _serve(self, connection: Connection, hello: AnyMessage) -> None:
        with self._lock:
            self._connections.add(connection)
        try:
            if isinstance(hello, AgentHello):
                self._hear_agent(connection, hello.machine_id)
            elif isinstance(hello, Hello):
                self._hear_worker(connection, hello)
        except Closed:
            return
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)

    def _hear_worker(self, connection: Connection, hello: Hello) -> None:
        job = self._jobs.get(hello.job)
        if job is not None and job.lets_in(hello.worker):
            self._job(hello.job)
        member = job.join(connection, hello) if job is not None else None
        if job is None or member is None:
            return _hang_up(connection)
        try:
            while True:
                message, payload = connection.receive(_placer(job, member))
                job.receive(member, message, payload)
        except Unsound as error:  # what its script has brought about, so it fails as a script does
            failed = Failed(kind="setup", detail=f"{hello.worker}: {error}")
            job.receive(member, failed, memoryview(b""))
            _hang_up(connection)
        except WireError as error:
            if not self._closed.is_set():
                job.leave(member, "connection", str(error))
        except Exception as error:
            # If this thread ended alone, the worker would stay a member that nobody listens to.
            log.exception("a message of %s could not be taken in", hello.worker)
            job.leave(member, "connection", f"the keeper could not take its message: {error!r}")

    def _hear_agent(self, connection: Connection, machine_id: str) -> None:
        """Send an agent's reports to the manager, and confirm each once it is in the inbox.

        An agent whose report has a value out of its range is given up, so that its machine is
        replaced: it would send the same report for ever. A machine that is switched off hangs up on
        nobody, so an agent from which nothing comes is let go; one that lives dials again.
        """
        try:
            while True:
                connection.patience(AGENT_SILENT_S)
                message, _ = connection.receive()
                if isinstance(message, Told):
                    self.report(message.report)
                    if self._outbox.flush(CONFIRM_S):
                        connection.send(Heard(serial=message.serial))
                elif not isinstance(message, Beat):
                    log.warning("an agent sent %s", type(message).__name__)
                    return
        except Unsound as error:
            log.warning("the agent of %s: %s", machine_id, error)
            self.report(AgentLost(at_s=CLOCK.now_s(), machine_id=machine_id, why=str(error)))
            _hang_up(connection)
        except WireError as error:
            log.info("an agent is gone: %s", error)

    def _tick(self) -> None:
        last_s = time.monotonic()
        while not self._closed.wait(TICK_S):
            now_s = time.monotonic()
            late_s, last_s = now_s - last_s - TICK_S, now_s
            with self._lock:
                jobs = list(self._jobs.values())
            for job in jobs:
                try:
                    job.tick(now_s, late_s)
                except Exception:
                    # If this thread ended, silence would not be noticed in any job.
                    log.exception("a look at %s failed", job.order.job)
            self._ticked_s = now_s

    def _hear_asked(self) -> None:
        """Read which jobs a person wants a timeline of, and write the pulse.

        The pulse shows that our clock still ticks, and that callers are accepted.
        """
        told_s = -PULSE_S
        while not self._closed.wait(ASKED_S):
            try:
                if self._ticked_s >= told_s + PULSE_S and not self._front.owes_thread:
                    told_s = self._ticked_s
                    self._client.set(PULSE, f"{os.getpid()} {told_s}")
                asked = {name.decode() for name in self._client.smembers(TRACES_ASKED)}
                with self._lock:
                    jobs = [self._jobs[name] for name in asked & self._jobs.keys()]
                if asked:
                    self._client.srem(TRACES_ASKED, *asked)
            except redis.RedisError as error:
                log.info("Redis does not say what is asked: %s", error)
                continue
            for job in jobs:
                job.trace()


class PatientLog:
    """A commit log that waits for Redis. Only a newer keeper can refuse a write."""

    def __init__(
        self, log_: RedisCommitLog, patiently: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self.take = patiently(log_.take)
        self.write = patiently(log_.write)
        self.rewind = patiently(log_.rewind)
        self.strike = patiently(log_.strike)


def _opened(name: str, data: bytes) -> OpenJob:
    where = f"{OPEN_JOBS} {name} in Redis"
    try:
        record = msgspec.json.decode(unseal(where, data), type=OpenJob)
    except ValueError as error:
        raise RecordError(f"{where} cannot be read ({error})") from error
    if record.order.job != name:
        raise RecordError(f"{where} is of {record.order.job}")
    return record


def _placer(job: KeptJob, member: Member) -> Callable[[AnyMessage, int], memoryview | None]:
    return lambda message, size: job.place(member, message, size)


def _hang_up(connection: Connection) -> None:
    """Receive until the caller has read the reason and has gone."""
    try:
        connection.patience(2.0)
        while True:
            connection.receive()
    except WireError:
        return
