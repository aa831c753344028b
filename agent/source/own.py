"""What is the person's own: the script, and the modules beside it. What these have names for.

A state that would be lost, or a stream that would be another, may lie in any of them: looked for where the loop is, in
what called it, in the script, in every module of its own that was imported, and in what objects of its classes have.
"""

import ast
import functools
import linecache
import sys
import sysconfig
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import CellType, FrameType, FunctionType, ModuleType, SimpleNamespace

import torch

from agent.source.parcel import contents

OURS = str(Path(__file__).parents[1])
PYTHON = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
DEPTH_MAX = 3  # objects in objects of one's own
INSTALLED = ("/site-packages/", "/dist-packages/")
SOURCES_MAX = 64
TORCHS = "torch.nn.modules."
_libraries: dict[str, object] = {}  # modules by name, once they are known to be none of these


def is_library(file: str | None) -> bool:
    """Whether this is code that is installed, ours, Python's or nobody's file."""
    if not file or file.startswith("<"):
        return True
    return file.startswith((f"{OURS}/", *PYTHON)) or any(part in file for part in INSTALLED)


def is_own_class(kind: type) -> bool:
    if kind.__module__ == "__main__":
        return True
    return not is_library(getattr(sys.modules.get(kind.__module__), "__file__", None))


def overheard_by(module: torch.nn.Module) -> list[object]:
    """The hooks of its forward that are neither torch's own, as those that make a weight before each forward are, nor ours."""
    if not (module._forward_hooks or module._forward_pre_hooks):
        return []  # as of nearly all, and all are asked in each step
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return [hook for hook in hooks if not _maker(hook).startswith(("torch.", "agent."))]


def _maker(hook: object) -> str:
    return getattr(hook, "__module__", None) or type(hook).__module__


def is_own(hook: object) -> bool:
    """Whether what is called there is the person's own: a function, a method, an object of a class."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    code = getattr(hook, "__code__", None)
    return is_own_class(type(hook)) if code is None else not is_library(code.co_filename)


def is_torchs(module: type) -> bool:
    return module.__module__.startswith(TORCHS)


def shown(file: str) -> str:
    """As its author knows it: from the script's folder on."""
    folder = f"{_folder(_main())}/"
    return file.removeprefix(folder) if file.startswith(folder) else file


def names(frame: FrameType, *, held: bool = False) -> dict[str, object]:
    """Where a frame is, by the names there; elsewhere with the module's or the function's before it. `held` are those that
    functions have around them, and their defaults."""
    found: dict[str, object] = {**frame.f_globals, **frame.f_locals}
    for where, there in _elsewhere(frame):
        found |= {f"{where}.{key}": value for key, value in there.items() if key[:2] != "__"}
    around, known = found, set[int]()
    for _ in range(DEPTH_MAX):
        own = {
            id(thing): (name, thing)
            for name, thing in around.items()
            if is_holder(thing) or (held and isinstance(thing, FunctionType) and is_own(thing))
        }
        around = {
            f"{name}.{key}": value
            for each, (name, thing) in own.items()
            if each not in known
            for key, value in [
                *getattr(thing, "__dict__", {}).items(),
                *(held_by(thing).items() if held and isinstance(thing, FunctionType) else ()),
            ]
            if not isinstance(thing, type) or not (key[:2] == "__" or hasattr(value, "__get__"))
        }
        known |= own.keys()
        found |= around
    return found


def is_holder(thing: object) -> bool:
    """What has attributes of the person's own: an object, a class, or a function. Modules tell of themselves."""
    match thing:
        case torch.nn.Module():
            return False
        case FunctionType():
            return bool(thing.__dict__) and not is_library(thing.__code__.co_filename)
        case type():
            return not issubclass(thing, torch.nn.Module) and is_own_class(thing)
        case SimpleNamespace():
            return True
    return is_own_class(type(thing))


def held_by(function: FunctionType) -> dict[str, object]:
    """What it has by names of the functions around it, and its defaults."""
    code = function.__code__
    places = code.co_varnames[: code.co_argcount]
    found = dict(zip(reversed(places), reversed(function.__defaults__ or ()), strict=False))
    found |= function.__kwdefaults__ or {}
    for name, cell in _cells(function).items():
        with suppress(ValueError):  # not set yet
            found[name] = cell.cell_contents
    return found


