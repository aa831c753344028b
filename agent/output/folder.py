"""`session.output`: a folder whose files outlive the machine. No torch here.

Every worker of a job has one, and notes after each step what the step changed in it. The leader
sends that to the job's storage while the next steps run; the next leader sends from its notes what
the storage lacks (see `agent.output.sender`).

What is guaranteed:

* A file in the storage holds what it held after a committed step, whole.
* If every worker writes, nothing is lost with the leader, because the next leader sends its files,
  and what was written before that worker came in was stored as it came in. Nothing is lost with
  all workers either, because what was written before a snapshot is stored before the snapshot.
* If only the leader writes (`if session.leader`), the last moments may be lost with it.
* The files of a job that ends are stored before it counts as done.
* A line that was appended is there once, whichever worker wrote it, if the file is opened in the
  step, or flushed after each. Only if a job goes back to a checkpoint of long ago, a few lines of
  just before that may be missing.
* A worker that gets its state from others finds the files of all steps before it, as they were
  then, or none if not all are stored. After the loop every worker finds the newest.

Before its loop a script finds the folder empty, also in a job that is resumed; what it writes there
then counts if the job has no such file.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

from agent.output import files
from agent.output.files import Bounds, Seen, open_file, why_no_path
from agent.output.kept import Kept
from agent.output.metrics import Log
from agent.output.script_values import Teller
from agent.output.sender import Change, How, Send, Sending
from agent.output.strays import Strays
from agent.protocol import OutputGiven, OutputTaken, OutputWhole, Strayed

FLUSH_S = 20.0  # the keeper waits a little longer for a script's end
SETTLE_S = 2.0  # others may wait for this worker meanwhile
FILES_PER_LOOK = 20  # some microseconds each, as for a folder
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
        is_stray = strays.has if strays is not None else lambda _: False
        self._sending = None if send is None else Sending(place, send, generation, is_stray)
        self._kept = None if send is None else Kept(send, strays)
        self._wrote = dict[str, int]()  # the step in which this worker changed a file last
        self._is_first = True  # no state has come from others, and no step was done in vain
        # The step that this worker entered with a state from others, and whether beside others.
        self._fresh: tuple[int, bool] | None = None
        # The steps in which the script can go on where it is; in another one it first ends its epoch.
        self.within: range | None = None
        # Whether this worker has its state from others, and not all files that belong to it.
        self.lacks = False
        self._counts = False  # whether a step that this worker did was one for the job
        self._log, self._values = Log(send), Teller(send)
        self._used = False
        self._seen: dict[str, Seen] = {}
        # What the script wrote before its loop; None until it comes there.
        self._before: dict[str, Seen] | None = None
        # Files that the job may have, or not, and that this worker only adds to.
        self._added = set[str]()
        self._looked = False  # whether all was found that was written before the step at hand
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

    @property
    def _is_there(self) -> bool:
        """Whether there is a folder: the script asked for it, or made one of this name itself."""
        return self._used or (self._place.is_dir() and self.folder.is_dir())

    def log(self, step: int, numbers: Mapping[str, Any]) -> None:
        self._log.add(step, numbers)

    def forget(self) -> None:
        """Forget the step in flight, because it counts for nothing here, and is done again."""
        self._log.forget()
        self._is_first = False

    def tell_numbers(self, *, anew: bool = False) -> None:
        """Send the numbers of the last steps, at a heartbeat and before anything depends on it.

        With `anew` the keeper may be another one, which has not got what was sent before.
        """
        if anew and self._leads:
            self._log.tell_again()
        if anew and self._sending is not None:
            self._sending.ask_again()
        self._log.tell()

    # --- where the world calls it -----------------------------------------------------------------

    def begin(self) -> None:
        """Take note of what the script has written before its loop, when it first comes there."""
        if self._before is None:
            self._before = self._found(self._present() if self._sending is not None else ())
        if self._strays is not None:
            self._strays.begin()

    def enter(
        self, step: int, *, leads: bool, fresh: bool, beside: bool = False, inside: bool = False
    ) -> None:
        """Enter a step at a boundary, or a new layout `inside` the step.

        `step` is the one to do, or in flight. `fresh` means that the state has come from others
        since the last call, or that this is the first. What the files hold then counts for earlier
        steps, and the files that the job has kept of these come here. `beside` means that workers
        which have done those steps enter it as well.
        """
        self.begin()
        self._counts |= not fresh
        if self._entered != self._generation() and not (fresh or inside or self._looked):
            self._find(step - 1, everywhere=True)
        led = self._leads
        begins, self._leads = leads and (fresh or not led), leads
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
        self._fresh = (step, beside) if fresh else None
        if fresh:
            self._sending.forget(step)
        if self.within is None or step in self.within:
            self.take_up()
        if begins:
            self._sending.lead()
        if self._entered != (entered := self._generation()):
            # A worker that comes in with this layout lacks what was written before: store that now.
            self._entered = entered
            if self._flush(SETTLE_S) and (led or leads) and not fresh:
                self._send_whole(step - 1)

    def take_up(self) -> None:
        """Put the files of the state here, if it has come from others.

        Once more if the script has done something else meanwhile, as an epoch's start or end that
        others have done: what it wrote then does not count.
        """
        if self._sending is not None and self._fresh is not None:
            step, beside = self._fresh
            self._sending.forget(step)
            self._begin_anew(step, beside=beside)

    def _begin_anew(self, step: int, *, beside: bool) -> None:
        """Go on from a state that has come from others, with the files that were there then."""
        self._seen, self._wrote, self._looked = {}, {}, False
        if step > 0 or not self._is_first:
            self._restore(step - 1, awaited=beside)
        self._is_first = False
        if self._is_there:
            self._look(step - 1, begun=True)

    def scan(
        self,
        step: int,
        *,
        leads: bool,
        saved: bool = False,
        awaited: bool = False,
        last: bool = False,
    ) -> list[str]:
        """Return the files that a step has changed or deleted, once the script's code is through.

        If there are many files, they are looked at only after every few steps, the same ones on
        every worker. They are also if a worker is `awaited` that may begin with the state after the
        step; if that state is going to be `saved`, all folders are.
        """
        self._log.ended(step, leads=leads)
        if last:
            self._log.tell()
        self._leads = leads
        self._looked = False
        if not (last or saved or awaited or (step + 1) % self._every == 0):
            return []
        changed = self._find(step, everywhere=last or saved)
        if self._sending is not None and self._sending.restless:
            self._flush(SETTLE_S)
        return changed

    def tell(self, step: int, state: Mapping[Any, Any], *, last: bool = False) -> None:
        """Tell people what `session.state` holds behind a step, if this worker leads."""
        if self._leads:
            self._values.tell(step, state, last=last)

    def precede(self, step: int, *, leads: bool) -> None:
        """Have what was written up to `step` stored, before the state after it is sent."""
        if self._sending is None or not leads:
            return
        if self._sending.owed or not self._leads:
            self._sending.lead()
        if self._flush(SETTLE_S):
            self._send_whole(step)

    def leave(self, step: int) -> None:
        """Leave the loop: find all that was written in it."""
        self._find(step, everywhere=True)

    def hand_in(self) -> None:
        """Have stored what was written in the loop, if this worker is the last to lead it."""
        if self._sending is not None:
            self._sending.lead()
            self._flush(FLUSH_S)

    def gather(self, step: int) -> None:
        """Get what was written in the loop, once all of it is stored."""
        if self._sending is not None:
            self._restore(step, awaited=False, after=True)

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

    def hear(self, message: OutputTaken | OutputGiven, payload: memoryview) -> None:
        """Take an answer of the keeper, on the thread that listens to it."""
        if self._sending is None or self._kept is None:
            return
        if isinstance(message, OutputGiven):
            self._kept.hear(message, payload)
        else:
            self._sending.hear(message)

    def close(self) -> None:
        if self._sending is not None and self._kept is not None:
            self._sending.close()
            self._kept.close()

    def _send_whole(self, step: int) -> None:
        assert self._sending is not None and self._send is not None
        if self._looked and not (self._sending.torn or self._sending.owed):
            self._send(OutputWhole(step=step))

    def _restore(self, step: int, *, awaited: bool, after: bool = False) -> None:
        """Put here what the job has kept of the steps up to this one.

        In the loop that is all or, if some of it is not stored, nothing: a file of another step
        would change what the script computes. Nor does what it wrote for a proof stay. After the
        loop it is what this worker has not written later.
        """
        kept = self._kept
        assert kept is not None
        with self._aided():
            given = kept.listed(step, awaited=awaited)
            self.lacks = given is None or not given.whole
            if given is None:
                return
            wanted = {
                file.path: file
                for file in given.files
                if (given.whole or after)
                and not why_no_path(file.path)
                and file.step >= self._wrote.get(file.path, -1)
            }
            if not after and (given.whole or not self._counts):
                self._keep_strays(everywhere=True)
                undone = self._present() - wanted.keys() - (self._before or {}).keys()
                kept.take_away(undone, self._place)
            here, lacking = kept.put(step, wanted, lambda: self.folder)
            self.lacks |= bool(lacking)
        self._seen |= self._found(here)

    def _present(self) -> set[str]:
        return {*files.look(self._place, self._bounds.files)[0]} if self._is_there else set()

    def _found(self, paths: Iterable[str]) -> dict[str, Seen]:
        found = {}
        for path in paths:
            if (file := open_file(self._place / path)) is not None:
                with file:
                    found[path] = files.seen_whole(file)
        return found

    def _flush(self, patience_s: float) -> bool:
        if self._sending is None or not self._is_there:
            return True
        with self._aided():
            return self._sending.flush(patience_s)

    def _find(self, step: int, *, everywhere: bool) -> list[str]:
        """Note what was written up to the end of a step."""
        self._keep_strays(everywhere=everywhere)
        self._looked = True
        return self._look(step) if self._sending is not None and self._is_there else []

    @property
    def _every(self) -> int:
        """How many steps there are from one look to the next."""
        strays = 0 if self._strays is None else self._strays.size
        return 1 + (len(self._seen) + strays) // FILES_PER_LOOK

    def _keep_strays(self, *, everywhere: bool) -> None:
        """Let what lies in the working folder lie in the output folder as well."""
        if self._strays is None or self._send is None:
            return
        stray = self._strays.look(lambda: self.folder, all_folders=everywhere)
        self._leave_out(self._strays.unkept)
        if stray and self._leads:
            self._send(Strayed(path=stray))

    def _leave_out(self, found: Mapping[str, str]) -> None:
        """Say of one file for each reason that it is not kept."""
        for why, path in found.items():
            if why not in self._left_out:
                self._left_out.add(why)
                self._say(LEFT_OUT.format(path, why))

    # --- looking ----------------------------------------------------------------------------------

    def _look(self, step: int, *, begun: bool = False) -> list[str]:
        """Note what has changed in the folder since the last look."""
        sending = self._sending
        assert sending is not None
        found, left_out = files.look(self._place, self._bounds.files, self._seen)
        self._leave_out(left_out)
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
            if not begun:
                self._wrote[path] = step
        return [*changes]

    def _change(self, path: str, step: int, generation: int, *, begun: bool) -> Change | None:
        """Return the change to a file that does not look as before; None if there is none."""
        file, before = open_file(self._place / path), self._seen.get(path)
        if file is None:
            if (self._place / path).exists():
                self._leave_out({files.UNREAD: path})
            return None
        with file:
            seen = files.seen_whole(file)
            self._seen[path] = seen
            only_added = path in self._added
            self._added.discard(path)
            if begun:
                return self._begun(path, step, generation, file) if before is None else None
            if before is None:
                lines = files.is_lines(file, seen.size) and not self._knows(path)
                return Change(step, "lines" if lines else "whole", generation, 0, seen)
            if before.key == seen.key and before.tail == seen.tail:
                return None
            how: How = "lines" if only_added else "append"
            grown = before.inode == seen.inode and before.size < seen.size
            if grown and files.tail_of(file, before.size) == before.tail:
                return Change(step, how, generation, before.size, seen)
            return Change(step, "whole", generation, 0, seen)

    def _begun(self, path: str, step: int, generation: int, file: IO[bytes]) -> Change | None:
        """Return what a file begins with if the job has none: what was written before the loop.

        What came after that is of steps that others have done, or that count for nothing.
        """
        first, now = (self._before or {}).get(path), self._seen[path]
        grown = first is not None and first.inode == now.inode and first.size <= now.size
        if first is not None and grown and files.tail_of(file, first.size) == first.tail:
            return Change(step, "begun", generation, 0, first)
        self._added.add(path)
        return None

    def _compare(self, step: int, sending: Sending) -> None:
        """Note the files that hold something else than was sent, though they look the same.

        What a script writes through a mapping changes neither a file's size nor, at once, its time.
        """
        for path in self._seen:
            file = open_file(self._place / path)
            if file is None:
                continue
            with file:
                if sending.differs(path, file, files.seen_of(file).size):
                    seen = files.seen_whole(file)
                    sending.note(path, Change(step, "whole", self._generation(), 0, seen))

    def _knows(self, path: str) -> bool:
        return self._sending is not None and self._sending.knows(path)
