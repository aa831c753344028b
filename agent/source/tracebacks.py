"""Tracebacks as a script's author knows them, and which code is the author's."""

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

OURS = str(Path(__file__).parents[1])
PYTHON = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
INSTALLED = ("/site-packages/", "/dist-packages/")
TORCHS = "torch.nn.modules."
LINE_CHARS_MAX = 500


def traceback_of(error: BaseException) -> str:
    """Format an error without our own frames; its last line says what the error is.

    CUDA's errors end with advice, groups with a frame, and some texts are longer than what is kept.
    """
    whole = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = whole
    seen: set[int] = set()
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        part.stack = traceback.StackSummary.from_list(
            [
                frame
                for frame in part.stack
                if not frame.filename.startswith((OURS, "<frozen runpy>"))
            ]
        )
        part = part.__cause__ or part.__context__
    said = "".join(whole.format()).rstrip()
    only = list(whole.format_exception_only())
    if isinstance(error, SyntaxError):
        only = only[-1:]  # after the line of the source
    line = " ".join(part.strip() for part in "".join(only).splitlines())[:LINE_CHARS_MAX].rstrip()
    return said if said.endswith(f"\n{line}") else f"{said}\n{line}"


def shown(file: str) -> str:
    """Return a file's name as its author knows it: from the script's folder on."""
    folder = f"{_script_folder()}/"
    return file.removeprefix(folder) if file.startswith(folder) else file


def is_library(file: str | None) -> bool:
    """Whether this is installed code, ours, Python's, or code without a file."""
    if not file or file.startswith("<"):
        return True
    return file.startswith((f"{OURS}/", *PYTHON)) or any(part in file for part in INSTALLED)


def is_own_class(kind: type) -> bool:
    """Whether a class is defined in the script, or in a module beside it."""
    if kind.__module__ == "__main__":
        return True
    return not is_library(getattr(sys.modules.get(kind.__module__), "__file__", None))


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield code and all code that is written within it, as lambdas and inner functions."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from codes(const)


def is_torchs(module: type) -> bool:
    return module.__module__.startswith(TORCHS)


def overheard_by(module: "torch.nn.Module") -> list[object]:
    """Return the hooks of a module's forward that are neither torch's own nor ours."""
    if not (module._forward_hooks or module._forward_pre_hooks):
        return []
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return [hook for hook in hooks if not _maker(hook).startswith(("torch.", "agent."))]


def _maker(hook: object) -> str:
    return getattr(hook, "__module__", None) or type(hook).__module__


def _script_folder() -> Path:
    main = sys.modules.get("__main__")
    return Path(getattr(main, "__file__", None) or "/nowhere").absolute().parent
