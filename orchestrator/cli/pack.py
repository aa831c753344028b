"""What goes to the workers of a job: the script, modules beside it, and what --with names.

The root is the folder in which the command was typed, or the script's folder if the script lies
elsewhere. Below it a worker has the files in the same places, and it runs in that folder, so the
script runs there as `python SCRIPT` or `python -m MODULE` does here.
"""

import ast
import glob
import hashlib
import importlib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Never

import msgspec
import typer
from rich.text import Text

from agent.errors import ParcelError
from agent.source import parcel
from orchestrator.cli.command import USAGE, CommandError, expanded
from orchestrator.cli.imports import (
    Absent,
    absent,
    check_source,
    developed,
    file_of,
    neighbours,
    owner,
    relative,
)
from orchestrator.config import Config
from orchestrator.formatting import plural

With = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="PATH",
        help="A file, a folder or a quoted pattern that goes along. More than once, if need be.",
    ),
]

AsModule = Annotated[
    bool,
    typer.Option("--module", "-m", help="SCRIPT is the name of a module, as for python -m."),
]

RELATIVE = (
    "{} imports from its own package (line {}), which Python refuses to a file that is started by its path: -m {} starts it as "
    "python -m does"
)
SHOWN_MAX = 8
LARGEST_SHOWN = 3
SCRIPT_BYTES_MAX = 16 * 1024 * 1024
ELSEWHERE = "put data into object storage, and let the script fetch it from there"
PYTHON_LINE = re.compile(rb"#!.*python")
CACHES = ("__pycache__", "node_modules")
SECRET = re.compile(
    r"\.env(\..*)?|\.?(netrc|pgpass|npmrc|pypirc)|id_(rsa|dsa|ecdsa|ed25519).*|.*(secret|credential|password).*|kubeconfig"
    r"|.*\.(pem|key|p12|pfx|jks|kdbx|keystore)|service[-_]account.*\.json",
    re.IGNORECASE,
)


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes to send, the sizes of the files beside the script, and notes for a person."""

    payload: bytes
    files: dict[str, int]
    notes: tuple[str, ...] = ()

    @property
    def sha(self) -> str:
        """Return the hash that identifies a job's script."""
        return hashlib.sha256(self.payload).hexdigest()

    def shown(self) -> list[Text]:
        texts = [Text(note, style="yellow") for note in self.notes]
        if self.files:
            size = sum(self.files.values())
            what = f"{plural(len(self.files), 'file')}, {size:,} bytes: {_some(list(self.files))}"
            texts.insert(0, Text.assemble(("goes along ", "green"), what))
        return texts

    def value(self) -> dict[str, object]:
        return {"files": self.files, "bytes": sum(self.files.values()), "notes": self.notes}


class Start(msgspec.Struct, frozen=True):
    """What a person has a worker start: a script, or a module, whose import begins in `folders`."""

    script: Path
    module: str = ""
    folders: tuple[Path, ...] = ()

    @property
    def words(self) -> list[str]:
        """Return it as it is typed."""
        return ["-m", self.module] if self.module else [str(self.script)]


def start_of(script: Path, *, as_module: bool = False) -> Start:
    """Return what to start. The file of a module is found as Python finds it, without running any."""
    if not as_module:
        return Start(script)
    name, here = str(script), Path.cwd().resolve()
    is_path = "/" in name or name.endswith(".py")
    if is_path or "" in name.split("."):
        would = f"; {_module(here / name, here)} would be one" if is_path else ""
        raise CommandError(f"-m {name}: not the name of a module{would}, or leave -m out", USAGE)
    importlib.invalidate_caches()  # a file may have been written a moment ago
    top = name.partition(".")[0]
    inside = PathFinder.find_spec(top, [str(here)]) is not None
    if inside and (whose := owner(top)):
        raise CommandError(
            f"-m {name}: {top} is the name of a module {whose}, which a worker has in use; rename it",
            USAGE,
        )
    for folder in [*([here] if inside else []), *developed(top)]:
        file = file_of(name, folder)
        if file is None or file.suffix != ".py":
            continue
        if not folder.is_relative_to(here):
            raise CommandError(f"-m {name}: lies in {folder}; submit it from there", USAGE)
        return Start(file.relative_to(here), name, tuple(dict.fromkeys((here, folder))))
    raise CommandError(
        f"-m {name}: neither a module nor a package with __main__.py in {here} or where PYTHONPATH leads",
        USAGE,
    )


def _module(path: Path, here: Path) -> str:
    """Return the name as which `python -m` runs a file."""
    return ".".join(Path(os.path.relpath(path, here)).with_suffix("").parts).lstrip(".")


