"""The files of a script's output in the job's storage, and a list of them. No torch here.

    JOB/output/PATH     what the script wrote
    JOB/output.json     each file's size and checksum, and the step after which it had these
    JOB/.*.draft        what is being written; not in the folder, whose names are the script's

Steps change a file one after another, and a step counts once: the output of a step replaces what
is there of that step and of later ones. So a step that is repeated, after a loss or because an
answer was lost, leaves the same file. A file that is replaced is written as a draft, flushed, and
renamed into its place. A file that grows does so in its place. The list says how long it is, so
that a write during which the keeper was killed is cut off.
"""

import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from agent.checksum import crc32c
from agent.messages import OutputFile
from agent.output.earlier import Earlier, as_of
from agent.output.files import CHUNK_BYTES, Bounds, checksum_of, open_file, pieces, why_no_path
from agent.protocol import OutputAsked, OutputGiven, OutputSent, OutputTaken
from cloud.private import flush

log = logging.getLogger(__name__)

FOLDER, LIST = "output", "output.json"
MARKS_MAX = 256
FINENESS = (128, 64, 32, 16, 8, 4, 2)  # an age divided by it is what one mark may stand for
NOTHING = (-1, 0, 0)


class Coming(msgspec.Struct):
    """A change that has arrived in part, in `draft` or after the file's first bytes."""

    worker: str
    sent: OutputSent
    marks: tuple[tuple[int, int, int], ...]
    file: IO[bytes]
    draft: Path | None
    checksum: int
    got: int = 0


