"""Write the output that workers send to the keeper to the disk. No torch here."""

import logging
import math
import queue
import threading
from pathlib import Path
from typing import Protocol

from agent.checksum import Buffer
from agent.keeper.outbox import Out
from agent.messages import (
    KEY_CHARS_MAX,
    VALUE_CHARS_MAX,
    JobOrder,
    Logged,
    OutputFile,
    OutputKept,
    StateSeen,
)
from agent.output.catalog import Shelf
from agent.output.controls import harmless
from agent.output.files import Bounds
from agent.protocol import (
    Message,
    Numbers,
    OutputAsked,
    OutputSent,
    OutputTaken,
    OutputWhole,
    ScriptValues,
    Strayed,
)
from cloud.clock import CLOCK

log = logging.getLogger(__name__)

WAITING_MAX = 64  # a worker waits for each answer; what does not fit is sent again
SHOWN_MAX = 20
STEPS_REMEMBERED = 256
STRAYED = (
    "{} was written to the script's working folder: what the script writes there in its loop is kept as well, as what it "
    "writes to session.output"
)
STUCK = "session.output cannot be kept now, and is tried again: {!r}"


Said = OutputSent | OutputWhole | OutputAsked


class Hearer(Protocol):
    worker: str
    lacks_files: bool

    def post(self, message: Message, *payload: Buffer) -> None: ...


class Outputs:
    """The output of one job.

    What takes long is done on a separate thread, which starts with the first file.
    """

    def __init__(self, order: JobOrder, home: Path, out: Out) -> None:
        self._job, self._home, self._out = order.job, home, out
        self._bounds = Bounds(files=order.output_files, total_bytes=order.output_bytes)
        self._waiting: queue.Queue[tuple[Hearer, Said, memoryview] | None] = queue.Queue(
            WAITING_MAX
        )
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()  # `close` comes from other threads than `hear`
        self._refused: set[str] = set()
        self._strayed = self._stuck = False
        self._logged: dict[int, None] = {}

    def hear(self, member: Hearer, message: Said, payload: memoryview) -> None:
        """Queue what a worker says of the output, on the thread that listens to it."""
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="output", daemon=True)
                self._thread.start()
            try:
                self._waiting.put_nowait((member, message, payload))
            except queue.Full:
                log.warning("%s: what %s sends of the output waits", self._job, member.worker)

    def strayed(self, message: Strayed) -> None:
        """Say it once, because the next leader sends the same."""
        if not self._strayed:
            self._strayed = True
            self._say(STRAYED.format(message.path))

    def log(self, message: Numbers) -> None:
        """Log numbers. Repeated numbers of a new leader only fill gaps; new ones always count."""
        fresh = [each for each in message.steps if not message.again or each[0] not in self._logged]
        for step, numbers in fresh:
            self._logged[step] = None
            self._out.numbers(self._job, step, numbers)
        while len(self._logged) > STEPS_REMEMBERED:
            del self._logged[next(iter(self._logged))]
        if fresh:
            step, numbers = fresh[-1]
            shown = {name: _finite(value) for name, value in numbers.items()}
            self._out.report(Logged(at_s=CLOCK.now_s(), job=self._job, step=step, numbers=shown))

    def hold(self, message: ScriptValues) -> None:
        """Report what the script keeps; what could harm a terminal or a page is written out."""
        entries = tuple(
            (_plain_text(name, KEY_CHARS_MAX), _plain_text(value, VALUE_CHARS_MAX))
            for name, value in message.entries
        )
        self._out.report(
            StateSeen(
                at_s=CLOCK.now_s(),
                job=self._job,
                step=message.step,
                entries=entries,
                count=message.count,
            )
        )

    def _say(self, line: str) -> None:
        self._out.lines(self._job, "keeper", (line,))

    def close(self, patience_s: float = 0.0) -> None:
        """Write what has arrived, for at most `patience_s`; a writer that takes longer goes on."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            try:
                self._waiting.put(None, timeout=max(patience_s, 0.001))
            except queue.Full:
                return
            thread.join(patience_s)

    def _work(self) -> None:
        shelf: Shelf | None = None
        while (said := self._waiting.get()) is not None:
            member, message, payload = said
            try:
                shelf = shelf or Shelf(self._home, self._bounds)
                self._see_to(shelf, member, message, payload)
            except Exception as error:
                # If this thread ended, no worker would get an answer; without one it asks again.
                log.exception("%s: the output could not be kept", self._job)
                if not self._stuck:
                    self._stuck = True
                    self._say(STUCK.format(error))
        if shelf is not None:
            shelf.close()

    def _see_to(self, shelf: Shelf, member: Hearer, message: Said, payload: memoryview) -> None:
        match message:
            case OutputWhole():
                shelf.mark(message.step)
            case OutputAsked():
                given, piece = shelf.give(message)
                if not message.path:
                    member.lacks_files = not given.whole
                member.post(given, piece)
            case OutputSent():
                taken = shelf.take(member.worker, message, payload)
                self._tell(shelf, message.path, taken)
                member.post(taken)

    def _tell(self, shelf: Shelf, path: str, taken: OutputTaken) -> None:
        if taken.state == "refused" and path not in self._refused:
            if len(self._refused) < SHOWN_MAX:
                self._say(f"{path} of session.output is not kept: {taken.why}")
            self._refused.add(path)
        if taken.state == "done":
            files = shelf.files
            self._out.report(
                OutputKept(
                    at_s=CLOCK.now_s(),
                    job=self._job,
                    files=len(files),
                    total_bytes=sum(file.size for file in files),
                    newest=tuple(_plain(file) for file in reversed(files[-SHOWN_MAX:])),
                )
            )


def _plain(file: OutputFile) -> OutputFile:
    return OutputFile(path=file.path, size=file.size, step=file.step, checksum=file.checksum)


def _plain_text(text: str, most: int) -> str:
    return harmless(text)[:most]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
