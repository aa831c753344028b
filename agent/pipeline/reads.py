"""What a loop's body reads besides its microbatch: recorded with other values it may be another graph.

    names          step, weight      numbers and words by value, all else by which object it is
    places         cfg.alpha         attributes and items of what is named, as far as they are numbers or words
    functions      loss_of(...)      the names that functions of the script read outside of themselves
    modules        self.training     numbers and words in the modules that were taken apart, and what learns in them

Modules that were kept whole are called as they are, and what they read is read anew every time.
"""

import ast
import dis
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
LIBRARIES = str(Path(torch.__file__).parents[1])
ABSENT = object()
Place = Callable[[dict[str, Any]], Any]


class Reads:
    """Everything that one recording was made with, and how to look at it again."""

    def __init__(
        self,
        parts: Sequence[ast.AST],
        names: dict[str, Any],
        model: torch.nn.Module,
        whole: Collection[str],
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
        called = [
            thing
            for node in nodes
            if isinstance(node, ast.Name)
            and isinstance(thing := names.get(node.id), FunctionType)
            and node.id not in stored
        ]
        self._modules = list(_taken_apart(model, whole))
        called += [forward for one in self._modules if (forward := _forward(one)) is not None]
        self._functions = list(_reached(called))
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
        return found


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


def _place(path: list[Any]) -> Place:
    name, *steps = path

    def look(names: dict[str, Any]) -> Any:
        value = names.get(name, ABSENT)
        for kind, key in steps:
            value = _attribute(value, key) if kind == "attribute" else _item(value, key)
        return value if not steps or isinstance(value, PLAIN) else None

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


def _forward(module: torch.nn.Module) -> FunctionType | None:
    forward = type(module).forward
    return forward if isinstance(forward, FunctionType) else None


def _reached(functions: Sequence[FunctionType]) -> Iterator[FunctionType]:
    """These and what they call by name, as far as it is no library's."""
    waiting, seen = list(functions), set[int]()
    while waiting:
        function = waiting.pop()
        if id(function) in seen or function.__code__.co_filename.startswith(LIBRARIES):
            continue
        seen.add(id(function))
        yield function
        waiting += [value for value in _outside(function) if isinstance(value, FunctionType)]


@functools.cache
def _globals(code: CodeType) -> tuple[str, ...]:
    return tuple(step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")


def _outside(function: FunctionType) -> list[Any]:
    """What a function reads by name outside of itself."""
    found = [function.__globals__.get(name) for name in _globals(function.__code__)]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(None)  # not set yet
    return found
