"""What is the person's own: the script, and the modules beside it. What these have names for.

A state that would be lost, or a stream that would be another, may lie in any of them: looked for where the loop is, in
what called it, in the script, in every module of its own that was imported, and in what objects of its classes have.
"""

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType

import torch

OURS = str(Path(__file__).parent)
PYTHON = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
INSTALLED = ("/site-packages/", "/dist-packages/")


def is_library(file: str | None) -> bool:
    """Whether this is code that is installed, ours, Python's or nobody's file."""
    if not file or file.startswith("<"):
        return True
    return file.startswith((f"{OURS}/", *PYTHON)) or any(part in file for part in INSTALLED)


def is_own_class(kind: type) -> bool:
    if kind.__module__ == "__main__":
        return True
    return not is_library(getattr(sys.modules.get(kind.__module__), "__file__", None))


def shown(file: str) -> str:
    """As its author knows it: from the script's folder on."""
    folder = f"{_folder(_main())}/"
    return file.removeprefix(folder) if file.startswith(folder) else file


def names(frame: FrameType) -> dict[str, object]:
    """Where a frame is, by the names there; elsewhere with the module's or the function's before it."""
    found: dict[str, object] = {**frame.f_globals, **frame.f_locals}
    for where, there in _elsewhere(frame):
        found |= {f"{where}.{key}": value for key, value in there.items() if key[:2] != "__"}
    for name, thing in [*found.items()]:
        if is_own_class(type(thing)) and not isinstance(thing, torch.nn.Module | type):
            inside = [*getattr(thing, "__dict__", {}).items()]
            found |= {f"{name}.{key}": value for key, value in inside}
    return found


def _elsewhere(frame: FrameType) -> Iterator[tuple[str, dict[str, object]]]:
    """What called it, and the modules that were imported, as far as they lie beside the script or the loop."""
    main = _main()
    folders = f"{_folder(main)}/", f"{Path(frame.f_code.co_filename).parent}/"

    def beside(file: str) -> bool:
        return file.startswith(folders) and not is_library(file)

    caller = frame.f_back
    while caller is not None:
        if caller.f_locals is not caller.f_globals and beside(caller.f_code.co_filename):
            yield caller.f_code.co_name, caller.f_locals
        caller = caller.f_back
    for name, module in [*sys.modules.items()]:
        file = str(getattr(module, "__file__", None))
        if beside(file) and vars(module) is not frame.f_globals:
            yield Path(file).stem if module is main else name, vars(module)


def _main() -> ModuleType | None:
    return sys.modules.get("__main__")


def _folder(module: ModuleType | None) -> str:
    return str(Path(getattr(module, "__file__", None) or "/nowhere").absolute().parent)
