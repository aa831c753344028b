"""The stage of a rehearsal: a Redis, a keeper and worker processes, in a temporary folder."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import msgspec

import agent
from agent.keeper.keeper import Keeper, connect
from agent.keeper.storage.vault import Place
from agent.machine.scratch import scratch
from agent.messages import WorkerOrder
from agent.net.handshake import job_secret
from agent.net.wire import job_secret
from orchestrator.errors import OrchestratorError
from orchestrator.interrupts import no_interrupts
from orchestrator.paths import Places
from orchestrator.supervisor.redis_server import RedisServer, RedisUnavailable

HOST = "127.0.0.1"
DISK = "SPOT_TEMP_DIR"
LOG_LINES = 5
PROGRAM = Path(agent.__file__).parents[1]


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
        self._nursery: subprocess.Popen[bytes] | None = None
        self.keeper: Keeper | None = None
        try:
            self._set_up()
        except BaseException:
            self._clear()
            raise
        return self

    def _set_up(self) -> None:
        self._places.make()
        # It comes first, because it imports everything while the other parts are set up.
        self._nursery = self._start_nursery()
        self._redis = RedisServer(self._places, dict(os.environ))
        try:
            self._redis.start()
        except RedisUnavailable as error:
            raise Unready(str(error)) from error
        self._secret = secrets.token_hex(16)
        place = Place(checkpoints=self.checkpoints)
        self.client = connect(self._redis.url)
        self.keeper = Keeper(self.client, place, HOST, self._secret)

    def _start_nursery(self) -> "subprocess.Popen[bytes]":
        disk = self._folder / "work"
        disk.mkdir()
        log = self._places.log("workers")
        with log.open("ab") as sink:
            return subprocess.Popen(
                # It runs in our own folder, because a file in the person's folder may have the name
                # of a module.
                [sys.executable, "-m", "agent.machine.fork_server", str(os.getpid())],
                cwd=PROGRAM,
                env={**os.environ, DISK: str(disk), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                start_new_session=True,
            )

    @property
    def checkpoints(self) -> Path:
        return self._places.checkpoints

    def start(self, job: str, worker: str, slot: int) -> int:
        """Start a worker, and return the id of its process."""
        assert self._nursery is not None and self.keeper is not None
        assert self._nursery.stdin is not None and self._nursery.stdout is not None
        order = WorkerOrder(
            job=job,
            worker=worker,
            machine_id=worker,
            slot=slot,
            keeper_address=self.keeper.address,
            secret=job_secret(self._secret, job),
        )
        with contextlib.suppress(BrokenPipeError):
            self._nursery.stdin.write(msgspec.json.encode(order) + b"\n")
            self._nursery.stdin.flush()
        answer = self._nursery.stdout.readline()
        if not answer:
            raise Unready(f"no worker could be started: {self.last_words() or 'it ended at once'}")
        return int(answer)

    def kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

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
            if self._nursery is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._nursery.pid, signal.SIGKILL)
                self._nursery.communicate()
            if self.keeper is not None:
                self.keeper.close()
            if self._redis is not None:
                self._redis.stop()
            self._places.remove_link()
            with contextlib.suppress(OSError):
                self._room.close()
