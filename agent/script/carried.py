"""What goes on from step to step under a name of the script's own: a best loss, a count, a factor that shrinks.

It is in no state, so whoever joins later has it as the script begins with it. Names are looked for in the source, since a
number does not tell where it comes from: in the loop over the steps, those that a turn reads before it sets them. Times may
go on; they are others on every machine anyway.
"""

import ast
import functools
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, TypeGuard

import numpy as np

from agent.errors import Misuse
from agent.script.behind import left_behind
from agent.script.shown import only_shown
from agent.source import own
from agent.source.found import Caller, Function, Loop, found_loop
from agent.source.loops import last_name, names_in, sets_in, stored_in, uses, within

Names = dict[str, Any]
STATE = "keep it in something with state_dict and load_state_dict, and give that to Session(...)"
LEAVE = ast.Break | ast.Continue | ast.Return | ast.Raise
CLOCKS = {"time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns", "now"}
ADDS = {"append", "appendleft", "extend", "extendleft", "insert"}


def refuse_carried(caller: Caller, given: Collection[object], total: int) -> None:
    """In the function that has the loop over `session.share(...)`, and in those that called it. What the objects have that
    the session was given is theirs."""
    theirs = {id(value) for each in given for value in getattr(each, "__dict__", {}).values()}
    share = found_loop(caller)
    for frame, scope, loop, names in loops_of(caller):
        without = _of_share(caller, frame, share) | only_shown(scope, loop, names)
        found = _carried(loop, without, left_behind(scope, loop, names, given, total))
        if found is None:
            items = _carried_items(loop, share)
            found = next((each for each in items if _counts(names.get(each.id), theirs)), None)
        if found is not None:
            raise Misuse(
                f"{own.shown(frame.f_code.co_filename)}:{found.lineno}: `{found.id}` goes on from step to step, and "
                "Session(...) does not know of it, so whoever joins later would begin it anew: compute it from the "
                f"step, or {STATE}"
            )


def say_shown(caller: Caller) -> None:
    """What is refused of nobody, since it is only said: but whoever reads it shall know of how many steps it is."""
    share = found_loop(caller)
    for frame, scope, loop, names in loops_of(caller):
        without, shown = _of_share(caller, frame, share), only_shown(scope, loop, names)
        while (found := _carried(loop, without, set())) is not None:
            without = without | {found.id}
            if found.id in shown:
                sys.stderr.write(
                    f"{own.shown(frame.f_code.co_filename)}:{found.lineno}: `{found.id}` goes on from step to step, and is only "
                    f"shown: after a machine was lost it may be of fewer steps. For it to go on, {STATE}\n"
                )


def loops_of(caller: Caller) -> Iterator[tuple[FrameType, ast.AST, ast.For | ast.While, Names]]:
    """Of the function that has the loop over `session.share(...)`, and of those that called it, each that is in a loop: with
    that loop, and what its names stand for."""
    for frame in own.frames(caller.frame):
        scope, loop = _loop_at(frame)
        if loop is not None:
            yield frame, scope, loop, {**frame.f_globals, **frame.f_locals}


def _of_share(caller: Caller, frame: FrameType, share: Loop | None) -> set[str]:
    """What becomes of those is looked for in `order.py`."""
    return stored_in(share) if frame is caller.frame else set()


def counted(sources: Mapping[str, Mapping[str, object]]) -> set[str]:
    """The attributes that count, `self.seen += 1`, or change by what they are: `if found < self.best: self.best = found`."""
    return {name for each in sources.items() for name in _counted(own.source(*each))}


@functools.lru_cache(own.SOURCES_MAX)
def _counted(source: str) -> frozenset[str]:
    return frozenset(_counting(own.parsed(source)))


def scopes(tree: ast.Module) -> Iterator[tuple[str, list[ast.AST]]]:
    """The statements and expressions of each function, by its name, and those outside of all of them."""
    inner = (each for each in ast.walk(tree) if isinstance(each, Function | ast.ClassDef))
    for node in (tree, *inner):
        body = node.body if isinstance(node.body, list) else [node.body]
        yield getattr(node, "name", ""), list(within(body))


def _counting(tree: ast.Module) -> Iterator[str]:
    for _, nodes in scopes(tree):
        told = times_in(nodes)
        for node in nodes:
            yield from _counting_there(node, told)


def _counting_there(node: ast.AST, told: set[str]) -> Iterator[str]:
    match node:
        case ast.AugAssign(target=ast.Attribute(attr=name), value=ast.Constant()):
            yield name
        case ast.Assign(targets=[ast.Attribute() as target], value=value):
            is_told = is_time(value) or bool(told & names_in(value))
            if place_in(target) in asked_for(value) and not is_told:
                yield target.attr
        case ast.If(test=test, body=body):
            inside = [each for part in body for each in ast.walk(part) if _is_set(each)]
            asked = asked_for(test) - {followed_by(node)}
            yield from (each.attr for each in inside if place_in(each) in asked)
        case _:
            pass


