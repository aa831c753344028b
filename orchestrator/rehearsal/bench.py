"""The stage of a rehearsal: a Redis, a keeper and worker processes, in a temporary folder."""

import contextlib
import os
import queue
import secrets
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from agent.keeper.keeper import Keeper, connect
from agent.keeper.storage.vault import Place
from agent.machine import environment
from agent.machine.crashes import DISK_VARIABLE
from agent.machine.scratch import scratch
from agent.machine.workers import Answer, Over, Workers
from agent.messages import WorkerOrder
from agent.net.handshake import job_secret
from orchestrator.errors import OrchestratorError
from orchestrator.interrupts import no_interrupts
from orchestrator.paths import Places
from orchestrator.supervisor.redis_server import RedisServer, RedisUnavailable

HOST = "127.0.0.1"
LOG_LINES = 5
MACHINES = 2  # in whose processes a set of texts may have another order


class Unready(OrchestratorError):  # noqa: N818 - it names what is the case
    """The stage could not be set up; the message says why."""


class Stage:
    """The processes and the folder of a rehearsal; its jobs use them one after the other."""

    def __enter__(self) -> Self:
        self._room = ExitStack()
        # `scratch` also deletes what a killed rehearsal has left.
        disk = Path(tempfile.gettempdir()).absolute()
        self._folder = self._room.enter_context(scratch("spot-rehearsal-", disk))
        self._places = Places(self._folder)
        self._redis: RedisServer | None = None
        self._machines: list[Workers] = []
        self._heard: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.keeper: Keeper | None = None
        try:
            self._set_up()
        except BaseException:
            self._clear()
            raise
        return self

    def _set_up(self) -> None:
        self._places.make()
        disk = self._folder / "work"
        disk.mkdir()
        # They come first, because they import everything while the other parts are set up.
        for _ in range(MACHINES):
            self._machines.append(self._start_workers(disk))
        self._redis = RedisServer(self._places, dict(os.environ))
        try:
            self._redis.start()
        except RedisUnavailable as error:
            raise Unready(str(error)) from error
        self._secret = secrets.token_hex(16)
        place = Place(checkpoints=self.checkpoints)
        self.client = connect(self._redis.url)
        self.keeper = Keeper(self.client, place, HOST, self._secret)

    def _start_workers(self, disk: Path) -> Workers:
        log = self._places.log("workers")
        env = {**os.environ, DISK_VARIABLE: str(disk), "OMP_NUM_THREADS": "1"}
        return Workers(log, environment.of_worker(env), self._heard.put)

    @property
    def checkpoints(self) -> Path:
        return self._places.checkpoints

    def start(self, job: str, worker: str, slot: int) -> None:
        """Start a worker, and return when its process is there."""
        assert self.keeper is not None
        order = WorkerOrder(
            job=job,
            worker=worker,
            machine_id=worker,
            slot=slot,
            keeper_address=self.keeper.address,
            secret=job_secret(self._secret, job),
        )
        self._machines[slot % MACHINES].start(order, HOST)
        while isinstance(answer := self._heard.get(), Over):
            if not answer.pid:  # else an earlier one has ended, of which the keeper has told
                raise Unready(f"no worker could be started: {self.last_words() or answer.why}")

    def kill(self, worker: str) -> None:
        for machine in self._machines:
            machine.stop(worker)

    def last_words(self) -> str:
        """Return the last lines of the worker processes, without what their scripts print."""
        with contextlib.suppress(OSError):
            lines = self._places.log("workers").read_text(errors="replace").splitlines()
            return "; ".join(line.strip() for line in lines[-LOG_LINES:])
        return ""

    def __exit__(self, *_: object) -> None:
        self._clear()

    def _clear(self) -> None:
        with no_interrupts():
            for machine in self._machines:
                machine.close()
            if self.keeper is not None:
                self.keeper.close()
            if self._redis is not None:
                self._redis.stop()
            self._places.remove_links()
            with contextlib.suppress(OSError):
                self._room.close()
