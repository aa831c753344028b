"""What a loop's body reads besides its microbatch: recorded with other values it may be another graph.

    names          step, weight      numbers and words by value, all else by which object it is
    places         cfg.alpha         attributes and items of what is named: numbers and words, and which function it is
    functions      losses.of(...)    the names and places that functions of the person's own read outside of themselves
    modules        self.training     numbers and words in the modules that were taken apart, and what learns in them

Modules that were kept whole are called as they are, and what they read is read anew every time; of guests (see `guests.py`)
it is looked at whether they train, since what draws random numbers has its turn.
"""

import ast
import dis
import functools
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch

from agent.own import is_library

PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
ABSENT = object()
Place = Callable[[Mapping[str, Any]], Any]


class Reads:
    """Everything that one recording was made with, and how to look at it again."""

    def __init__(
        self,
        parts: Sequence[ast.AST],
        names: dict[str, Any],
        model: torch.nn.Module,
        whole: Collection[str],
        asked: Sequence[torch.nn.Module] = (),
    ) -> None:
        nodes = [node for part in parts for node in ast.walk(part)]
        stored = {
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        self._places: list[Place] = []
        for node in nodes:
            if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
                path = _path(node)
                if path and path[0] in names and path[0] not in stored:
                    self._places.append(_place(path))
        self._modules = list(_taken_apart(model, whole))
        called = [place(names) for place in self._places]
        called += [each for one in self._modules for each in _methods(one)]
        self._functions = list(_reached(called))
        self._asked = [each for one in asked for each in one.modules()]
        self._found = self._look(names)

    def changed(self, names: dict[str, Any]) -> bool:
        found = self._look(names)
        return len(found) != len(self._found) or any(
            a is not b and not (isinstance(a, PLAIN) and type(a) is type(b) and a == b)
            for a, b in zip(found, self._found, strict=True)
        )

    def _look(self, names: dict[str, Any]) -> list[Any]:
        found = [place(names) for place in self._places]
        for function in self._functions:
            found += _outside(function)
        for module in self._modules:
            found += [value for value in vars(module).values() if isinstance(value, PLAIN)]
        return found + [module.training for module in self._asked]


def _path(node: ast.AST) -> list[Any]:
    """`a.b["c"]` as a, .b, ["c"]; nothing for what is no such chain."""
    match node:
        case ast.Name():
            return [node.id]
        case ast.Attribute() if before := _path(node.value):
            return [*before, ("attribute", node.attr)]
        case ast.Subscript(slice=ast.Constant(value=key)) if before := _path(node.value):
            return [*before, ("item", key)]
    return []


def lying_at(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """What such a chain leads to; nothing where it is none."""
    path = _path(node)
    return _followed(path, names) if path else ABSENT


def _followed(path: list[Any], names: Mapping[str, Any]) -> Any:
    name, *steps = path
    value = names.get(name, ABSENT)
    for kind, key in steps:
        value = _attribute(value, key) if kind == "attribute" else _item(value, key)
    return value


def _place(path: list[Any]) -> Place:
    _, *steps = path

    def look(names: Mapping[str, Any]) -> Any:
        value = _followed(path, names)
        return value if not steps or isinstance(value, (*PLAIN, FunctionType)) else None

    return look


def _attribute(owner: Any, key: str) -> Any:
    """What lies there: nothing of the script's is run to find it out."""
    own = getattr(owner, "__dict__", {})
    return own[key] if key in own else getattr(type(owner), "__dict__", {}).get(key)


def _item(owner: Any, key: Any) -> Any:
    if type(owner) in (list, tuple) and isinstance(key, int):
        return owner[key] if -len(owner) <= key < len(owner) else None
    return owner.get(key) if type(owner) is dict else None


def _taken_apart(model: torch.nn.Module, whole: Collection[str]) -> Iterator[torch.nn.Module]:
    """The modules whose own code was recorded."""
    kept: list[str] = []
    for name, module in model.named_modules():
        path = f"model.{name}" if name else "model"
        if path in whole:
            kept.append(f"{path}.")
        elif not path.startswith(tuple(kept)):
            yield module


def _methods(module: torch.nn.Module) -> Iterator[FunctionType]:
    """Its forward, and methods of its own with names that are used there."""
    waiting, seen = ["forward"], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for kind in type(module).__mro__:
            method = vars(kind).get(name)
            if isinstance(method, FunctionType) and not is_library(method.__code__.co_filename):
                yield method
                waiting += method.__code__.co_names


def _reached(called: Sequence[Any]) -> Iterator[FunctionType]:
    """Functions among these and what they call by name, as far as it is no library's."""
    waiting, seen = list(called), set[int]()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        if not is_library(function.__code__.co_filename):
            yield function
            waiting += _outside(function)


@functools.cache
def _paths(code: CodeType) -> tuple[Place, ...]:
    """`losses.weight` where it reads that: what it names outside of itself, and what lies there."""
    found: list[list[Any]] = []
    goes_on = False
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
            found.append([step.argval])
            goes_on = True
        elif goes_on and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found.append([*found[-1], ("attribute", step.argval)])
        else:
            goes_on = False
    inner = (
        place for each in code.co_consts if isinstance(each, CodeType) for place in _paths(each)
    )
    return (*map(_place, found), *inner)


def _outside(function: FunctionType) -> list[Any]:
    """What a function reads by name outside of itself."""
    cells: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            cells[name] = cell.cell_contents
        except ValueError:
            cells[name] = None  # not set yet
    names = ChainMap(cells, function.__globals__)
    return [place(names) for place in _paths(function.__code__)]