def followed_by(node: ast.If) -> str:
    """What is only the last of something else, `if epoch != last: last = epoch; order = ...`: it is that in any case, and
    whoever begins anew does at once what is done for another."""
    match node:
        case ast.If(test=ast.Compare(left=left, ops=[ast.NotEq()], comparators=[right]), orelse=[]):
            pair = {ast.unparse(left), ast.unparse(right)}
            for target, value in sets_in(node.body):
                if value is not None and pair == {ast.unparse(target), ast.unparse(value)}:
                    return ast.unparse(target)
    return ""


def timed(sources: Mapping[str, Mapping[str, object]]) -> set[str]:
    """What is a list of times wherever something is added to it: `times.append(time.perf_counter() - began_s)`."""
    each = [_added(own.source(*one)) for one in sources.items()]
    others = {name for _, rest in each for name in rest}
    return {name for times, _ in each for name in times} - others


def clocked(sources: Mapping[str, Mapping[str, object]]) -> set[str]:
    """The names that are set to what a clock tells."""
    sets = (
        each for one in sources.items() for each in sets_in(ast.walk(own.parsed(own.source(*one))))
    )
    return {last_name(target) for target, value in sets if value is not None and is_time(value)}


@functools.lru_cache(own.SOURCES_MAX)
def _added(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """Where times are added, and where something else is."""
    tree = own.parsed(source)
    told, times, others = _only_times(tree), set[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=how, value=to), args=args) if how in ADDS:
                is_time = how in ("append", "appendleft") and _is_only_time(args[0], told)
                (times if is_time else others).add(last_name(to))
            case ast.AugAssign(target=to) if not _is_only_time(node.value, told):
                others.add(last_name(to))
            case _:
                pass
    return frozenset(times), frozenset(others)


def _only_times(tree: ast.AST) -> set[str]:
    """The names that are never set to anything but what a clock has told, or what was computed from that alone."""
    values = [
        (last_name(target), value) for target, value in sets_in(ast.walk(tree)) if value is not None
    ]
    told = {name for name, _ in values} - {"", *_set_otherwise(tree)}
    while wrong := {
        name for name, value in values if name in told and not _is_only_time(value, told)
    }:
        told -= wrong
    return told


def _set_otherwise(tree: ast.AST) -> Iterator[str]:
    """What is given to a function, or set by a loop."""
    assigned = {id(target) for target, _ in sets_in(ast.walk(tree))}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(getattr(node, "ctx", None), ast.Store) and id(node) not in assigned:
            yield last_name(node)


def _is_only_time(value: ast.AST, told: set[str]) -> bool:
    match value:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return name in CLOCKS
        case ast.BinOp(left=left, op=ast.Sub() | ast.Add(), right=right):
            return _is_only_time(left, told) and _is_only_time(right, told)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=ast.Constant()):
            return _is_only_time(left, told)
        case _:
            return isinstance(value, ast.Name | ast.Attribute) and last_name(value) in told


def asked_for(value: ast.AST) -> set[str]:
    """The attributes that are read there, with what they are of: `self.loss = session.loss` does not ask for itself."""
    return {place_in(each) for each in ast.walk(value) if isinstance(each, ast.Attribute)}


def place_in(attribute: ast.Attribute) -> str:
    return ast.unparse(attribute)


