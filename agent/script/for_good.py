"""What some step sets for good in an object or a dict of the script's own: `if step == 100: cfg.beta = 0.5`, `cfg["w"] = 3.0`.

Whoever begins behind that step has it as the script begins with it. Looked for in the source of the loop over the steps, and
of functions that it calls: what is set there, and what the loop over `session.share(...)` or the gradients behind it go by
in a later step that does not set it before. In which steps something is set is tried out, where their number tells.
"""

import ast
import copy
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import msgspec
import torch

from agent.errors import Misuse
from agent.script.behind import Steps, finds_out, is_of_steps, of_step
from agent.script.carried import STATE, counted, followed_by, is_time, loops_of, times_in
from agent.script.counts import only_says
from agent.script.seen import KEPT, gone_by_in
from agent.source import own
from agent.source.found import Caller, Function, found_loop
from agent.source.loops import names_in, uses, within
from agent.source.reads import lying_at

DEPTH_MAX = 2  # functions that call functions
INNER = "_inside"  # ends the names that only a function has
LEAVES = ast.Return | ast.Raise
Tests = tuple[ast.expr, ...]
Position = tuple[int, int]


class Store(msgspec.Struct, frozen=True):
    """What is set, to what and where; and what is asked before."""

    place: ast.expr
    value: ast.expr
    at: Position
    tests: Tests

    @property
    def words(self) -> str:
        return ast.unparse(self.place)


def refuse_for_good(caller: Caller, given: Collection[object], total: int) -> None:
    share, counts = found_loop(caller), counted(own.sources(caller.frame))
    for frame, _, loop, names in loops_of(caller):
        if not isinstance(loop, ast.For) or not any(map(is_of_steps, ast.walk(loop.iter))):
            continue
        at = _calling(loop, frame.f_lineno)
        if frame is caller.frame:
            at = [share.whole] if share is not None else []
        if not at:
            continue
        store = ForGood(loop, at, names, given, total, counts).found()
        if store is not None:
            raise Misuse(
                f"{own.shown(frame.f_code.co_filename)}:{store.at[0]}: `{store.words}` goes on from step to step, and "
                "Session(...) does not know of it, so whoever joins later would have it as the script begins with it: "
                f"set it anew in every step, as it depends on its number, or {STATE}"
            )