class Shelf:
    """The output of one job, for one thread at a time."""

    def __init__(self, home: Path, bounds: Bounds) -> None:
        self._folder, self._list, self._bounds = home / FOLDER, home / LIST, bounds
        self._files = {file.path: file for file in listed(home)}
        # The newest layout whose leader wrote a file: changes of earlier leaders come too late.
        self._generations: dict[str, int] = {}
        # Files that were found to hold what the list says.
        self._sound: set[str] = set()
        self._coming: Coming | None = None
        self._earlier = Earlier(home, bounds.total_bytes)
        self._mend()

    @property
    def files(self) -> tuple[OutputFile, ...]:
        """All files, the newest last."""
        return tuple(self._files.values())

    def _mend(self) -> None:
        """Make the list true where a keeper was killed between a file and the list.

        A file that had grown is cut. One that was replaced after the list was written is whole, so
        it is listed as it is. Others that are not as listed are forgotten.
        """
        listed_ns = self._list.stat().st_mtime_ns if self._files else 0
        for path, known in list(self._files.items()):
            file = open_file(self._folder / path, os.O_RDWR)
            file = file or open_file(self._folder / path)  # nothing may be changed now
            mended = None
            if file is not None:
                with file:
                    mended = _mended(file, known, listed_ns)
            if mended is None:
                log.warning("%s is damaged or gone, and is taken for neither", path)
                del self._files[path]
            else:
                self._files[path] = mended
        for draft in self._list.parent.glob(".*.draft"):
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def take(self, worker: str, sent: OutputSent, payload: memoryview) -> OutputTaken:
        """Take a part of a change; if it cannot be written, answer why, and keep what was there."""
        try:
            taken = self._take(worker, sent, payload)
        except OSError as error:
            self._drop()
            why = f"the job's storage does not take it: {error.strerror}"
            taken = _refused(sent, why, for_now=True)
        if taken.state == "refused":
            self._outdate(sent)
        return taken

    def _outdate(self, sent: OutputSent) -> None:
        """Note that a file is kept only as it was before a change that is refused."""
        known = self._files.get(sent.path)
        if known is not None and known.until is None:
            self._files[sent.path] = msgspec.structs.replace(known, until=sent.since)
            with suppress(OSError):  # on a full disk the next list has it
                self._write_list()

    def mark(self, step: int) -> None:
        """Note that what was written up to this step is here; the state after it may follow."""
        self._earlier.mark(step)

    def give(self, asked: OutputAsked) -> tuple[OutputGiven, bytes]:
        """Return the files as they were after a step, or a piece of one."""
        if asked.path:
            return OutputGiven(serial=asked.serial), self._piece(asked)
        paths = self._files.keys() | self._earlier.paths()
        found = [self._as_of(path, asked.step) for path in sorted(paths)]
        files = tuple(one[0] for one in found if one is not None)
        whole = asked.step <= self._earlier.whole
        return OutputGiven(serial=asked.serial, files=files, whole=whole), b""

    def _piece(self, asked: OutputAsked) -> bytes:
        found = self._as_of(asked.path, asked.step)
        source = None if found is None else open_file(found[1])
        if found is None or source is None:
            return b""
        with source:
            end = min(found[0].size, asked.at + CHUNK_BYTES)
            return next(pieces(source, asked.at, end), b"")

    def _as_of(self, path: str, step: int) -> tuple[OutputFile, Path] | None:
        # First, because a keeper that was killed may not have listed what has taken its place.
        if (before := self._earlier.find(path, step)) is not None:
            return before
        newest = self._files.get(path)
        then = None if newest is None else as_of(newest, step)
        return None if then is None else (then, self._folder / path)

    def _take(self, worker: str, sent: OutputSent, payload: memoryview) -> OutputTaken:
        if sent.at:
            coming = self._coming
            here = coming and (coming.worker, coming.sent.serial, coming.got)
            if coming is None or here != (worker, sent.serial, sent.at):
                return _answer(sent, "again")
            return self._write(coming, payload)
        self._drop()
        known = self._files.get(sent.path)
        if why := why_no_path(sent.path):
            return _refused(sent, why)
        if known is not None and (taken := self._needless(sent, known)):
            return taken
        if sent.how == "gone":
            self._delete(sent)
            return _answer(sent, "done")
        return self._add(worker, sent, payload)

    def _needless(self, sent: OutputSent, known: OutputFile) -> OutputTaken | None:
        """Return the answer to a change that another leader or the storage makes needless."""
        late = sent.generation < self._generations.get(sent.path, -1)
        if late or sent.how == "begun":
            return _answer(sent, "done")
        if sent.again and known.step >= sent.since:
            return _answer(sent, "has", known.step)
        return None

    def _add(self, worker: str, sent: OutputSent, payload: memoryview) -> OutputTaken:
        known = self._files.get(sent.path)
        if sent.how in ("append", "lines") and known is not None and not self._is_sound(known):
            known = None
        marks = _marks_before(known, sent)
        if sent.how == "append" and not marks:
            return _answer(sent, "lacks")
        if why := self._too_much(sent, marks):
            return _refused(sent, why)
        self._delete_in_the_way(sent)
        return self._write(self._begin(worker, sent, known, marks), payload)

    def _delete_in_the_way(self, sent: OutputSent) -> None:
        """Delete files whose folder is a file now, or the other way, before it is said of them."""
        for path in list(self._files):
            if path.startswith(f"{sent.path}/") or sent.path.startswith(f"{path}/"):
                self._delete(msgspec.structs.replace(sent, path=path))

    def _too_much(self, sent: OutputSent, marks: tuple[tuple[int, int, int], ...]) -> str:
        size = sent.size + (marks or (NOTHING,))[-1][1]
        others = [each.size for each in self._files.values() if each.path != sent.path]
        if len(others) >= self._bounds.files:
            return f"{len(others):,} files are kept already (job.output_files)"
        if sum(others) + size > self._bounds.total_bytes:
            most = f"{self._bounds.total_bytes:,} bytes are kept of a job (job.output_bytes)"
            return f"it has {size:,} bytes, and with the others at most {most}"
        return ""

    def _is_sound(self, known: OutputFile) -> bool:
        """Return whether a file is as listed, because one that others changed is not extended.

        Its contents are compared once.
        """
        file = open_file(self._folder / known.path)
        if file is None:
            return False
        with file:
            if known.path in self._sound:
                return os.fstat(file.fileno()).st_size >= known.size
            if checksum_of(file, known.size) != known.checksum:
                return False
        self._sound.add(known.path)
        return True

    def _begin(
        self,
        worker: str,
        sent: OutputSent,
        known: OutputFile | None,
        marks: tuple[tuple[int, int, int], ...],
    ) -> Coming:
        path = self._folder / sent.path
        path.parent.mkdir(parents=True, exist_ok=True)
        step, size, checksum = (marks or (NOTHING,))[-1]
        draft = None
        if known is not None and size:
            if size < known.size:
                cut = msgspec.structs.replace(
                    known, size=size, step=step, checksum=checksum, marks=marks
                )
                self._note(cut)
            file = path.open("r+b", buffering=0)
            file.truncate(size)
            file.seek(size)
        else:
            draft = self._draft()
            file = draft.open("xb", buffering=0)
        self._coming = Coming(worker, sent, marks, file, draft, checksum)
        return self._coming

    def _write(self, coming: Coming, payload: memoryview) -> OutputTaken:
        sent, left = coming.sent, payload
        while left:
            left = left[os.write(coming.file.fileno(), left) :]
        coming.got += len(payload)
        coming.checksum = crc32c(coming.checksum, payload)
        if coming.got < sent.size:
            return _answer(sent, "more", coming.got)
        os.fsync(coming.file.fileno())
        size = os.fstat(coming.file.fileno()).st_size
        if coming.draft is not None:
            path = self._folder / sent.path
            self._keep(sent)
            coming.draft.replace(path)
            flush(path.parent)
        coming.file.close()
        self._coming = None
        self._sound.add(sent.path)
        self._generations[sent.path] = sent.generation
        now = (sent.step, size, coming.checksum)
        file = OutputFile(
            path=sent.path,
            size=size,
            step=sent.step,
            checksum=coming.checksum,
            marks=_thinned([*coming.marks, now]),
            stray=sent.stray,
        )
        self._note(file)
        return _answer(sent, "done")

    def _keep(self, sent: OutputSent) -> None:
        """Keep what a change replaces or deletes, as long as a worker may begin before it."""
        known = self._files.get(sent.path)
        if known is not None:
            with suppress(OSError):  # it is gone, or the disk is full: then nobody gets it
                self._earlier.keep(known, self._folder / sent.path, sent.since)

    def close(self) -> None:
        """Forget a change that has arrived in part."""
        self._drop()

    def _drop(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            if coming.draft is not None:
                coming.draft.unlink(missing_ok=True)
            else:
                with suppress(OSError):
                    coming.file.truncate((coming.marks or (NOTHING,))[-1][1])
            coming.file.close()

    def _delete(self, sent: OutputSent) -> None:
        self._keep(sent)
        if self._files.pop(sent.path, None) is None:
            return
        self._generations[sent.path] = sent.generation
        self._sound.discard(sent.path)
        self._write_list()
        with suppress(OSError):
            (self._folder / sent.path).unlink()
        for folder in (self._folder / sent.path).parents:
            if folder == self._folder:
                break
            with suppress(OSError):  # other files are in it
                folder.rmdir()

    def _draft(self) -> Path:
        return self._list.with_name(f".{secrets.token_hex(4)}.draft")

    def _note(self, file: OutputFile) -> None:
        """Add a file to the list, as the newest."""
        self._files.pop(file.path, None)
        self._files[file.path] = file
        self._write_list()

    def _write_list(self) -> None:
        draft = self._draft()
        draft.parent.mkdir(parents=True, exist_ok=True)
        try:
            with draft.open("xb") as file:
                file.write(msgspec.json.encode(self.files))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._list)
        finally:
            draft.unlink(missing_ok=True)  # on a full disk, it would be in its own way
        flush(self._list.parent)


