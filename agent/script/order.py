"""What would depend on which microbatches a worker had, and in which order: found before it changes a number.

Workers have different microbatches, and other ones tomorrow. So nothing may go from one microbatch into the loss
of the next, no count of those that were seen may, and no random stream of the script's own may be drawn from.
"""

import ast
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch

from agent.errors import Misuse
from agent.source import own
from agent.source.found import (
    Caller,
    Function,
    Loop,
    all_at_once,
    asked_for_in,
    found_loop,
    is_share,
    names_of,
)
from agent.source.loops import emptied_in, names_in, read_behind, read_first, stored_in, uses
from agent.source.reads import lying_at

ELSEWISE = (
    "session.loss is the mean loss of the step; what else is wanted of all its microbatches has to be computed from "
    "them behind the loop"
)

DROPPED = {"all", "any", "deque", "frozenset", "list", "max", "min", "set", "sum", "tuple"}
Stream = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def refuse_order(caller: Caller, asking: FrameType | None) -> None:
    """What the source of the loop shows. `asking` is who asks for the first microbatch, if there is no `for` to be found."""
    loop = found_loop(caller)
    if loop is None:
        _refuse_at_once(caller, asking)
        asked = asked_for_in(caller, asking)
        if asked is not None:
            _refuse_behind(asked)
        return
    into_loss = _into_loss(loop.whole)
    counted = sorted(into_loss & set(counted_in(loop.whole.target, loop.over)))
    if counted:
        raise Misuse(
            f"{loop.place}: `{counted[0]}` goes into the loss and counts the microbatches of this worker only, "
            "of which others have others: put it into the microbatch"
        )
    drawn = sorted(into_loss & set(drawn_along(loop.whole.target, loop.over, is_share)))
    if drawn:
        raise Misuse(
            f"{loop.place}: `{drawn[0]}` goes into the loss and is drawn along with the microbatches of this worker only, from "
            "its beginning on every worker: put it into the microbatch"
        )
    carried = carried_in(loop.whole, into_loss)
    if carried is not None:
        raise Misuse(
            f"{loop.place}: `{carried.id}` goes from one microbatch into the loss of the next, which another "
            "worker may have: begin anew with every microbatch"
        )
    kept = _kept_by_key(loop, names_of(caller.frame))
    if kept is not None:
        raise Misuse(
            f"{loop.place}: `{ast.unparse(kept)}` keeps what the model has computed in the loop over session.share(...) for a "
            "later microbatch, which another worker may have: begin anew with every microbatch, or put all that belongs "
            "together into one"
        )
    _refuse_behind(loop)


def _refuse_behind(loop: Loop) -> None:
    behind = read_behind(loop)
    if behind is not None:
        raise Misuse(
            f"{Path(loop.file).name}:{behind.lineno}: `{behind.id}` is set in the loop over session.share(...), where "
            f"every worker has other microbatches, so behind it there is this worker's only: {ELSEWISE}"
        )


def _refuse_at_once(caller: Caller, asking: FrameType | None) -> None:
    """`losses = [train_on(x) for x in session.share(...)]`, if anything reads them."""
    line, code = all_at_once(caller, asking), caller.frame.f_code
    match line:
        case None:
            return
        case ast.Expr(value=ast.ListComp() | ast.SetComp() | ast.DictComp()):
            return
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))) if (
            name in DROPPED
        ):
            return
        case ast.Assign(targets=[ast.Name(id=name)]) if name not in names_in(
            own.parsed_of(caller.frame), how=ast.Load
        ):
            return
    raise Misuse(
        f"{Path(code.co_filename).name}:{line.lineno}: what this line makes of session.share(...) is of this worker's "
        f"microbatches only, of which others have others: {ELSEWISE}"
    )