def _calling(loop: ast.For, line: int) -> list[ast.AST]:
    """The innermost statement of it that is at work."""
    found = [
        node
        for node in within(loop.body)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return [*found[-1:]]


class ForGood:
    """In one function that has the loop over the steps. `at` is what asks for the microbatches there, and `given` what the
    session has."""

    def __init__(
        self,
        loop: ast.For,
        at: Sequence[ast.AST],
        names: Mapping[str, Any],
        given: Collection[object],
        total: int,
        counts: Collection[str],
    ) -> None:
        self._loop, self._at, self._names, self._counts = loop, at, names, counts
        self._given = {id(each) for each in given}
        self._stored = {name for name, is_stored, _ in uses([loop]) if is_stored}
        self._told = of_step(loop, self._stored)
        self._plain = _set_once(loop, self._told, self._stored)
        self._steps = Steps(loop, self._plain, names, total)

    def found(self) -> Store | None:
        """The first that a later step goes by."""
        if any(isinstance(each, ast.Continue) for each in within(self._loop.body)):
            return None
        stores = dict[str, list[Store]]()
        for each in self._stores(self._loop.body, (), None):
            stores.setdefault(each.words, []).append(each)
        times = times_in(ast.walk(self._loop))
        for there in stores.values():
            if any(is_time(each.value) or times & names_in(each.value) for each in there):
                continue
            asked = {
                ast.unparse(node) for s in there for test in s.tests for node in ast.walk(test)
            }
            if asked & stores.keys() or not self._is_scripts(there[0].place):
                continue
            read_at = self._read_at(there[0])
            if read_at is not None and self._goes_on(there, read_at):
                return there[0]
        return None

    def _stores(
        self, nodes: Iterable[ast.AST], tests: Tests, at: Position | None, depth: int = DEPTH_MAX
    ) -> Iterator[Store]:
        for node in nodes:
            where = at or (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
            match node:
                case _ if node in self._at or isinstance(node, Function | ast.ClassDef):
                    pass
                case ast.If(test=test):
                    more = () if followed_by(node) else (test,)
                    yield from self._stores(node.body, (*tests, *more), at, depth)
                    other = ast.UnaryOp(ast.Not(), test)
                    yield from self._stores(node.orelse, (*tests, other), at, depth)
                case ast.Expr(value=ast.Call() as call) if depth:
                    for target, value in _set_by(call):
                        yield from _stores_in(target, value, where, tests, at is not None)
                    body = called(call, self._names)
                    if not any(isinstance(each, LEAVES) for each in within(body)):
                        yield from self._stores(body, tests, where, depth - 1)
                case ast.Assign() | ast.AugAssign() | ast.AnnAssign() if node.value is not None:
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        yield from _stores_in(target, node.value, where, tests, at is not None)
                case _:
                    inner = (each for each in ast.iter_child_nodes(node) if _is_block(each))
                    yield from self._stores(inner, tests, at, depth)

    def _is_scripts(self, place: ast.expr) -> bool:
        """Not what the session has, nor what is in it; but what a model goes by beside its state."""
        if names_in(place) & self._stored:
            return False
        if isinstance(place, ast.Name):
            return place.id in self._names
        chain = [lying_at(each, self._names) for each in _chain(place)]
        now, owner = chain[:2]
        if isinstance(owner, torch.nn.Module) and isinstance(place, ast.Attribute):
            is_counted = place.attr in self._counts  # looked at while it counts
            return place.attr in gone_by_in(owner) and isinstance(now, KEPT) and not is_counted
        if any(id(each) in self._given for each in chain):
            return False
        if isinstance(place, ast.Subscript):
            return type(owner) in (dict, list) and "params" not in owner
        return own.is_holder(owner)

    def _goes_on(self, stores: list[Store], read_at: Position) -> bool:
        """Whether some step sets it, and a later one does not set it before it goes by it."""
        groups = dict[str, list[Store]]()
        for each in stores:
            groups.setdefault(ast.dump(ast.Tuple(list(each.tests))), []).append(each)
        ever, fresh = list[list[bool]](), list[list[bool]]()
        for *others, last in groups.values():
            if (others or not last.tests) and self._restores(last):
                if not last.tests:
                    return False
                continue
            when = self._when(last.tests)
            if when is None:
                return False
            ever.append(when)
            if last.at < read_at and not self._is_found_out(last.tests):
                fresh.append(when)
        begun = False
        for step in range(len(ever[0]) if ever else 0):
            if begun and not any(when[step] for when in fresh):
                return True
            begun = begun or any(when[step] for when in ever)
        return False

    def _when(self, tests: Tests) -> list[bool] | None:
        """In which steps it may be. Only a leader does what others do not know of."""
        asked = (each for test in tests for each in ast.walk(test))
        if any(isinstance(each, ast.Attribute) and each.attr == "leader" for each in asked):
            return None
        if self._is_found_out(tests):
            return self._steps.all_of(())
        is_plain = not names_in(*tests) & (self._stored - self._plain)
        return self._steps.all_of(tests) if is_plain else None

    def _is_found_out(self, tests: Tests) -> bool:
        values = self._stored - self._told
        return any(finds_out(test, values, self._names, self._given) for test in tests)

    def _restores(self, store: Store) -> bool:
        """What it was: `cfg.asks = True; look(); cfg.asks = False`."""
        match store.value:
            case ast.Constant(value=value):
                now = lying_at(store.place, self._names)
                return type(now) is type(value) and now == value
            case ast.Name(id=name):
                sets = (each for each in ast.walk(self._loop) if isinstance(each, ast.Assign))
                return any(
                    name in names_in(*each.targets) and store.words == ast.unparse(each.value)
                    for each in sets
                )
        return False

    def _read_at(self, store: Store) -> Position | None:
        first = min(
            (each.lineno, each.col_offset) for each in self._at if isinstance(each, ast.stmt)
        )
        place = store.place
        if isinstance(place, ast.Attribute) and isinstance(
            lying_at(place.value, self._names), torch.nn.Module
        ):
            return first
        found = [at for node, at in self._going_by(first) if self._reads(node, store.words)]
        return min(found, default=None)

    def _going_by(self, first: Position) -> Iterator[tuple[ast.AST, Position]]:
        """What the gradients of a step are made of."""
        for each in self._at:
            yield each, first
        wanted = names_in(*self._at, how=ast.Load)
        nodes = [each for each in within(self._loop.body) if isinstance(each, ast.stmt)]
        while True:
            into = [
                node
                for node in nodes
                if isinstance(node, ast.Assign | ast.AugAssign)
                and names_in(node, how=ast.Store) & wanted
            ]
            more = names_in(*into, how=ast.Load)
            if more <= wanted:
                break
            wanted |= more
        for node in [*into, *(each for each in nodes if _is_of_gradients(each))]:
            yield node, (node.lineno, node.col_offset)

    def _reads(self, node: ast.AST, words: str, depth: int = DEPTH_MAX) -> bool:
        if only_says(node) or isinstance(node, Function | ast.ClassDef):
            return False
        if isinstance(getattr(node, "ctx", None), ast.Load) and ast.unparse(node) == words:
            return True
        if isinstance(node, ast.Call) and depth:
            body = called(node, self._names)
            if any(self._reads(each, words, depth - 1) for each in body):
                return True
        return any(self._reads(each, words, depth) for each in ast.iter_child_nodes(node))


def _set_once(loop: ast.For, told: set[str], stored: set[str]) -> set[str]:
    """The names that every step sets once, and to what its number says."""
    places = [name for name, is_stored, _ in uses([loop]) if is_stored]
    found = names_in(loop.target)
    for node in loop.body:
        if isinstance(node, ast.Assign) and not names_in(node.value) & (stored - found):
            found |= names_in(*node.targets) & told
    return {name for name in found if places.count(name) == 1}


def _chain(place: ast.expr) -> Iterator[ast.expr]:
    """`a.b.c`, `a.b` and `a`"""
    yield place
    if isinstance(place, ast.Attribute | ast.Subscript):
        yield from _chain(place.value)


def _stores_in(
    target: ast.expr, value: ast.expr, at: Position, tests: Tests, is_inside: bool
) -> Iterator[Store]:
    match target:
        case ast.Attribute() | ast.Subscript(slice=ast.Constant()) | ast.Name() if not isinstance(
            target, ast.Name
        ) or (is_inside and not target.id.endswith(INNER)):
            place = ast.parse(ast.unparse(target), mode="eval").body
            yield Store(place, value, at, tests)
        case ast.Tuple(elts=targets) | ast.List(elts=targets):
            values = value.elts if isinstance(value, ast.Tuple) else [value] * len(targets)
            for one, its in zip(targets, values, strict=False):
                yield from _stores_in(one, its, at, tests, is_inside)


def _set_by(call: ast.Call) -> Iterator[tuple[ast.expr, ast.expr]]:
    """`setattr(cfg, "beta", 0.5)`, `cfg.update(beta=0.5)`"""
    match call:
        case ast.Call(func=ast.Name(id="setattr"), args=[owner, ast.Constant(value=str(name)), to]):
            yield ast.Attribute(owner, name, ast.Store()), to
        case ast.Call(func=ast.Attribute(value=owner, attr="update"), args=args):
            items: list[tuple[ast.expr | None, ast.expr]] = [
                (ast.Constant(each.arg), each.value) for each in call.keywords if each.arg
            ]
            for each in args:
                if isinstance(each, ast.Dict):
                    items += zip(each.keys, each.values, strict=True)
            for key, to in items:
                if isinstance(key, ast.Constant):
                    yield ast.Subscript(owner, key, ast.Store()), to


def _is_block(node: ast.AST) -> bool:
    return isinstance(node, ast.stmt | ast.ExceptHandler)


def _is_of_gradients(node: ast.stmt) -> bool:
    """`clip_grad_norm_(...)`, `p.grad.add_(...)`, `group["lr"] = ...`"""
    match node:
        case ast.Expr(value=ast.Call(func=func)):
            name = ast.unparse(func)
            return name.split(".")[-1].startswith("clip_grad_") or ".grad." in name
        case ast.Assign(targets=[target]) | ast.AugAssign(target=target):
            match target:
                case ast.Attribute(attr="grad") | ast.Subscript(slice=ast.Constant(value="lr")):
                    return True
    return False


def called(call: ast.Call, names: Mapping[str, Any]) -> list[ast.stmt]:
    """What a function of the person's own does, in the words of who calls it; nothing where that is not to be found."""
    function, bound = lying_at(call.func, names), list[ast.expr]()
    if isinstance(call.func, ast.Attribute):
        owner = lying_at(call.func.value, names)
        method = inspect.getattr_static(type(owner), call.func.attr, None)
        if isinstance(method, FunctionType):
            function, bound = method, [call.func.value]
    if not isinstance(function, FunctionType) or not own.is_own(function):
        return []
    found = own.definition(function)
    if found is None:
        return []
    places = [each.arg for each in (*found.args.posonlyargs, *found.args.args)]
    given = dict(zip(reversed(places), reversed(found.args.defaults), strict=False))
    given |= dict(zip(places, (*bound, *call.args), strict=False))
    given |= {each.arg: each.value for each in call.keywords if each.arg is not None}
    return list(_in_words(found, given))


def _in_words(function: ast.FunctionDef, given: Mapping[str, ast.expr]) -> Iterator[ast.stmt]:
    said = [each for each in within(function.body) if isinstance(each, ast.Global)]
    inner = names_in(*function.body, how=ast.Store) - {name for each in said for name in each.names}
    inner |= {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    words = _Words({**{name: ast.Name(f"{name}{INNER}") for name in inner}, **given})
    yield from (words.visit(copy.deepcopy(each)) for each in function.body)


class _Words(ast.NodeTransformer):
    def __init__(self, given: Mapping[str, ast.expr]) -> None:
        self._given = given

    def visit_Name(self, node: ast.Name) -> ast.expr:
        other = self._given.get(node.id, node)
        if isinstance(other, ast.Name):
            return ast.copy_location(ast.Name(other.id, node.ctx), node)
        return other if isinstance(node.ctx, ast.Load) else ast.Name(f"{node.id}{INNER}", node.ctx)
