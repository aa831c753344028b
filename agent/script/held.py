"""What functions count from step to step outside of themselves: `nonlocal n; n += 1`, `def rate(seen=[0]): seen[0] += 1`.

In a name around them, or in a list, a dict or an array that they have by a name around them or as a default. Looked for in their
source. What is begun anew again and again, and what is only counted and said, may go on.
"""

import ast
import functools
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from agent.script.carried import is_time
from agent.script.contents import content_of
from agent.script.counts import only_says
from agent.source import own
from agent.source.loops import names_in, within

ITEMS_MAX = 10_000
FUNCTIONS_MAX = 1024

Counted = tuple[
    str, str, bool
]  # a name, what of it, and whether that is only asked for before it is set


def counts_of(things: Iterable[object]) -> Iterator[tuple[str, tuple[object, tuple[Any, ...]]]]:
    """By name: whose it is, and how far."""
    for function in _functions(things):
        held, there = own.held_by(function), own.around(function)
        for root, place, is_asked in _counted_in(function):
            value = there.get(root)
            holder, numbers = value, _numbers(value, bools=not is_asked)
            if root == place:
                holder, numbers = (
                    own.place_of(function, root),
                    _numbers([value], bools=not is_asked),
                )
            if numbers:
                yield f"{function.__name__}.{place}" if root in held else place, (holder, numbers)


def _counted_in(function: FunctionType) -> tuple[Counted, ...]:
    found = own.definition(function)
    return () if found is None else _counted(found, own.parsed_where(function))


def _functions(things: Iterable[object]) -> Iterator[FunctionType]:
    """Each once: functions among these, and methods of classes."""
    met, kinds = dict[int, FunctionType](), set[type]()
    for thing in things:
        kind = thing if isinstance(thing, type) else type(thing)
        inside = [] if kind in kinds or not own.is_own_class(kind) else vars(kind).values()
        kinds.add(kind)
        for each in map(_bare, (thing, *inside)):
            if isinstance(each, FunctionType) and own.is_own(each):
                met[id(each)] = each
    yield from met.values()


def _bare(thing: object) -> object:
    while isinstance(thing, functools.partial | staticmethod | classmethod | MethodType):
        thing = thing.func if isinstance(thing, functools.partial) else thing.__func__
    return thing


def _numbers(value: object, *, bools: bool) -> tuple[Any, ...]:
    match value:
        case np.ndarray():
            return (value.tobytes(),)
        case list() | dict() if len(value) <= ITEMS_MAX:
            items = dict.values(value) if isinstance(value, dict) else value
            some = (each for each in items if isinstance(each, int | float))
            numbers = [each for each in some if bools or not isinstance(each, bool)]
            return *numbers, *content_of([e for e in items if isinstance(e, torch.Tensor)])
        case torch.Tensor():
            return content_of(value)
    return ()


@functools.lru_cache(FUNCTIONS_MAX)
def _counted(function: ast.FunctionDef, tree: ast.Module) -> tuple[Counted, ...]:
    nodes = list(within(function.body))
    outer = _outer(nodes)
    local = names_in(*nodes, how=ast.Store) - outer
    given = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    found = dict[str, Counted]()
    for node in nodes:
        for target, is_asked in _counting(node):
            root, place = _root(target), ast.unparse(target)
            if root and root not in local and (root != place or root in outer):
                found.setdefault(place, (root, place, is_asked))
    if not found:
        return ()
    begun, read, read_here = {*_begun(tree.body)}, {*_read(tree)}, {*_read(function)}
    return tuple(
        each
        for each in found.values()
        if each[1] not in begun and each[0] in (read_here if each[0] in given else read)
    )


def _outer(nodes: Iterable[ast.AST]) -> set[str]:
    said = (node.names for node in nodes if isinstance(node, ast.Nonlocal | ast.Global))
    return {name for names in said for name in names}


def _counting(node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """What becomes another by what it is. What a clock has told may."""
    match node:
        case ast.AugAssign(target=target, value=value) if not is_time(value):
            yield target, False
        case ast.Assign(targets=[target], value=value) if not is_time(value):
            if _has(value, target):
                yield target, False
        case ast.If(test=test, body=body):
            sets = [part for part in body if isinstance(part, ast.Assign)]
            for target in (each for part in sets for each in _targets(part)):
                if _is_fixed(target) and _has(test, target):
                    yield target, True


def _targets(node: ast.Assign) -> Iterator[ast.expr]:
    for target in node.targets:
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else (target,)


def _is_fixed(target: ast.expr) -> bool:
    """An item by another name than its own is one of a table that is filled."""
    return not isinstance(target, ast.Subscript) or isinstance(target.slice, ast.Constant)


def _has(node: ast.AST, target: ast.expr) -> bool:
    place = ast.unparse(target)
    return any(
        isinstance(each, type(target)) and ast.unparse(each) == place for each in ast.walk(node)
    )


def _root(target: ast.AST) -> str:
    while isinstance(target, ast.Subscript):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""


def _begun(body: Iterable[ast.AST], outer: set[str] | None = None) -> Iterator[str]:
    """What is set anew whatever it was, by a loop or by a function. In the latter only what is `outer` is meant."""
    for part in body:
        match part:
            case ast.Assign(value=value) if outer is not None:
                for target in _targets(part):
                    is_local = isinstance(target, ast.Name) and outer and target.id not in outer
                    if not is_local and not _has(value, target):
                        yield ast.unparse(target)
            case ast.FunctionDef():
                yield from _begun(part.body, _outer(within(part.body)) or {""})
            case ast.For() | ast.While():
                yield from _begun(part.body, set())
            case ast.If():
                yield from _begun([*part.body, *part.orelse])
            case ast.With() | ast.Try():
                yield from _begun(part.body, outer)
            case ast.ClassDef():
                yield from _begun(part.body)


def _read(node: ast.AST) -> Iterator[str]:
    """For something else than to count on, or to say."""
    match node:
        case ast.Name(id=name, ctx=ast.Load()):
            yield name
        case ast.AugAssign(target=target, value=value) | ast.Assign(targets=[target], value=value):
            yield from {*_read(value)} - {_root(target)}
            return
        case _ if only_says(node):
            return
    for child in ast.iter_child_nodes(node):
        yield from _read(child)
