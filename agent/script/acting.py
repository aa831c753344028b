"""Which of the person's own functions do more than compute something from what they are given, or say it.

Told by their names, as they are called: `log(total)` may set the learning rate.
"""

import ast
import functools
from collections.abc import Iterator, Mapping
from typing import TypeGuard

from agent.script.counts import SAYING, says
from agent.source import own
from agent.source.found import Function
from agent.source.loops import names_in, sets_in, within

MADE = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
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
    return last(call.func)


def last(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


@functools.lru_cache(own.SOURCES_MAX)
def _calls(source: str) -> tuple[tuple[str, frozenset[str] | None], ...]:
    """Each function, with those that it calls; None of one that does something by itself."""
    tree = own.parsed(source)
    return *_aliases(tree), *(
        (name, None if _acts(function) else frozenset(map(called, _all_calls(function))))
        for name, function in _functions(tree)
    )


def _aliases(tree: ast.AST) -> Iterator[tuple[str, frozenset[str]]]:
    """`log = set_rate`, `log = partial(set_rate, ...)`, `from other import set_rate as log`"""
    for node in ast.walk(tree):
        match node:
            case ast.alias(name=name, asname=str(other)):
                yield other, frozenset({name})
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if isinstance(value, ast.Call) and called(value) == "partial" and value.args:
                    value = value.args[0]
                if isinstance(value, ast.Name | ast.Attribute):
                    yield name, frozenset({last(value)})


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
    nodes = list(within(function.body))
    made = {name for node in nodes for name in _made(node)} - given
    counted = {id(node.target) for node in nodes if _counts(node)}
    return any(_is_act(node, given, made) for node in nodes if id(node) not in counted)


def _counts(node: ast.AST) -> TypeGuard[ast.AugAssign]:
    """`self.lines += 1`, which is looked at while it counts."""
    match node:
        case ast.AugAssign(
            target=ast.Attribute(value=ast.Name(id="self")), op=ast.Add(), value=ast.Constant()
        ):
            return True
    return False


def _made(node: ast.AST) -> Iterator[str]:
    """Lists and dicts that nobody else has."""
    for target, value in sets_in([node]):
        if isinstance(target, ast.Name) and isinstance(value, MADE):
            yield target.id


def _is_act(node: ast.AST, given: set[str], made: set[str]) -> bool:
    match node:
        case ast.Subscript(ctx=ast.Store(), value=ast.Name(id=name)):
            return name not in made
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))) if name in made:
            return False
        case (
            ast.Attribute(ctx=ast.Store())
            | ast.Subscript(ctx=ast.Store())
            | ast.Global()
            | ast.Nonlocal()
        ):
            return True
        case ast.AugAssign(target=target):
            return not _counts(node) and bool(names_in(target) & given)
        case ast.Expr(value=ast.Call() as call):
            return not says(node) and called(call) not in QUIET
    return False
