"""Send changes of a worker's files to the job's storage during training. No torch here.

Every worker notes in a few words what each step changed in each file. The leader has its notes
sent; the next leader has notes too, and sends what the storage lacks. The bytes stay in the files
until they are sent.

One thread reads and sends, a piece at a time, and waits for the answer to each. It rests ten times
as long as it has worked, so that it takes no more than a tenth of one core, unless others wait for
it. A file that has changed while it was read is sent as the next look finds it.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

import msgspec

from agent.checksum import crc32c
from agent.output.files import (
    CHUNK_BYTES,
    Seen,
    checksum_of,
    open_file,
    pieces,
    seen_of,
    tail_of,
)
from agent.protocol import OutputSent, OutputTaken

log = logging.getLogger(__name__)

RESTS = 10
REST_S_MAX = 30.0
ASK_AGAIN_S = 5.0  # because a restarted keeper has forgotten what it was sent
NOTES_MAX = 256
TORN_MAX = 3

Send = Callable[..., None]
How = Literal["begun", "whole", "append", "lines", "gone"]


class Change(msgspec.Struct, frozen=True):
    """What steps changed in a file: its bytes from `start` on, as `seen` after the last step.

    Without `seen` the file is gone. `generation` is that of the layout that this worker led then;
    -1 if another worker led. `since` is the first step, if there are several.
    """

    step: int
    how: How
    generation: int
    start: int = 0
    seen: Seen | None = None
    since: int = -1

    @property
    def first(self) -> int:
        return self.step if self.since < 0 else self.since

    def joined(self, later: "Change") -> "Change | None":
        """Return both as one; None if they cannot be sent as one."""
        alike = (self.generation < 0) == (later.generation < 0)
        if not alike or self.how in ("begun", "gone") or later.how != "append":
            return None
        return msgspec.structs.replace(self, step=later.step, seen=later.seen, since=self.first)


class Sending:
    """The changes that the storage may lack, and the thread that sends them."""

    def __init__(
        self,
        folder: Path,
        send: Send,
        generation: Callable[[], int],
        is_stray: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._folder, self._send, self._generation = folder, send, generation
        self._is_stray = is_stray
        self._changed = threading.Condition()
        self._changes: dict[str, list[Change]] = {}
        self._due: dict[str, None] = {}
        self._busy = self._closed = self._anew = False
        self._urgent = 0  # how many wait for what is due
        # How often a file was being changed while it was read, or could not be read.
        self._torn: dict[str, int] = {}
        # Files for which the storage had no room.
        self._owed: set[str] = set()
        # Size and checksum of what was sent last.
        self._sums: dict[str, tuple[int, int]] = {}
        self._serial = 0
        self._answer: OutputTaken | None = None
        self._thread: threading.Thread | None = None

    # --- what the script's thread does ------------------------------------------------------------

    def knows(self, path: str) -> bool:
        return path in self._changes

    @property
    def restless(self) -> bool:
        """Whether some file changes faster than it can be sent."""
        return any(count >= TORN_MAX for count in self._torn.values())

    def differs(self, path: str, file: IO[bytes], size: int) -> bool:
        """Whether a file of this size does not hold what was sent of it last."""
        sent_size, checksum = self._sums.get(path, (-1, 0))
        return sent_size == size and checksum_of(file, size) != checksum

    def note(self, path: str, change: Change) -> None:
        """Note a change. It replaces notes of a repeated step; a whole file replaces all notes."""
        with self._changed:
            changes = self._changes.setdefault(path, [])
            while changes and (changes[-1].step > change.step or change.how in ("whole", "gone")):
                changes.pop()
            changes.append(change)
            if len(changes) > NOTES_MAX:
                _join(changes)
            if change.generation >= 0:
                self._due[path] = None
                self._wake()

    def lead(self) -> None:
        """Send what was noted while others led, or was refused, as far as the storage lacks it."""
        with self._changed:
            self._due |= dict.fromkeys(self._changes)
            self._wake()

    def forget(self, step: int) -> None:
        """Keep only notes from steps before `step` that this worker led.

        That is because the state has come from others.
        """
        with self._changed:
            for path, changes in list(self._changes.items()):
                self._keep(path, [c for c in changes if c.generation >= 0 and c.step < step])

    def flush(self, patience_s: float) -> bool:
        """Wait, without rests, until all that is due is stored or refused. Return whether it is."""
        with self._changed:
            self._urgent += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(
                    lambda: self._closed or not (self._due or self._busy), patience_s
                )
            finally:
                self._urgent -= 1

    @property
    def torn(self) -> bool:
        """Whether some file was changed again, or gone, before it was stored."""
        return bool(self._torn)

    @property
    def owed(self) -> bool:
        """Whether the storage lacks some file for which it may have room later."""
        with self._changed:
            return bool(self._owed & self._changes.keys())

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def hear(self, answer: OutputTaken) -> None:
        """Take an answer, on the thread that listens to the keeper."""
        with self._changed:
            self._answer = answer
            self._changed.notify_all()

    def ask_again(self) -> None:
        """Send what is not answered again, because the keeper may be another one."""
        with self._changed:
            self._anew = True
            self._changed.notify_all()

    def _keep(self, path: str, changes: list[Change]) -> None:
        if changes:
            self._changes[path] = changes
        else:
            for of_path in (self._changes, self._due, self._torn):
                of_path.pop(path, None)

    def _wake(self) -> None:
        if self._thread is None and self._due:
            self._thread = threading.Thread(target=self._work, name="output", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    # --- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        with suppress(Closed):
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._due)
                    if self._closed:
                        raise Closed
                    path = next(iter(self._due))
                    del self._due[path]
                    changes, self._busy = _next(self._changes.get(path, [])), True
                began_s = time.monotonic()
                try:
                    if changes:
                        self._deliver(path, changes)
                except OSError as error:
                    log.warning("%s could not be read: %s", path, error)
                    self._tear(path)
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
                    rest_s = min(REST_S_MAX, RESTS * (time.monotonic() - began_s))
                    self._changed.wait_for(lambda: self._urgent or self._closed, rest_s)

    def _deliver(self, path: str, changes: list[Change]) -> None:
        """Send changes of a file as one, and forget them when they are stored."""
        first, last = changes[0], changes[-1]
        with self._changed:
            self._serial += 1
            sent = OutputSent(
                serial=self._serial,
                generation=first.generation if first.generation >= 0 else self._generation(),
                path=path,
                how=first.how,
                since=first.first,
                step=last.step,
                again=first.generation < 0,
                stray=self._is_stray(path),
            )
        if last.seen is None:
            taken: OutputTaken | None = self._say(sent, b"")
        else:
            source = open_file(self._folder / path)
            if source is None:
                self._tear(path)  # the next look finds that it is gone
                return
            with source:
                taken = self._hand_over(sent, source, (first.start, last.seen))
        if taken is None:
            self._tear(path)
            return
        with self._changed:
            self._torn.pop(path, None)
            self._owed.discard(path)
            here = self._changes.get(path, [])
            left = [each for each in here if not any(each is one for one in changes)]
            if taken.state == "refused":
                if taken.for_now:
                    self._owed.add(path)
                # What follows goes on from it, so both are sent with the next change, or neither.
                return
            if taken.state == "has":
                left = [self._lacking(each, taken.at) for each in here if each.step > taken.at]
            elif taken.state == "lacks":
                left = [msgspec.structs.replace(last, how="whole", start=0), *left]
            self._keep(path, left)
            if left:
                self._due[path] = None

    def _tear(self, path: str) -> None:
        with self._changed:
            self._torn[path] = self._torn.get(path, 0) + 1

    def _lacking(self, change: Change, at: int) -> Change:
        """Return a change that is to be sent, because the storage has the file only as of step `at`.

        Where in the change that step ended is not known, so all of it replaces what is there of it.
        """
        within = change.generation < 0 and change.first <= at
        generation = self._generation() if within else change.generation
        return msgspec.structs.replace(change, generation=generation)

    def _hand_over(
        self, sent: OutputSent, source: IO[bytes], what: tuple[int, Seen]
    ) -> OutputTaken | None:
        """Return the answer to all of it; None if the file changed meanwhile, except at its end."""
        (start, seen), path, total = what, sent.path, 0
        if start:
            total = checksum_of(source, start)
            size, checksum = self._sums.get(path, (start, total))
            if size == start and checksum != total:
                # The file was changed before its end as well.
                start, total, sent = 0, 0, msgspec.structs.replace(sent, how="whole")
        sent = msgspec.structs.replace(sent, size=seen.size - start)
        at, before, summed = 0, total, 0
        while True:
            if at == 0:
                total, summed = before, 0
            end = min(seen.size, start + at + CHUNK_BYTES)
            piece = next(pieces(source, start + at, end), b"")
            if not _holds(source, seen):
                return None
            taken = self._say(msgspec.structs.replace(sent, at=at), piece)
            if at == summed:
                total, summed = crc32c(total, piece), summed + len(piece)
            if taken.state not in ("more", "again"):
                if taken.state == "done" and summed == sent.size:
                    self._sums[path] = (seen.size, total)
                return taken
            at = taken.at

    def _say(self, message: OutputSent, payload: bytes) -> OutputTaken:
        """Send a message again and again, until it is answered. Return the answer."""
        while True:
            self._anew = False
            self._send(message, payload)
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._anew or self._answer_to(message.serial),
                    ASK_AGAIN_S,
                )
                if self._closed:
                    raise Closed
                if (answer := self._answer_to(message.serial)) is not None:
                    # The next piece of the change has the same serial.
                    self._answer = None
                    return answer

    def _answer_to(self, serial: int) -> OutputTaken | None:
        answer = self._answer
        return answer if answer is not None and answer.serial == serial else None


def _join(changes: list[Change]) -> None:
    """Join changes of the older half in pairs, so that their bytes are sent and only steps blur."""
    half, joined = len(changes) // 2, list[Change]()
    while half:
        first, half = changes.pop(0), half - 1
        both = first.joined(changes[0]) if half else None
        if both is not None:
            half -= 1
            changes.pop(0)
        joined.append(both or first)
    changes[:0] = joined


def _next(changes: list[Change]) -> list[Change]:
    """Return the changes that can be sent as one: those since the file was last replaced."""
    return changes[:1] if changes and changes[0].how == "begun" else changes[:]


def _holds(source: IO[bytes], seen: Seen) -> bool:
    """Whether the file still holds what was seen of it; more may have been added."""
    now = seen_of(source)
    if now.size == seen.size:
        return now.key == seen.key
    grown = now.inode == seen.inode and now.size > seen.size
    return grown and tail_of(source, seen.size) == seen.tail


class Closed(Exception):  # noqa: N818 - it names what happened
    """The output is closed, and no thread waits for it any more."""
