"""Where the loop over `session.share(...)` is in the script's source: around the call, over a name that has what it gave, or in
a function that was handed it.
"""

import ast
import copy
import functools
from collections.abc import Callable, Iterator
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec

from agent.errors import CannotRecord
from agent.source import own

MICROBATCH = "__microbatch__"
SHARED = ast.parse("session.share()", mode="eval").body  # in what a loop goes over
SIMPLE = ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return | ast.Assert
COMPREHENSIONS = {
    "<listcomp>",
    "<setcomp>",
    "<dictcomp>",
}  # with code of their own before Python 3.12
LOOPS_MAX = 4
NAMES_MAX = 4  # that stand for each other
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
End = tuple[int | None, int | None]
Position = tuple[int | None, int | None, int | None, int | None]


class Caller(msgspec.Struct, frozen=True):
    """Who called `session.share`, or has the loop over what it gave, and from where: the instruction. `rows` are names there
    for what it gave."""

    frame: FrameType
    at: int
    rows: frozenset[str] = frozenset()


def looping(caller: Caller, asking: FrameType | None, rows: object) -> Caller:
    """Where the loop is, if it is not around the call of `session.share`: over a name that has what it gave, or in a
    function that was handed it. `asking` is who asks for the first microbatch: the loop, or a generator between."""
    if found_loop(caller) is not None:
        return caller
    frame = _behind_generators(caller, asking)
    if frame is None or own.is_library(frame.f_code.co_filename):
        return caller
    names = frozenset(name for name, value in frame.f_locals.items() if value is rows)
    there = Caller(frame, frame.f_lasti, names)
    return caller if found_loop(there) is None else there


def _behind_generators(caller: Caller, asking: FrameType | None) -> FrameType | None:
    while asking is not None and asking is not caller.frame and _is_between(asking.f_code):
        asking = asking.f_back
    return asking


def _is_between(code: CodeType) -> bool:
    return bool(code.co_flags & CO_GENERATOR) or code.co_name in COMPREHENSIONS


def all_at_once(caller: Caller, asking: FrameType | None) -> ast.stmt | None:
    """The line that calls `session.share` and goes through all of it: `[train_on(x) for x in session.share(...)]`."""
    frame = caller.frame
    if _behind_generators(caller, asking) is not frame:
        return None
    call, now = (_line(frame.f_code, at) for at in (caller.at, frame.f_lasti))
    tree = own.parsed_of(frame)
    lines = [
        node
        for node in ast.walk(tree)
        if isinstance(node, SIMPLE)
        and any(is_share(each) for each in ast.walk(node))
        and all(node.lineno <= line <= (node.end_lineno or 0) for line in (call, now))
    ]
    return lines[0] if len(lines) == 1 else None


def names_of(frame: FrameType) -> dict[str, Any]:
    return {**frame.f_globals, **frame.f_locals}


class Loop(msgspec.Struct, frozen=True):
    """A `for` over `session.share(...)` as it is in the script, and over one microbatch; and what is around it. `over` is
    what it goes over, where names are what they were set to."""

    whole: ast.For
    over: ast.expr
    single: ast.For
    scope: ast.AST
    file: str

    @property
    def lineno(self) -> int:
        return self.whole.lineno

    @property
    def place(self) -> str:
        return f"{Path(self.file).name}:{self.lineno}"


