"""The modules of a person's own that a script imports, found without running any of it.

They are looked up as when the script is started by hand: in the script's folder first, then where
PYTHONPATH and editable installations lead. Packages are taken whole, because a package may load
modules by computed names. Modules that no import statement reaches have to be named with --with.
"""

import ast
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from typing import NamedTuple

from orchestrator.cli.command import USAGE, CommandError

PRODUCT = Path(__file__).parents[2]
OURS = ("agent", "bidding", "cloud", "orchestrator")
MODULES = (".py", *EXTENSION_SUFFIXES)


def check_source(path: str, data: bytes) -> ast.Module:
    """Parse a source file; raise `CommandError` for a syntax error, before anything is bought."""
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(data, path, "exec", dont_inherit=True)
            return ast.parse(data)
    except SyntaxError as error:
        where = f"{path}:{error.lineno}" if error.lineno else path
        raise CommandError(f"{where}: not Python: {error.msg}", USAGE) from None
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        raise CommandError(f"{path}: not Python: {reason}", USAGE) from None


def neighbours(
    script: Path, tree: ast.Module, typed: str, folders: list[Path], root: Path
) -> Iterator[Path]:
    """Yield the modules to send, each once; `typed` is the path that the person typed.

    `folders` are those in which a worker looks first. A folder below `root` is added if Python finds
    a module there by other ways than the script's folder.
    """
    importlib.invalidate_caches()  # a file may have been written a moment ago
    tops, known = set[str](), {script}
    waiting = [(typed, list(_imported(tree)))]
    if packages := script.relative_to(folders[-1]).parts[:-1]:
        # A module: the packages around it are imported before it.
        waiting.append((typed, [(1, ".".join(packages))]))
    while waiting:
        place, imported = waiting.pop()
        for line, name in imported:
            top = name.partition(".")[0]
            if top in tops:
                continue  # all of it is found
            tops.add(top)
            homes = _own_folders(top, folders, root)
            for home, path in (
                (one, path) for one in homes for path in _found(one, top, f"{place}:{line}")
            ):
                if path in known:
                    continue
                known.add(path)
                yield path
                shown = _shown(path, script.parent, typed, root)
                parsed = _parsed(path, shown, strictly=_is_asked_for(home, name, path))
                if parsed is not None:
                    waiting.append((shown, list(_imported(parsed))))


def _shown(path: Path, beside: Path, typed: str, root: Path) -> str:
    """Return a module's path as the person would type it."""
    if path.is_relative_to(beside):
        return os.path.join(os.path.dirname(typed), path.relative_to(beside))  # noqa: PTH118, PTH120 - as it was typed
    return str(path.relative_to(root))


def _own_folders(top: str, folders: list[Path], root: Path) -> list[Path]:
    """Return folders of the person's own in which Python finds a module, and note them in `folders`.

    A package without __init__.py may lie in several.
    """
    found = [folder for folder in folders if PathFinder.find_spec(top, [str(folder)]) is not None]
    whole = [folder for folder in found if _is_whole(top, folder)]
    for place in [] if whole else developed(top):
        if place.is_relative_to(root) and place not in found:
            folders.append(place)
            found.append(place)
            whole += [place] if _is_whole(top, place) else []
    return whole[:1] or found


def _is_whole(top: str, folder: Path) -> bool:
    spec = PathFinder.find_spec(top, [str(folder)])
    return spec is not None and spec.origin is not None


def file_of(name: str, folder: Path) -> Path | None:
    """Return the file in `folder` that `python -m` runs for a module, without running any."""
    places, spec = [str(folder)], None
    for part in name.split("."):
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    if places:
        spec = PathFinder.find_spec("__main__", places)
    return None if spec is None or spec.origin is None else Path(spec.origin)


def developed(top: str) -> list[Path]:
    """Return folders with a module that is a person's own work: no part of an installation.

    PYTHONPATH names such folders, and so do editable installations.
    """
    if owner(top) or top in sys.builtin_module_names:
        return []
    try:
        spec = importlib.util.find_spec(top)
    except (ValueError, ImportError):
        return []
    if spec is None:
        return []
    places = spec.submodule_search_locations or ([spec.origin] if spec.origin else [])
    found = [Path(place).resolve() for place in places]
    return [each.parent for each in found if each.exists() and not _is_installation(each)]


