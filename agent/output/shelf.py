"""The files of a script's output in the job's storage: a folder, and a list of what is in it. No torch here.

    JOB/output/PATH     what the script wrote
    JOB/output.json     each file's size, digest, and the step behind which it was so

A file that was written anew is written beside its place, flushed, and renamed into it. One that has grown by little
grows in its place: the list says how long it is, so that what a keeper was killed over is cut off again. Every file that
is sent names the one that it takes the place of; where another is stored meanwhile it is refused, and nothing is
overwritten that the sender has not seen.
"""

import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from agent.messages import OutputFile
from agent.output.files import (
    CHUNK_BYTES,
    DRAFT,
    Bounds,
    Digest,
    digest_of,
    open_file,
    pieces,
    why_no_path,
)
from agent.protocol import OutputGone, OutputSent, OutputTaken

log = logging.getLogger(__name__)

FOLDER, LIST = "output", "output.json"
MARKS_MAX = 256


class Draft(msgspec.Struct):
    """A file of which some has come."""

    worker: str
    sent: OutputSent
    path: Path
    file: IO[bytes]
    digest: Digest


class Shelf:
    """Of one job. One thread at a time."""

    def __init__(self, home: Path, bounds: Bounds) -> None:
        self._folder, self._list, self._bounds = home / FOLDER, home / LIST, bounds
        self._files = {file.path: file for file in listed(home)}
        self._generation = -1  # of whoever has written last
        self._digests: dict[str, Digest] = {}
        self._draft: Draft | None = None
        self._mend()

    @property
    def files(self) -> tuple[OutputFile, ...]:
        return tuple(self._files.values())

    def _mend(self) -> None:
        """After a keeper that was killed: what is longer than it was said to be is cut, what is shorter is not there."""
        for path, known in list(self._files.items()):
            file = open_file(self._folder / path, os.O_RDWR)
            size = -1 if file is None else os.fstat(file.fileno()).st_size
            if file is not None and size > known.size:
                file.truncate(known.size)
            if size < known.size:
                log.warning("%s is damaged or gone, and is taken for neither", path)
                del self._files[path]
            if file is not None:
                file.close()
        for draft in [path for path in self._folder.rglob(".*") if DRAFT.search(path.name)]:
            draft.unlink(missing_ok=True)

    # --- what comes ---------------------------------------------------------------------------------

    def take(self, worker: str, sent: OutputSent, payload: memoryview) -> OutputTaken:
        """Some of a file. What cannot be written is refused in a line, and nothing is lost that was there."""
        try:
            answer = self._take(worker, sent, payload)
        except OSError as error:
            self._drop()
            answer = _refused(sent, f"the job's storage does not take it: {error.strerror}")
        return answer

    def _take(self, worker: str, sent: OutputSent, payload: memoryview) -> OutputTaken:
        file, known = sent.file, self._files.get(sent.file.path)
        if why := self._why_not(sent):
            return _refused(sent, why)
        if known is not None and known.digest == file.digest and known.size == file.size:
            self._note(msgspec.structs.replace(known, step=max(known.step, file.step)), sent)
            return _answer(sent, "done")
        if self._is_outdated(sent, known):
            return _answer(sent, "other")
        if sent.at == sent.kept and sent.kept and file.size - sent.kept == len(payload):
            return self._append(sent, payload)
        return self._add(worker, sent, payload)

    def _is_outdated(self, sent: OutputSent, known: OutputFile | None) -> bool:
        """Whether another file is stored than the sender knows."""
        digest, size = ("", 0) if known is None else (known.digest, known.size)
        late = sent.generation < self._generation
        return late or digest != sent.before or sent.kept not in (0, size)

    def _why_not(self, sent: OutputSent) -> str:
        path, size = sent.file.path, sent.file.size
        others = [each.size for each in self._files.values() if each.path != path]
        if why := why_no_path(path):
            return why
        if not 0 <= sent.kept <= sent.at <= size:
            return "it makes no sense"
        if len(others) >= self._bounds.files:
            return f"{len(others):,} files are kept already (job.output_files)"
        if sum(others) + size > self._bounds.total_bytes:
            most = f"{self._bounds.total_bytes:,} bytes are kept of a job (job.output_bytes)"
            return f"it has {size:,} bytes, and with the others at most {most}"
        return ""

    def _append(self, sent: OutputSent, payload: memoryview) -> OutputTaken:
        digest = self._digest(sent.file.path, sent.kept)
        if digest is None or digest.text != sent.before:
            self._files.pop(sent.file.path, None)  # it is not what it was
            return _answer(sent, "other")
        digest = digest.copy()
        digest.add(payload)
        if digest.text != sent.file.digest:
            return _answer(sent, "again")
        with (self._folder / sent.file.path).open("r+b", buffering=0) as file:
            try:
                os.pwrite(file.fileno(), payload, sent.kept)
                os.fsync(file.fileno())
            except OSError:
                file.truncate(sent.kept)
                raise
        self._digests[sent.file.path] = digest
        marks = self._files[sent.file.path].marks
        self._note(_marked(sent.file, marks), sent)
        return _answer(sent, "done")

    def _add(self, worker: str, sent: OutputSent, payload: memoryview) -> OutputTaken:
        if sent.at == sent.kept:
            self._begin(worker, sent)
        draft = self._draft
        begun = draft is not None and (draft.worker, draft.sent.file) == (worker, sent.file)
        if draft is None or not begun or draft.digest.size != sent.at:
            return _answer(sent, "again")
        draft.file.write(payload)
        draft.digest.add(payload)
        if draft.digest.size < sent.file.size:
            return _answer(sent, "more", draft.digest.size)
        if draft.digest.text != sent.file.digest:
            self._drop()
            return _answer(sent, "again")
        self._place(draft)
        return _answer(sent, "done")

    def _begin(self, worker: str, sent: OutputSent) -> None:
        """Beside its place, with what stays of the one that is there."""
        self._drop()
        path = self._folder / sent.file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.parent / f".{secrets.token_hex(4)}.draft"
        self._draft = Draft(worker, sent, draft, draft.open("xb", buffering=0), Digest())
        before = open_file(path) if sent.kept else None
        if before is not None:
            with before:
                for piece in pieces(before, 0, sent.kept):
                    self._draft.file.write(piece)
                    self._draft.digest.add(piece)

    def _place(self, draft: Draft) -> None:
        path = draft.sent.file.path
        os.fsync(draft.file.fileno())
        draft.path.replace(self._folder / path)
        _flush(draft.path.parent)
        self._draft = None
        draft.file.close()
        self._digests[path] = draft.digest
        known = self._files.get(path)
        marks = known.marks if known is not None and draft.sent.kept else ()
        self._note(_marked(draft.sent.file, marks), draft.sent)

    def close(self) -> None:
        """Of what has come in part nothing stays."""
        self._drop()

    def _drop(self) -> None:
        draft, self._draft = self._draft, None
        if draft is not None:
            draft.file.close()
            draft.path.unlink(missing_ok=True)

    def gone(self, gone: OutputGone) -> OutputTaken:
        """The script has deleted it, and nobody has written it since."""
        file, known = gone.file, self._files.get(gone.file.path)
        taken = OutputTaken(path=file.path, digest=file.digest, state="done")
        if known is None or why_no_path(file.path):
            return taken
        if gone.generation < self._generation or known.digest != file.digest:
            return msgspec.structs.replace(taken, state="other")
        del self._files[file.path]
        self._digests.pop(file.path, None)
        self._generation = gone.generation
        self._write_list()
        with suppress(OSError):
            (self._folder / file.path).unlink()
        for folder in (self._folder / file.path).parents:
            if folder == self._folder:
                break
            with suppress(OSError):  # others lie in it
                folder.rmdir()
        return taken

    # --- what is there ------------------------------------------------------------------------------

    def read(self, file: OutputFile, at: int) -> bytes | None:
        """Some of this very file; None if it is another one by now."""
        known = self._files.get(file.path)
        if known is None or known.digest != file.digest:
            return None
        source = open_file(self._folder / file.path)
        if source is None:
            return None
        with source:
            return next(pieces(source, at, min(known.size, at + CHUNK_BYTES)), b"")

    def _digest(self, path: str, size: int) -> Digest | None:
        found = self._digests.get(path)
        if found is not None and found.size == size:
            return found
        file = open_file(self._folder / path)
        if file is None:
            return None
        with file:
            return digest_of(file, size)

    def _note(self, file: OutputFile, sent: OutputSent) -> None:
        """The newest is the last."""
        self._generation = sent.generation
        if self._files.pop(file.path, None) == file:
            self._files[file.path] = file
            return
        self._files[file.path] = file
        self._write_list()

    def _write_list(self) -> None:
        draft = self._list.with_name(f".{secrets.token_hex(4)}.draft")
        self._list.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("xb") as file:
            file.write(msgspec.json.encode(self.files))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._list)
        _flush(self._list.parent)


def listed(home: Path) -> tuple[OutputFile, ...]:
    """What a job's storage says that it has of its output. Nothing where it says nothing that can be read."""
    try:
        found = msgspec.json.decode((home / LIST).read_bytes(), type=tuple[OutputFile, ...])
    except (OSError, msgspec.DecodeError):
        return ()
    return tuple(file for file in found if not why_no_path(file.path))


def _marked(file: OutputFile, marks: tuple[tuple[int, int], ...]) -> OutputFile:
    earlier = tuple(mark for mark in marks if mark[0] < file.step)
    return msgspec.structs.replace(file, marks=(*earlier, (file.step, file.size))[-MARKS_MAX:])


def _answer(sent: OutputSent, state: str, at: int = 0) -> OutputTaken:
    return OutputTaken(path=sent.file.path, digest=sent.file.digest, state=state, at=at)  # type: ignore[arg-type]


def _refused(sent: OutputSent, why: str) -> OutputTaken:
    return OutputTaken(path=sent.file.path, digest=sent.file.digest, state="refused", why=why)


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
