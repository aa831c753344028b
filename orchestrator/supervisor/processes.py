"""Starting, marking and ending our own processes on this machine.

Every process that the house starts, and all their descendants, carry the environment variable
SPOT_HOUSE with the house's identity. By this mark the leftovers of a killed house are recognised
and ended without ever touching a process that is not ours.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

MARK = "SPOT_HOUSE"
HOUSE = b"orchestrator.supervisor"  # the module that `up` starts
PR_SET_PDEATHSIG = 1
KILL_S_MAX = 3.0
STARTS_MAX = 3  # of one part, if it is killed while it starts
# Hundreds of processes import the same modules; where a shell or an image sets this variable, each
# would compile them anew.
UNCACHED = "PYTHONDONTWRITEBYTECODE"
FILE_BYTES_MIN = 1 << 30  # Ray's shared memory, checkpoints, and a journal that grows


def narrow() -> str:
    """Return why a file size limit is too low for our processes, or "" if it is not.

    Without this check Ray would wait for ever and report nothing.
    """
    bytes_max, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if bytes_max == resource.RLIM_INFINITY or bytes_max >= FILE_BYTES_MIN:
        return ""
    return (
        f"files may have {bytes_max:,} bytes at most here (ulimit -f), and {FILE_BYTES_MIN:,} are needed; start it "
        "where that is unlimited"
    )


def start(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Path,
    cwd: Path | None = None,
    files: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Start a child in a new session; it gets SIGTERM when this thread's process dies.

    It inherits the open `files`, by their numbers.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        return subprocess.Popen(
            list(arguments),
            env=caching(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=files,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - the house starts children from its main thread
        )


def caching(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Python keeps what it has compiled."""
    return {name: value for name, value in env.items() if name != UNCACHED}


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def was_killed(process: "subprocess.Popen[bytes]") -> bool:
    """Return whether a signal ended a child, which does not tell against its data or settings."""
    status = process.poll()
    return status is not None and status < 0


def end(
    process: "subprocess.Popen[bytes]", grace_s: float = 5.0, word: int = signal.SIGTERM
) -> None:
    """Send a child the signal `word`, and kill it if it still runs after `grace_s`."""
    if process.poll() is None:
        process.send_signal(word)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def marked(identity: str) -> list[int]:
    """Return the pids of all other live processes that carry this house's mark."""
    needle = f"{MARK}={identity}".encode()
    found = []
    for process in _others():
        with contextlib.suppress(OSError):
            environ = (process / "environ").read_bytes()
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and needle in environ.split(b"\0"):
                found.append(int(process.name))
    return sorted(found)


def homes() -> list[str]:
    """Return the folders in which managers that run were started, as far as we may see them."""
    found = set()
    for process in _others():
        with contextlib.suppress(OSError):
            if HOUSE in (process / "cmdline").read_bytes().split(b"\0"):
                found.add(str((process / "cwd").readlink()))
    return sorted(found)


def houses(lock: Path) -> list[int]:
    """Return the pids of houses that have this lock open, also of one that only starts or ends."""
    found = []
    for process in _others():
        with contextlib.suppress(OSError):
            is_house = HOUSE in (process / "cmdline").read_bytes().split(b"\0")
            if is_house and any(lock.samefile(file) for file in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def _others() -> Iterator[Path]:
    """Yield what the system says of each other process."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            yield Path(entry.path)


def sweep(identity: str, grace_s: float = 3.0) -> int:
    """End every process that carries the mark; return how many there were at first."""
    count = len(marked(identity))
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S_MAX)):
        for pid in marked(identity) if patience_s > 0 else ():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and marked(identity):
            time.sleep(0.05)
    return count
