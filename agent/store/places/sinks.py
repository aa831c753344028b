"""Where files go: a narrow interface, and the sink on a local disk. No torch here.

What every sink promises, and one contract suite tests:

* `put` writes a whole file or none, never over an existing one; after `settle` the file survives
  all that the sink survives (`settle` is apart from `put` so that many files share one flush of
  their folders);
* `create` is put-if-absent: of any number of callers exactly one gets True;
* what is missing or short raises `Damaged`, what has no room `Full`, what does not answer
  `Unavailable`.
"""

import errno
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from agent.checksum import Buffer
from agent.errors import CheckpointError
from agent.faults import passing
from agent.store.errors import Damaged, Full, Unavailable
from cloud.private import flush

KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
PIECES_PER_CALL = 512  # below every system's IOV_MAX
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DRAFT = ".part"

Read = Callable[[int, list[memoryview]], None]


class Sink(Protocol):
    """A place for files. Keys are relative paths; one read should ask for `span_bytes`."""

    name: str
    span_bytes: int

    def put(self, key: str, pieces: Sequence[Buffer]) -> None: ...

    def settle(self) -> None: ...

    def create(self, key: str, data: bytes) -> bool: ...

    def open(self, key: str) -> AbstractContextManager[Read]:
        """Inside, `read(offset, views)` fills the views with the file's bytes from `offset` on."""

    def get(self, key: str) -> bytes: ...

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the size of every file below a folder by key, drafts of killed writers too."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete files; one that is not there counts as deleted."""


def check_key(key: str) -> str:
    """Return a valid key. Keys come out of manifests, so none may lead out of the sink."""
    if not KEY.fullmatch(key):
        raise Damaged(f"{key!r} is not a key: letters, digits and ._- between slashes")
    return key


class DiskSink:
    """Files below a folder. A file is written beside its place, flushed, and linked into it."""

    span_bytes = 1 << 18

    def __init__(self, root: Path) -> None:
        self.name = str(root)
        self.root = root
        self._unflushed: set[Path] = set()
        self._lock = threading.Lock()
        # If two threads settle, the second must not go on before the first has flushed.
        self._settling = threading.Lock()

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        if not self._place(key, pieces):
            raise CheckpointError(f"{self.root / key} is there already")

    def create(self, key: str, data: bytes) -> bool:
        self.settle()  # the parts that a manifest names are on the disk before the manifest is
        made = self._place(key, [data])
        self.settle()
        return made

    def _place(self, key: str, pieces: Sequence[Buffer]) -> bool:
        path = self.root / check_key(key)
        draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{DRAFT}")
        with _mapped(path):
            self._folder(path.parent)
            try:
                with draft.open("wb", buffering=0) as file:
                    _write_all(file.fileno(), [memoryview(piece).cast("B") for piece in pieces])
                    os.fsync(file.fileno())
                passing(
                    "keeper: part drafted" if key.startswith("parts/") else "keeper: mark drafted"
                )
                # Unlike a rename, a link never replaces: of two writers one gets an error.
                os.link(draft, path)
            except FileExistsError:
                return False
            finally:
                draft.unlink(missing_ok=True)
        with self._lock:
            self._unflushed.add(path.parent)
        return True

    def _folder(self, folder: Path) -> None:
        missing = [at for at in (folder, *folder.parents) if not at.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._unflushed.update(at.parent for at in missing)

    def settle(self) -> None:
        """Flush the folders of all files that were placed before this call."""
        with self._settling:
            with self._lock:
                folders, self._unflushed = self._unflushed, set()
            try:
                for folder in sorted(folders):
                    with _mapped(folder):
                        flush(folder)
            except BaseException:
                with self._lock:
                    self._unflushed |= folders
                raise

    @contextmanager
    def open(self, key: str) -> Iterator[Read]:
        path = self.root / check_key(key)
        with _mapped(path):
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe waits for its writer

        def read(offset: int, views: list[memoryview]) -> None:
            wanted = sum(view.nbytes for view in views)
            with _mapped(path):
                few = len(views) <= PIECES_PER_CALL
                if not few or os.preadv(handle, views, offset) != wanted:
                    _fill_each(handle, offset, views, path)

        try:
            yield read
        finally:
            os.close(handle)

    def get(self, key: str) -> bytes:
        path = self.root / check_key(key)
        with _mapped(path):
            return path.read_bytes()

    def sizes(self, prefix: str) -> dict[str, int]:
        with _mapped(self.root / prefix):
            return dict(_files_below(self.root / prefix, prefix))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self.root / check_key(key)
            with _mapped(path):
                path.unlink(missing_ok=True)
                if path.parent.parent.name == "parts":
                    self._remove_if_empty(path.parent)

    def _remove_if_empty(self, folder: Path) -> None:
        with suppress(OSError):  # something else lies in it, or it is gone
            folder.rmdir()
            with self._lock:
                self._unflushed.discard(folder)


def _files_below(folder: Path, key: str) -> Iterator[tuple[str, int]]:
    """Yield the files below a folder.

    A file that is deleted meanwhile is left out. A folder that may not be read is an error,
    because it is not known to be empty.
    """
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(folder / entry.name, f"{key}/{entry.name}")
            elif entry.is_file() and not entry.name.startswith("."):
                with suppress(FileNotFoundError):
                    yield f"{key}/{entry.name}", entry.stat().st_size


def _write_all(handle: int, views: list[memoryview]) -> None:
    first = 0
    while first < len(views):
        written = os.writev(handle, views[first : first + PIECES_PER_CALL])
        while first < len(views) and written >= views[first].nbytes:
            written -= views[first].nbytes
            first += 1
        if written:
            views[first] = views[first][written:]


def _fill_each(handle: int, offset: int, views: list[memoryview], path: Path) -> None:
    """Fill view by view after a read that came back short, to find out where the file ends."""
    for view in views:
        filled = 0
        while filled < view.nbytes:
            count = os.preadv(handle, [view[filled:]], offset + filled)
            if not count:
                raise Damaged(f"{path} ends at {offset + filled}")
            filled += count
        offset += view.nbytes


@contextmanager
def _mapped(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing") from error
    except OSError as error:
        what = f"{path}: {error.strerror or error}"
        raise (Full(what) if error.errno in NO_ROOM else Unavailable(what)) from error
