"""Files that a script writes into its working folder: they are kept as well. No torch here.

What was there when the script's loop began, as what came with the script and what it has fetched,
is not kept.
"""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from agent.output.files import RACY_NS, draft_of, make_way, place

FOLDERS_MAX, LINKS_MAX, THERE_MAX = 100, 2000, 20_000
PASSED_OVER = ("__pycache__",)
Key = tuple[int, int, int]


class Strays:
    """Links new files of a folder into the output folder.

    A look is cheap, as a folder's time shows if a file was made. What is written to a file
    afterwards shows in the output folder by itself, because both names are of one file.
    """

    def __init__(self, root: Path, output: Path) -> None:
        self.root, self._output = root, str(output)
        self._folders: dict[str, int] = {str(root): -1}
        self._linked: dict[str, int] = {}  # the inodes, by path
        self._begun_ns = -1
        self._before: dict[str, Key] = {}  # what was hardly older than the loop
        self._there = set[str]()  # what was older at all, or the first of it
        self._said = False
        self.unkept: dict[str, str] = {}  # one file by the reason

    def begin(self) -> None:
        """Let files be kept that are made or changed from now on."""
        if self._begun_ns >= 0:
            return
        with draft_of(self.root / "begun") as probe:  # by the clock of the file system
            probe.touch()
            begun_ns = probe.stat().st_ctime_ns - RACY_NS
        self._begun_ns = 0
        self._there = {path for path, _ in islice(self._fresh(), THERE_MAX)}
        self._folders, self._begun_ns = {str(self.root): -1}, begun_ns
        self._before = dict(self._fresh())

    def look(self, output: Callable[[], Path], *, all_folders: bool = False) -> str:
        """Link what is new. Return the first file that was linked, once; else an empty string.

        With `all_folders` files are found, too, that were there before and were written to since.
        Bytes of a name that are no text are written out.
        """
        if all_folders:
            self._folders = dict.fromkeys(self._folders, -1)
        for path in [*self._linked]:
            self._follow(path, output())
        first = ""
        for path, key in self._fresh():
            if (
                path not in self._linked
                and self._before.get(path) != key
                and len(self._linked) < LINKS_MAX
            ):
                self._link(path, output())
                first = first or path
        if not first or self._said:
            return ""
        self._said = True
        return os.fsencode(first).decode(errors="backslashreplace")

    @property
    def size(self) -> int:
        """How many folders and files a look asks for."""
        return len(self._folders) + len(self._linked)

    def has(self, path: str) -> bool:
        return path in self._linked

    def put(self, path: str, output: Path) -> None:
        """Give a file of the output folder the name in this folder that it has on other workers."""
        source, target = output / path, place(self.root, path, "a kept file")
        make_way(target)
        with draft_of(target) as draft:
            draft.hardlink_to(source)
            draft.replace(target)
        self._linked[path] = target.lstat().st_ino

    def drop(self, path: str) -> bool:
        """Remove the name of a file here. Return False if there was one before the loop."""
        if path in self._linked and (path in self._there or len(self._there) >= THERE_MAX):
            return False
        if path in self._linked and (self.root / path).lstat().st_ino == self._linked.pop(path):
            (self.root / path).unlink()
        return True

    def _fresh(self) -> Iterator[tuple[str, Key]]:
        """Find the files that are about as new as the loop, in folders which have changed."""
        todo = list(self._folders)
        while todo:
            folder = todo.pop()
            with suppress(OSError):  # it was deleted meanwhile, or is read the next time
                changed_ns = Path(folder).stat().st_mtime_ns
                if changed_ns == self._folders.get(folder):
                    continue
                entries = sorted(os.scandir(folder), key=lambda each: each.name)
                self._folders[folder] = changed_ns
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if self._is_new(entry):
                            self._folders[entry.path] = -1
                            todo.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        now = entry.stat(follow_symlinks=False)
                        if now.st_ctime_ns >= self._begun_ns:
                            key = now.st_ino, now.st_size, now.st_mtime_ns
                            yield os.path.relpath(entry.path, self.root), key

    def _follow(self, path: str, output: Path) -> None:
        """Take a name out of the output folder, or give it to the file that has it now."""
        try:
            now = (self.root / path).lstat()
        except OSError:
            now = None
        if now is not None and now.st_ino == self._linked[path]:
            return
        if now is not None and stat.S_ISREG(now.st_mode):
            self._link(path, output)
            return
        with suppress(OSError):
            if (output / path).lstat().st_ino == self._linked.pop(path):
                (output / path).unlink()

    def _link(self, path: str, output: Path) -> None:
        """Give a file a second name, unless another one has it in the output folder."""
        source, target = self.root / path, output / path
        if os.path.lexists(target) and target.lstat().st_ino != self._linked.get(path):
            return
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with draft_of(target) as draft:
                draft.hardlink_to(source)
                draft.replace(target)
            self._linked[path] = target.lstat().st_ino
        except OSError as error:
            self._linked.pop(path, None)
            if source.exists():  # else it was deleted meanwhile
                self.unkept[error.strerror or str(error)] = path

    def _is_new(self, entry: os.DirEntry[str]) -> bool:
        if entry.path in self._folders or len(self._folders) >= FOLDERS_MAX:
            return False
        hidden = entry.name.startswith(".") or entry.name in PASSED_OVER
        return not hidden and entry.path != self._output
