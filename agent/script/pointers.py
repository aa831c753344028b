"""A buffer that says where the forward writes next: `ptr = int(self.ptr); self.queue[:, ptr:ptr + n] = keys; self.ptr[0] = (ptr + n) % K`.

Each microbatch sees the buffers of the step's start, and what they make of them is added up: they would all write to the same
place, of which the queue would keep the mean, and the place would leave the queue. Looked for in the source of the forward and
of what it calls.
"""

import ast
import functools
import inspect
from collections.abc import Iterable, Iterator
from types import FunctionType

import torch

from agent.errors import Misuse
from agent.source import own
from agent.source.loops import names_in

KINDS_MAX = 1024
PLACED = {"index_copy", "index_copy_", "index_fill_", "index_put_", "scatter_"}


def refuse_pointers(models: Iterable[torch.nn.Module], microbatches: int) -> None:
    if microbatches < 2:
        return
    for model in models:
        for path, module in model.named_modules():
            kind: type = type(module)
            for key in sorted(_pointers(kind) & module._buffers.keys()):
                if not _counts(module._buffers[key]):
                    continue
                raise Misuse(
                    f"the buffer {f'{path}.{key}'.lstrip('.')!r} says where the forward writes next. Each microbatch sees the "
                    f"buffers of the step's start, so all {microbatches} of a step would write to the same place, and what they "
                    "add to it would be added up: write behind the loop over session.share(...), what is computed from all "
                    "microbatches of the step, or make the step of one, Session(..., microbatches=1)"
                )


def _counts(buffer: torch.Tensor | None) -> bool:
    return buffer is not None and not buffer.is_floating_point() and buffer.dtype != torch.bool


@functools.lru_cache(KINDS_MAX)
def _pointers(kind: type) -> frozenset[str]:
    found = frozenset[str]()
    for method in _called(kind):
        found |= _written(method) & _placing(method)
    return found


def _called(kind: type) -> Iterator[ast.FunctionDef]:
    """The forward, and methods of its own with names that are used there."""
    waiting, seen = {"forward"}, set[str]()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        for each in kind.__mro__:
            method = inspect.unwrap(vars(each).get(name, ""))  # `@torch.no_grad()`
            if isinstance(method, FunctionType) and own.is_own(method):
                found = own.definition(method)
                if found is not None:
                    yield found
                    waiting |= _attributes(found) - seen


def _attributes(node: ast.AST) -> set[str]:
    """`self.ptr`"""
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


def _written(method: ast.FunctionDef) -> set[str]:
    found = set[str]()
    for node in ast.walk(method):
        match node:
            case ast.Assign(targets=targets):
                found |= {name for each in targets for name in _owner(each)}
            case ast.AugAssign(target=target):
                found |= _owner(target)
            case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name.endswith("_"):
                found |= _owner(owner)
    return found


def _owner(target: ast.expr) -> set[str]:
    """`self.ptr` of `self.ptr[0]`"""
    while isinstance(target, ast.Subscript):
        target = target.value
    return _attributes(target) if isinstance(target, ast.Attribute) else set()


def _placing(method: ast.FunctionDef) -> set[str]:
    """The attributes that say where in another something is put."""
    places = list[ast.AST]()
    for node in ast.walk(method):
        match node:
            case ast.Subscript(slice=place, value=value, ctx=ast.Store()) if _owner(value):
                places.append(place)
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=args) if name in PLACED:
                places += args[:2]
    sets = [node for node in ast.walk(method) if isinstance(node, ast.Assign)]
    while True:
        names = names_in(*places)
        come = [node.value for node in sets if names_in(*node.targets, how=ast.Store) & names]
        if names_in(*come) <= names:
            return {name for each in (*places, *come) for name in _attributes(each)}
        places += come
