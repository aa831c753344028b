"""The record of a crashed worker: signal, place in the script, last lines printed.

Only the process itself knows them: the machine's agent sees only that it ended, and the keeper that
its connection broke. `faulthandler` writes into a file even in the middle of a crash; what the
script prints is written there before.
"""

import faulthandler
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

from agent.messages import WorkerOrder

DISK_VARIABLE = "SPOT_TEMP_DIR"
RECORD_BYTES_MAX = 1 << 16
READ_BYTES_MAX = 1 << 17
LINES_MAX, LINE_CHARS_MAX = 5, 200
PRINTED = "| "  # before each line that the script printed, which may look like anything
STDERR = 2
FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
FRAME = re.compile(r'^  File "(.+)", (line \d+ in .+)$', re.MULTILINE)
SIGNALS = {
    "Aborted": "SIGABRT",
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}


class Crash(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a process that its script crashed; `where` is the script's innermost line."""

    signal: str
    where: str
    printed: tuple[str, ...]


def disk() -> Path:
    """Return where a worker keeps its files: the machine's own disk."""
    return Path(os.environ.get(DISK_VARIABLE) or tempfile.gettempdir()).absolute()


class Record:
    """The file of one worker, which lives as long as its process."""

    def __init__(self, order: WorkerOrder, folder: Path) -> None:
        """`folder` holds the script's files."""
        self._path, self._folder = _path_of(order), folder
        self._file = self._path.open("wb", buffering=0)
        self._last: list[str] = []
        self._begin()
        faulthandler.enable(self._file, all_threads=False)
        # A crash of a process that the script forks is not the worker's.
        os.register_at_fork(after_in_child=_crash_to_stderr)

    def add(self, line: str) -> None:
        """Remember a line that the script has printed."""
        short = line[:LINE_CHARS_MAX]
        self._last = [*self._last[1 - LINES_MAX :], short]
        with suppress(OSError):  # on a full disk
            if self._file.tell() > RECORD_BYTES_MAX:
                self._begin()
            else:
                self._file.write(f"{PRINTED}{short}\n".encode(errors="replace"))

    def close(self) -> None:
        faulthandler.disable()
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _begin(self) -> None:
        with suppress(OSError):
            self._file.seek(0)
            self._file.truncate()
            lines = [str(self._folder), *(f"{PRINTED}{line}" for line in self._last)]
            self._file.write("".join(f"{line}\n" for line in lines).encode(errors="replace"))


def _crash_to_stderr() -> None:
    if faulthandler.is_enabled():
        faulthandler.enable(STDERR)


def crash_of(order: WorkerOrder) -> Crash | None:
    """Return how the worker's process crashed, or None if it did not; remove its file."""
    path = _path_of(order)
    try:
        with path.open("rb") as file:
            text = file.read(READ_BYTES_MAX).decode(errors="replace")
        path.unlink()
    except OSError:
        return None
    fatal = FATAL.search(text)
    if fatal is None:
        return None
    folder = f"{text.partition(chr(10))[0]}{os.sep}"
    frames = [(m[1], m[2]) for m in FRAME.finditer(text, fatal.end())]
    own = [f"{file[len(folder) :]}, {line}" for file, line in frames if file.startswith(folder)]
    printed = [
        x[len(PRINTED) :] for x in text[: fatal.start()].split("\n") if x.startswith(PRINTED)
    ]
    return Crash(
        signal=SIGNALS.get(fatal[1], fatal[1]),
        where=own[0] if own else "",
        printed=tuple(printed[-LINES_MAX:]),
    )


def _path_of(order: WorkerOrder) -> Path:
    return disk() / f"crash-{order.machine_id}-{order.worker}.txt"
