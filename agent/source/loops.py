"""What cannot be taken out of the loop over `session.share(...)`.

What a body sets is seen by nobody if it is run apart, and under a pipeline it is not run for every microbatch. A body that has to be is
refused with its line: one that hands values to what comes behind the loop, or from one microbatch to the next, or that does
something behind `session.backward(...)`.
"""

import ast
import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

import msgspec
import torch

from agent.errors import CannotRecord
from agent.source.found import Function, Loop
from agent.source.reads import lying_at

EMPTIED = (list, dict, set, deque)
GOES_ON = (  # in what no line of the source shows
    "something there goes on from one microbatch to the next, which another worker may have. A count, a list, an iterator or "
    "a random stream of its own in the loop, in a hook, or in a generator between the two has to begin anew with every "
    "microbatch, or to be put into the microbatches before session.share(...)"
)
NEW = {  # what is called so makes something that nobody else has
    *("dict", "list", "set", "defaultdict", "OrderedDict", "deque"),
    *("empty", "zeros", "ones", "full", "clone"),
    *("empty_like", "zeros_like", "ones_like", "full_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full"),
}


def uncleared(loop: Loop, names: dict[str, Any]) -> Loop:
    """Without `optimizer.zero_grad()` before the loss: what a microbatch finds there is nothing anyway."""
    body = loop.whole.body
    trained = [any(map(is_backward, ast.walk(part))) for part in body]
    until = trained.index(True) if True in trained else len(body) - 1
    clears = [at < until and _clears(part, names) for at, part in enumerate(body)]

    def without(node: ast.For) -> ast.For:
        found = copy.copy(node)
        found.body = [part for part, is_left in zip(node.body, clears, strict=True) if not is_left]
        return found

    return msgspec.structs.replace(loop, whole=without(loop.whole), single=without(loop.single))


def _clears(part: ast.stmt, names: dict[str, Any]) -> bool:
    match part:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="zero_grad", value=owner))):
            thing = lying_at(owner, names)
            return isinstance(thing, torch.optim.Optimizer | torch.nn.Module)
    return False


def refuse(loop: Loop, names: dict[str, Any], at: Callable[[Any], str]) -> None:
    """What the body does that has to be done for every microbatch."""
    body = loop.whole.body
    calls = [node for part in body for node in ast.walk(part) if is_backward(node)]
    nested = [
        node
        for part in body
        for outer in ast.walk(part)
        if isinstance(outer, ast.For | ast.While)
        for node in ast.walk(outer)
        if is_backward(node)
    ]
    if len(calls) > 1 or nested:
        raise CannotRecord(
            f"{at((nested or calls)[-1])}: a microbatch has more than one session.backward(...); cutting the "
            "model into stages needs one: add the losses up"
        )
    for index, part in enumerate(body):
        if any(is_backward(node) for node in ast.walk(part)) and index + 1 < len(body):
            raise CannotRecord(
                f"{at(body[index + 1])}: this line comes behind session.backward(...) in the loop over "
                "session.share(...), whose body is not run for every microbatch when the model is cut into "
                "stages. Move it behind the loop: session.loss is the loss of the step there"
            )
    emptied = {each for each in emptied_in(loop) if isinstance(names.get(each), EMPTIED)}
    made = _made_anew(body) | emptied
    for part in body:
        _refuse_effects(part, made, stored_in(loop), at)
    carried = read_first(list(uses([loop.whole.target, *body])), stored_in(loop))
    if carried is not None:
        raise CannotRecord(
            f"{at(carried)}: `{carried.id}` goes from one microbatch to the next, which are not computed in "
            "one place when the model is cut into stages"
        )


def _refuse_effects(
    part: ast.stmt, made: set[str], stored: set[str], at: Callable[[Any], str]
) -> None:
    """What leaves a trace would leave one more: the body is run once with placeholders to record it."""
    for node in ast.walk(part):
        # `losses.append(...)`; what is printed is caught
        dropped = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Attribute)
            and not is_backward(node.value)
            and _root(node.value.func) not in made
        )
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else targets
        kept = any(
            isinstance(target, ast.Attribute | ast.Subscript) and _root(target) not in made
            for target in targets
        )
        forgot = isinstance(node, ast.Delete) and not all(
            isinstance(target, ast.Name) and target.id in stored for target in node.targets
        )
        if dropped or kept or forgot or isinstance(node, ast.Global | ast.Nonlocal):
            raise CannotRecord(
                f"{at(node)}: this line does something besides the loss; cutting the model into stages needs a "
                "loop over session.share(...) that only computes it. Behind the loop, session.loss is the loss"
            )


