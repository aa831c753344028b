"""What files of a job's output held earlier, for workers that begin with an earlier state.

    JOB/earlier/list.json   the steps of such states, and the files that are kept for them
    JOB/earlier/TOKEN       a file as it was before it was replaced or deleted

Before a state is sent, the storage gets what was written before it (`mark`). So a
worker that begins with that state finds each file as it was then: the newest one, the beginning of
one that has grown, or one that is kept here. No torch here.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path

import msgspec

from agent.messages import OutputFile

FOLDER, LIST = "earlier", "list.json"
STATES_MAX = 3  # the newest that the keeper has, the one that is on its way, one for proofs


class Replaced(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a step has replaced or deleted, and where its bytes are."""

    file: OutputFile
    by: int
    token: str


class Known(msgspec.Struct, frozen=True, kw_only=True):
    whole: int = -1  # what was written up to this step has arrived
    states: tuple[int, ...] = ()
    files: tuple[Replaced, ...] = ()


class Earlier:
    def __init__(self, home: Path, bytes_max: int) -> None:
        self._folder, self._bytes_max = home / FOLDER, bytes_max
        self._known = Known()
        with suppress(OSError, ValueError):
            self._known = msgspec.json.decode((self._folder / LIST).read_bytes(), type=Known)
        self._sweep()

    @property
    def whole(self) -> int:
        return self._known.whole

    def mark(self, step: int) -> None:
        """Note that a state of this step may follow, and forget what no state needs any more.

        A lower step than before means that the job has gone back.
        """
        known = self._known
        states = [*(state for state in known.states if state < step), step]
        self._known = Known(whole=step, states=tuple(states[-STATES_MAX:]), files=known.files)
        self._note(
            tuple(each for each in known.files if self._is_needed(each.file, each.by)),
        )
        self._sweep()

    def keep(self, file: OutputFile, path: Path, by: int) -> None:
        """Keep a file that step `by` replaces, if a worker may begin with a state before that."""
        used = sum(each.file.size for each in self._known.files)
        if not self._is_needed(file, by) or used + file.size > self._bytes_max:
            return
        token = secrets.token_hex(8)
        self._folder.mkdir(parents=True, exist_ok=True)
        os.link(path, self._folder / token)
        self._note((*self._known.files, Replaced(file=file, by=by, token=token)))

    def find(self, path: str, step: int) -> tuple[OutputFile, Path] | None:
        """Return a file that was replaced or deleted after this step, as it was then.

        That is known of the marked steps only: of what came between two of them, not all arrives.
        """
        if step not in self._known.states:
            return None
        found = [each for each in self._known.files if each.file.path == path and step < each.by]
        then = [(file, each) for each in found if (file := as_of(each.file, step)) is not None]
        if not then:
            return None
        file, each = max(then, key=lambda both: both[0].step)
        return file, self._folder / each.token

    def paths(self) -> set[str]:
        return {each.file.path for each in self._known.files}

    def _is_needed(self, file: OutputFile, by: int) -> bool:
        states = (state for state in self._known.states if state < by)
        return any(as_of(file, state) is not None for state in states)

    def _note(self, files: tuple[Replaced, ...]) -> None:
        self._known = msgspec.structs.replace(self._known, files=files)
        if not self._folder.parent.exists():
            return  # nothing is stored of this job yet, so nothing has to be known of it
        self._folder.mkdir(exist_ok=True)
        draft = self._folder / f".{secrets.token_hex(4)}.draft"
        draft.write_bytes(msgspec.json.encode(self._known))
        draft.replace(self._folder / LIST)

    def _sweep(self) -> None:
        """Remove what is not in the list, or no longer."""
        listed = {LIST, *(each.token for each in self._known.files)}
        with suppress(OSError):
            for path in self._folder.iterdir():
                if path.name not in listed:
                    path.unlink()


def as_of(file: OutputFile, step: int) -> OutputFile | None:
    """Return a file as it was after a step; None if its beginning is of a later one, or refused."""
    if file.until is not None and file.until <= step:
        return None
    if file.step <= step:
        return msgspec.structs.replace(file, marks=())
    for mark in reversed(file.marks):
        if mark[0] <= step:
            return msgspec.structs.replace(
                file, step=mark[0], size=mark[1], checksum=mark[2], marks=()
            )
    return None