def around(function: FunctionType) -> Mapping[str, object]:
    return ChainMap(held_by(function), function.__globals__)


def place_of(function: FunctionType, name: str) -> object:
    """Where a name lies that it sets: the same for all that share it."""
    return _cells(function).get(name, function.__globals__)


def _cells(function: FunctionType) -> dict[str, CellType]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def asking() -> FrameType | None:
    """Where the person's own code is just now, and has called ours."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def source(file: str, there: Mapping[str, object]) -> str:
    """What a file says, or the loader of its module, which has these names."""
    return "".join(linecache.getlines(file, dict(there)))


@functools.lru_cache(SOURCES_MAX)
def parsed(source: str) -> ast.Module:
    """For everyone who looks at it, and changes nothing. What is no Python any more has nothing in it."""
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def parsed_of(frame: FrameType) -> ast.Module:
    """The file that it runs."""
    return parsed(source(frame.f_code.co_filename, frame.f_globals))


def parsed_where(function: FunctionType) -> ast.Module:
    """The file that it is in."""
    return parsed(source(function.__code__.co_filename, function.__globals__))


def definition(function: FunctionType) -> ast.FunctionDef | None:
    """Where it is defined, if that is to be found. Code begins with the first decorator."""
    code = function.__code__
    there = _definitions(source(code.co_filename, function.__globals__))
    return there.get((code.co_name, code.co_firstlineno))


@functools.lru_cache(SOURCES_MAX)
def _definitions(source: str) -> dict[tuple[str, int], ast.FunctionDef]:
    """All of a file at once: a class has many methods, and a file many classes."""
    return {
        (node.name, min([node.lineno, *(each.lineno for each in node.decorator_list)])): node
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.FunctionDef)
    }


def frames(frame: FrameType) -> Iterator[FrameType]:
    """Where a frame is, and what of the person's own called it."""
    yield frame
    yield from _callers(frame)


def traceback_of(error: BaseException) -> str:
    """The traceback as the script's author knows it: without the frames of ours below and between."""
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
    return "".join(whole.format()).rstrip()


def sources(frame: FrameType) -> dict[str, Mapping[str, object]]:
    """The files of all that, each with what its module has names for."""
    found = {each.f_code.co_filename: each.f_globals for each in frames(frame)}
    return found | {file: there for file, _, there in _modules(frame)}


def _elsewhere(frame: FrameType) -> Iterator[tuple[str, Mapping[str, object]]]:
    for caller in _callers(frame):
        if caller.f_locals is not caller.f_globals:
            yield caller.f_code.co_name, caller.f_locals
    for file, name, there in _modules(frame):
        if there is not frame.f_globals:
            yield Path(file).stem if name == "__main__" else name, there


def _beside(frame: FrameType) -> Callable[[str], bool]:
    """Whether a file lies beside the script or the loop."""
    folders = f"{_folder(_main())}/", f"{Path(frame.f_code.co_filename).parent}/"
    return lambda file: file.startswith(folders) and not is_library(file)


def _callers(frame: FrameType) -> Iterator[FrameType]:
    caller, beside = frame.f_back, _beside(frame)
    while caller is not None:
        if beside(caller.f_code.co_filename):
            yield caller
        caller = caller.f_back


def _modules(frame: FrameType) -> Iterator[tuple[str, str, Mapping[str, object]]]:
    """File, name and contents of those that were imported."""
    beside = _beside(frame)
    yield from (each for each in unknown_modules() if beside(each[0]))


def unknown_modules() -> list[tuple[str, str, Mapping[str, object]]]:
    """Those that are not known to be libraries. There are thousands, and the first look at each of them is the dear one:
    who can do it while nobody waits."""
    found = []
    for name, module in [*sys.modules.items()]:
        if _libraries.get(name) is module:
            continue
        there = contents(module)
        file = there.get("__file__")
        if isinstance(file, str) and is_library(file):
            _libraries[name] = module
        else:
            found.append((str(file), name, there))
    return found


def _main() -> ModuleType | None:
    return sys.modules.get("__main__")


def _folder(module: ModuleType | None) -> str:
    return str(Path(getattr(module, "__file__", None) or "/nowhere").absolute().parent)