def asked_for_in(caller: Caller, asking: FrameType | None) -> Loop | None:
    """A `while` that asks for the microbatches by itself, as a loop that what is behind it can be told from."""
    frame = _behind_generators(caller, asking)
    if frame is None or own.is_library(frame.f_code.co_filename):
        return None
    line, tree = _line(frame.f_code, frame.f_lasti), own.parsed_of(frame)
    around = [
        (node, scope)
        for node, scope in _within(tree, tree)
        if isinstance(node, ast.While) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if not around or any(is_share(each) for each in ast.walk(around[-1][0])):
        return None
    node, scope = around[-1]
    loop = ast.copy_location(ast.For(ast.Name("_", ast.Store()), SHARED, node.body, []), node)
    return Loop(loop, SHARED, loop, scope, frame.f_code.co_filename)


def find(caller: Caller) -> Loop:
    loop = found_loop(caller)
    if loop is None:
        code = caller.frame.f_code
        raise CannotRecord(
            f"{Path(code.co_filename).name}:{_line(code, caller.at)}: cutting the model into stages needs a loop that can "
            "be found in the script's source: `for ... in session.share(...):`"
        )
    return loop


def found_loop(caller: Caller) -> Loop | None:
    """The loop in the script's source, if it can be found there."""
    code = caller.frame.f_code
    source = own.source(code.co_filename, caller.frame.f_globals)
    return _found(code, code.co_filename, caller.at, source, caller.rows)


@functools.lru_cache(LOOPS_MAX)
def _found(code: CodeType, file: str, at: int, source: str, rows: frozenset[str]) -> Loop | None:
    """Asked for by everyone who looks at the loop, in every step."""
    position, tree = _instruction(code, at), own.parsed(source)
    for node, scope in _within(tree, tree):
        if isinstance(node, ast.For):
            over = _over(node, scope, position, rows)
            if over is not None:
                return Loop(node, over, _single(node, over), scope, file)
    return None


def _over(
    loop: ast.For, scope: ast.AST, position: Position, rows: frozenset[str]
) -> ast.expr | None:
    """What a loop goes over, if the instruction is the call of `session.share` in it, or the loop's own asking."""
    end = position[1], position[3]
    if any(_ends(call, end) for call in ast.walk(loop.iter)):
        return _replaced(loop.iter, lambda each: SHARED if _ends(each, end) else None)
    if position != _position(loop) and position != _position(
        loop.iter
    ):  # as Python's versions have it
        return None
    followed = _followed(loop.iter, scope, rows, NAMES_MAX)
    return followed if any(each is SHARED for each in ast.walk(followed)) else None


def _instruction(code: CodeType, at: int) -> Position:
    """Where it stands in the source."""
    return list(code.co_positions())[at // 2]


def _line(code: CodeType, at: int) -> int:
    return _instruction(code, at)[0] or 0


def _position(node: ast.For | ast.expr) -> Position:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _followed(node: ast.expr, scope: ast.AST, rows: frozenset[str], depth: int) -> ast.expr:
    """Names are what they were set to in the same function, if that was once."""

    def followed(each: ast.AST) -> ast.expr | None:
        if is_share(each):
            return SHARED
        if not isinstance(each, ast.Name) or not isinstance(each.ctx, ast.Load):
            return None
        if each.id in rows:
            return SHARED
        value = _set_once(each.id, scope)
        if value is None or not depth:
            return None
        found = _followed(value, scope, rows, depth - 1)
        return found if any(one is SHARED for one in ast.walk(found)) else None

    return _replaced(node, followed)


def _set_once(name: str, scope: ast.AST) -> ast.expr | None:
    inside = [node for node, where in _within(scope, scope) if where is scope]
    stored = [
        node
        for node in inside
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
    ]
    values = [
        node.value
        for node in inside
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id == name
    ]
    return values[0] if len(stored) == len(values) == 1 else None


def is_share(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr="share")):
            return True
    return False


def _replaced(node: ast.expr, by: Callable[[ast.AST], ast.expr | None]) -> ast.expr:
    """A copy of it, with others in the places of some: the original is still looked at."""

    def copied(each: Any) -> Any:
        if isinstance(each, list):
            return [copied(one) for one in each]
        if not isinstance(each, ast.AST):
            return each
        if (other := by(each)) is not None:
            return other
        fields = {name: copied(value) for name, value in ast.iter_fields(each)}
        return ast.copy_location(type(each)(**fields), each)

    found: ast.expr = copied(node)
    return found


def _ends(node: ast.AST, end: End) -> bool:
    return isinstance(node, ast.Call) and (node.end_lineno, node.end_col_offset) == end


def _within(tree: ast.AST, scope: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Every node, and the function (or the module) that it is in."""
    for child in ast.iter_child_nodes(tree):
        yield child, scope
        yield from _within(child, child if isinstance(child, Function) else scope)


def _single(loop: ast.For, over: ast.expr) -> ast.For:
    """The same loop over one microbatch."""
    one = ast.Name(MICROBATCH, ast.Load())
    single = copy.copy(loop)
    single.iter = _replaced(
        over, lambda node: ast.copy_location(one, loop.iter) if node is SHARED else None
    )
    single.orelse = []
    return single
