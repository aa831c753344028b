"""The Ray actors: one keeper, and an agent per instance.

They are plain classes; their creator wraps them with `ray.remote`. Instances speak with the keeper
over its own TCP port only, so nothing else of the manager's machine needs to be reachable for them.
Workers are no actors: see `agent.machine.workers`.
"""

import os
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from agent.errors import WireError
from agent.keeper.storage.offsite import Storage
from agent.layout import Layout
from agent.machine import environment
from agent.machine.crashes import Crash, crash_of, disk
from agent.machine.notices import URL_VARIABLE, Watcher
from agent.machine.workers import Answer, Over, Workers
from agent.messages import (
    AgentJoined,
    JobOrder,
    NoticeSeen,
    Report,
    When,
    WorkerLost,
    WorkerOrder,
)
from agent.net.handshake import job_secret
from agent.net.link import Link
from agent.protocol import AgentHello, AnyMessage, Heard, Told
from cloud import private
from cloud.clock import CLOCK
from cloud.model import Notice
from cloud.open_files import raise_limit

REPORTS_WAITING_MAX = 1000
KEEPER_PATIENCE_S = 3600.0
LOG = "workers.log"
LAST_TO_GO = b"0"  # out of memory: Ray gives its processes 1000, and a machine without us is lost
ADDRESS_VARIABLE = "SPOT_ADDRESS"
SLOTS_VARIABLE = "SPOT_SLOTS"


def keeper_options(
    redis_url: str,
    checkpoints_dir: Path,
    host: str,
    secret_path: Path,
    storage: Storage | None,
) -> dict[str, Any]:
    """Return the arguments of `KeeperActor`."""
    return {
        "redis_url": redis_url,
        "checkpoints_dir": str(checkpoints_dir),
        "host": host,
        "secret_path": str(secret_path),
        "storage": msgspec.json.encode(storage),
        "lasting": True,
    }


class KeeperActor:
    """The keeper as an actor; any of its orders may come twice."""

    def __init__(
        self,
        redis_url: str,
        checkpoints_dir: str,
        host: str,
        secret_path: str,
        storage: bytes,
        *,
        lasting: bool = False,
    ) -> None:
        """Start the keeper; what a `lasting` keeper holds outlives it, if the machine lives."""
        from agent.keeper.keeper import Keeper, connect
        from agent.keeper.storage.memory_log import root_of
        from agent.keeper.storage.vault import Place

        raise_limit()
        secret = private.secret(Path(secret_path))
        place = Place(
            checkpoints=Path(checkpoints_dir),
            storage=msgspec.json.decode(storage, type=Storage | None),
            memory=root_of(Path(checkpoints_dir)) if lasting else None,
        )
        self._keeper = Keeper(connect(redis_url), place, host, secret)

    def ping(self) -> int:
        """Return the id of the process that answers."""
        return os.getpid()

    def address(self) -> str:
        return self._keeper.address

    def open_job(self, data: bytes, script: bytes | None = None) -> None:
        self._keeper.open_job(msgspec.json.decode(data, type=JobOrder), script)

    def regroup(self, job: str, layout: bytes, when: When) -> None:
        self._keeper.regroup(job, msgspec.json.decode(layout, type=Layout), when)

    def write_checkpoint(self, job: str) -> None:
        self._keeper.write_checkpoint(job)

    def close_job(self, job: str) -> None:
        self._keeper.close_job(job)


class Telling:
    """Reports on their way to the manager, sent again after a reconnect until they were heard."""

    def __init__(self, machine_id: str, keeper_address: str, secret: str) -> None:
        self._lock = threading.Lock()
        self._serial = 0
        self._closed = False
        self._waiting: deque[Told] = deque(maxlen=REPORTS_WAITING_MAX)
        self._link = Link(
            keeper_address,
            secret,
            lambda: AgentHello(machine_id=machine_id),
            self._hear,
            lambda _: None,
            connected=self._tell_again,
            patience_s=KEEPER_PATIENCE_S,
        )
        threading.Thread(target=self._start, name="telling", daemon=True).start()

    def tell(self, report: Report) -> None:
        with self._lock:
            self._serial += 1
            told = Told(serial=self._serial, report=report)  # type: ignore[arg-type]
            self._waiting.append(told)
        self._link.send(told)

    def waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        self._closed = True
        self._link.close()

    def _start(self) -> None:
        try:
            self._link.start()
        except WireError:
            if not self._closed:
                os._exit(1)  # an agent that cannot reach the keeper is of no use

    def _tell_again(self) -> None:
        with self._lock:
            waiting = list(self._waiting)
        for told in waiting:
            self._link.send(told)

    def _hear(self, message: AnyMessage, _: memoryview) -> None:
        if isinstance(message, Heard):
            with self._lock:
                while self._waiting and self._waiting[0].serial <= message.serial:
                    self._waiting.popleft()


