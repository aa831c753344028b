"""Two histories of one file: what the job's storage has, and what this worker has written behind that. No torch here.

The storage has a file as whoever led before left it behind step t. A worker that begins to lead now has its own: the
same, where every worker writes; none, where only the one that leads does; or some of it, where it came later. It goes on
from the stored one with what it has itself appended behind step t. So a line is there once, whoever wrote it.

The file is changed in its place, so that a handle that the script keeps open goes on writing to it, at its end.
"""

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

import msgspec

from agent.messages import OutputFile
from agent.output.files import CHUNK_BYTES, TAIL_BYTES, open_file, pieces, seen_of, tail_of

HANDLES = Path("/proc/self/fd")


class Mark(msgspec.Struct, frozen=True):
    """How a file was here behind a step. With a size of -1 there was none."""

    step: int
    size: int
    inode: int = 0
    tail: int = 0

    def same(self, other: "Mark") -> bool:
        """Whether the file was the same, as far as can be told without reading all of it."""
        return (self.size, self.inode, self.tail) == (other.size, other.inode, other.tail)


Choice = Literal["stored", "joined", "own"]


def cut_of(stored: OutputFile, step: int) -> int:
    """How much of it counts for a worker that is about to do `step`: what is of later steps is written again."""
    if stored.step < step:
        return stored.size
    earlier = [size for at, size in stored.marks if at < step]
    return earlier[-1] if earlier else stored.size


def base_of(marks: list[Mark], step: int) -> Mark:
    """How the file was here behind `step`, or as early as is known."""
    known = [mark for mark in marks if mark.step <= step]
    return known[-1] if known else next(iter(marks), Mark(-1, -1))


def choose(own: IO[bytes], base: Mark) -> Choice:
    """Whether the stored file counts, with what was appended to this one behind `base`, or this one alone."""
    now = seen_of(own)
    if base.size < 0:
        # It was begun here: lines go on with those that others wrote, a picture takes the place of theirs.
        is_text = b"\0" not in os.pread(own.fileno(), TAIL_BYTES, 0)
        return "stored" if not now.size else "joined" if is_text else "own"
    grown = now.inode == base.inode and now.size >= base.size
    if grown and tail_of(own, base.size) == base.tail:
        return "joined" if now.size > base.size else "stored"
    return "own"


def begins_with(own: IO[bytes], stored: IO[bytes], size: int) -> bool:
    """Whether the first `size` bytes of both are the same, and there are so many."""
    if os.fstat(own.fileno()).st_size < size:
        return False
    at = 0
    while at < size:
        count = min(CHUNK_BYTES, size - at)
        one, other = os.pread(own.fileno(), count, at), os.pread(stored.fileno(), count, at)
        if one != other or not one:
            return False
        at += len(one)
    return True


def rewrite(path: Path, stored: IO[bytes], size: int, appended: int, room: Path) -> int:
    """Make the file hold the first `size` bytes of the stored one, and what it holds itself from `appended` on.

    Returns how long it is then. What it takes meanwhile lies in `room`.
    """
    with tempfile.TemporaryFile(dir=room) as whole:
        for piece in pieces(stored, 0, size):
            whole.write(piece)
        own = open_file(path, os.O_RDWR)
        before = 0 if own is None else os.fstat(own.fileno()).st_size
        if own is not None:
            for piece in pieces(own, appended, before):
                whole.write(piece)
        whole.flush()
        length = os.fstat(whole.fileno()).st_size
        if own is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            own = path.open("x+b", buffering=0)
        with own:
            at = 0
            for piece in pieces(whole, 0, length):
                os.pwrite(own.fileno(), piece, at)
                at += len(piece)
            own.truncate(length)
            _to_the_end(own, before, length)
    return length


def _to_the_end(file: IO[bytes], before: int, length: int) -> None:
    """Handles of this process that stood at the end of the file still do."""
    here = os.fstat(file.fileno())
    with suppress(OSError):
        for each in HANDLES.iterdir():
            handle = int(each.name)
            with suppress(OSError):
                there = os.fstat(handle)
                same = (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
                if same and os.lseek(handle, 0, os.SEEK_CUR) == before:
                    os.lseek(handle, length, os.SEEK_SET)