def pack(
    start: Start, config: Config, words: Sequence[str] = (), argv: Sequence[str] = ()
) -> Packed:
    """Pack the script and its other files as they are now; `words` are the values of --with."""
    script, here = start.script, Path.cwd().resolve()
    data, tree = read_script(script, config)
    # A module has the name by which it is found, whatever links lead to it. A script's modules are
    # imported from the folder of the file that a link leads to.
    place = here / script if start.module else script.absolute().parent.resolve() / script.name
    real = place if start.module else place.resolve()
    folders = list(start.folders or [real.parent])
    typed = str(script if real == place else real)
    beside = list(neighbours(real, tree, typed, folders, _root(real, here)))
    if beside:
        place = real
    elif not start.module:
        folders = [place.parent]
    found = _Found(_root(place, here), config)
    for path in (place, *beside):
        found.add(path)
    for word in words:
        found.named(word, here)
    paths = {at: path for at, path in sorted(found.paths.items()) if path != place}
    _check_text((str(script), *argv, *paths))
    found.check_size()
    lacking = absent(folders, tree, found.root)
    notes = (*found.notes(here, argv), *_lacking(script, lacking, paths))
    if not start.module and (line := relative(tree)):
        notes += (RELATIVE.format(script, line, _module(place, found.root)),)
    if not paths and not start.module:
        return Packed(payload=data, files={}, notes=notes)
    files = {at: _read(path) for at, path in paths.items()}
    at, *imports = (path.relative_to(found.root).as_posix() for path in (place, *folders))
    if folders == [place.parent]:
        imports = []  # as it is without a word
    try:
        payload = parcel.pack(at, {at: parcel.File(data), **files}, tuple(imports), start.module)
    except ParcelError as error:
        raise CommandError(f"{script}: {error}", USAGE) from None
    sizes = {path: len(file.data) for path, file in files.items()}
    return Packed(payload=payload, files=sizes, notes=notes)


def _check_text(words: Iterable[str]) -> None:
    for word in words:
        if not word.isascii() and word != word.encode(errors="replace").decode():
            raise CommandError(
                f"{word}: a name or an argument that is not UTF-8, which no worker could be told",
                USAGE,
            )


def _root(place: Path, here: Path) -> Path:
    return here if place.is_relative_to(here) else place.parent


def _lacking(script: Path, absent: Iterable[Absent], sent: Iterable[str]) -> Iterator[str]:
    """Yield notes if imports would fail; a file that is sent may be the one of its name."""
    named = {part.partition(".")[0] for at in sent for part in Path(at).parts}
    lacking = [each for each in absent if each.name not in named]
    if nowhere := [str(each) for each in lacking if each.place is None]:
        yield (
            f"{script} imports what is neither beside it nor installed here, so it would end there: {_some(nowhere)}; "
            f"install it with {shlex.quote(sys.executable)} -m pip install, and in the image of a cloud's machines"
        )
    if away := [f"{each} from {each.place}" for each in lacking if each.place is not None]:
        yield (
            f"{script} imports what lies on this machine only: {_some(away)}; submit from a folder above both, or install "
            "it in the image of a cloud's machines"
        )


def read_script(path: Path, config: Config) -> tuple[bytes, ast.Module]:
    """Return the script's bytes, and what they say; raise `CommandError` if it is no script or too large."""
    most = min(config.limits.script_bytes, SCRIPT_BYTES_MAX)
    try:
        if path.is_dir():
            raise CommandError(f"{path}: a directory; name the script in it", USAGE)
        if path.exists() and not path.is_file():
            raise CommandError(f"{path}: not a file", USAGE)
        with path.open("rb") as stream:
            data = stream.read(most + 1)
    except FileNotFoundError:
        raise CommandError(f"{path}: no such file", USAGE) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CommandError(f"{path}: cannot be read: {reason}", USAGE) from None
    if len(data) > most:
        raise CommandError(
            f"{path}: larger than {most:,} bytes; a script is small (limits.script_bytes)", USAGE
        )
    return data, _checked(path, data)


