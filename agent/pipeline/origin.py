"""Whose code something is: torch's, an installed library's, ours, or the person's own."""

import sys
import sysconfig
from pathlib import Path

import torch

OURS = str(Path(__file__).parents[1])
LIBRARY = str(Path(torch.__file__).parent)
PYTHON = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
INSTALLED = ("/site-packages/", "/dist-packages/")
TORCHS = "torch.nn.modules."


def is_library(file: str | None) -> bool:
    """Whether this is code that is installed, ours, Python's or nobody's file."""
    if not file or file.startswith("<"):
        return True
    return file.startswith((f"{OURS}/", *PYTHON)) or any(part in file for part in INSTALLED)


def is_own_class(kind: type) -> bool:
    if kind.__module__ == "__main__":
        return True
    return not is_library(getattr(sys.modules.get(kind.__module__), "__file__", None))


def is_torchs(module: type) -> bool:
    return module.__module__.startswith(TORCHS)


def overheard_by(module: torch.nn.Module) -> list[object]:
    """The hooks of its forward that are neither torch's own, as those that make a weight before each forward are, nor ours."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return [hook for hook in hooks if not _maker(hook).startswith(("torch.", "agent."))]


def _maker(hook: object) -> str:
    return getattr(hook, "__module__", None) or type(hook).__module__


def shown(file: str) -> str:
    """As its author knows it: from the script's folder on."""
    main = getattr(sys.modules.get("__main__"), "__file__", None) or "/nowhere/script"
    return file.removeprefix(f"{Path(main).absolute().parent}/")
