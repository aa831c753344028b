"""Files of a script's output folder: names, looks and contents. No torch here.

A file is known by its path below the folder, with slashes. The path is the same on every worker of
a job and in the job's storage, so nothing in it may lead out of the folder.
"""

import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import IO

import msgspec

from agent.checksum import crc32c
from agent.errors import Misuse

PATH_BYTES_MAX = 240  # what a file system takes in one name, and a line has room for
CHUNK_BYTES = 1 << 20  # so that urgent messages pass in between
TAIL_BYTES = 1 << 12
RACY_NS = 50_000_000  # two writes that are this close may have the same time
TOO_MANY = "more than {:,} files are there"
LINK = "it is a link, and what it leads to may lie elsewhere"
UNREAD = "it cannot be read now"
_DRAFTS = set[str]()  # what this process is writing beside its place


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a script's output is kept."""

    files: int = 1000
    total_bytes: int = 1 << 30


class Seen(msgspec.Struct, frozen=True):
    """A file as a look at it found it; `tail` is a checksum of its last bytes, once read."""

    inode: int
    size: int
    changed_ns: int
    racy: bool = False
    tail: int = -1

    @property
    def key(self) -> tuple[int, int, int]:
        return self.inode, self.size, self.changed_ns


@lru_cache(4096)
def why_no_path(path: str) -> str:
    """Return why a file of this name cannot be kept; empty if it can."""
    if not path or path.startswith("/") or "\\" in path:
        return "it has to be a relative path with slashes"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "it may not lead out of the folder"
    if not path.isprintable():
        return "its name cannot be printed"
    if len(path.encode(errors="surrogateescape")) > PATH_BYTES_MAX:
        return f"its name is longer than {PATH_BYTES_MAX} bytes"
    return ""


def place(folder: Path, path: object, who: str) -> Path:
    """Return where a file of this name lies, or raise `Misuse`."""
    if not isinstance(path, str | os.PathLike):
        raise Misuse(f"{who}: the name of a file is expected, not {path!r}")
    name = os.fspath(path)
    if isinstance(name, bytes):
        name = os.fsdecode(name)
    if Path(name).is_absolute():
        with suppress(ValueError):
            name = str(Path(name).relative_to(folder))
    shown, name = name, name.removeprefix("./")
    if why := why_no_path(name):
        raise Misuse(f"{who}: {shown!r} cannot lie in session.output: {why}")
    at = folder
    for part in name.split("/"):
        if at.is_symlink():
            break
        at /= part
    if at.is_symlink():
        raise Misuse(f"{who}: {name!r} leads through a link: give a path without one")
    return folder / name


@contextmanager
def draft_of(target: Path) -> Iterator[Path]:
    """Yield where a file may be written before it is renamed into its place; no look sees it."""
    draft = target.parent / f".{secrets.token_hex(4)}.draft"
    _DRAFTS.add(str(draft))
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)
        _DRAFTS.discard(str(draft))


def make_way(target: Path) -> None:
    """Make the folder of a file, and take away empty folders where it shall lie itself."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        for folder, _, _ in os.walk(target, topdown=False):
            with suppress(OSError):  # something lies in it
                Path(folder).rmdir()


def look(
    folder: Path, files_max: int, known: Mapping[str, Seen] = MappingProxyType({})
) -> tuple[dict[str, Seen], dict[str, str]]:
    """Return the files below a folder, and by reason the first left out. Follow no links.

    If there are too many, the `known` ones are not left out for newer ones. A folder that cannot be
    read, as when no more files can be opened, is not known to be empty: its files are as they were.
    """
    found, fresh, left_out = dict[str, Seen](), dict[str, Seen](), dict[str, str]()
    now_ns = time.time_ns()

    def unread(prefix: str) -> None:
        found.update({path: known[path] for path in known if path.startswith(prefix)})
        left_out.setdefault(UNREAD, prefix or ".")

    for path, entry in _walk(str(folder), unread):
        if entry.path in _DRAFTS:
            continue
        why = why_no_path(path) or (LINK if entry.is_symlink() else "")
        into = found if path in known else fresh
        if not why and len(into) >= files_max:
            why = TOO_MANY.format(files_max)
        if why:
            left_out.setdefault(why, path)
            continue
        with suppress(OSError):  # it was deleted meanwhile
            into[path] = _seen(entry.stat(follow_symlinks=False), now_ns)
    taken = dict(islice(fresh.items(), files_max - len(found)))
    if len(taken) < len(fresh):
        beyond = next(path for path in fresh if path not in taken)
        left_out.setdefault(TOO_MANY.format(files_max), beyond)
    return found | taken, left_out


def _walk(folder: str, unread: Callable[[str], None]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the files and links below a folder, and folders in which no name is short enough."""
    todo = [""]
    while todo:
        prefix = todo.pop()
        try:
            with os.scandir(f"{folder}/{prefix}") as found:
                entries = [*found]
        except (FileNotFoundError, NotADirectoryError):
            continue  # it was deleted meanwhile
        except OSError:
            unread(prefix)
            continue
        for entry in entries:
            path = f"{prefix}{entry.name}"
            if not entry.is_dir(follow_symlinks=False):
                if entry.is_file(follow_symlinks=False) or entry.is_symlink():
                    yield path, entry
            elif len(path) <= PATH_BYTES_MAX:
                todo.append(f"{path}/")
            else:
                yield path, entry


def _seen(found: os.stat_result, now_ns: int) -> Seen:
    # A clock that was set back leaves times in the future: these are racy, too.
    racy = found.st_mtime_ns > now_ns - RACY_NS
    return Seen(found.st_ino, found.st_size, found.st_mtime_ns, racy)


def open_file(path: Path, flags: int = os.O_RDONLY) -> IO[bytes] | None:
    """Open a regular file, or return None. No link is followed, and no pipe is waited for."""
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        return None
    return os.fdopen(handle, "rb" if flags == os.O_RDONLY else "r+b", buffering=0)


def seen_of(file: IO[bytes]) -> Seen:
    return _seen(os.fstat(file.fileno()), time.time_ns())


def seen_whole(file: IO[bytes]) -> Seen:
    """Return how a file is found, with its last bytes."""
    seen = seen_of(file)
    return msgspec.structs.replace(seen, tail=tail_of(file, seen.size))


def pieces(file: IO[bytes], start: int, end: int) -> Iterator[bytes]:
    """Yield the file's bytes from `start` to `end`, or to its end if that comes first."""
    while start < end:
        piece = os.pread(file.fileno(), min(CHUNK_BYTES, end - start), start)
        if not piece:
            return
        yield piece
        start += len(piece)


def checksum_of(file: IO[bytes], end: int) -> int:
    """Return the checksum of the first `end` bytes; -1 if the file has fewer."""
    found, size = 0, 0
    for piece in pieces(file, 0, end):
        found, size = crc32c(found, piece), size + len(piece)
    return found if size == end else -1


def tail_of(file: IO[bytes], end: int) -> int:
    """Return a checksum of the last bytes before `end`."""
    return crc32c(0, os.pread(file.fileno(), min(TAIL_BYTES, end), max(0, end - TAIL_BYTES)))


def is_lines(file: IO[bytes], size: int) -> bool:
    """Whether it is text that ends with a line, so that others may have written lines before."""
    ends = os.pread(file.fileno(), 1, max(0, size - 1)) == b"\n"
    return ends and b"\0" not in os.pread(file.fileno(), TAIL_BYTES, 0)
