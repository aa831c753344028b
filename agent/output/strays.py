"""Files in a script's working folder, which are lost with its machine. No torch here."""

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

FOLDERS_MAX = 100
PASSED_OVER = ("__pycache__",)


class Strays:
    """New files in a folder. A look is cheap, as a folder's time shows if a file was made."""

    def __init__(self, root: Path, known: Collection[str]) -> None:
        """`known` are the files that came with the script."""
        self._root, self._known = root, frozenset(known)
        self._folders: dict[str, int] = {str(root): -1}
        self._found = False

    def look(self, output: Path | None) -> str:
        """Return the first file that the script has made, once; else an empty string.

        Files in `output` are where they belong. Bytes of a name that are no text are written out.
        """
        if self._found:
            return ""
        kept = "" if output is None else str(output)
        todo = list(self._folders)
        while todo:
            folder = todo.pop()
            with suppress(OSError):  # it was deleted meanwhile
                changed_ns = Path(folder).stat().st_mtime_ns
                if changed_ns == self._folders.get(folder):
                    continue
                self._folders[folder] = changed_ns
                for entry in sorted(os.scandir(folder), key=lambda each: each.name):
                    if entry.is_dir(follow_symlinks=False):
                        if self._is_new(entry, kept):
                            self._folders[entry.path] = -1
                            todo.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        path = os.path.relpath(entry.path, self._root)
                        if path not in self._known:
                            self._found = True
                            return os.fsencode(path).decode(errors="backslashreplace")
        return ""

    def _is_new(self, entry: os.DirEntry[str], kept: str) -> bool:
        if entry.path in self._folders or len(self._folders) >= FOLDERS_MAX:
            return False
        hidden = entry.name.startswith(".") or entry.name in PASSED_OVER
        return not hidden and entry.path != kept