def owner(top: str) -> str:
    """Return whose module has this name, if it is not a person's to give."""
    if top in OURS:
        return "of this product's"
    return "of Python's own" if top in sys.stdlib_module_names else ""


def _is_installation(path: Path) -> bool:
    homes = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts) or any(
        path.is_relative_to(home) for home in homes
    )


class Absent(NamedTuple):
    """A package that a script needs, and where it lies on this machine, if it does."""

    line: int
    name: str
    place: Path | None

    def __str__(self) -> str:
        return f"{self.name} (line {self.line})"


def absent(folders: list[Path], tree: ast.Module, root: Path) -> Iterator[Absent]:
    """Yield each package that the script needs and that workers may not have.

    Only imports that are sure to run count: what stands in an `if`, a `try` or a function may be
    meant to be missing.
    """
    names: set[str] = set()
    for statement in tree.body:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        for line, name in _imported(statement):
            top = name.partition(".")[0]
            if top in names or PathFinder.find_spec(top, list(map(str, folders))) is not None:
                continue
            names.add(top)
            if not _installed(top, bare=True):
                yield Absent(line, top, None)
            elif places := [each for each in developed(top) if not each.is_relative_to(root)]:
                yield Absent(line, top, places[0])


def relative(tree: ast.Module) -> int:
    """Return the line of the first import from the script's own package that is sure to run, or 0."""
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.level:
            return statement.lineno
    return 0


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and full name of every imported module.

    Relative imports are skipped, because a package is taken whole anyway.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from ((node.lineno, each.name) for each in node.names)
            case ast.ImportFrom(level=0, module=str(module)):
                yield node.lineno, module
                yield from ((node.lineno, f"{module}.{each.name}") for each in node.names)


def _found(folder: Path, top: str, where: str) -> list[Path]:
    """Return the files in `folder` of an imported module; all modules if it is a package."""
    spec = PathFinder.find_spec(top, [str(folder)])
    if spec is None:
        return []
    if spec.origin is None:  # a folder without __init__.py; an installed module comes before it
        return [] if _installed(top) else _modules(folder / top)
    path = Path(spec.origin)
    if top in OURS and path.is_relative_to(PRODUCT):
        return []
    if whose := owner(top):
        raise CommandError(
            f"{where}: imports {path.relative_to(folder)}, which lies beside the script and has the name of a module "
            f"{whose}: a worker has that one in use; rename it",
            USAGE,
        )
    return _modules(path.parent) if spec.submodule_search_locations else [path]


def _installed(top: str, *, bare: bool = False) -> bool:
    """Return whether a module is installed here; a folder without __init__.py counts only if `bare`."""
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module of this process that was not found on a path
        return True
    return spec is not None and (bare or spec.origin is not None)


def _modules(package: Path) -> list[Path]:
    found = []
    for folder, inner, files in os.walk(package, followlinks=True):
        inner[:] = sorted(name for name in inner if _is_inside(Path(folder, name)))
        found += [Path(folder, name) for name in sorted(files) if name.endswith(MODULES)]
    return found


def _is_inside(folder: Path) -> bool:
    """Return whether a folder in a package may have modules of it.

    A link to a package is one; a link to data is not, nor one that leads back to where it lies.
    """
    if not folder.name.isidentifier() or folder.name == "__pycache__":
        return False
    if not folder.is_symlink():
        return True
    leads_back = folder.parent.resolve().is_relative_to(folder.resolve())
    return not leads_back and (folder / "__init__.py").exists()


def _is_asked_for(folder: Path, name: str, path: Path) -> bool:
    """Return whether this import runs that file; other files of its package are only sent."""
    inside = path.relative_to(folder).with_suffix("").parts
    module = inside[:-1] if inside[-1] == "__init__" else inside
    return tuple(name.split("."))[: len(module)] == module


def _parsed(path: Path, shown: str, *, strictly: bool) -> ast.Module | None:
    if path.suffix != ".py":
        return None
    try:
        return check_source(shown, path.read_bytes())
    except OSError as error:
        raise CommandError(f"{shown}: cannot be read: {error.strerror}", USAGE) from None
    except CommandError:
        if strictly:
            raise
        return None
