"""The modules beside a script that it imports, found without running any of it.

They are looked up as when the script is started by hand: in the script's folder first. Packages are
taken whole, because a package may load modules by computed names. Modules that no import statement
reaches have to be named with --with.
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


def neighbours(script: Path, data: bytes, typed: str) -> Iterator[Path]:
    """Yield the modules to send, each once; `typed` is the path that the person typed."""
    importlib.invalidate_caches()  # a file may have been written a moment ago
    folder = script.parent
    known, waiting = {script}, [(typed, check_source(typed, data))]
    while waiting:
        place, tree = waiting.pop()
        for line, name in _imported(tree):
            for path in _found(folder, name, f"{place}:{line}"):
                if path in known:
                    continue
                known.add(path)
                yield path
                shown = os.path.join(os.path.dirname(typed), path.relative_to(folder))  # noqa: PTH118, PTH120 - as it was typed
                parsed = _parsed(path, shown, strictly=_is_asked_for(folder, name, path))
                if parsed is not None:
                    waiting.append((shown, parsed))


def absent(script: Path, data: bytes, typed: str) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each package that the script needs and that is not here.

    Only imports that are sure to run count: what stands in an `if`, a `try` or a function may be
    meant to be missing.
    """
    names: set[str] = set()
    for statement in check_source(typed, data).body:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        for line, name in _imported(statement):
            top = name.partition(".")[0]
            beside = PathFinder.find_spec(top, [str(script.parent)])
            if top not in names and beside is None and not _installed(top, bare=True):
                names.add(top)
                yield line, top


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


def _found(folder: Path, name: str, where: str) -> list[Path]:
    """Return the files in `folder` of an imported module; all modules if it is a package."""
    top = name.partition(".")[0]
    spec = PathFinder.find_spec(top, [str(folder)])
    if spec is None:
        return []
    if spec.origin is None:  # a folder without __init__.py; an installed module comes before it
        return [] if _installed(top) else _modules(folder / top)
    path = Path(spec.origin)
    if top in OURS and path.is_relative_to(PRODUCT):
        return []
    if top in OURS or top in sys.stdlib_module_names:
        whose = "of this product's" if top in OURS else "of Python's own"
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
