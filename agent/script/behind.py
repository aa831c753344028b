"""What some step leaves under a name for the code behind the loop over the steps: the best weights so far.

Whoever comes after that step has the name as the script begins with it, or has none. What every step sets is there on
all, and so is what is set again and again in steps that their number tells, or where the loop is left.
"""

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

from agent.source.found import Function
from agent.source.loops import names_in, place_of, read_first, uses
from agent.source.reads import lying_at

LAST = ast.Break | ast.Return | ast.Raise
STEPS_MAX = 100_000  # that are tried, from the last one on
COMPUTES = {"abs", "bool", "divmod", "float", "int", "len", "max", "min", "round"}

Store = tuple[ast.Name, tuple[ast.expr, ...]]  # and what is asked before


def left_behind(
    scope: ast.AST,
    loop: ast.For | ast.While,
    names: Mapping[str, Any],
    given: Iterable[object],
    total: int,
) -> set[str]:
    """The names that are set in the loop because of what was found out there, or in early steps only, and read behind
    it. `given` is what the session has."""
    stored = {name for name, is_stored, _ in uses([loop]) if is_stored}
    told, theirs = of_step(loop, stored), {id(each) for each in given}
    stores = list(_stores(loop.body, ()))
    found = {
        name.id
        for name, tests in stores
        if any(finds_out(test, stored - told, names, theirs) for test in tests)
    }
    steps = Steps(loop, told, names, total)
    early = [(name.id, steps.early(tests)) for name, tests in stores]
    found |= {name for name, is_early in early if is_early} - {
        name for name, is_early in early if not is_early
    }
    end = (loop.end_lineno or 0, loop.end_col_offset or 0)
    behind = [use for use in uses(getattr(scope, "body", []), loop) if place_of(use[2]) >= end]
    read: set[str] = set()
    while (one := read_first(behind, found - read)) is not None:
        read.add(one.id)
    return read


def _stores(nodes: Iterable[ast.AST], tests: tuple[ast.expr, ...]) -> Iterator[Store]:
    for node in nodes:
        match node:
            case ast.Name(ctx=ast.Store()):
                yield node, tests
            case ast.If(test=test):
                for block in (node.body, node.orelse):
                    if not (block and isinstance(block[-1], LAST)):
                        yield from _stores(block, (*tests, test))
            case _ if isinstance(node, Function | ast.ClassDef):
                pass  # with names of its own
            case _:
                yield from _stores(ast.iter_child_nodes(node), tests)


def of_step(loop: ast.For | ast.While, stored: set[str]) -> set[str]:
    """The names that the number of the step tells, and nothing else that a step sets."""
    told = names_in(loop.target) if isinstance(loop, ast.For) else set[str]()
    sets = [node for node in ast.walk(loop) if isinstance(node, ast.Assign)]
    while True:
        more = {
            name
            for node in sets
            if names_in(node.value) & told
            and not names_in(node.value) & (stored - told)
            and _only_computes(node)
            for name in names_in(*node.targets)
        }
        if more <= told:
            return told
        told |= more


class Steps:
    """In which steps something is done that their number tells."""

    def __init__(
        self, loop: ast.For | ast.While, told: set[str], names: Mapping[str, Any], total: int
    ) -> None:
        self._loop, self._told, self._total = loop, told, total
        self._names = {**{name: getattr(builtins, name) for name in COMPUTES}, **names}
        self._sets: list[ast.stmt] = [
            node
            for node in ast.walk(loop)
            if isinstance(node, ast.Assign)
            and names_in(*node.targets) <= told
            and _only_computes(node)
        ]

    def early(self, tests: Sequence[ast.expr]) -> bool:
        """In none of the second half. What cannot be computed here may be done in any."""
        if not (
            isinstance(self._loop, ast.For)
            and isinstance(self._loop.target, ast.Name)
            and is_of_steps(self._loop.iter)
            and any(names_in(test) & self._told for test in tests)
            and all(_computes(each) for test in tests for each in ast.walk(test))
        ):
            return False
        try:
            return not any(
                self._asked(tests, range(self._total - 1, self._total - 1 - self._tried, -1))
            )
        except Exception:
            return False

    def all_of(self, tests: Sequence[ast.expr]) -> list[bool] | None:
        """For each step, from the first on, whether all of it is so; None where that cannot be computed here."""
        if not (
            isinstance(self._loop, ast.For)
            and isinstance(self._loop.target, ast.Name)
            and all(_computes(each) for test in tests for each in ast.walk(test))
        ):
            return None
        try:
            return list(self._asked(tests, range(min(STEPS_MAX, self._total))))
        except Exception:
            return None

    def _asked(self, tests: Sequence[ast.expr], steps: Iterable[int]) -> Iterator[bool]:
        sets = _compiled(ast.Module(body=self._sets, type_ignores=[]))
        asks = [_compiled(ast.Expression(test)) for test in tests]
        there, number = dict(self._names), ast.unparse(self._loop.target)  # type: ignore[union-attr]
        for step in steps:
            there[number] = step
            exec(sets, there)  # noqa: S102 - what the script does with its number, and nothing else
            yield all(eval(ask, there) for ask in asks)  # noqa: S307

    @property
    def _tried(self) -> int:
        return min(STEPS_MAX, (self._total + 1) // 2)


def is_of_steps(source: ast.AST) -> bool:
    match source:
        case ast.Call(func=ast.Attribute(attr="steps")):
            return True
    return False


def _compiled(tree: ast.Module | ast.Expression) -> CodeType:
    how = "exec" if isinstance(tree, ast.Module) else "eval"
    return compile(ast.fix_missing_locations(tree), "<steps>", how)


def _only_computes(node: ast.Assign) -> bool:
    """Names of its own: what is set in an object, `cfg.weight = step`, would be another there as well."""
    parts = (each for target in node.targets for each in ast.walk(target))
    are_names = not any(isinstance(each, ast.Attribute | ast.Subscript) for each in parts)
    return are_names and all(_computes(each) for each in ast.walk(node.value))


def _computes(node: ast.AST) -> bool:
    return not isinstance(node, ast.Call) or getattr(node.func, "id", None) in COMPUTES


def finds_out(test: ast.expr, values: set[str], names: Mapping[str, Any], theirs: set[int]) -> bool:
    """Whether it asks for something that a step has set, for the loss, or for what an object has that goes on."""
    if names_in(test) & values:
        return True
    attributes = [each for each in ast.walk(test) if isinstance(each, ast.Attribute)]
    return any(
        each.attr == "loss" or id(lying_at(each.value, names)) in theirs for each in attributes
    )
