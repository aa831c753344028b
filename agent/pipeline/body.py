"""The body of the script's loop over `session.share(...)`, taken out so that it can be run with placeholders.

    for x, y in session.share(batches):      the body is the recording: there is no second place in which
        loss = loss_of(model, x, y)          a script would have to say what its step computes
        session.backward(loss)

A loop's body cannot be run from outside, and what fails in it cannot be caught there. So the loop is looked up
in the script's source and compiled once more, over a single microbatch, in a copy of the script's names:
nothing that it sets is seen by the script, and what fails is a reason, not an end.

Under a pipeline the body is not run for every microbatch. A body that has to be is refused with its line: one
that hands values to what comes behind the loop, or from one microbatch to the next, or that does something
behind `session.backward(...)`.
"""

import ast
import contextlib
import copy
import functools
import hashlib
import io
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from agent import own
from agent.device import anywhere, device_of
from agent.errors import CannotRecord, Misuse
from agent.pipeline import guests
from agent.pipeline.examine import Facts, examined
from agent.pipeline.reads import Reads, lying_at
from agent.pipeline.record import (
    FIXED,
    attributes_kept,
    functions_refused,
    record,
    streams_kept,
)
from agent.pipeline.scaling import Scaler
from agent.pipeline.variants import Variant, Variants, form_of
from agent.pipeline.witness import unsaved

