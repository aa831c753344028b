"""What a script only shows while it trains: a loss that it adds up between two prints, a count, whether it has said something.

It goes on from step to step, and no weight goes by it: whoever begins anew shows it of fewer steps. Only what is plain to see
is taken for that: numbers, made by arithmetic, and said by `print` or by what a library has for it. What is read behind
the loop is a result.
"""

import ast
import builtins
import math
import time
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from agent.script.behind import of_step
from agent.script.counts import SAYING
from agent.source import own
from agent.source.found import Function
from agent.source.loops import last_name, names_in
from agent.source.reads import lying_at

READS_ALL = {"eval", "exec", "locals", "globals", "vars"}
COMPUTES = (float, int, str, bool, round, abs, min, max, sum, len)
MODULES = (math.__name__, time.__name__)  # whose functions change nothing
ASKED = {"item", "format", "join"}
ARITHMETIC = (
    *(ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp),
    *(ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context, ast.IfExp, ast.JoinedStr),
    *(ast.FormattedValue, ast.Tuple, ast.List, ast.Dict, ast.Slice, ast.keyword),
)  # fmt: skip
MADE = ast.Constant | ast.BinOp | ast.UnaryOp | ast.Compare | ast.JoinedStr  # nobody else has it


def only_shown(scope: ast.AST, loop: ast.For | ast.While, names: Mapping[str, Any]) -> set[str]:
    """The names that are set in the loop, and read there to be said, or for another such name."""
    if names_in(scope) & READS_ALL:
        return set()
    shown = Shown(loop, names, elsewhere=set(_read_around(scope, loop)))
    while wrong := set(shown.gone_by(loop)):
        shown.names -= wrong
    return shown.names


def _read_around(node: ast.AST, loop: ast.AST, *, anywhere: bool = False) -> Iterator[str]:
    """Behind the loop, by functions, and by whoever shares a name with this function."""
    for each in ast.iter_child_nodes(node):
        match each:
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                yield from names
            case ast.Name(id=name, ctx=ast.Load()) if anywhere or each.lineno > loop.end_lineno:  # type: ignore[attr-defined]
                yield name
        inside = anywhere or isinstance(each, Function | ast.ClassDef)
        yield from _read_around(each, loop, anywhere=inside)


class Shown:
    def __init__(
        self, loop: ast.For | ast.While, names: Mapping[str, Any], elsewhere: set[str]
    ) -> None:
        self._there = names
        plainly = [pair for node in ast.walk(loop) for pair in _sets(node)]
        ids = {id(target) for target, _ in plainly}
        otherwise = {
            node.id
            for node in ast.walk(loop)
            if isinstance(node, ast.Name)
            and not isinstance(node.ctx, ast.Load)
            and id(node) not in ids
        }
        numbers = {
            target.id
            for target, _ in plainly
            if isinstance(names.get(target.id), int | float | str | None)
        }
        told = of_step(
            loop, names_in(loop, how=ast.Store)
        )  # by its number: nothing goes on in these
        self.names = numbers - otherwise - elsewhere - told
        # `+=` makes another number, but changes a tensor that something else has as well.
        self._had = {target.id for target, value in plainly if not self._is_new(value)}

    def gone_by(self, node: ast.AST) -> Iterator[str]:
        """What of these is read for something else."""
        if self._shows(node):
            return
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.AugAssign(target=ast.Name(id=name)):
                yield from self.names & {name}
        for each in ast.iter_child_nodes(node):
            yield from self.gone_by(each)

    def _shows(self, node: ast.AST, *, strictly: bool = False) -> bool:
        """`strictly` where one of these says whether it comes to it."""
        match node:
            case ast.AugAssign(target=ast.Name(id=name), value=value):
                is_number = name in self.names and name not in self._had
                return is_number and self._is_arithmetic(value, strictly=strictly)
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                return name in self.names and self._is_arithmetic(value, strictly=strictly)
            case ast.If(test=test, body=body, orelse=orelse):
                inside = strictly or bool(names_in(test) & self.names)
                return self._is_arithmetic(test, strictly=strictly) and all(
                    self._shows(each, strictly=inside) for each in (*body, *orelse)
                )
            case ast.Expr(value=ast.Call(func=func, args=args, keywords=keywords)):
                return self._says(func) and all(
                    self._is_arithmetic(each, strictly=strictly) for each in (*args, *keywords)
                )
        return isinstance(node, ast.Pass)

    def _says(self, function: ast.expr) -> bool:
        found = self._found(function)
        is_known = isinstance(found, FunctionType | MethodType | BuiltinFunctionType)
        return last_name(function) in SAYING and is_known and not own.is_own(found)

    def _is_arithmetic(self, value: ast.AST, *, strictly: bool) -> bool:
        """Other calls are made anyway, if they are given nothing of this."""
        if isinstance(value, ast.IfExp | ast.BoolOp):
            strictly = strictly or bool(names_in(value) & self.names)
        if isinstance(value, ast.Call) and not self._computes(value):
            return not strictly and not names_in(value) & self.names
        if isinstance(value, ast.Call):
            parts = [*value.args, *value.keywords, *ast.iter_child_nodes(value.func)]
        else:
            parts = [*ast.iter_child_nodes(value)]
        return isinstance(value, (*ARITHMETIC, ast.Call)) and all(
            self._is_arithmetic(each, strictly=strictly) for each in parts
        )

    def _computes(self, call: ast.Call) -> bool:
        if isinstance(call.func, ast.Attribute) and call.func.attr in ASKED:
            return True
        found = self._found(call.func)
        return found in COMPUTES or (
            isinstance(found, BuiltinFunctionType) and found.__module__ in MODULES
        )

    def _is_new(self, value: ast.expr) -> bool:
        return isinstance(value, MADE) or (isinstance(value, ast.Call) and self._computes(value))

    def _found(self, function: ast.expr) -> Any:
        if isinstance(function, ast.Name) and function.id not in self._there:
            return getattr(builtins, function.id, None)
        return lying_at(function, self._there)


def _sets(node: ast.AST) -> Iterator[tuple[ast.Name, ast.expr]]:
    match node:
        case ast.AugAssign(target=ast.Name() as target):
            yield target, ast.Constant(0)
        case (
            ast.Assign(targets=[ast.Name() as target], value=ast.expr() as value)
            | ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as value)
        ):
            yield target, value
