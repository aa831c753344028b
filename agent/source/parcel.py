"""What travels with a script: files beside it, and its place among them. No torch here.

    payload = the script's own bytes, if no other file goes along
            | mark, then in msgpack: the script's path; for every file its path, bytes, and whether
              it is a program; and, if they are not the usual ones, the folders in which imports are
              looked up and the name of the module as which it runs

The same files give the same bytes, and so the same checksum. By that the payload is stored, and
what was measured of a job is found again. Links and devices cannot be expressed in it, and no path
leads out of its folder.
"""

import importlib
import linecache
import os
import runpy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.machinery import all_suffixes
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec

from agent.errors import ParcelError

MARK = b"\0parcel 1\0"  # no Python source has a null byte in it
FILES_MAX = 10_000


class File(msgspec.Struct, frozen=True, array_like=True):
    data: bytes
    runs: bool = False  # whether it is a program, called by its name


class Parcel(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Paths are relative, with slashes; `script` is one of them.

    Imports are looked up in `imports` first, by default in the script's folder. `module` is set if
    the script runs as `python -m` runs a module.
    """

    script: str
    files: dict[str, File]
    imports: tuple[str, ...] = ()
    module: str = ""

    @property
    def folders(self) -> list[PurePosixPath]:
        if self.imports:
            return list(map(PurePosixPath, self.imports))
        return [PurePosixPath(self.script).parent]


class Unpacked(NamedTuple):
    """Where a script lies on this machine, and how it is run."""

    path: Path
    folders: list[Path]
    module: str

    def run(self) -> None:
        """Run it in this process, as `python SCRIPT` or `python -m MODULE` would."""
        if self.module:
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(self.path), run_name="__main__")


def pack(
    script: str, files: Mapping[str, File], imports: tuple[str, ...] = (), module: str = ""
) -> bytes:
    parcel = Parcel(script, {path: files[path] for path in sorted(files)}, imports, module)
    _check(parcel)
    return MARK + msgspec.msgpack.encode(parcel)


def read(payload: bytes, name: str) -> Parcel:
    """Return what is in a payload. `name` is the script's, if it is alone in it."""
    if not payload.startswith(MARK):
        return Parcel(name, {name: File(payload)})
    try:
        parcel = msgspec.msgpack.decode(memoryview(payload)[len(MARK) :], type=Parcel)
    except ValueError as error:
        raise ParcelError(f"what came with the script cannot be read: {error}") from error
    _check(parcel)
    return parcel


def _check(parcel: Parcel) -> None:
    if len(parcel.files) > FILES_MAX:
        raise ParcelError(
            f"{len(parcel.files):,} files; at most {FILES_MAX:,} travel with a script"
        )
    if parcel.script not in parcel.files:
        raise ParcelError(f"{parcel.script} is not among the files that came with it")
    for path in parcel.imports:
        if ".." in path.split("/") or path.startswith("/"):
            raise ParcelError(f"{path!r} is no folder of what came with the script")
    for path in parcel.files:
        above = [str(each) for each in PurePosixPath(path).parents]
        if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
            raise ParcelError(f"{path!r} is no place for a file that travels with a script")
        if any(each in parcel.files for each in above):
            raise ParcelError(f"{path!r} lies in what is a file")


def unpack(parcel: Parcel, folder: Path) -> Unpacked:
    """Put all files into an empty folder."""
    for path, file in parcel.files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        handle = os.open(target, flags, 0o700 if file.runs else 0o600)
        with os.fdopen(handle, "wb") as sink:
            sink.write(file.data)
    folders = [folder / each for each in parcel.folders]
    return Unpacked(folder / parcel.script, folders, parcel.module)


def taken_names(parcel: Parcel) -> list[str]:
    """Return files that are imported by the name of a module that is loaded already.

    The script would import that module instead of the file, and `-m` would run it.
    """
    folders = parcel.folders
    suffixes = tuple(all_suffixes())
    found = []
    for path in map(PurePosixPath, parcel.files):
        inner = path.parent != path.parent.parent and path.parent.parent in folders
        package = path.name == "__init__.py" and inner
        module = path.parent in folders and path.name.endswith(suffixes)
        name = path.parent.name if package else path.name.partition(".")[0]
        script = str(path) == parcel.script and not parcel.module
        if (package or module) and name in sys.modules and not script:
            found.append(str(path))
    return found


@contextmanager
def at_home(folder: Path, script: Unpacked) -> Iterator[None]:
    """Run as if a person had started the script by hand in `folder`.

    Modules that were imported from it are forgotten at the end, because the next script may have
    other modules of these names.
    """
    path, modules, here = list(sys.path), dict(sys.modules), Path.cwd()
    sys.path[:0] = map(str, script.folders)
    os.chdir(folder)
    try:
        yield
    finally:
        with suppress(OSError):  # it may be gone by now
            os.chdir(here)
        sys.path[:] = path
        new = [(name, one) for name, one in sys.modules.items() if modules.get(name) is not one]
        for name in [name for name, module in new if _lies_in(folder, module)]:
            del sys.modules[name]
            if name in modules:
                sys.modules[name] = modules[name]
        for entry in [entry for entry in sys.path_importer_cache if _below(folder, entry)]:
            del sys.path_importer_cache[entry]
        for file in [file for file in linecache.cache if _below(folder, file)]:
            del linecache.cache[file]
        importlib.invalidate_caches()


def contents(module: object) -> Mapping[str, Any]:
    """Return a module's attributes without asking it.

    Some modules have an answer to every name, and some are loaded when they are first asked.
    """
    try:
        found: Mapping[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return found


def _lies_in(folder: Path, module: object) -> bool:
    own = contents(module)
    places = [own.get("__file__"), *(own.get("__path__") or ())]
    return any(_below(folder, place) for place in places)


def _below(folder: Path, place: object) -> bool:
    return isinstance(place, str) and f"{place}{os.sep}".startswith(f"{folder}{os.sep}")
