"""What a script only shows while it trains: a loss that it adds up between two prints, a count, whether it has said something.

It goes on from step to step, and no weight goes by it: whoever begins anew shows it of fewer steps. What is read behind
the loop is a result, and is not meant.
"""

import ast
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from agent.script.acting import acting, called
from agent.script.behind import of_step
from agent.script.counts import says
from agent.source import own
from agent.source.found import Function
from agent.source.loops import names_in

CLOCKS = {"time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns", "now"}
COMPUTES = {"float", "int", "round", "abs", "min", "max", "sum", "len", "str", "format", "item"}
COMPUTES |= CLOCKS
NUMBERS = int | float | str | None  # `+=` makes another of them, and changes none
READS_ALL = {"eval", "exec", "locals", "globals"}


def only_shown(
    scope: ast.AST,
    loop: ast.For | ast.While,
    names: Mapping[str, Any],
    sources: Mapping[str, Mapping[str, object]],
) -> set[str]:
    """The names that are set in the loop, and read there to be said, or for another such name."""
    if names_in(scope) & READS_ALL:
        return set()
    elsewhere = set(_read_around(scope, loop))
    return _Names(loop, names, elsewhere, acting(sources)).of([loop])


def only_shown_of(sources: Mapping[str, Mapping[str, object]], counts: set[str]) -> set[str]:
    """Those of these attributes of the script's objects that are read nowhere but to be said."""
    trees = [own.parsed(own.source(*each)) for each in sources.items()]
    return _Attributes(counts, acting(sources)).of(trees)


def _read_around(node: ast.AST, loop: ast.AST, *, anywhere: bool = False) -> Iterator[str]:
    """Behind the loop, by functions, and by whoever shares a name with this function."""
    for each in ast.iter_child_nodes(node):
        match each:
            case _ if each is loop:
                yield from _shared_in(each)
                continue
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                yield from names
            case ast.Name(id=name, ctx=ast.Load()) if anywhere or each.lineno > loop.lineno:  # type: ignore[attr-defined]
                yield name
        yield from _read_around(each, loop, anywhere=anywhere or isinstance(each, Function))


def _shared_in(loop: ast.AST) -> Iterator[str]:
    for each in ast.walk(loop):
        if isinstance(each, ast.Global | ast.Nonlocal):
            yield from each.names


class _Shown:
    """`acting` are the person's own functions that do more than compute."""

    def __init__(self, names: set[str], acting: Collection[str]) -> None:
        self._names, self._acting, self._asks_calls = names, acting, False

    def of(self, nodes: Collection[ast.AST]) -> set[str]:
        """Some may be shown only because others seemed to be. At first what calls do is not asked for: of what is gone by
        anyway they may be given all."""
        for self._asks_calls in (False, True):
            while wrong := {name for node in nodes for name in self._gone_by(node)}:
                self._names = self._names - wrong
        return self._names

    def _name(self, node: ast.AST) -> str:
        raise NotImplementedError

    def _takes(self, target: ast.expr, value: ast.expr, *, adds: bool) -> bool:
        """Whether nothing becomes another by it but one of these."""
        raise NotImplementedError

    def _gone_by(self, node: ast.AST) -> Iterator[str]:
        """What of these is read for something else."""
        if self._shows(node):
            return
        yield from self._read([node], deep=False)
        for each in ast.iter_child_nodes(node):
            is_method = isinstance(node, ast.Call) and each is node.func
            is_method = is_method and isinstance(each, ast.Attribute)
            yield from self._gone_by(each.value if is_method else each)  # type: ignore[attr-defined]

    def _read(self, nodes: Collection[ast.AST], *, deep: bool = True) -> set[str]:
        every = (each for node in nodes for each in (ast.walk(node) if deep else (node,)))
        loaded = (each for each in every if isinstance(getattr(each, "ctx", None), ast.Load))
        return {self._name(each) for each in loaded} & self._names

    def _shows(self, node: ast.AST, *, asked: bool = False) -> bool:
        """`asked` is whether one of these says whether it comes to it."""
        match node:
            case ast.Assign(targets=targets, value=value):
                every = (one for each in targets for one in getattr(each, "elts", [each]))
                takes = all(self._takes(each, value, adds=False) for each in every)
                return takes and self._only_computes(value, asked, known=True)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                takes = self._takes(target, value, adds=False)
                return takes and self._only_computes(value, asked, known=True)
            case ast.AugAssign(target=target, value=value):
                takes = self._takes(target, value, adds=True)
                return takes and self._only_computes(value, asked, known=True)
            case ast.If(test=test, body=body, orelse=orelse):
                inside = asked or bool(self._read([test]))
                return self._only_computes(test, asked) and all(
                    self._shows(each, asked=inside) for each in (*body, *orelse)
                )
            case ast.Pass():
                return True
        return says(node) and self._only_computes(node, asked)

    def _only_computes(self, value: ast.AST, asked: bool, *, known: bool = False) -> bool:
        """A function may do anything with what it is given, and where it is called only now and then. What is said may be made
        by all but the person's own that do more; what is set, by those that are `known`."""
        every = list(ast.walk(value)) if self._asks_calls else []
        if any(isinstance(each, ast.IfExp | ast.BoolOp) for each in every):
            asked = asked or bool(self._read([value]))
        for each in every:
            if isinstance(each, ast.NamedExpr) and (asked or self._read([each.value])):
                return False
            if isinstance(each, ast.Call) and (asked or self._read(_given(each))):
                name = called(each)
                if not name or name in self._acting or (known and name not in COMPUTES):
                    return False
        return True


