"""What is the person's own between `session.share(...)` and the loop: `for x, y in noisy(session.share(...))`.

A generator sees the microbatches of this worker only, as the loop does, so nothing may go from one of them into what it
gives for the next, and no count of those that it has seen may. Found in its source: a function, a method, `__iter__` of
an object, an expression, and what these hand on to.
"""

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from agent.errors import Misuse
from agent.script.order import carried_in, counted_in, drawn_along, flowing_into, has
from agent.source import own
from agent.source.found import Caller, found_loop, is_share, names_of
from agent.source.reads import lying_at

DEPTH_MAX = 4
Is = Callable[[ast.AST], bool]
Given = tuple[
    FunctionType, Is
]  # a generator that is handed microbatches, and how they are known in it


def refuse_between(caller: Caller) -> None:
    loop = found_loop(caller)
    if loop is not None:
        file = Path(caller.frame.f_code.co_filename).name
        _look(loop.over, is_share, names_of(caller.frame), file, DEPTH_MAX)


def _look(node: ast.AST, is_given: Is, names: Mapping[str, Any], file: str, depth: int) -> None:
    """At what is made of microbatches here."""
    for each in ast.walk(node):
        if isinstance(each, ast.GeneratorExp):
            part = each.generators[0]
            if len(each.generators) == 1 and has(part.iter, is_given):
                gives = ast.Expr(ast.Yield(each.elt))
                _refuse(_as_loop(part, gives, each.lineno), is_given, file)
        elif isinstance(each, ast.Call) and depth:
            for given in _generators(each, is_given, names):
                _look_into(given, depth - 1)


def _as_loop(part: ast.comprehension, gives: ast.stmt, lineno: int) -> ast.For:
    return ast.For(part.target, part.iter, [gives], [], lineno=lineno, col_offset=0)


def _look_into(given: Given, depth: int) -> None:
    function, is_given = given
    there, file = function.__globals__, Path(function.__code__.co_filename).name
    found = own.definition(function)
    for each in [] if found is None else ast.walk(found):
        if isinstance(each, ast.For) and has(each.iter, is_given):
            _refuse(each, is_given, file)
            _look(each.iter, is_given, there, file, depth)
        elif isinstance(each, ast.YieldFrom):
            _look(each.value, is_given, there, file, depth)


def _generators(call: ast.Call, is_given: Is, names: Mapping[str, Any]) -> Iterator[Given]:
    function, bound = _called(call, names)
    is_class = isinstance(function, type)
    if is_class:
        function = inspect.getattr_static(function, "__iter__", None)
    if (
        not isinstance(function, FunctionType)
        or not function.__code__.co_flags & inspect.CO_GENERATOR
    ):
        return
    if own.is_library(function.__code__.co_filename):
        return
    code = function.__code__
    places = code.co_varnames[bound : code.co_argcount]
    handed = [*zip(places, call.args, strict=False)] + [
        (keyword.arg, keyword.value) for keyword in call.keywords
    ]
    if is_class:
        if any(has(arg, is_given) for arg in call.args):
            yield (function, lambda node: _is_attribute(node, code.co_varnames[0]))
        return
    for name, arg in handed:
        if name is not None and has(arg, is_given):
            yield (function, lambda node, name=name: _is_name(node, name))  # type: ignore[misc]


def _called(call: ast.Call, names: Mapping[str, Any]) -> tuple[Any, int]:
    """What is called, and how many of its parameters are given by that: nothing is run to find it."""
    match call.func:
        case ast.Attribute(value=ast.Call(func=maker), attr=name):
            kind = lying_at(maker, names)
            return (
                (inspect.getattr_static(kind, name, None), 1)
                if isinstance(kind, type)
                else (None, 0)
            )
        case ast.Attribute(value=owner, attr=name):
            thing = lying_at(owner, names)
            method = inspect.getattr_static(type(thing), name, None)
            if isinstance(method, FunctionType) and not inspect.ismodule(thing):
                return method, 1
    return lying_at(call.func, names), 0


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_attribute(node: ast.AST, owner: str) -> bool:
    return isinstance(node, ast.Attribute) and _is_name(node.value, owner)


def _refuse(loop: ast.For, is_given: Is, file: str) -> None:
    inside = [node for part in loop.body for node in ast.walk(part)]
    values = [node.value for node in inside if isinstance(node, ast.Yield) and node.value]
    gives, place = flowing_into(values, loop), f"{file}:{loop.lineno}"
    beside = sorted(
        gives
        & {*counted_in(loop.target, loop.iter), *drawn_along(loop.target, loop.iter, is_given)}
    )
    if beside:
        raise Misuse(
            f"{place}: `{beside[0]}` goes into a microbatch and counts those of this worker only, of which others have "
            "others: put it into the microbatch before session.share(...)"
        )
    carried = carried_in(loop, gives)
    if carried is not None:
        raise Misuse(
            f"{place}: `{carried.id}` goes from one microbatch into the next, which another worker may have: begin anew "
            "with every microbatch, or do it before session.share(...)"
        )