class _Running(msgspec.Struct, frozen=True):
    order: WorkerOrder
    began_s: float


class AgentActor:
    """One per instance: starts and stops its workers, and reports notices and exits."""

    def __init__(self, machine_id: str, keeper_address: str, secret: str) -> None:
        self._machine_id = machine_id
        self._lock = threading.Lock()
        self._running: dict[str, _Running] = {}
        self._host, slots = _facts()
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_bytes(LAST_TO_GO)
        self._workers = Workers(disk() / LOG, environment.of_worker(os.environ), self._hear)
        self._telling = Telling(machine_id, keeper_address, secret)
        joined = AgentJoined(
            at_s=CLOCK.now_s(), machine_id=machine_id, address=self._host, slots=slots
        )
        self._telling.tell(joined)
        if URL_VARIABLE in os.environ:
            watcher = Watcher.of_this_machine()
            threading.Thread(
                target=watcher.watch,
                args=(self._tell_notice, threading.Event()),
                kwargs={"idle": self._idle},
                name="notices",
                daemon=True,
            ).start()

    def ping(self) -> int:
        """Return the id of the process that answers."""
        return os.getpid()

    def start_worker(self, data: bytes) -> None:
        order = msgspec.json.decode(data, type=WorkerOrder)
        with self._lock:
            if order.worker in self._running:
                return
            earlier = [
                w for w, running in self._running.items() if running.order.slot == order.slot
            ]
        for worker in earlier:
            self.stop_worker(worker)
        # A worker proves that it knows the secret of its own job, and learns no other.
        known = msgspec.structs.replace(order, secret=job_secret(order.secret, order.job))
        with self._lock:
            self._running[order.worker] = _Running(order, CLOCK.now_s())
            self._workers.start(known, self._host)

    def stop_worker(self, worker: str) -> None:
        with self._lock:
            running = self._running.pop(worker, None)
            if running is not None:
                self._workers.stop(worker)
        # The keeper may have seen its connection break before we saw its process end.
        if running is not None and (crash := crash_of(running.order)) is not None:
            self._telling.tell(_lost(running, "", crash))

    def _hear(self, answer: Answer) -> None:
        """Take note that a worker's process has finished its script, or is gone."""
        if isinstance(answer, Over):
            with self._lock:
                running = self._running.pop(answer.worker, None)
            if running is not None and not answer.finished:
                self._telling.tell(_lost(running, answer.why, crash_of(running.order)))

    def _tell_notice(self, notice: Notice) -> None:
        self._telling.tell(NoticeSeen(at_s=CLOCK.now_s(), notice=notice))

    def _idle(self) -> bool:
        """Return whether no worker is left here and every report was heard.

        Then the machine is not needed.
        """
        return not self._running and not self._telling.waiting()


def _lost(running: _Running, detail: str, crash: Crash | None) -> WorkerLost:
    order, at_s = running.order, CLOCK.now_s()
    return WorkerLost(
        at_s=at_s,
        job=order.job,
        worker=order.worker,
        machine_id=order.machine_id,
        cause="exited",
        detail=detail if crash is None else crash.where,
        signal="" if crash is None else crash.signal,
        printed=() if crash is None else crash.printed,
        lived_s=max(0.0, at_s - running.began_s),
    )


def _facts() -> tuple[str, int]:
    """Return this machine's own address, and how many workers it has room for."""
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    host = os.environ.get(ADDRESS_VARIABLE) or str(node["NodeManagerAddress"])
    slots = os.environ.get(SLOTS_VARIABLE) or node["Resources"].get("CPU", 1)
    return host, int(float(slots))
