"""Files that the job has kept, put where the script of this worker looks for them. No torch here.

A worker that has got its state from others gets the files as they were then, and after the loop
every worker gets the newest. The keeper is asked for a list, and piece by piece for what differs
here. A file that the script holds open to write to stays as it is.
"""

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from agent.errors import Misuse
from agent.messages import OutputFile
from agent.output import files
from agent.output.files import checksum_of, draft_of, make_way, open_file
from agent.output.strays import Strays
from agent.protocol import OutputAsked, OutputGiven

log = logging.getLogger(__name__)

Send = Callable[..., None]

ASK_AGAIN_S = 5.0  # because a restarted keeper has forgotten what it was asked
ASKED_MAX = 6
AWAITED_S, LOOK_S = 3.0, 0.05
OPEN_FILES = "/dev/fd"
WHO = "a kept file"
SILENT = "the keeper does not answer"
SAME, NOTHING = (-1, 0), (-1, -1)


class Kept:
    """The script's thread calls all but `hear`."""

    def __init__(self, send: Send, strays: Strays | None) -> None:
        self._send, self._strays = send, strays
        self._heard = threading.Condition()
        self._serial, self._closed = 0, False
        self._answer: tuple[OutputGiven, bytes] | None = None

    def hear(self, answer: OutputGiven, payload: memoryview) -> None:
        """Take an answer, on the thread that listens to the keeper."""
        with self._heard:
            self._answer = answer, bytes(payload)
            self._heard.notify_all()

    def close(self) -> None:
        with self._heard:
            self._closed = True
            self._heard.notify_all()

    def listed(self, step: int, *, awaited: bool) -> OutputGiven | None:
        """Return the list of files as they were after a step; None if the keeper does not answer.

        With `awaited` others may still send what belongs to it.
        """
        until_s = time.monotonic() + AWAITED_S
        with suppress(TimeoutError):
            while True:
                found, _ = self._ask(step)
                if found.whole or not awaited or time.monotonic() > until_s:
                    return found
                with self._heard:
                    self._heard.wait_for(lambda: self._closed, LOOK_S)
        return None

    def put(
        self, step: int, wanted: Mapping[str, OutputFile], output: Callable[[], Path]
    ) -> tuple[list[str], list[str]]:
        """Put these files into their places, as they were after `step`.

        Return those that are there, and those that did not come. Nothing is left in the place of
        one that did not: that would be of another step.
        """
        written, here, lacking = _written(), list[str](), list[str]()
        answers = True
        for path, file in wanted.items():
            came = False
            try:
                found = self._found(file, output())
                if found in written:
                    continue
                came = found == SAME or (answers and self._put(step, file, output()))
            except Misuse:  # a link of the script's is in its way
                continue
            except TimeoutError:
                answers = False
            except OSError as error:
                log.warning("%s could not be put back: %s", path, error)
            (here if came else lacking).append(path)
        self.take_away(lacking, output())
        return here, lacking

    def take_away(self, paths: Iterable[str], output: Path) -> None:
        """Remove files that no step has written as far as this worker's state goes."""
        written = _written()
        for path in paths:
            with suppress(OSError):
                there = (output / path).lstat()
                if (there.st_dev, there.st_ino) in written:
                    continue
                if self._strays is None or self._strays.drop(path):
                    (output / path).unlink()

    def _found(self, file: OutputFile, output: Path) -> tuple[int, int]:
        """Return what lies in the file's place: `SAME`, `NOTHING`, or which other file."""
        root = output if self._strays is None or not file.stray else self._strays.root
        source = open_file(files.place(root, file.path, WHO))
        if source is None:
            return NOTHING
        with source:
            there = os.fstat(source.fileno())
            if there.st_size == file.size and checksum_of(source, file.size) == file.checksum:
                return SAME
            return there.st_dev, there.st_ino

    def _put(self, step: int, file: OutputFile, output: Path) -> bool:
        target = files.place(output, file.path, WHO)
        make_way(target)
        with draft_of(target) as draft:
            if not self._fetch(step, file, draft):
                return False
            draft.replace(target)
        if file.stray and self._strays is not None:
            self._strays.put(file.path, output)
        return True

    def _fetch(self, step: int, file: OutputFile, draft: Path) -> bool:
        """Fetch a file. Return whether it has come as it is listed."""
        with draft.open("x+b", buffering=0) as sink:
            at = 0
            while at < file.size:
                _, piece = self._ask(step, file.path, at)
                if not piece:
                    return False
                at += sink.write(piece)
            return at == file.size and checksum_of(sink, at) == file.checksum

    def _ask(self, step: int, path: str = "", at: int = 0) -> tuple[OutputGiven, bytes]:
        """Return the keeper's answer, or raise `TimeoutError` if there is none after some time."""
        self._serial += 1
        asked = OutputAsked(serial=self._serial, step=step, path=path, at=at)
        for _ in range(ASKED_MAX):
            self._send(asked)
            with self._heard:
                self._heard.wait_for(lambda: self._closed or self._has_answer(), ASK_AGAIN_S)
                if self._closed:
                    break
                if (answer := self._answer) is not None and self._has_answer():
                    return answer
        raise TimeoutError(SILENT)

    def _has_answer(self) -> bool:
        return self._answer is not None and self._answer[0].serial == self._serial


def _written() -> set[tuple[int, int]]:
    """Return what this process has open to write to."""
    found = set[tuple[int, int]]()
    for name in os.listdir(OPEN_FILES):  # noqa: PTH208 - these are numbers
        with suppress(OSError):
            if fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                one = os.fstat(int(name))
                found.add((one.st_dev, one.st_ino))
    return found
