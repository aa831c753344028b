"""`session.output`: a folder whose files outlive the machine. No torch here.

Every worker of a job has one, and whoever leads sends what is in it to the job's storage. It is looked at behind every
step of the script: what has changed since is due, and goes on its way beside the next steps.

What is guaranteed: a file in the storage holds what it held behind a committed step, whole. Where every worker writes,
nothing is lost with the one that leads, because the next one to lead sends its own, and what was written before it came
in is stored before it does. Where only the one that leads writes (`if session.leader`) the last moments may be lost with
it. The files of a job that ends are stored before it counts as done. A line that was appended is there once, whoever
wrote it, if the file is opened in the step, or flushed behind each: see `agent.output.merging`. Before its loop a script
finds the folder empty, in a job that is resumed as well; what it writes there then counts where the job has no such file.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any

from agent.checksum import Buffer
from agent.messages import OutputFile
from agent.output import files
from agent.output.files import Bounds, Seen, open_file
from agent.output.merging import Mark, base_of, begins_with, choose, cut_of, rewrite
from agent.output.numbers import Log
from agent.output.sending import TORN_MAX, Closed, Due, Send, Sending
from agent.output.strays import Strays
from agent.protocol import OutputHeld, OutputTaken, Strayed

FLUSH_S = 20.0  # the keeper waits a little longer for a script's end
SETTLE_S = 2.0  # others may wait for this worker meanwhile
MARKS_MAX = 256
FILES_PER_LOOK = 100  # of a microsecond or a few each
CAPTURES = ".captures"
LEFT_OUT = "session.output: {}; it is not kept"


class Output:
    """What a script writes and logs, on one worker. All but `hear` is called by the script's thread."""

    def __init__(  # noqa: PLR0913 - what it needs of the worker is told to whoever made it
        self,
        place: Path,
        send: Send | None = None,
        generation: Callable[[], int] = lambda: -1,
        *,
        aided: Callable[[], AbstractContextManager[None]] = nullcontext,
        bounds: Bounds | None = None,
        strays: Strays | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Alone there is nobody to `send` to. `aided`: others are waited for meanwhile; `say` is told what is left out."""
        self._place, self._send, self._aided = place, send, aided
        self._generation = generation
        self._bounds, self._strays, self._say = bounds or Bounds(), strays, say
        self._sending = None if send is None else Sending(place, send, generation)
        self._log = Log(send)
        self._used = False
        self._seen: dict[str, Seen] = {}
        self._marks: dict[str, list[Mark]] = {}
        self._step = 0  # that is about to be done, or is
        self._looked = -1  # the step behind which the folder was looked at last
        self._every = 1  # so many steps from one look to the next
        self._base = -1  # the step behind which this worker came in
        self._entered = generation()
        self._leads = self._owes = (
            False  # the latter: the storage has not been looked at since it leads
        )
        self._left_out = False

    @property
    def folder(self) -> Path:
        """Where the script writes; made when it is first asked for."""
        if not self._used:
            self._place.mkdir(parents=True, exist_ok=True)
            self._place, self._used, self._looked = self._place.resolve(), True, self._step - 1
            if self._owes:
                self._look_at_storage()
        return self._place

    @property
    def in_use(self) -> Path | None:
        """The folder, if the script has asked for it."""
        return self._place if self._used else None

    def log(self, step: int, numbers: Mapping[str, Any]) -> None:
        self._log.add(step, numbers)

    def forget(self) -> None:
        """The step in flight counts for nothing here, and is done again."""
        self._log.forget()

    # --- where the world calls it -------------------------------------------------------------------

    def enter(self, step: int, *, leads: bool, fresh: bool) -> None:
        """At a boundary, and whenever another layout is entered within a step: `step` is the one to do, or in flight.

        `fresh`: the state has come from others since the last call, or this is the first. What the files hold by now
        counts for the steps before.
        """
        self._step = step
        if fresh:
            self._base = step - 1
            self._marks.clear()
            self._seen.clear()
            self._log.forget()
            if self._used:
                self._look(step - 1)
        begins = leads and (fresh or not self._leads)
        if begins and step > 0:
            self._log.lead(step)
        self._owes = self._sending is not None and leads and (self._owes or begins)
        self._leads = leads
        if self._used and (self._owes or (leads and self._outdated)):
            self._look_at_storage()
        if self._entered != (entered := self._generation()):
            self._entered = entered
            self._settle()

    def scan(self, step: int, *, leads: bool, last: bool = False) -> list[str]:
        """Behind a step of the script, once its code is through: which files have changed, or are gone.

        Where many files are, they are looked at behind every few steps, behind the same ones on every worker.
        """
        self._log.ended(step, leads=leads)
        self._step = step + 1
        if leads and self._strays is not None and self._send is not None:
            stray = self._strays.look(self._place if self._used else None)
            if stray:
                self._send(Strayed(path=stray))
        due = last or (step + 1) % self._every == 0
        if not self._used or self._sending is None or not due:
            return []
        changed = self._look(step)
        if leads:
            if self._sending.outdated:
                self._look_at_storage()
                changed = self._look(step)
            self._sending.put({path: self._due(path) for path in changed})
        return changed

    def finish(self, step: int, *, leads: bool, patience_s: float = FLUSH_S) -> bool:
        """The script is at its end: whether all it wrote is stored, or need not be."""
        if self._sending is None or not self._used:
            self._log.ended(step, leads=leads)
            return True
        self.scan(step, leads=leads, last=True)
        with self._aided():
            stored = self._sending.flush(patience_s)
        if leads and self._sending.outdated:
            self.scan(step, leads=True, last=True)
            with self._aided():
                stored = self._sending.flush(patience_s)
        return stored

    def hear(self, message: OutputTaken | OutputHeld, payload: Buffer) -> None:
        """What the keeper says, on the thread that listens to it."""
        if self._sending is not None:
            self._sending.hear(message, payload)

    def close(self) -> None:
        if self._sending is not None:
            self._sending.close()

    def _settle(self) -> None:
        """Another layout begins: who comes in with it has written nothing of what was written before, so it is stored."""
        if self._used and self._sending is not None:
            with self._aided():
                self._sending.flush(SETTLE_S)

    # --- looking ------------------------------------------------------------------------------------

    @property
    def _outdated(self) -> bool:
        return self._sending is not None and self._sending.outdated

    def _look(self, step: int) -> list[str]:
        found, left_out = files.look(self._place, self._bounds.files)
        if left_out and not self._left_out:
            self._left_out = True
            self._say(LEFT_OUT.format(left_out))
        changed = [path for path, seen in found.items() if not seen.same(self._seen.get(path))]
        gone = [path for path in self._seen if path not in found]
        for path in changed:
            if path not in self._marks and step > self._base:
                self._note(path, Mark(step - 1, -1))
            self._mark(path, step)
        for path in gone:
            self._note(path, Mark(step, -1))
        self._seen, self._looked = found, step
        self._every = 1 + len(found) // FILES_PER_LOOK
        return [*gone, *changed]

    def _mark(self, path: str, step: int) -> None:
        file = open_file(self._place / path)
        if file is not None:
            with file:
                seen = files.seen_of(file)
                tail = files.tail_of(file, seen.size)
                self._note(path, Mark(step, seen.size, seen.inode, tail))

    def _note(self, path: str, mark: Mark) -> None:
        """A step that is done again takes the place of what it was; one that changed nothing is none."""
        marks = self._marks.setdefault(path, [])
        if marks and marks[-1].step < mark.step and mark.same(marks[-1]):
            return
        while marks and marks[-1].step >= mark.step:
            marks.pop()
        marks.append(mark)
        del marks[:-MARKS_MAX]

    def _due(self, path: str) -> Due:
        seen, sending = self._seen.get(path), self._sending
        assert sending is not None
        capture = None
        if seen is not None and sending.torn.get(path, 0) >= TORN_MAX:
            capture = self._capture(path)
        return Due(self._marks[path][-1].step, seen, capture=capture)

    def _capture(self, path: str) -> Path | None:
        """It changes faster than it is read: a copy does not."""
        room = self._room()
        with suppress(OSError), tempfile.NamedTemporaryFile(dir=room, delete=False) as copy:
            with (self._place / path).open("rb") as own:
                shutil.copyfileobj(own, copy)
            return Path(copy.name)
        return None

    def _room(self) -> Path:
        """Beside the folder, on the same disk."""
        room = self._place.parent / f".{self._place.name}{CAPTURES}"
        room.mkdir(exist_ok=True)
        return room

    # --- beginning to lead --------------------------------------------------------------------------

    def _look_at_storage(self) -> None:
        """Have the files of the job here, each with what this worker has appended to it since."""
        sending = self._sending
        assert sending is not None
        self._owes = False
        with suppress(Closed), self._aided():
            while True:
                stored = {file.path: file for file in sending.listing()}
                with sending.files:
                    if all(self._take(file) for file in stored.values()):
                        break
            sending.restart(stored)
            lacking = [path for path in stored if not (self._place / path).exists()]
            due = {path: Due(self._looked, None) for path in lacking}
            for path, marks in self._marks.items():
                mark = marks[-1]
                if mark.size >= 0 and path not in lacking:
                    # As it was behind the last step: what this one has written follows behind its end.
                    due[path] = Due(mark.step, Seen(mark.inode, mark.size, 0), tail=mark.tail)
            sending.put(due)
            self._every = 1 + max(len(stored), len(self._marks)) // FILES_PER_LOOK
            self._seen = {}

    def _take(self, stored: OutputFile) -> bool:
        """Make the file here go on from the stored one. False if that is another one by now."""
        path, step = self._place / stored.path, self._step
        marks = self._marks.get(stored.path, [])
        cut = cut_of(stored, step)
        own = open_file(path)
        if own is None:
            if marks and marks[-1].size < 0 and marks[-1].step > stored.step:
                return True  # the script has deleted it since
            return self._fetch(stored, cut, 0)
        with own:
            size = files.seen_of(own).size
            if cut == stored.size <= size and self._goes_on(own, stored):
                return True
            base = base_of(marks, stored.step)
            choice = choose(own, base)
            if choice == "own":
                return True
            appended = max(0, base.size) if choice == "joined" else size
            return self._fetch(stored, cut, appended, own)

    @staticmethod
    def _goes_on(own: IO[bytes], stored: OutputFile) -> bool:
        """Whether it begins as the stored one is."""
        return files.digest_of(own, stored.size).text == stored.digest

    def _fetch(
        self, stored: OutputFile, cut: int, appended: int, own: IO[bytes] | None = None
    ) -> bool:
        sending, path = self._sending, self._place / stored.path
        assert sending is not None
        size = 0 if own is None else files.seen_of(own).size
        last = next(reversed(self._marks.get(stored.path, [])), Mark(-1, 0))
        in_flight = min(max(0, size - max(0, last.size)), max(0, size - appended))
        room = self._room()
        with tempfile.TemporaryFile(dir=room) as whole:
            if not sending.fetch(stored, whole):
                return False
            if own is None or not begins_with(own, whole, cut):
                length = rewrite(path, whole, cut, appended, room)
                self._remark(stored.path, length - in_flight)
        return True

    def _remark(self, path: str, size: int) -> None:
        """From now on the file is reckoned with as it is here."""
        file = open_file(self._place / path)
        if file is not None:
            with file:
                mark = Mark(
                    self._looked, size, files.seen_of(file).inode, files.tail_of(file, size)
                )
                self._marks[path] = [mark]
