"""The workers of a machine: forked by one process, `agent.machine.fork_server`. No torch here.

That process has imported all that a worker needs, so a worker starts in milliseconds. It has no
Ray, and of the machine's environment only what a script may see, so a script is not the manager. It
ends with us, and every worker ends with it; it is then started again, and all its workers are lost.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

import agent
from agent.machine.parent_death import kill_family
from agent.messages import WorkerOrder

PROGRAM = Path(agent.__file__).parents[1]
AGAIN_S = 1.0
CLOSE_S = 5.0
GONE = "the process that all workers of this machine descend from has ended"


class Start(msgspec.Struct, frozen=True, tag=True):
    order: WorkerOrder
    host: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    worker: str


class Started(msgspec.Struct, frozen=True, tag=True):
    worker: str
    pid: int


class Over(msgspec.Struct, frozen=True, tag=True):
    """The end of a worker's process.

    It has `finished` if its script came to an end, failed or not; otherwise `why` says what ended
    the process. The `pid` is 0 if there never was one.
    """

    worker: str
    pid: int
    finished: bool
    why: str


Request = Start | Stop
Answer = Started | Over


class Workers:
    """Starts and ends workers; `hear` is called, on a thread of ours, with what becomes of them.

    For every worker that was started there is one `Over`.
    """

    def __init__(self, log: Path, env: Mapping[str, str], hear: Callable[[Answer], None]) -> None:
        """`log` takes what the processes write to their standard output and error."""
        self._log, self._env, self._hear = log, dict(env), hear
        self._lock = threading.Lock()
        self._pids: dict[str, int | None] = {}
        self._server: subprocess.Popen[bytes] | None = None
        self._up, self._closed = threading.Event(), threading.Event()
        # The kernel ends the server with the thread that has started it, so one thread stays.
        self._thread = threading.Thread(target=self._run, name="workers", daemon=True)
        self._thread.start()
        self._up.wait()

    def start(self, order: WorkerOrder, host: str) -> None:
        with self._lock:
            self._pids[order.worker] = None
            self._send(Start(order, host))

    def stop(self, worker: str) -> None:
        """Kill a worker's process and all that its script has started."""
        with self._lock:
            self._send(Stop(worker))

    def close(self) -> None:
        """End all workers, and return when they have ended."""
        self._closed.set()
        with self._lock:
            server = self._server
            if server is not None:
                assert server.stdin is not None
                with suppress(OSError):
                    server.stdin.close()
        if server is not None:
            try:
                server.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                server.kill()
        self._thread.join()

    def _send(self, request: Request) -> None:
        """Send to the server; if there is none, its workers are about to be reported lost."""
        if self._server is not None and self._server.stdin is not None:
            with suppress(OSError, ValueError):
                self._server.stdin.write(msgspec.json.encode(request) + b"\n")
                self._server.stdin.flush()

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                lost = self._take_lost()
                self._server = server = self._spawn()
            self._up.set()
            self._report(lost)
            if server is not None:
                self._listen(server)
            with self._lock:
                lost = self._take_lost()
            self._report(lost)
            self._closed.wait(AGAIN_S)

    def _listen(self, server: "subprocess.Popen[bytes]") -> None:
        assert server.stdout is not None
        with server.stdout:
            for line in server.stdout:
                with suppress(ValueError):  # a line that a dying server has begun
                    self._take(msgspec.json.decode(line, type=Answer))
        server.wait()
        assert server.stdin is not None
        with self._lock, suppress(OSError):
            server.stdin.close()

    def _take(self, answer: Answer) -> None:
        with self._lock:
            if isinstance(answer, Started):
                self._pids[answer.worker] = answer.pid
            else:
                self._pids.pop(answer.worker, None)
        self._hear(answer)

    def _take_lost(self) -> dict[str, int | None]:
        lost, self._pids = self._pids, {}
        return lost

    def _report(self, lost: Mapping[str, int | None]) -> None:
        for worker, pid in lost.items():
            if pid is not None:
                kill_family(pid)  # it has ended with its server, but its children may live
            self._hear(Over(worker, pid or 0, finished=False, why=GONE))

    def _spawn(self) -> "subprocess.Popen[bytes] | None":
        try:
            with self._log.open("ab") as sink:
                return subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "agent.machine.fork_server",
                        str(os.getpid()),
                        self._log,
                    ],
                    # It runs in our own folder, because a file in the present folder may have the
                    # name of a module.
                    cwd=PROGRAM,
                    env=self._env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=sink,
                    start_new_session=True,
                )
        except OSError as error:
            said = f"no worker can be started, so it is tried again: {error}\n"
            sys.stderr.write(said)
            return None


def ended_by(status: int) -> str:
    """Return how a process ended, from its exit code as `subprocess` gives it."""
    if status >= 0:
        return f"its process ended with status {status}"
    try:
        return f"its process was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"its process was ended by signal {-status}"
