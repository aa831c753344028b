"""A worker's files on their way to the job's storage, beside the training. No torch here.

One thread reads, sums and sends what has changed, a piece at a time, and waits for the answer to each. It rests ten times
as long as it has worked, so that it takes no more than a tenth of one core, unless the job ends and waits for it. What
changes again meanwhile is sent once more; the keeper compares what it has got with what was summed here.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from agent.checksum import Buffer
from agent.messages import OutputFile
from agent.output.files import (
    CHUNK_BYTES,
    Digest,
    Seen,
    digest_of,
    open_file,
    pieces,
    seen_of,
    tail_of,
)
from agent.protocol import OutputAsked, OutputGone, OutputHeld, OutputSent, OutputTaken

log = logging.getLogger(__name__)

RESTS = 10
REST_S_MAX = 30.0
ASK_AGAIN_S = 5.0  # a keeper that was restarted has forgotten what it was asked
TORN_MAX = 3
ANSWERS_MAX = 16

Send = Callable[..., None]


class Due(msgspec.Struct, frozen=True):
    """A file that has changed, as the end of a step found it; of one that is gone there is nothing.

    With a `tail` it may have grown since, and only what was there before is meant.
    """

    step: int
    seen: Seen | None
    tail: int | None = None
    capture: Path | None = None  # a copy of it as it was then


class Sending:
    """What is due, and the thread that sends it. `files` is held by whoever changes files in their places."""

    def __init__(self, folder: Path, send: Send, generation: Callable[[], int]) -> None:
        self._folder, self._send, self._generation = folder, send, generation
        self.files = threading.RLock()
        self._changed = threading.Condition()
        self._due: dict[str, Due] = {}
        self._busy = False
        self._urgent = False
        self._closed = False
        self.stored: dict[str, OutputFile] = {}  # as far as is known here
        self.torn: dict[str, int] = {}  # how often each was caught in the middle of a change
        self.outdated = False  # somebody else has written, and what is stored is to be looked at
        self._serial = 0
        self._answers: list[tuple[OutputTaken | OutputHeld, bytes]] = []
        self._thread: threading.Thread | None = None

    # --- what the script's thread does --------------------------------------------------------------

    def put(self, changes: dict[str, Due]) -> None:
        with self._changed:
            for path, due in changes.items():
                self._forget(self._due.pop(path, None))
                self._due[path] = due
            if self._thread is None and self._due:
                self._thread = threading.Thread(target=self._work, name="output", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def restart(self, stored: dict[str, OutputFile]) -> None:
        """Go on from what the storage has."""
        with self._changed:
            for due in self._due.values():
                self._forget(due)
            self._due.clear()
            self.stored, self.outdated = dict(stored), False
            self._changed.notify_all()

    def flush(self, patience_s: float) -> bool:
        """Wait until all that is due is stored, or refused. Nothing rests meanwhile."""
        with self._changed:
            self._urgent = True
            self._changed.notify_all()
            try:
                return self._changed.wait_for(
                    lambda: self._closed or self.outdated or not (self._due or self._busy),
                    patience_s,
                )
            finally:
                self._urgent = False

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- asking the keeper --------------------------------------------------------------------------

    def hear(self, message: OutputTaken | OutputHeld, payload: Buffer) -> None:
        with self._changed:
            self._answers.append((message, bytes(payload)))
            self._changed.notify_all()

    def listing(self) -> tuple[OutputFile, ...]:
        held, _ = self._ask(None, 0)
        return held.files

    def fetch(self, file: OutputFile, into: IO[bytes]) -> bool:
        """All that the storage has of this very file. False if it has another one by now."""
        found = Digest()
        while found.size < file.size:
            held, piece = self._ask(file, found.size)
            if not held.found or not piece:
                return False
            into.write(piece)
            found.add(piece)
        into.flush()
        return found.text == file.digest

    def _ask(self, file: OutputFile | None, at: int) -> tuple[OutputHeld, bytes]:
        with self._changed:
            self._serial += 1
            serial = self._serial
        asked = OutputAsked(serial=serial, file=file, at=at)
        held, payload = self._exchange(
            lambda: self._send(asked),
            lambda said: isinstance(said, OutputHeld) and said.serial == serial,
        )
        assert isinstance(held, OutputHeld)
        return held, payload

    def _exchange(
        self, say: Callable[[], None], is_answer: Callable[[OutputTaken | OutputHeld], bool]
    ) -> tuple[OutputTaken | OutputHeld, bytes]:
        """Say it, again and again, until it is answered."""

        def found() -> tuple[OutputTaken | OutputHeld, bytes] | None:
            return next((each for each in self._answers if is_answer(each[0])), None)

        with self._changed:
            self._answers = [each for each in self._answers if not is_answer(each[0])]
        while True:
            say()
            with self._changed:
                self._changed.wait_for(lambda: found() or self._closed, ASK_AGAIN_S)
                answer = found()
                if answer is not None:
                    self._answers.remove(answer)
                    # Of those that were asked twice the second answer is nobody's.
                    del self._answers[:-ANSWERS_MAX]
                    return answer
                if self._closed:
                    raise Closed

    # --- the thread ---------------------------------------------------------------------------------

    def _work(self) -> None:
        with suppress(Closed):
            while True:
                path, due = self._take()
                began_s = time.monotonic()
                again = None
                try:
                    again = self._deliver(path, due)
                except OSError as error:
                    log.warning("%s could not be read: %s", path, error)
                finally:
                    self._forget(due)
                with self._changed:
                    self._busy = False
                    if again is not None:
                        self._due.setdefault(path, again)
                    self._changed.notify_all()
                    rest_s = min(REST_S_MAX, RESTS * (time.monotonic() - began_s))
                    self._changed.wait_for(lambda: self._urgent or self._closed, rest_s)

    def _take(self) -> tuple[str, Due]:
        """What has waited longest. Nothing is sent that others may have written over."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._due and not self.outdated))
            if self._closed:
                raise Closed
            path = next((p for p, due in self._due.items() if due.seen is None), None)
            path = path if path is not None else next(iter(self._due))
            self._busy = True
            return path, self._due.pop(path)

    @staticmethod
    def _forget(due: Due | None) -> None:
        if due is not None and due.capture is not None:
            due.capture.unlink(missing_ok=True)

    def _deliver(self, path: str, due: Due) -> Due | None:
        """What is to be tried again of it, if anything is."""
        if due.seen is None:
            return due if self._delete(path) == "other" else None
        source = open_file(due.capture or self._folder / path)
        if source is None:
            return None  # the next look finds that it is gone
        with source:
            with self.files:
                sent = self._summed(path, due, source)
            known = self.stored.get(path)
            if sent is None:
                state = "again"
            elif known is not None and (known.digest, known.size) == (
                sent.file.digest,
                sent.file.size,
            ):
                state = "done"
            else:
                state = self._hand_over(sent, source)
            if state == "done" and sent is not None:
                self.stored[path] = sent.file
                self.torn.pop(path, None)
            elif state == "other":
                self.outdated = True
            elif state == "again":
                self.torn[path] = self.torn.get(path, 0) + 1
            if state in ("other", "again"):
                return Due(due.step, seen_of(source))
        return None

    def _summed(self, path: str, due: Due, source: IO[bytes]) -> OutputSent | None:
        """What there is to send of it; None if it was changing meanwhile, and not at its end only."""
        assert due.seen is not None
        known, end = self.stored.get(path), due.seen.size
        kept, found = 0, Digest()
        if known is not None and known.size <= end:
            found = digest_of(source, known.size)
            kept = known.size if found.text == known.digest else 0
        for piece in pieces(source, found.size, end):
            found.add(piece)
        settled = due.capture is not None or _is_as_seen(source, due)
        restless = self.torn.get(path, 0) >= 2 * TORN_MAX
        if found.size < end or not (settled or kept or restless):
            return None
        file = OutputFile(path=path, size=end, step=due.step, digest=found.text)
        before = known.digest if known is not None else ""
        generation = self._generation()
        return OutputSent(generation=generation, file=file, before=before, kept=kept, at=kept)

    def _hand_over(self, sent: OutputSent, source: IO[bytes]) -> str:
        at = sent.kept
        while True:
            piece = next(pieces(source, at, min(sent.file.size, at + CHUNK_BYTES)), b"")
            taken = self._told(msgspec.structs.replace(sent, at=at), piece)
            if taken.state != "more":
                return taken.state
            at = taken.at

    def _delete(self, path: str) -> str:
        known = self.stored.get(path)
        if known is None:
            return "done"
        taken = self._told(OutputGone(generation=self._generation(), file=known))
        if taken.state == "other":
            self.outdated = True
        else:
            self.stored.pop(path, None)
        return taken.state

    def _told(self, message: OutputSent | OutputGone, *payload: bytes) -> OutputTaken:
        file = message.file
        taken, _ = self._exchange(
            lambda: self._send(message, *payload),
            lambda said: (
                isinstance(said, OutputTaken)
                and (said.path, said.digest) == (file.path, file.digest)
            ),
        )
        assert isinstance(taken, OutputTaken)
        return taken


def _is_as_seen(source: IO[bytes], due: Due) -> bool:
    """Whether what is meant of the file is still there."""
    assert due.seen is not None
    now = seen_of(source)
    if due.tail is not None:
        return now.inode == due.seen.inode and tail_of(source, due.seen.size) == due.tail
    return now.key == due.seen.key


class Closed(Exception):  # noqa: N818 - it names what happened
    """Nobody waits for anything any more."""
