"""The output of a script, line by line, on its way to the keeper.

All workers run the same script, so its standard output is taken from one of them, the leader. Then
the job's log reads as if the script had run alone. Lines printed before it is known which worker
leads are held until then. Standard error is taken from every worker.

Nothing that a script prints takes much time, memory or network: a line is cut, a line that is not
ended is held to the same length, and what comes faster than anybody reads is dropped and counted.
"""

import io
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from agent.net.forks import let_go_in_forks
from agent.output.controls import harmless

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

FLUSH_S = 0.1
BATCH_LINES = 100
WAITING_MAX = 10_000
LINE_CHARS_MAX = 4_000  # the keeper keeps no more of a line
CUT = " ... and {:,} characters"
BURST_CHARS = 8 << 20
CHARS_PER_S = 1 << 20
DROPPED_S = 1.0  # between two lines that say how many were dropped
HELD_MAX = 1_000
STDERR = 2


class Lines:
    """Collects whole lines and hands them on in batches, a few times a second."""

    def __init__(
        self,
        send: Callable[[tuple[str, ...]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send, self._clock = send, clock
        self._lock = threading.Lock()
        self._waiting: list[str] = []
        self._dropped, self._said_s = 0, clock()
        self._room, self._filled_s = float(BURST_CHARS), clock()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def add(self, line: str) -> None:
        """Add a line, or count it as dropped if too much is waiting or has been sent lately."""
        line = harmless(shortened(line))
        with self._lock:
            self._fill()
            if len(self._waiting) < WAITING_MAX and self._room > 0:
                self._waiting.append(line)
                self._room -= len(line)
            else:
                self._dropped += 1

    def _fill(self) -> None:
        now_s = self._clock()
        more = (now_s - self._filled_s) * CHARS_PER_S
        self._room, self._filled_s = min(self._room + more, float(BURST_CHARS)), now_s

    def flush(self, *, last: bool = False) -> None:
        with self._lock:
            lines, self._waiting = self._waiting, []
            now_s = self._clock()
            if self._dropped and (last or now_s >= self._said_s + DROPPED_S):
                lines.append(f"... {self._dropped:,} lines were dropped: they came too fast")
                self._dropped, self._said_s = 0, now_s
        for start in range(0, len(lines), BATCH_LINES):
            self._send(tuple(lines[start : start + BATCH_LINES]))

    def close(self) -> None:
        self._closed.set()
        self.flush(last=True)

    def _run(self) -> None:
        while not self._closed.wait(FLUSH_S):
            self.flush()


def shortened(line: str, more: int = 0) -> str:
    """Return the beginning of a line that is too long, and how much is left out.

    `more` characters were left out already.
    """
    if more == 0 and len(line) <= LINE_CHARS_MAX:
        return line
    kept = LINE_CHARS_MAX - len(CUT.format(10**12))
    return line[:kept] + CUT.format(max(0, len(line) - kept) + more)


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
    """Stands in for sys.stdout or sys.stderr while a script runs.

    As on a terminal, what follows a carriage return takes the place of what stands before it.
    """

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, add: Callable[[str], None]) -> None:
        self._add = add
        self._begun, self._more = "", 0  # a line that is not ended, and how much of it is left out
        self._returned = False
        self.last = ""  # the last line with a word in it; later lines may be the edge of a frame
        let_go_in_forks(self)

    def let_go(self) -> None:
        """Write to the worker's own descriptor in a process that the script forks.

        What hands on the worker's lines has a lock, which is perhaps held, and a thread, which is
        not there.
        """
        self._add, self._begun, self._more = _to_descriptor, "", 0

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        # the text may hold a file name that is not UTF-8
        sayable = text if text.isascii() else text.encode(errors="backslashreplace").decode()
        *ends, begins = sayable.split("\n")
        for end in ends:
            self._append(end)
            self._end_line()
        self._append(begins)
        return len(text)

    def _append(self, text: str) -> None:
        first, *others = text.split("\r")
        newest = next(filter(None, reversed(others)), "")
        if newest or (first and self._returned):
            self._begun, self._more = newest or first, 0
        else:
            self._begun += first
        if text:
            self._returned = text.endswith("\r")
        if len(self._begun) > LINE_CHARS_MAX:
            self._more += len(self._begun) - LINE_CHARS_MAX
            self._begun = self._begun[:LINE_CHARS_MAX]

    def _end_line(self) -> None:
        line = shortened(self._begun, self._more)
        self._begun, self._more, self._returned = "", 0, False
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
            self._end_line()


def _to_descriptor(line: str) -> None:
    with suppress(OSError):  # on a full disk
        os.write(STDERR, f"{line}\n".encode(errors="replace"))


class _Bytes(io.BufferedIOBase):
    """A stream of bytes in front of a stream of text."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: "ReadableBuffer", /) -> int:
        self._stream.write(bytes(data).decode(errors="replace"))
        return len(bytes(data))
