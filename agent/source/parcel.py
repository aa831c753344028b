"""What travels with a script: files beside it, and its place among them. No torch here.

    payload = the script's own bytes, if no other file goes along
            | mark, then in msgpack: the script's path, and for every file its path, bytes, and
              whether it is a program

The same files give the same bytes, and so the same checksum. By that the payload is stored, and
what was measured of a job is found again. Links and devices cannot be expressed in it, and no path
leads out of its folder.
"""

import importlib
import linecache
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.machinery import all_suffixes
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from agent.errors import ParcelError

MARK = b"\0parcel 1\0"  # no Python source has a null byte in it
FILES_MAX = 10_000


class File(msgspec.Struct, frozen=True, array_like=True):
    data: bytes
    runs: bool = False  # whether it is a program, called by its name


class Parcel(msgspec.Struct, frozen=True, array_like=True):
    """Paths are relative, with slashes; `script` is one of them."""

    script: str
    files: dict[str, File]


def pack(script: str, files: Mapping[str, File]) -> bytes:
    parcel = Parcel(script, {path: files[path] for path in sorted(files)})
    _check(parcel)
    return MARK + msgspec.msgpack.encode(parcel)


def read(payload: bytes, name: str) -> Parcel:
    """Return what is in a payload. `name` is the script's, if it is alone in it."""
    if not payload.startswith(MARK):
        return Parcel(name, {name: File(payload)})
    try:
        parcel = msgspec.msgpack.decode(memoryview(payload)[len(MARK) :], type=Parcel)
    except msgspec.MsgspecError as error:
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
    for path in parcel.files:
        above = [str(each) for each in PurePosixPath(path).parents]
        if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
            raise ParcelError(f"{path!r} is no place for a file that travels with a script")
        if any(each in parcel.files for each in above):
            raise ParcelError(f"{path!r} lies in what is a file")


def unpack(parcel: Parcel, folder: Path) -> Path:
    """Put all files into an empty folder. Return where the script is."""
    for path, file in parcel.files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        handle = os.open(target, flags, 0o700 if file.runs else 0o600)
        with os.fdopen(handle, "wb") as sink:
            sink.write(file.data)
    return folder / parcel.script


def taken_names(parcel: Parcel) -> list[str]:
    """Return files beside the script that have the name of a module that is loaded already.

    The script would import that module instead of the file.
    """
    folder = PurePosixPath(parcel.script).parent
    suffixes = tuple(all_suffixes())
    found = []
    for path in map(PurePosixPath, parcel.files):
        package = path.name == "__init__.py" and path.parent.parent == folder != path.parent
        module = path.parent == folder and path.name.endswith(suffixes)
        name = path.parent.name if package else path.name.partition(".")[0]
        if (package or module) and name in sys.modules and str(path) != parcel.script:
            found.append(str(path))
    return found


@contextmanager
def at_home(folder: Path, script: Path) -> Iterator[None]:
    """Run as if a person had started the script by hand in `folder`.

    Modules that were imported from it are forgotten at the end, because the next script may have
    other modules of these names.
    """
    path, modules, here = list(sys.path), dict(sys.modules), Path.cwd()
    sys.path.insert(0, str(script.parent))
    os.chdir(folder)
    try:
        yield
    finally:
        with suppress(OSError):  # it may be gone by now
            os.chdir(here)
        sys.path[:] = path
        for name in [name for name, module in sys.modules.items() if _lies_in(folder, module)]:
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
