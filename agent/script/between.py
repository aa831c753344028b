"""A generator of the person's own between `session.share(...)` and the loop: `for x, y in noisy(session.share(...))`.

It sees the microbatches of this worker only, as the loop does, so nothing may go from one of them into what it gives for
the next, and no count of those that it has seen may. Found in its source.
"""

import ast
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from agent.errors import Misuse
from agent.script.order import counted_in, drawn_along, flowing_into, is_share
from agent.source import own
from agent.source.loops import Caller, found_loop, names_in, names_of, read_first, uses
from agent.source.reads import lying_at


def refuse_between(caller: Caller) -> None:
    loop = found_loop(caller)
    if loop is None:
        return
    for function, given in _generators(loop.whole.iter, names_of(caller.frame)):
        for inner in _loops(function, given):
            _refuse(inner, given, Path(function.__code__.co_filename).name)


def _generators(node: ast.AST, names: Mapping[str, Any]) -> Iterator[tuple[FunctionType, str]]:
    """Those that are given the share, and by which name."""
    for call in ast.walk(node):
        if not isinstance(call, ast.Call):
            continue
        function = lying_at(call.func, names)
        if not inspect.isgeneratorfunction(function) or not isinstance(function, FunctionType):
            continue
        if own.is_library(function.__code__.co_filename):
            continue
        known = function.__code__.co_varnames
        for place, arg in enumerate(call.args):
            if place < function.__code__.co_argcount and _has_share(arg):
                yield function, known[place]
        yield from ((function, k.arg) for k in call.keywords if k.arg and _has_share(k.value))


def _has_share(node: ast.AST) -> bool:
    return any(map(is_share, ast.walk(node)))


def _loops(function: FunctionType, given: str) -> Iterator[ast.For]:
    code = function.__code__
    tree = own.parsed(own.source(code.co_filename, function.__globals__))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == code.co_firstlineno:
                yield from (
                    each
                    for each in ast.walk(node)
                    if isinstance(each, ast.For) and given in names_in(each.iter)
                )


def _refuse(loop: ast.For, given: str, file: str) -> None:
    def is_given(node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == given

    inside = [node for part in loop.body for node in ast.walk(part)]
    values = [node.value for node in inside if isinstance(node, ast.Yield) and node.value]
    gives, place = flowing_into(values, loop), f"{file}:{loop.lineno}"
    beside = sorted(gives & {*counted_in(loop), *drawn_along(loop, is_given)})
    if beside:
        raise Misuse(
            f"{place}: `{beside[0]}` goes into a microbatch and counts those of this worker only, of which others have "
            "others: put it into the microbatch before session.share(...)"
        )
    within = list(uses([loop.target, *loop.body]))
    stored = {name for name, is_stored, _ in within if is_stored}
    carried = read_first(within, stored & gives)
    if carried is not None:
        raise Misuse(
            f"{place}: `{carried.id}` goes from one microbatch into the next, which another worker may have: begin anew "
            "with every microbatch, or do it before session.share(...)"
        )