def _is_set(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def _loop_at(frame: FrameType) -> tuple[ast.AST, ast.For | ast.While | None]:
    """The function that the frame is in, and the outermost loop of it that it is in."""
    tree, found = own.parsed_of(frame), None
    scope: ast.AST = tree
    for node in _around(tree, frame.f_lineno):
        if isinstance(node, Function):
            scope, found = node, None
        elif isinstance(node, ast.For | ast.While):
            found = found or node
    return scope, found


def _around(tree: ast.AST, line: int) -> Iterator[ast.AST]:
    """From the outside to the inside."""
    for node in ast.iter_child_nodes(tree):
        if getattr(node, "lineno", line) <= line <= (getattr(node, "end_lineno", line) or line):
            yield node
            yield from _around(node, line)


def _carried(loop: ast.For | ast.While, without: set[str], behind: set[str]) -> ast.Name | None:
    """`behind` is what is read when the loop is over."""
    found = list(uses([loop]))
    names = {name for name, is_stored, _ in found if is_stored} - times_in(ast.walk(loop)) - without
    known = set[str]()
    return _Turn(names).read_first([loop], known) or next(
        (node for name, _, node in found if name in names & behind - known), None
    )


def _carried_items(loop: ast.For | ast.While, share: Loop | None) -> Iterator[ast.Name]:
    """What has an item that becomes another by what it is: `kept["best"] = min(kept["best"], found)`, `sums[i] += x`; and
    what is shuffled where it lies."""
    names = {name for name, is_stored, _ in uses([loop]) if is_stored}
    told = times_in(ast.walk(loop))
    for node in _outside(loop, share):
        match node:
            case ast.AugAssign(target=ast.Subscript() as item, value=value):
                items = {ast.dump(_read(item))}
            case ast.Assign(targets=[ast.Subscript() as item], value=value):
                items = _items(value)
            case ast.If(test=value, body=[ast.Assign(targets=[ast.Subscript() as item]), *_]):
                items = _items(value)
            case ast.Call(func=ast.Attribute(attr="shuffle"), args=[ast.Name() as order, *_]):
                if order.id not in names:
                    yield order
                continue
            case _:
                continue
        if not isinstance(item.value, ast.Name) or item.value.id in names:
            continue
        if ast.dump(_read(item)) in items and not is_time(value) and not told & names_in(value):
            yield item.value


def _read(item: ast.Subscript) -> ast.Subscript:
    return ast.Subscript(item.value, item.slice, ast.Load())


def _items(value: ast.AST) -> set[str]:
    return {ast.dump(each) for each in ast.walk(value) if isinstance(each, ast.Subscript)}


def _outside(loop: ast.AST, share: Loop | None) -> Iterator[ast.AST]:
    """What is in the loop over `session.share(...)` is looked for in `within.py`."""
    for node in ast.iter_child_nodes(loop):
        if share is None or not isinstance(node, ast.For) or node.lineno != share.lineno:
            yield node
            yield from _outside(node, share)


def _counts(thing: object, theirs: set[int]) -> bool:
    """Tensors are looked at while they are written to; a group of parameters is the optimizer's."""
    plain = isinstance(thing, list | dict | np.ndarray) and id(thing) not in theirs
    return plain and not (isinstance(thing, dict) and "params" in thing)


class _Turn:
    """One time through the loop over the steps. What is set in it under a condition only may be that of an earlier step."""

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self._under: dict[str, set[str]] = {}  # what is set where the same was asked before

    def read_first(self, body: list[ast.stmt], known: set[str]) -> ast.Name | None:
        """The first of the names that is read where it may not be set. `known` are set already, and will be."""
        for part in body:
            match part:
                case ast.If():
                    found = self._asked(part, known)
                case ast.For() | ast.While() | ast.With() | ast.Try():
                    inner = [each for each in ast.iter_child_nodes(part) if _is_block(each)]
                    outer = [each for each in ast.iter_child_nodes(part) if not _is_block(each)]
                    if isinstance(part, ast.For):
                        outer = [part.iter, part.target]
                    found = self._read(outer, known) or self.read_first(inner, known)
                case _:
                    found = self._read([part], known)
            if found is not None:
                return found
        return None

    def _read(self, nodes: list[ast.AST], known: set[str]) -> ast.Name | None:
        for name, is_stored, node in uses(nodes):
            if is_stored:
                known.add(name)
            elif name in self._names - known:
                return node
        return None

    def _asked(self, part: ast.If, known: set[str]) -> ast.Name | None:
        last = followed_by(part)
        if last:
            known.add(last)
        test = ast.dump(part.test)
        yes = self._under[test] = known | self._under.get(test, set())
        no = set(known)
        found = self._read([part.test], known) or self.read_first(part.body, yes)
        found = found or self.read_first(part.orelse, no)
        if last:
            known |= yes
        ends = [isinstance(each[-1], LEAVE) if each else False for each in (part.body, part.orelse)]
        known |= (yes | no) if all(ends) else no if ends[0] else yes if ends[1] else yes & no
        return found


def _is_block(node: ast.AST) -> TypeGuard[ast.stmt]:
    return isinstance(node, ast.stmt | ast.ExceptHandler)


def times_in(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that a clock has told, or that were computed from these."""
    told: set[str] = set()
    sets = [n for n in nodes if isinstance(n, ast.Assign | ast.AugAssign | ast.AnnAssign)]
    while True:
        more = {
            name
            for node in sets
            if node.value is not None and (is_time(node.value) or told & names_in(node.value))
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            for name in names_in(target)
        }
        if more <= told:
            return told
        told |= more


def is_time(node: ast.AST) -> bool:
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return any((getattr(f, "attr", None) or getattr(f, "id", None)) in CLOCKS for f in calls)