def _kept_by_key(loop: Loop, names: dict[str, Any]) -> ast.expr | None:
    """`states[i] = state` or `self.state = state`, read before it is set: of what comes of a model that learns. What was
    loaded once may be kept, and what the same microbatch has set before may be read."""
    body = [part for part in loop.whole.body if not isinstance(part, Function | ast.ClassDef)]
    statements = [node for part in body for node in ast.walk(part) if isinstance(node, ast.stmt)]
    made, read = emptied_in(loop) | stored_in(loop), set[str]()
    computed = _computed(statements, names)
    always, begun = {id(each) for each in _always(body)}, set[str]()
    for node in sorted(statements, key=lambda each: each.lineno):
        targets, parts = list(_kept_targets(node)), list(_own_parts(node))
        own_to_it = [each for part in parts for each in _places(part) if ast.unparse(each) in begun]
        apart = {id(each) for place in (*targets, *own_to_it) for each in ast.walk(place)}
        read |= {
            ast.unparse(each)
            for part in parts
            for each in ast.walk(part)
            if isinstance(each, ast.Name | ast.Attribute) and id(each) not in apart
        }
        for target in targets if _is_computed(node, computed, names) else []:
            where = target.value if isinstance(target, ast.Subscript) else target
            if ast.unparse(where) in read and not names_in(where) & made:
                return target
        begun.update(ast.unparse(target) for target in targets if id(node) in always)
    return None


def _always(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """What every microbatch comes by."""
    for part in body:
        yield part
        yield from _always(part.body) if isinstance(part, ast.With) else ()


def _places(part: ast.AST) -> Iterator[ast.Subscript | ast.Attribute]:
    return (each for each in ast.walk(part) if isinstance(each, ast.Subscript | ast.Attribute))


def _own_parts(node: ast.stmt) -> Iterator[ast.AST]:
    """Of a statement what is not another statement."""
    return (each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.stmt))


def _kept_targets(node: ast.stmt) -> Iterator[ast.Subscript | ast.Attribute]:
    for target in node.targets if isinstance(node, ast.Assign) else []:
        for each in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
            if isinstance(each, ast.Subscript | ast.Attribute):
                yield each


def _computed(statements: Sequence[ast.stmt], names: dict[str, Any]) -> set[str]:
    """The names that stand for what a model that learns has computed."""
    found, before = set[str](), -1
    sets = [node for node in statements if isinstance(node, ast.Assign)]
    while len(found) != before:
        before = len(found)
        for node in sets:
            if _is_computed(node, found, names):
                found |= names_in(*node.targets, how=ast.Store)
    return found


def _is_computed(node: ast.stmt, computed: set[str], names: dict[str, Any]) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    value = node.value
    calls = (node.func for node in ast.walk(value) if isinstance(node, ast.Call))
    return bool(names_in(value) & computed) or any(
        _learns(lying_at(func, names))
        for func in calls
        if isinstance(func, ast.Name | ast.Attribute)
    )


def _learns(thing: object) -> bool:
    """A model that does, or a function of the person's own that calls one by its name."""
    if isinstance(thing, torch.nn.Module):
        return any(param.requires_grad for param in thing.parameters())
    if not isinstance(thing, FunctionType) or own.is_library(thing.__code__.co_filename):
        return False
    named = (thing.__globals__.get(name) for name in thing.__code__.co_names)
    return any(isinstance(each, torch.nn.Module) and _learns(each) for each in named)


def _into_loss(loop: ast.For) -> set[str]:
    """The names that the loss is computed from, as far as it is computed in the body."""
    calls = (
        node
        for part in loop.body
        for node in ast.walk(part)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "backward"
    )
    return flowing_into([each for call in calls for each in call.args], loop)


def flowing_into(values: Sequence[ast.AST], loop: ast.For) -> set[str]:
    """The names that these are computed from in a loop's body, and that say whether they are."""
    found = names_in(*values, how=ast.Load)
    statements = [
        (node, tests)
        for part in loop.body
        for node, tests in _with_tests(part, ())
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.For)
    ]
    while True:
        more = {
            name
            for node, tests in statements
            if found & _stored(node)
            for each in (node.iter if isinstance(node, ast.For) else node, *tests)
            for name in names_in(each, how=ast.Load)
        }
        if more <= found:
            return found
        found |= more


def _with_tests(
    node: ast.AST, tests: tuple[ast.expr, ...]
) -> Iterator[tuple[ast.AST, tuple[ast.expr, ...]]]:
    """Every node, and what is asked before it is come by."""
    yield node, tests
    inside = (*tests, node.test) if isinstance(node, ast.If | ast.While) else tests
    for child in ast.iter_child_nodes(node):
        yield from _with_tests(child, inside)


