"""The output of a script, line by line, on its way to the keeper.

All workers run the same script, so its standard output is taken from one of them, the leader. Then
the job's log reads as if the script had run alone. Lines printed before it is known which worker
leads are held until then. Standard error is taken from every worker.
"""

import io
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

FLUSH_S = 0.1
BATCH_LINES = 100
WAITING_MAX = 10_000
HELD_MAX = 1_000
STDERR = 2


class Lines:
    """Collects whole lines and hands them on in batches, a few times a second."""

    def __init__(self, send: Callable[[tuple[str, ...]], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._waiting: list[str] = []
        self._dropped = 0
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def add(self, line: str) -> None:
        with self._lock:
            if len(self._waiting) < WAITING_MAX:
                self._waiting.append(line)
            else:
                self._dropped += 1

    def flush(self) -> None:
        with self._lock:
            lines, self._waiting = self._waiting, []
            dropped, self._dropped = self._dropped, 0
        if dropped:
            lines.append(f"... {dropped} lines were dropped")
        for start in range(0, len(lines), BATCH_LINES):
            self._send(tuple(lines[start : start + BATCH_LINES]))

    def close(self) -> None:
        self._closed.set()
        self.flush()

    def _run(self) -> None:
        while not self._closed.wait(FLUSH_S):
            self.flush()


class LeaderOnly:
    """A filter that passes lines while this worker leads; None means that it is not known yet."""

    def __init__(self, lines: Lines, leads: Callable[[], bool | None]) -> None:
        self._lines, self._leads = lines, leads
        self._held: list[str] = []

    def add(self, line: str) -> None:
        leads = self._leads()
        if leads is None:
            if len(self._held) < HELD_MAX:
                self._held.append(line)
            return
        self.settle(passes=leads)
        if leads:
            self._lines.add(line)

    def settle(self, *, passes: bool) -> None:
        """Pass on or drop the held lines; a worker that turns out not to lead printed nothing."""
        held, self._held = self._held, []
        for line in held if passes else ():
            self._lines.add(line)


class Stream(io.TextIOBase):
    """Stands in for sys.stdout or sys.stderr while a script runs."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, add: Callable[[str], None]) -> None:
        self._add = add
        self._begun = ""
        self.last = ""  # the last line with a word in it; later lines may be the edge of a frame

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        # the text may hold a file name that is not UTF-8
        sayable = text.encode(errors="backslashreplace").decode()
        *whole, self._begun = (self._begun + sayable).split("\n")
        for line in whole:
            self._pass_on(line.rpartition("\r")[2] or line.strip("\r"))
        return len(text)

    def _pass_on(self, line: str) -> None:
        if any(map(str.isalnum, line)):
            self.last = line
        self._add(line)

    @property
    def buffer(self) -> io.BufferedIOBase:
        """A stream for scripts that write bytes."""
        return _Bytes(self)

    def fileno(self) -> int:
        """Return the worker's own descriptor, for `faulthandler` and processes of the script."""
        return STDERR

    def reconfigure(self, **_: object) -> None:
        """Accept the request for line buffering, which this stream has anyway."""

    def finish(self) -> None:
        """Pass on a line that was begun and not ended."""
        if self._begun:
            self._pass_on(self._begun)
            self._begun = ""


class _Bytes(io.BufferedIOBase):
    """A stream of bytes in front of a stream of text."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: "ReadableBuffer", /) -> int:
        self._stream.write(bytes(data).decode(errors="replace"))
        return len(bytes(data))