def _root(node: ast.AST) -> str | None:
    """The name that `losses["a"].append` begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _made_anew(body: list[ast.stmt]) -> set[str]:
    """Names of lists, dicts and tensors that the body makes for its microbatch: nobody else sees what is put there."""
    stored = [node for name, is_stored, node in uses(body) if is_stored]
    grown = [
        node.target
        for part in body
        for node in ast.walk(part)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
    ]
    made = [
        target
        for part in body
        for node in ast.walk(part)
        if isinstance(node, ast.Assign) and _is_new(node.value)
        for target in node.targets
    ]
    known = {id(node) for node in (*made, *grown)}
    others = {
        node.id for node in stored if id(node) not in known and not isinstance(node.ctx, ast.Del)
    }
    return {node.id for node in made if isinstance(node, ast.Name)} - others


def emptied_in(loop: Loop | None) -> set[str]:
    """What the loop, if one was found, empties for each microbatch before it does anything else with it."""
    body = [] if loop is None else loop.whole.body
    emptied = {found.id for part in body if (found := _emptied(part)) is not None}
    first = dict[str, bool]()
    for name, is_stored, _ in uses(body):
        first.setdefault(name, is_stored)
    return {name for name in emptied if first[name]}


def _emptied(part: ast.stmt) -> ast.Name | None:
    """`found.clear()`"""
    match part:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="clear", value=ast.Name() as owner))):
            return owner
    return None


def _is_new(value: ast.expr) -> bool:
    match value:
        case ast.Dict() | ast.List() | ast.Set() | ast.DictComp() | ast.ListComp() | ast.SetComp():
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in NEW
    return False


def is_backward(node: ast.AST) -> TypeGuard[ast.Call]:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "backward"
    )


Use = tuple[str, bool, ast.Name]  # a name, whether it is set, and where


def read_first(uses: list[Use], names: set[str]) -> ast.Name | None:
    """The first of these names that is read before it is set."""
    known: set[str] = set()
    for name, is_stored, node in uses:
        if name in names and name not in known:
            if not is_stored:
                return node
            known.add(name)
    return None


def _around(loop: Loop) -> Iterator[Use]:
    """The names that are used behind the loop, and before it when the loop around comes round again."""
    end = (loop.whole.end_lineno or 0, loop.whole.end_col_offset or 0)
    start = (loop.whole.lineno, loop.whole.col_offset)
    found = list(uses(getattr(loop.scope, "body", []), loop.whole))
    yield from (use for use in found if place_of(use[2]) >= end)
    again = [
        node
        for node in ast.walk(loop.scope)
        if isinstance(node, ast.For | ast.While)
        and any(inner is loop.whole for inner in ast.walk(node))
        and node is not loop.whole
    ]
    first = min((node.lineno for node in again), default=loop.lineno)
    yield from (use for use in found if first <= use[2].lineno and place_of(use[2]) < start)


def stored_in(loop: Loop | None) -> set[str]:
    """The names that the loop sets, if one was found."""
    if loop is None:
        return set()
    inside = uses([loop.whole.target, *loop.whole.body])
    return {name for name, is_stored, _ in inside if is_stored}


def read_behind(loop: Loop) -> ast.Name | None:
    """What the loop sets, and the code around it reads before it sets it anew."""
    return read_first(list(_around(loop)), stored_in(loop))


def names_in(*nodes: ast.AST, how: type[ast.expr_context] = ast.expr_context) -> set[str]:
    """That are read or set there, or only what is done so."""
    return {
        each.id
        for node in nodes
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, how)
    }


def within(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All that is in there but functions and classes, which have names of their own."""
    for node in nodes:
        if not isinstance(node, Function | ast.ClassDef):
            yield node
            yield from within(ast.iter_child_nodes(node))


def sets_in(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                yield from zip(targets, values, strict=False)
            case ast.Assign(targets=targets, value=value):
                yield from ((target, value) for target in targets)
            case (
                ast.AugAssign(target=target, value=value)
                | ast.AnnAssign(target=target, value=value)
            ):
                yield target, value
            case _:
                pass


def last_name(node: ast.AST) -> str:
    """Of a name or an attribute; nothing of anything else."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def place_of(node: ast.Name) -> tuple[int, int]:
    return node.lineno, node.col_offset


def uses(nodes: list[Any], without: ast.AST | None = None) -> Iterator[Use]:
    """Names in the order in which they are read and set. Functions have names of their own."""
    for node in nodes:
        if node is without or isinstance(node, Function | ast.ClassDef):
            continue
        match node:
            case ast.Name():
                yield node.id, not isinstance(node.ctx, ast.Load), node
            case ast.Assign():
                yield from uses([node.value, *node.targets], without)
            case (
                ast.AnnAssign(target=target, value=value)
                | ast.NamedExpr(target=target, value=value)
            ):
                yield from uses([] if value is None else [value, target], without)
            case ast.AugAssign(target=ast.Name() as target):
                yield target.id, False, target
                yield from uses([node.value, target], without)
            case ast.Expr() if (emptied := _emptied(node)) is not None:
                yield emptied.id, True, emptied
            case ast.For():
                yield from uses([node.iter, node.target, *node.body, *node.orelse], without)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                inside = list(uses(list(ast.iter_child_nodes(node)), without))
                own = {name for name, is_stored, _ in inside if is_stored}
                yield from (use for use in inside if use[0] not in own)
            case _:
                yield from uses(list(ast.iter_child_nodes(node)), without)