def _stored(node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.For) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {name for target in targets for name in names_in(target, how=ast.Store)}


def carried_in(loop: ast.For, wanted: set[str]) -> ast.Name | None:
    """What of this is set for one microbatch and read for the next."""
    inside = list(uses([loop.target, *loop.body]))
    stored = {name for name, is_stored, _ in inside if is_stored}
    return read_first(inside, stored & wanted)


def counted_in(target: ast.expr, over: ast.expr) -> Iterator[str]:
    """What `enumerate` gives for a microbatch; `tqdm(enumerate(...))` gives it too."""
    match over, target:
        case (
            ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]),
            ast.Tuple(elts=[ast.Name(id=name), rest]),
        ):
            yield name
            yield from counted_in(rest, inner)
        case ast.Call(func=ast.Name(id="zip" | "map")), _:
            return
        case ast.Call(args=[inner]), _ if not is_share(over):
            yield from counted_in(target, inner)


def drawn_along(
    target: ast.expr, over: ast.expr, is_theirs: Callable[[ast.AST], bool]
) -> Iterator[str]:
    """What `zip` gives beside a microbatch, which comes from what `is_theirs`; of `map`, whatever comes of both.
    `tqdm(zip(...))` gives it too."""
    match over:
        case ast.Call(func=ast.Name(id="map"), args=[_, *args]):
            inside = any(
                any(drawn_along(ast.Name("_", ast.Store()), arg, is_theirs)) for arg in args
            )
            if inside or not all(_is_constant(arg) or has(arg, is_theirs) for arg in args):
                yield from names_in(target, how=ast.Store)
        case ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]):
            rest = target.elts[-1] if isinstance(target, ast.Tuple | ast.List) else target
            yield from drawn_along(rest, inner, is_theirs)
        case ast.Call(
            func=ast.Name(id="zip" | "zip_longest") | ast.Attribute(attr="zip_longest"), args=args
        ):
            parts = (
                target.elts if isinstance(target, ast.Tuple | ast.List) else [target] * len(args)
            )
            for part, arg in zip(parts, args, strict=False):
                alone = isinstance(target, ast.Name) or not has(arg, is_theirs)
                if not alone:
                    yield from drawn_along(part, arg, is_theirs)
                elif not _is_constant(arg):
                    yield from names_in(part, how=ast.Store)
        case ast.Call(args=[inner]) if not is_theirs(over) and has(inner, is_theirs):
            yield from drawn_along(target, inner, is_theirs)


def has(node: ast.AST, is_theirs: Callable[[ast.AST], bool]) -> bool:
    return any(map(is_theirs, ast.walk(node)))


def _is_constant(node: ast.AST) -> bool:
    """`itertools.repeat(0.5)`"""
    match node:
        case ast.Call(
            func=ast.Name(id="repeat") | ast.Attribute(attr="repeat"), args=[_], keywords=[]
        ):
            return True
    return False


class Streams:
    """The person's own random streams, by the names that there are for them."""

    def __init__(self, caller: Caller) -> None:
        named = own.names(caller.frame)
        self._streams = {name: each for name, each in named.items() if isinstance(each, Stream)}
        self._before = self._states()

    def _states(self) -> dict[str, str]:
        return {name: state_of(stream) for name, stream in self._streams.items()}

    def refuse_draws(self) -> None:
        after = self._states()
        for name, before in self._before.items():
            if after[name] != before:
                raise Misuse(
                    f"`{name}` is drawn from in the loop over session.share(...), where every worker has other "
                    "microbatches: draw from torch's own stream, which is the same for a microbatch wherever it is"
                )


def state_of(stream: Stream) -> str:
    if isinstance(stream, torch.Generator):
        return stream.get_state().numpy().tobytes().hex()
    if isinstance(stream, np.random.Generator):
        return repr(stream.bit_generator.state)
    if isinstance(stream, np.random.RandomState):
        return repr([np.asarray(each).tolist() for each in stream.get_state(legacy=True)])
    return repr(stream.getstate())