def _checked(path: Path, data: bytes) -> ast.Module:
    """Parse the script; raise `CommandError` unless the file looks like a script and would do something.

    Parsing alone is not enough, because a single word in a text file is valid Python.
    """
    if path.suffix != ".py" and not PYTHON_LINE.match(data):
        raise CommandError(
            f"{path}: not a Python script; name one that ends in .py, or begins with #!/usr/bin/env python3",
            USAGE,
        )
    tree = check_source(str(path), data)
    if all(_is_text(each) for each in tree.body):
        raise CommandError(f"{path}: nothing in it would run; name the script that trains", USAGE)
    return tree


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class _Found:
    """The files to send, by their paths below `root`."""

    def __init__(self, root: Path, config: Config) -> None:
        self.root, self._most = root, config.limits.parcel_bytes
        self._state_dir = config.state_dir.resolve()
        self.paths: dict[str, Path] = {}
        self._left_out: dict[str, None] = {}
        self._secrets: dict[str, None] = {}

    def add(self, path: Path) -> None:
        if not path.is_relative_to(self.root):
            raise CommandError(
                f"{path}: lies outside of {self.root}, which is what a worker has of this machine: submit from a "
                "folder above the script and all that goes along",
                USAGE,
            )
        self.paths[self._at(path)] = path
        if SECRET.fullmatch(path.name):
            self._secrets[self._at(path)] = None

    def named(self, word: str, here: Path) -> None:
        """Add a file, a folder, or what a pattern matches.

        A path that is named literally is added even if a pattern would leave it out.
        """
        if not word:
            raise CommandError("--with: the name is empty; for this whole folder, --with .", USAGE)
        plain = here / expanded(f"--with {word}", word)
        literal = os.path.lexists(plain)
        matching = glob.glob(word, root_dir=here, recursive=True)  # noqa: PTH207 - as a shell does
        found = [plain] if literal else [here / each for each in sorted(matching)]
        if not found:
            raise CommandError(f"--with {word}: no such file", USAGE)
        for each in found:
            if not literal and not self._is_met(each, here, word):
                continue
            path = _place(each)
            if path.resolve().is_relative_to(self._state_dir):
                raise CommandError(f"--with {word}: what the manager keeps for itself", USAGE)
            if path.is_dir():
                self._walk(path)
            elif not path.is_file():
                raise CommandError(f"--with {word}: {path.name}: not a file", USAGE)
            else:
                self.add(path)

    def _is_met(self, match: Path, here: Path, word: str) -> bool:
        """Return whether a match of a pattern is added.

        It is if it would be added with the folder before the pattern, so hidden files are not.
        """
        named = itertools.takewhile(lambda part: not glob.has_magic(part), Path(word).parts)
        base = Path(os.path.normpath(here.joinpath(*named)))
        path = Path(os.path.normpath(match))
        inner = path.relative_to(base).parts if path.is_relative_to(base) else ()
        return all(self._is_wanted(base.joinpath(*inner[:end])) for end in range(1, len(inner) + 1))

    def _walk(self, top: Path) -> None:
        """Add the files of a folder, without caches, hidden files, secrets and installations."""
        for folder, inner, files in os.walk(top, onerror=_unreadable):
            kept = sorted(name for name in inner if self._is_wanted(Path(folder, name)))
            inner[:] = kept
            for path in (Path(folder, name) for name in sorted(files)):
                if self._is_wanted(path):
                    self.add(path)

    def _is_wanted(self, path: Path) -> bool:
        if path.name in CACHES or path.suffix == ".pyc":
            return False
        hidden = path.name.startswith(".") or SECRET.fullmatch(path.name) is not None
        leads_out = path.is_symlink() and (
            path.is_dir() or not path.resolve().is_relative_to(self.root)
        )
        machinery = (path / "pyvenv.cfg").exists() or path.resolve() == self._state_dir
        wanted = not (hidden or leads_out or machinery) and (path.is_file() or path.is_dir())
        if not wanted:
            self._left_out[self._at(path)] = None
        return wanted

    def _at(self, path: Path) -> str:
        return (
            path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)
        )

    def check_size(self) -> None:
        """Raise `CommandError` if there are too many files or bytes; no file is read for this."""
        sizes = {at: path.stat().st_size for at, path in self.paths.items()}
        if len(sizes) <= parcel.FILES_MAX and sum(sizes.values()) <= self._most:
            return
        largest = sorted(sizes, key=lambda at: -sizes[at])[:LARGEST_SHOWN]
        raise CommandError(
            f"{plural(len(sizes), 'file')} with {sum(sizes.values()):,} bytes would go along, and at most "
            f"{parcel.FILES_MAX:,} with {self._most:,} can (limits.parcel_bytes): {ELSEWHERE}; the largest: "
            + ", ".join(f"{at} {sizes[at]:,}" for at in largest),
            USAGE,
        )

    def notes(self, here: Path, argv: Sequence[str]) -> tuple[str, ...]:
        found = []
        if self._left_out:
            found.append(
                f"left out {_some([*self._left_out])}: hidden, a secret by its name, a link that leads out, or an "
                "installation; --with and its name sends it"
            )
        if self._secrets:
            found.append(f"sent, though it looks like a secret: {_some([*self._secrets])}")
        values = (value for word in argv for value in (word, word.partition("=")[2]))
        stays = [value for value in values if self._stays(value, here)]
        if stays:
            found.append(
                f"{_some(stays)} is an argument of the script's and lies here; workers have it with: --with {shlex.quote(stays[0])}"
            )
        return tuple(found)

    def _stays(self, value: str, here: Path) -> bool:
        """Return whether a value is a file or folder of this machine that no worker will have."""
        if not value or Path(value).is_absolute() or not os.path.exists(here / value):  # noqa: PTH110 - any text
            return False
        at = self._at(_place(here / value))
        return not any(path == at or path.startswith(f"{at}/") for path in self.paths)


def _place(path: Path) -> Path:
    """Return the real path of the parent folder with the file's name; a last link is kept."""
    return (
        Path(os.path.normpath(path.parent.resolve() / path.name)) if path.name else path.resolve()
    )


def _read(path: Path) -> parcel.File:
    try:
        return parcel.File(path.read_bytes(), os.access(path, os.X_OK))
    except OSError as error:
        _unreadable(error)


def _unreadable(error: OSError) -> Never:
    raise CommandError(f"{error.filename}: cannot be read: {error.strerror}", USAGE) from None


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_MAX
    return ", ".join([*names[:SHOWN_MAX], *([f"and {more:,} more"] if more > 0 else [])])