class _Names(_Shown):
    def __init__(
        self,
        loop: ast.For | ast.While,
        names: Mapping[str, Any],
        elsewhere: set[str],
        acting: Collection[str],
    ) -> None:
        stored = names_in(loop, how=ast.Store)
        super().__init__(stored - elsewhere - of_step(loop, stored) - set(_of_loops(loop)), acting)
        plain = {name for name in self._names if isinstance(names.get(name), NUMBERS)}
        self._numbers = plain - set(_set_to_others(loop))

    def _name(self, node: ast.AST) -> str:
        return node.id if isinstance(node, ast.Name) else ""

    def _takes(self, target: ast.expr, _: ast.expr, *, adds: bool) -> bool:
        """`p -= lr * p.grad` changes a parameter."""
        name = self._name(target)
        return name in self._names and (not adds or name in self._numbers)


class _Attributes(_Shown):
    def _name(self, node: ast.AST) -> str:
        return node.attr if isinstance(node, ast.Attribute) else ""

    def _read(self, nodes: Collection[ast.AST], *, deep: bool = True) -> set[str]:
        """Also by `getattr`."""
        found = super()._read(nodes, deep=deep)
        every = (each for node in nodes for each in (ast.walk(node) if deep else (node,)))
        for each in every:
            if isinstance(each, ast.Call) and called(each) in ("getattr", "attrgetter"):
                found |= {one.value for one in each.args if isinstance(one, ast.Constant)}  # type: ignore[misc]
        return found & self._names

    def _takes(self, target: ast.expr, value: ast.expr, *, adds: bool) -> bool:
        """`p.data -= self.lr * p.grad` has a parameter's name, and what another object has may be a library's."""
        if not isinstance(target, ast.Attribute) or target.attr not in self._names:
            return False
        owner = ast.unparse(target.value)
        read = [each for each in ast.walk(value) if self._read([each], deep=False)]
        return not read or (
            not adds
            and all(isinstance(e, ast.Attribute) and ast.unparse(e.value) == owner for e in read)
        )


def _given(call: ast.Call) -> list[ast.AST]:
    """What it is given, and what says which one it is."""
    is_plain = all(
        isinstance(each, ast.Name | ast.Attribute | ast.expr_context)
        for each in ast.walk(call.func)
    )
    return [*call.args, *call.keywords, *([] if is_plain else [call.func])]


def _of_loops(loop: ast.AST) -> Iterator[str]:
    for each in ast.walk(loop):
        if isinstance(each, ast.For):
            yield from names_in(each.target)


def _set_to_others(loop: ast.AST) -> Iterator[str]:
    """The names that stand for what may be something else's as well: `for p in model.parameters()`, `w = model.weight`."""
    anew = set[int]()
    for node in ast.walk(loop):
        match node:
            case ast.AugAssign(target=target):
                anew.add(id(target))
            case ast.Assign(targets=targets, value=value) if _is_new(value):
                anew |= {id(each) for each in targets}
    for node in ast.walk(loop):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in anew:
            yield node.id


def _is_new(value: ast.expr) -> bool:
    is_known = isinstance(value, ast.Call) and called(value) in COMPUTES
    return is_known or isinstance(
        value, ast.Constant | ast.BinOp | ast.UnaryOp | ast.Compare | ast.JoinedStr
    )