def _mended(file: IO[bytes], known: OutputFile, listed_ns: int) -> OutputFile | None:
    """Return a file as it is to be listed; None if it is damaged."""
    found = os.fstat(file.fileno())
    changed = found.st_mtime_ns >= listed_ns
    if found.st_size == known.size and not changed:
        return known
    if checksum_of(file, known.size) == known.checksum:
        with suppress(OSError):  # no more of it than is listed is given to anybody
            file.truncate(known.size)
        return known
    if not changed:
        return None
    size, checksum = found.st_size, checksum_of(file, found.st_size)
    marks = ((known.step, size, checksum),)
    return msgspec.structs.replace(known, size=size, checksum=checksum, marks=marks)


def listed(home: Path) -> tuple[OutputFile, ...]:
    """Return a job's list of its output; empty if there is none that can be read."""
    try:
        found = msgspec.json.decode((home / LIST).read_bytes(), type=tuple[OutputFile, ...])
    except (OSError, ValueError):
        return ()
    return tuple(file for file in found if not why_no_path(file.path))


def _marks_before(known: OutputFile | None, sent: OutputSent) -> tuple[tuple[int, int, int], ...]:
    """Return the marks of a file before the steps that are sent; none if it is replaced."""
    if known is None or sent.how not in ("append", "lines"):
        return ()
    return tuple(mark for mark in known.marks if mark[0] < sent.since)


def _thinned(marks: list[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Return marks within their bound: the older, the fewer, but always the first and the newest.

    A job can go back to the first, however old that is. Some places are left free, so that this is
    seldom done.
    """
    newest = marks[-1][0]
    for fineness in FINENESS if len(marks) > MARKS_MAX else ():
        kept = marks[:1]
        for mark in marks[1:]:
            before = kept[-1][0]
            if (mark[0] - before) * fineness > newest - before:
                kept.append(mark)
        marks = kept
        if len(marks) <= MARKS_MAX * 3 // 4:
            break
    return tuple(marks)


def _answer(sent: OutputSent, state: Any, at: int = 0) -> OutputTaken:
    return OutputTaken(serial=sent.serial, state=state, at=at)


def _refused(sent: OutputSent, why: str, *, for_now: bool = False) -> OutputTaken:
    return OutputTaken(serial=sent.serial, state="refused", why=why, for_now=for_now)