MICROBATCH = "__microbatch__"
BEGINNING_BYTES_MAX = 1 << 20  # of a microbatch of which nothing but its shape is asked
LATE = "late"  # in the `meta` of a graph: guests are asked as late as can be
LOOPS_MAX = 4
NEW = {  # what is called so makes something that nobody else has
    *("dict", "list", "set", "defaultdict", "OrderedDict", "deque"),
    *("empty", "zeros", "ones", "full", "clone"),
    *("empty_like", "zeros_like", "ones_like", "full_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full"),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Recording(msgspec.Struct, frozen=True):
    """What a step computes from a microbatch, and all that cutting needs to know about it.

    `example` are the tensors of a microbatch, in the order of the graph's placeholders; `flatten` takes any
    microbatch apart like that. `reads` is what else the body was recorded with.
    """

    variants: Variants
    spec: Any
    reads: Reads

    @property
    def graph(self) -> fx.GraphModule:
        return self.variants.first.graph

    @property
    def facts(self) -> Facts:
        return self.variants.first.facts

    @property
    def example(self) -> tuple[torch.Tensor, ...]:
        return self.variants.first.example

    def same_as(self, other: "Recording") -> bool:
        """Constants have no values in the code, so a graph that has any is like no other. Nor does it say who a guest is."""
        called = [
            [guest.called[0] for guest in guests.guests(each.graph)] for each in (self, other)
        ]
        return (
            self.graph.code == other.graph.code
            and all(map(operator.is_, *called))
            and not _has_constants(self.graph)
        )

    def begun_with(self, first: Variant) -> "Recording":
        return msgspec.structs.replace(self, variants=self.variants.begun_with(first))

    @property
    def beginning(self) -> tuple[torch.Tensor, ...]:
        """What somebody needs who began with a microbatch that is computed in another way: nothing where there is no
        other way, or hardly one and much to send."""
        first = self.variants.first
        small = sum(tensor.nbytes for tensor in first.example) <= BEGINNING_BYTES_MAX
        return first.example if first.asks or (first.fixed and small) else ()

    @property
    def mark(self) -> str:
        return mark_of(self.graph)

    def flatten(self, batch: object) -> "Leaves":
        leaves, spec = pytree.tree_flatten(batch)
        if spec != self.spec or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise CannotRecord(
                "session.share(batches): this microbatch is not made of tensors in the way that the recorded "
                f"one was ({spec}, not {self.spec}), which cutting the model into stages needs"
            )
        found = Leaves(leaves)
        found.variant = self.variants.of(found)
        return found


class Leaves(tuple[torch.Tensor, ...]):
    """A microbatch taken apart, and what is computed of it."""

    variant: Variant


def _has_constants(graph: fx.GraphModule) -> bool:
    return "_tensor_constant" in graph.code


def mark_of(graph: fx.GraphModule) -> str:
    """The same for whoever computes the same, on whichever device."""
    asked = [guest.shapes for guest in guests.guests(graph)]
    code = form_of(graph) if graph.meta.get(FIXED) else graph.code  # others begin with other shapes
    return hashlib.blake2b(f"{anywhere(code)}{asked}".encode(), digest_size=8).hexdigest()


Told = Callable[[str], Facts | None]
Looked = tuple[fx.GraphModule, Facts, Any]


def nobody(mark: str) -> Facts | None:  # noqa: ARG001
    """Nobody else has looked at this graph."""
    return None


class Body:
    """The loop that a caller of `session.share` is about to run over its microbatches."""

    def __init__(self, caller: "Caller") -> None:
        self._file = caller.frame.f_code.co_filename
        self._names = _names(caller.frame)
        self._loop = _uncleared(_find(caller), self._names)
        self._code = self._compile()

    def record(
        self,
        model: torch.nn.Module,
        run: Callable[..., Any],
        batches: Sequence[object],
        scaler: Scaler | None = None,
        told: Told = nobody,
        empty: Callable[[], None] = lambda: None,
    ) -> Recording:
        """`run(body)` runs it, and gives the loss that was handed to `session.backward`. `told` may know what another
        worker has found out about the graph of this mark: the body is not run then, for it was there. `empty` makes the
        model what it was before its first forward."""
        leaves, spec = pytree.tree_flatten(batches[0])
        if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            kinds = sorted({type(leaf).__name__ for leaf in leaves})
            raise CannotRecord(
                f"{self._at(self._loop)}: a microbatch is made of {', '.join(kinds) or 'nothing'}; "
                "cutting the model into stages needs tensors, or tuples, lists and dicts of them"
            )

        def loss_of(_: torch.nn.Module | None, *tensors: Any) -> Any:
            return run(lambda: self._play(pytree.tree_unflatten(list(tensors), spec)))

        self._refuse_hooks(model)
        leaves = [leaf.clone() for leaf in leaves]  # the body may write into its microbatch

        def own(batch: Sequence[torch.Tensor] = leaves) -> Any:
            return loss_of(None, *(leaf.clone() for leaf in batch))

        def recorded(fixed: bool) -> Looked:
            with attributes_kept(model):
                graph = record(model, loss_of, leaves, scaler, fixed=fixed)
                late = guests.postpone(graph)
                known = None if _has_constants(graph) else told(mark_of(graph))
                graph.meta[LATE] = True
                if known:
                    return graph, known, None
                facts, loss = examined(graph, leaves)
                nodes = list(graph.graph.nodes)
                if any(nodes[index] in late for index in facts.draws):
                    graph = record(model, loss_of, leaves, scaler, fixed=fixed)
                    facts, loss = examined(graph, leaves)
                return graph, facts, loss

        try:
            graph, facts, loss = self._recorded(recorded, partial(self._run_twice, model, own))
        except CannotRecord as error:
            raise CannotRecord(self._short(str(error))) from error

        def another(batch: Sequence[torch.Tensor]) -> fx.GraphModule:
            with attributes_kept(model):
                empty()
                other = record(model, loss_of, [leaf.clone() for leaf in batch], scaler, fixed=True)
            if graph.meta.get(LATE):
                guests.postpone(other)
            return other

        variants = Variants(Variant(graph, facts, leaves), another)
        found = Recording(variants, spec, self._reads(graph, model))
        if graph.meta.get(FIXED) and loss is not None and isinstance(batches, list | tuple):
            for other in [found.flatten(batch) for batch in batches[1:]][:1]:
                # What was taken from the first one shows.
                loss = self._again(model, partial(other.variant.graph, *other))
                self._compare(loss, self._again(model, partial(own, other)))
        return found

    def _recorded(self, recorded: Callable[[bool], Looked], run: Callable[[], Any]) -> Looked:
        """With placeholders, and where these lead astray with tensors as they are. The loss is that of the loop itself;
        there is none if somebody has looked before."""
        try:
            graph, facts, loss = recorded(False)
        except CannotRecord as error:
            with self._failing_left_to_the_script():
                run()
            try:
                graph, facts, loss = recorded(True)
            except CannotRecord:
                raise error from None
        if loss is None:
            return graph, facts, None
        found = run()
        if not _alike(loss, found) and not graph.meta.get(FIXED):
            graph, facts, loss = recorded(True)
        self._compare(loss, found)
        return graph, facts, loss

    @contextlib.contextmanager
    def _failing_left_to_the_script(self) -> Iterator[None]:
        """What fails here will fail there, where it is told with its own traceback."""
        try:
            yield
        except CannotRecord:
            pass
        except Misuse:
            raise
        except Exception:  # noqa: S110 - whatever the person's code raises
            pass

    def _refuse_hooks(self, model: torch.nn.Module) -> None:
        """A stage asks for gradients, and does not accumulate them; and of a tied parameter each has a part."""
        for name, param in model.named_parameters():
            if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
                raise CannotRecord(
                    f"the parameter {name!r} has a hook, which stages would call at other moments than one backward "
                    "does: change its gradient behind the loop over session.share(...), or train with depth 1"
                )

    def _compare(self, loss: Any, again: Any) -> None:
        """The recording computes what the body computes: code that asks what its inputs are sees placeholders
        while it is recorded, and may take another way with them."""
        if not _alike(loss, again):
            raise CannotRecord(
                f"{self._at(self._loop)}: recorded, this loop computes another loss than it does when it is run "
                f"({float(loss.detach().mean())}, not {float(again.detach().mean())}): something in it asks what its inputs are, and "
                "is told something else by a placeholder. Train with depth 1"
            )

    def _run_twice(self, model: torch.nn.Module, run: Callable[[], Any]) -> Any:
        """What a module keeps for itself may not go into the loss of the next microbatch, which others may have."""
        with attributes_kept(model):
            one, before = self._again(model, run), _attributes(model)
            other, after = self._again(model, run), _attributes(model)
        if not _alike(one, other):
            kept = sorted(name for name in after if after[name] is not before.get(name))
            what = " and ".join(f"`{name}`" for name in kept[:2]) or "something"
            raise Misuse(
                f"{self._at(self._loop)}: a microbatch has another loss when it is computed once more: the model keeps "
                f"{what} from one forward to the next, which may be that of another worker. Begin anew with every "
                "microbatch, or put it into a buffer, of which every microbatch sees the step's start"
            )
        return one

    def _again(self, model: torch.nn.Module, run: Callable[[], Any]) -> Any:
        """The loss of the body as it is. Buffers and random streams are as before then."""
        before = [
            (module._buffers, key, buffer, buffer.detach().clone())
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        with streams_kept(device_of(model)), self._reentrant_refused():
            try:
                with unsaved():
                    loss = run()
            except RuntimeError:  # it needs what it saves; any other error comes up again
                loss = run()
        with torch.no_grad():
            for owner, key, buffer, kept in before:
                buffer.copy_(kept)
                owner[key] = buffer
        return loss

    @contextlib.contextmanager
    def _reentrant_refused(self) -> Iterator[None]:
        try:
            with functions_refused(CheckpointFunction):
                yield
        except fx.proxy.TraceError as error:
            raise CannotRecord(
                f"{self._at(self._loop)}: torch.utils.checkpoint is called with use_reentrant=True, which asks for "
                "backward(), and stages ask for gradients: give it use_reentrant=False, or train with depth 1"
            ) from error

    def _play(self, batch: object) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(self._code, {**self._names, MICROBATCH: [batch]})  # noqa: S102 - the script's own code

    def _compile(self) -> CodeType:
        _refuse(self._loop, self._at)
        try:
            module = ast.Module(body=[self._loop.single], type_ignores=[])
            return compile(ast.fix_missing_locations(module), self._file, "exec")
        except SyntaxError as error:
            raise CannotRecord(
                f"{self._at(self._loop)}: the loop over session.share(...) cannot be run apart from the code "
                f"around it ({error.msg})"
            ) from error

    def _reads(self, graph: fx.GraphModule, model: torch.nn.Module) -> Reads:
        whole = {str(node.target) for node in graph.graph.nodes if node.op == "call_module"}
        parts = [self._loop.whole.target, *self._loop.whole.body]
        asked = [guest.called[0] for guest in guests.guests(graph)]
        return Reads(parts, self._names, model, whole, asked)

    def _at(self, node: Any) -> str:
        return f"{Path(self._file).name}:{node.lineno}"

    def _short(self, text: str) -> str:
        return text.replace(self._file, Path(self._file).name)


def _alike(one: Any, other: Any) -> bool:
    """What is no loss is left to `session.backward`, which says what it has to be."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return True
    return torch.equal(one.detach().nan_to_num(), other.detach().nan_to_num())


def _attributes(model: torch.nn.Module) -> dict[str, Any]:
    """What modules have besides parameters, buffers and modules."""
    return {
        f"{name}.{key}" if name else key: value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if not key.startswith("_")
    }


class Caller(msgspec.Struct, frozen=True):
    """Who called `session.share`, and from where: the instruction of the call."""

    frame: FrameType
    at: int


def outdated(recording: Recording, caller: Caller) -> bool:
    """Whether the body would read something else now. Its graph may be another one then."""
    return recording.reads.changed(_names(caller.frame))


def _names(frame: FrameType) -> dict[str, Any]:
    return {**frame.f_globals, **frame.f_locals}


class Loop(msgspec.Struct, frozen=True):
    """A `for` over `session.share(...)` as it is in the script, and over one microbatch; and what is around it."""

    whole: ast.For
    single: ast.For
    scope: ast.AST
    file: str

    @property
    def lineno(self) -> int:
        return self.whole.lineno

    @property
    def place(self) -> str:
        return f"{Path(self.file).name}:{self.lineno}"


End = tuple[int | None, int | None]


def found_loop(caller: Caller) -> Loop | None:
    """The loop in the script's source, if it can be found there."""
    try:
        return _find(caller)
    except CannotRecord:
        return None


def _find(caller: Caller) -> Loop:
    code = caller.frame.f_code
    source = own.source(code.co_filename, caller.frame.f_globals)
    return _found(code, code.co_filename, caller.at, source)


@functools.lru_cache(LOOPS_MAX)
def _found(code: CodeType, file: str, at: int, source: str) -> Loop:
    """Asked for by everyone who looks at the loop."""
    line, end_line, _, end_column = list(code.co_positions())[at // 2]
    tree = own.parsed(source)
    for node, scope in _within(tree, tree):
        if isinstance(node, ast.For) and any(
            _ends(call, (end_line, end_column)) for call in ast.walk(node.iter)
        ):
            return Loop(
                node,
                _single(source, node, (end_line, end_column)),
                scope,
                file,
            )
    raise CannotRecord(
        f"{Path(file).name}:{line}: cutting the model into stages needs a loop that can "
        "be found in the script's source: `for ... in session.share(...):`"
    )


def _ends(node: ast.AST, end: End) -> bool:
    return isinstance(node, ast.Call) and (node.end_lineno, node.end_col_offset) == end


def _within(tree: ast.AST, scope: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Every node, and the function (or the module) that it is in."""
    for child in ast.iter_child_nodes(tree):
        yield child, scope
        yield from _within(child, child if isinstance(child, Function) else scope)


def _single(source: str, loop: ast.For, end: End) -> ast.For:
    """The same loop over one microbatch. Parsed anew, since the original is still looked at."""

    class Replace(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            if _ends(node, end):
                return ast.copy_location(ast.Name(MICROBATCH, ast.Load()), node)
            return self.generic_visit(node)

    for node in ast.walk(ast.parse(source)):
        same = isinstance(node, ast.For) and node.lineno == loop.lineno
        if same and isinstance(node, ast.For) and node.col_offset == loop.col_offset:
            node.iter = Replace().visit(node.iter)
            node.orelse = []
            return node
    raise AssertionError("the loop was there a moment ago")


def _uncleared(loop: Loop, names: dict[str, Any]) -> Loop:
    """Without `optimizer.zero_grad()` before the loss: what a microbatch finds there is nothing anyway."""
    body = loop.whole.body
    trained = [any(map(_is_backward, ast.walk(part))) for part in body]
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


def _refuse(loop: Loop, at: Callable[[Any], str]) -> None:
    """What the body does that has to be done for every microbatch."""
    body = loop.whole.body
    calls = [node for part in body for node in ast.walk(part) if _is_backward(node)]
    nested = [
        node
        for part in body
        for outer in ast.walk(part)
        if isinstance(outer, ast.For | ast.While)
        for node in ast.walk(outer)
        if _is_backward(node)
    ]
    if len(calls) > 1 or nested:
        raise CannotRecord(
            f"{at((nested or calls)[-1])}: a microbatch has more than one session.backward(...); cutting the "
            "model into stages needs one: add the losses up"
        )
    for index, part in enumerate(body):
        if any(_is_backward(node) for node in ast.walk(part)) and index + 1 < len(body):
            raise CannotRecord(
                f"{at(body[index + 1])}: this line comes behind session.backward(...) in the loop over "
                "session.share(...), whose body is not run for every microbatch when the model is cut into "
                "stages. Move it behind the loop: session.loss is the loss of the step there"
            )
    made = _made_anew(body)
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
            and not _is_backward(node.value)
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


def _is_new(value: ast.expr) -> bool:
    match value:
        case ast.Dict() | ast.List() | ast.Set() | ast.DictComp() | ast.ListComp() | ast.SetComp():
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in NEW
    return False


def _is_backward(node: ast.AST) -> bool:
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
    yield from (use for use in found if (use[2].lineno, use[2].col_offset) >= end)
    again = [
        node
        for node in ast.walk(loop.scope)
        if isinstance(node, ast.For | ast.While)
        and any(inner is loop.whole for inner in ast.walk(node))
        and node is not loop.whole
    ]
    first = min((node.lineno for node in again), default=loop.lineno)
    yield from (use for use in found if first <= use[2].lineno and _at(use[2]) < start)


def stored_in(loop: Loop | None) -> set[str]:
    """The names that the loop sets, if one was found."""
    if loop is None:
        return set()
    inside = uses([loop.whole.target, *loop.whole.body])
    return {name for name, is_stored, _ in inside if is_stored}


def read_behind(loop: Loop) -> ast.Name | None:
    """What the loop sets, and the code around it reads before it sets it anew."""
    return read_first(list(_around(loop)), stored_in(loop))


def _at(node: ast.Name) -> tuple[int, int]:
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
            case ast.AugAssign(target=ast.Name() as target):
                yield target.id, False, target
                yield from uses([node.value, target], without)
            case ast.For():
                yield from uses([node.iter, node.target, *node.body, *node.orelse], without)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                inside = list(uses(list(ast.iter_child_nodes(node)), without))
                own = {name for name, is_stored, _ in inside if is_stored}
                yield from (use for use in inside if use[0] not in own)
            case _:
                yield from uses(list(ast.iter_child_nodes(node)), without)
