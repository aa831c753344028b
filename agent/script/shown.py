"""What a script only shows while it trains: a loss that it adds up between two prints, a count, whether it has said something.

It goes on from step to step, and no weight goes by it: whoever begins anew shows it of fewer steps. What is read behind
the loop is a result, and is not meant.
"""

import ast
from collections.abc import Callable, Collection, Iterator, Mapping

from agent.script.counts import says
from agent.source import own
from agent.source.found import Function
from agent.source.loops import names_in

COMPUTES = {"float", "int", "round", "abs", "min", "max", "sum", "len", "str", "format", "item"}


def only_shown(scope: ast.AST, loop: ast.For | ast.While) -> set[str]:
    """The names that are set in the loop, and read there to be said, or for another such name."""
    elsewhere = set(_read_around(scope, loop))
    return _Shown(_name, names_in(loop, how=ast.Store) - elsewhere).of([loop])


def only_shown_of(sources: Mapping[str, Mapping[str, object]], counts: set[str]) -> set[str]:
    """Those of these attributes of the script's objects that are read nowhere but to be said."""
    trees = [own.parsed(own.source(*each)) for each in sources.items()]
    stored = {_attribute(each) for tree in trees for each in ast.walk(tree) if _is_stored(each)}
    return counts & _Shown(_attribute, stored | counts).of(trees)


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _attribute(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def _read_around(node: ast.AST, loop: ast.AST, *, anywhere: bool = False) -> Iterator[str]:
    """Behind the loop, by functions, and by whoever shares a name with this function."""
    for each in ast.iter_child_nodes(node):
        match each:
            case _ if each is loop:
                continue
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                yield from names
            case ast.Name(id=name, ctx=ast.Load()) if anywhere or each.lineno > loop.lineno:  # type: ignore[attr-defined]
                yield name
        yield from _read_around(each, loop, anywhere=anywhere or isinstance(each, Function))


class _Shown:
    def __init__(self, called: Callable[[ast.AST], str], names: set[str]) -> None:
        self._called, self._names = called, names

    def of(self, nodes: Collection[ast.AST]) -> set[str]:
        """Some may be shown only because others seemed to be."""
        while wrong := {name for node in nodes for name in self._gone_by(node)}:
            self._names = self._names - wrong
        return self._names

    def _gone_by(self, node: ast.AST) -> Iterator[str]:
        """What of these is read for something else."""
        if self._shows(node):
            return
        name = self._called(node)
        if name in self._names and isinstance(getattr(node, "ctx", None), ast.Load):
            yield name
        for each in ast.iter_child_nodes(node):
            is_method = isinstance(node, ast.Call) and each is node.func
            yield from self._gone_by(getattr(each, "value", each) if is_method else each)

    def _shows(self, node: ast.AST) -> bool:
        match node:
            case ast.Assign(targets=targets, value=value):
                return self._goes_into(*targets) and self._only_computes(value)
            case ast.AugAssign(target=target, value=value):
                return self._goes_into(target) and self._only_computes(value)
            case ast.If(body=body, orelse=orelse):
                return all(map(self._shows, (*body, *orelse)))
            case ast.Pass():
                return True
        return says(node)

    def _goes_into(self, *targets: ast.AST) -> bool:
        return all(self._called(each) in self._names for each in targets)

    def _only_computes(self, value: ast.AST) -> bool:
        """Another function may do anything with what it is given."""
        for call in (each for each in ast.walk(value) if isinstance(each, ast.Call)):
            given = (each for part in (*call.args, *call.keywords) for each in ast.walk(part))
            if {self._called(each) for each in given} & self._names and _called(
                call
            ) not in COMPUTES:
                return False
        return True


def _called(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))
