"""`session.output`: a folder whose files outlive the machine. No torch here.

Every worker of a job has one, and notes after each step what the step changed in it. The leader
sends that to the job's storage while the next steps run; the next leader sends from its notes what
the storage lacks (see `agent.output.sender`).

What is guaranteed:

* A file in the storage holds what it held after a committed step, whole.
* If every worker writes, nothing is lost with the leader, because the next leader sends its files,
  and what was written before that worker came in was stored as it came in.
* If only the leader writes (`if session.leader`), the last moments may be lost with it.
* The files of a job that ends are stored before it counts as done.
* A line that was appended is there once, whichever worker wrote it, if the file is opened in the
  step, or flushed after each. Only if a job goes back to a checkpoint of long ago, a few lines of
  just before that may be missing.

A worker has only the files that it wrote itself, so what a script reads back later belongs into
`session.state`. Before its loop a script finds the folder empty, also in a job that is resumed;
what it writes there then counts if the job has no such file.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from agent.output import files
from agent.output.files import Bounds, Seen, open_file
from agent.output.metrics import Log
from agent.output.script_values import Teller
from agent.output.sender import Change, Send, Sending
from agent.output.strays import Strays
from agent.protocol import OutputTaken, Strayed

FLUSH_S = 20.0  # the keeper waits a little longer for a script's end
SETTLE_S = 2.0  # others may wait for this worker meanwhile
FILES_PER_LOOK = 20  # some microseconds each
# A stray file is reported once, so it may be found some steps late; a look takes 0.1 ms.
STRAYS_EARLY, STRAYS_EVERY = 4, 16
LEFT_OUT = "session.output: {!r}: {}; it is not kept"


class Output:
    """A script's files and numbers, on one worker.

    The script's thread calls all but `hear` and `tell_numbers`.
    """

    def __init__(  # noqa: PLR0913 - its maker gives what it needs of the worker
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
        """Without `send`, the worker is alone.

        `aided` marks that others are waited for; `say` prints what is left out.
        """
        self._place, self._send, self._aided = place, send, aided
        self._generation = generation
        self._bounds, self._strays, self._say = bounds or Bounds(), strays, say
        self._sending = None if send is None else Sending(place, send, generation)
        self._log, self._values = Log(send), Teller(send)
        self._used = False
        self._seen: dict[str, Seen] = {}
        self._every = 1  # steps from one look to the next
        self._entered = generation()
        self._leads = False
        self._left_out = set[str]()  # the reasons that were said

    @property
    def folder(self) -> Path:
        """The folder that the script writes to; made at the first request."""
        if not self._used:
            self._place.mkdir(parents=True, exist_ok=True)
            self._place, self._used = self._place.resolve(), True
        return self._place

    @property
    def in_use(self) -> Path | None:
        """The folder, if the script has asked for it."""
        return self._place if self._used else None

    def log(self, step: int, numbers: Mapping[str, Any]) -> None:
        self._log.add(step, numbers)

    def forget(self) -> None:
        """Forget the step in flight, because it counts for nothing here, and is done again."""
        self._log.forget()

    def tell_numbers(self, *, anew: bool = False) -> None:
        """Send the numbers of the last steps, at a heartbeat and before anything depends on it.

        With `anew` the keeper may be another one, which has not got what was sent before.
        """
        if anew and self._leads:
            self._log.tell_again()
        self._log.tell()

    # --- where the world calls it -----------------------------------------------------------------

    def enter(self, step: int, *, leads: bool, fresh: bool) -> None:
        """Enter a step at a boundary, or a new layout within the step.

        `step` is the one to do, or in flight. `fresh` means that the state has come from others
        since the last call, or that this is the first. What the files hold then counts for earlier
        steps.
        """
        begins, self._leads = leads and (fresh or not self._leads), leads
        if fresh or not leads:
            self._log.tell()
        if fresh:
            self._log.forget()
        if begins:
            self._values.forget()
        if begins and step > 0:
            self._log.tell_again(before=step)
        if self._sending is None:
            return
        if fresh:
            self._sending.forget(step)
            self._seen = {}
            if self._used:
                self._look(step - 1, begun=True)
        if begins:
            self._sending.lead()
        if self._entered != (entered := self._generation()):
            # A worker that comes in with this layout lacks what was written before: store that now.
            self._entered = entered
            self._flush(SETTLE_S)

    def scan(self, step: int, *, leads: bool, last: bool = False) -> list[str]:
        """Return the files that a step has changed or deleted, once the script's code is through.

        If there are many files, they are looked at only after every few steps, the same ones on
        every worker.
        """
        self._log.ended(step, leads=leads)
        if last:
            self._log.tell()
        self._leads = leads
        look = last or step < STRAYS_EARLY or step % STRAYS_EVERY == 0
        if look and leads and self._strays is not None and self._send is not None:
            stray = self._strays.look(self._place if self._used else None)
            if stray:
                self._send(Strayed(path=stray))
        due = last or (step + 1) % self._every == 0
        if not self._used or self._sending is None or not due:
            return []
        changed = self._look(step)
        if self._sending.restless:
            self._flush(SETTLE_S)
        return changed

    def tell(self, step: int, state: Mapping[Any, Any], *, last: bool = False) -> None:
        """Tell people what `session.state` holds behind a step, if this worker leads."""
        if self._leads:
            self._values.tell(step, state, last=last)

    def finish(self, step: int, *, leads: bool, patience_s: float = FLUSH_S) -> bool:
        """End the output. Return whether all the script wrote is stored, or need not be.

        What the storage has refused is sent once more, because it may have room now.
        """
        until_s = time.monotonic() + patience_s
        self.scan(step, leads=leads, last=True)
        if self._sending is None or not leads:
            return self._flush(patience_s)
        self._sending.lead()
        if not self._flush(patience_s):
            return False
        self._compare(step, self._sending)
        return self._flush(max(0.0, until_s - time.monotonic()))

    def hear(self, message: OutputTaken) -> None:
        """Take an answer of the keeper, on the thread that listens to it."""
        if self._sending is not None:
            self._sending.hear(message)

    def close(self) -> None:
        if self._sending is not None:
            self._sending.close()

    def _flush(self, patience_s: float) -> bool:
        if self._sending is None or not self._used:
            return True
        with self._aided():
            return self._sending.flush(patience_s)

    # --- looking ----------------------------------------------------------------------------------

    def _look(self, step: int, *, begun: bool = False) -> list[str]:
        """Note what has changed in the folder since the last look."""
        sending = self._sending
        assert sending is not None
        found, left_out = files.look(self._place, self._bounds.files, self._seen)
        for why, path in left_out.items():
            if why not in self._left_out:
                self._left_out.add(why)
                self._say(LEFT_OUT.format(path, why))
        generation = self._generation() if self._leads else -1
        changes = dict[str, Change]()
        for path in self._seen.keys() - found.keys():
            changes[path] = Change(step, "gone", generation)
            del self._seen[path]
        for path, seen in found.items():
            before = self._seen.get(path)
            if before is None or before.racy or before.key != seen.key:
                change = self._change(path, step, generation, begun=begun)
                if change is not None:
                    changes[path] = change
        for path, change in changes.items():
            sending.note(path, change)
        self._every = 1 + len(found) // FILES_PER_LOOK
        return [*changes]

    def _change(self, path: str, step: int, generation: int, *, begun: bool) -> Change | None:
        """Return the change to a file that does not look as before; None if there is none."""
        file, before = open_file(self._place / path), self._seen.get(path)
        if file is None:
            return None
        with file:
            seen = files.seen_of(file)
            seen = msgspec.structs.replace(seen, tail=files.tail_of(file, seen.size))
            self._seen[path] = seen
            if begun:
                return Change(step, "begun", generation, 0, seen)
            if before is None:
                lines = files.is_lines(file, seen.size) and not self._knows(path)
                return Change(step, "lines" if lines else "whole", generation, 0, seen)
            if before.key == seen.key and before.tail == seen.tail:
                return None
            grown = before.inode == seen.inode and before.size < seen.size
            if grown and files.tail_of(file, before.size) == before.tail:
                return Change(step, "append", generation, before.size, seen)
            return Change(step, "whole", generation, 0, seen)

    def _compare(self, step: int, sending: Sending) -> None:
        """Note the files that hold something else than was sent, though they look the same.

        What a script writes through a mapping changes neither a file's size nor, at once, its time.
        """
        for path in self._seen:
            file = open_file(self._place / path)
            if file is None:
                continue
            with file:
                seen = files.seen_of(file)
                if sending.differs(path, file, seen.size):
                    seen = msgspec.structs.replace(seen, tail=files.tail_of(file, seen.size))
                    sending.note(path, Change(step, "whole", self._generation(), 0, seen))

    def _knows(self, path: str) -> bool:
        return self._sending is not None and self._sending.knows(path)
