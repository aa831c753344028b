"""Which of the person's own functions do more than compute something from what they are given, or say it.

Told by their names, as they are called: `log(total)` may set the learning rate.
"""

import ast
import functools
from collections.abc import Iterator, Mapping

from agent.script.counts import SAYING, says
from agent.source import own
from agent.source.found import Function
from agent.source.loops import names_in, within

QUIET = {"flush", "close"}


def acting(sources: Mapping[str, Mapping[str, object]]) -> set[str]:
    """Also those that call others that do."""
    calls = [pair for one in sources.items() for pair in _calls(own.source(*one))]
    found = {name for name, asked in calls if asked is None}
    while more := {name for name, asked in calls if asked and asked & found} - found:
        found |= more
    return found


def called(call: ast.Call) -> str:
    """By its last name."""
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


@functools.lru_cache(own.SOURCES_MAX)
def _calls(source: str) -> tuple[tuple[str, frozenset[str] | None], ...]:
    """Each function, with those that it calls; None of one that does something by itself."""
    return tuple(
        (name, None if _acts(function) else frozenset(map(called, _all_calls(function))))
        for name, function in _functions(own.parsed(source))
    )


def _functions(tree: ast.AST) -> Iterator[tuple[str, Function]]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda() as function):
                yield name, function


def _all_calls(function: Function) -> Iterator[ast.Call]:
    return (each for each in ast.walk(function) if isinstance(each, ast.Call))


def _acts(function: Function) -> bool:
    if isinstance(function, ast.Lambda):
        return any(called(each) not in SAYING for each in _all_calls(function))
    given = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    return any(_is_act(node, given) for node in within(function.body))


def _is_act(node: ast.AST, given: set[str]) -> bool:
    match node:
        case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
            return True
        case ast.Global() | ast.Nonlocal():
            return True
        case ast.AugAssign(target=target):
            return bool(names_in(target) & given)
        case ast.Expr(value=ast.Call() as call):
            return not says(node) and called(call) not in QUIET
    return False
