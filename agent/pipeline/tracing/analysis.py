"""What each value of a recorded graph is, found by running the graph once.

A *value* is what a node of the graph computes. Values that a later node still needs would have to
cross a cut made before it; parameters and microbatches would not, since every stage takes those
itself. A cut is refused where it would change the numbers:

* a value that crosses shares its memory with something that is written to after the cut;
* a buffer is written to, and used on both sides;
* a module that is called unchanged keeps something for a later call, which gives a different result
  without it;
* the forward differentiates what is computed after the cut with respect to what is before it;
* an autocast casts a weight once, and uses that on both sides;
* what would cross is neither a tensor nor plain numbers.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import msgspec
import torch
from msgspec import structs
from torch import fx
from torch._ops import OpOverloadPacket
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from agent.errors import CannotRecord
from agent.pipeline import autocast_nodes
from agent.pipeline.loss_scale import Scaling
from agent.pipeline.tracing.recording.compiled import compiled_refused
from agent.pipeline.tracing.recording.eager_trace import unsaved
from agent.pipeline.tracing.recording.frozen_modules import Guest
from agent.pipeline.tracing.recording.places import where
from agent.pipeline.tracing.recording.trace import Kept, attributes_kept
from agent.source.tracebacks import is_torchs
from agent.tensors.absent import computable
from agent.tensors.device import PythonStreams, device_of, stream_kept, stream_state
from agent.tensors.unchanged import memory_of, version_of

OURS = Guest | Scaling
DRAW = _DropoutNd | torch.nn.RNNBase | torch.nn.MultiheadAttention | torch.nn.RReLU
SEEDED = torch.Tag.nondeterministic_seeded
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """What a node computes. `crosses` says that it could be sent to another stage."""

    name: str
    at: int  # its node, counted in the order of the graph
    last_use: int
    nbytes: int
    needs_grad: bool
    plain: bool
    crosses: bool


class CutPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A cut between the nodes `after` and `after + 1`."""

    after: int
    values: tuple[Value, ...]

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.values)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All that cutting needs to know about a graph."""

    nodes: int
    values: tuple[Value, ...]
    tied_down: tuple[tuple[int, int], ...]  # no cut after i with first <= i < last
    draws: tuple[int, ...]  # nodes that draw from torch's random stream
    written: frozenset[str]  # buffers that the forward writes to


def examine(graph: fx.GraphModule, example: Sequence[torch.Tensor]) -> Facts:
    """Return all that cutting needs to know about a graph."""
    return examined(graph, example)[0]


def examined(graph: fx.GraphModule, example: Sequence[torch.Tensor]) -> tuple[Facts, Any]:
    """Run the graph once on one microbatch; return the facts and what the graph returned.

    For parameters that are away a number may stand in.
    """
    for _, buffer in graph.named_buffers():
        refuse_sparse("a tensor that loss_of reads", buffer)
    for leaf in example:
        refuse_sparse("a part of the microbatch", leaf)
    try:
        look, written, out = _looked(graph, example, unsaved())
    except CannotRecord:
        # A forward that differentiates something itself needs what is saved for that.
        look, written, out = _looked(graph, example, nullcontext())
    drawing, writing = _at_times(graph)
    written |= writing
    facts = Facts(
        nodes=len(graph.graph.nodes),
        values=look.values(),
        tied_down=(
            *look.writes(),
            *look.casts.spans(),
            *_switches(graph),
            *autocast_nodes.without_grad(graph.graph.nodes),
            *_buffer_uses(graph, written),
            *look.handed_on,
            *_weights_handed_out(graph, look.weights),
            *_derivatives(graph),
        ),
        draws=tuple(sorted(drawing.union(look.draws))),
        written=written,
    )
    return facts, out


def _looked(
    graph: fx.GraphModule, example: Sequence[torch.Tensor], how: AbstractContextManager[None]
) -> tuple["_Look", frozenset[str], Any]:
    """Run the graph; return the look, the buffers that it wrote to, and what it returned.

    The buffers are put back.
    """
    before = {
        name: (buffer, version_of(buffer), buffer.clone()) for name, buffer in graph.named_buffers()
    }
    with attributes_kept(graph):
        look = _Look(graph)
        try:
            with (
                compiled_refused(),
                stream_kept(device_of(graph)),
                how,
                autocast_nodes.kept(),
                computable(graph),
            ):
                out = look.run(*example)
        finally:
            written = frozenset(
                name
                for name, buffer in graph.named_buffers()
                if name in before and _is_written(buffer, *before[name])
            )
            with torch.no_grad():
                for name in written:
                    before[name][0].copy_(before[name][2])
    return look, written, out


def _at_times(graph: fx.GraphModule) -> tuple[set[int], set[str]]:
    """Return the nodes that may draw, and the norms' buffers that may be written to.

    These are in modules that are called unchanged. A module may do on another microbatch what it
    did not do on this one, because of the values there or because the script has switched it. So may
    a function of torch that draws, because its rate or its mask may be another.
    """
    drawing, owned = set[int](), set[int]()
    for index, node in enumerate(graph.graph.nodes):
        if node.op != "call_module":
            if node.op in ("call_function", "call_method") and _is_drawing(_name_of(node.target)):
                drawing.add(index)
            continue
        module = graph.get_submodule(str(node.target))
        for each in module.modules():
            known = is_torchs(type(each)) or isinstance(each, OURS)
            if not known or isinstance(each, DRAW):
                drawing.add(index)
            if isinstance(each, _NormBase):
                owned.update(map(id, each.buffers()))
    return drawing, {name for name, buffer in graph.named_buffers() if id(buffer) in owned}


def _name_of(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", "")


@cache
def _is_drawing(name: str) -> bool:
    """Return whether torch says of its function of this name that it draws random numbers."""
    known = getattr(torch.ops.aten, name, None)
    if not isinstance(known, OpOverloadPacket):  # `__getitem__`, for one
        return False
    return any(SEEDED in getattr(known, each).tags for each in known._overload_names)


def _is_written(
    buffer: torch.Tensor, before: torch.Tensor, version: int, value: torch.Tensor
) -> bool:
    """Return whether the forward wrote to a buffer, even if the value is the same afterwards.

    The largest value so far, for one, may change with the next microbatch. Values are compared too,
    because batch norm's kernels do not count what they write. A buffer of a new size is kept for
    another call, like an attribute, and does not count.
    """
    if buffer.shape != before.shape:
        return False
    counted = buffer is not before or version_of(buffer) != version
    return counted or not torch.equal(buffer, value)


def refuse_sparse(what: str, value: object) -> None:
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        raise CannotRecord(
            f"{what} is of {value.layout}, and what shares its memory cannot be seen, which cutting the model into stages "
            "needs: keep it dense, or train with depth 1"
        )


def cut_points(facts: Facts) -> tuple[CutPoint, ...]:
    """Return every position where the graph may be cut, with what would cross it."""
    points = []
    for after in range(facts.nodes - 1):
        if any(first <= after < last for first, last in facts.tied_down):
            continue
        values = tuple(v for v in facts.values if v.at <= after < v.last_use)
        if values and all(value.crosses for value in values):
            points.append(CutPoint(after=after, values=values))
    return tuple(points)


class _Look(fx.Interpreter):
    """Runs the nodes, and notes what each one makes, writes to and draws."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)  # which releases what no later node needs
        self.extra_traceback = False  # our errors name the line
        self._device, self._nodes = device_of(graph), list(graph.graph.nodes)
        self._index = {node: index for index, node in enumerate(self._nodes)}
        self._values: list[Value] = []
        self._memories: dict[int, _Memory] = {}
        self._writes: dict[int, int] = {}  # the last writing node, by the first
        self._learns: dict[
            int, bool
        ] = {}  # whether a node's result has gradients, once it is made or written to
        self.draws: list[int] = []
        self._kept, self._keeps, self._at = Kept(graph), -1, 0
        self.handed_on: list[tuple[int, int]] = []
        self.weights: list[tuple[fx.Node, torch.Tensor]] = []  # nodes that return a weight itself
        self._params = {id(param) for param in graph.parameters()}
        self._stream, self._others = stream_state(self._device), PythonStreams()
        self.casts = autocast_nodes.Casts(graph.parameters())

    def run_node(self, n: fx.Node) -> Any:
        self._at = self._index[n]
        try:
            with self.casts.watching(self._at, n):
                out = super().run_node(n)
        except Exception as error:
            raise CannotRecord(
                f"{where(error)}: {n.format_node()} fails on the first microbatch: {error}"
            ) from error
        if self._others.moved:
            raise CannotRecord(
                f"{n.target} draws from Python's or numpy's random stream, which does not travel from "
                "stage to stage: draw from torch instead, or train with depth 1"
            )
        stream = stream_state(self._device)
        if not torch.equal(stream, self._stream):
            self.draws.append(self._index[n])
            self._stream = stream
        self._note(n, out)
        return out

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a module, and note if its result depends on what an earlier call kept.

        A table made in a module's first call is made in another stage as well, but values kept from
        that call exist only in the stage that ran it.
        """
        module = self.fetch_attr(target)
        if all(is_torchs(type(each)) or isinstance(each, OURS) for each in module.modules()):
            return super().call_module(target, args, kwargs)
        apart = None
        if self._keeps >= 0:
            given = pytree.tree_map(_cloned, (args, kwargs))
            apart = self._kept.without(module, partial(super().call_module, target, *given))
        out = super().call_module(target, args, kwargs)
        if self._keeps >= 0 and not _alike(out, apart):
            self.handed_on.append((self._keeps, self._at))
        elif self._keeps < 0 and self._kept.anything:
            self._keeps = self._at
        return out

    def _note(self, node: fx.Node, out: Any) -> None:
        index = self._index[node]
        for key, memory in list(self._memories.items()):
            written = memory.written()
            if written is None:
                # No code can write to it any more, and its address may be used again.
                del self._memories[key]
            elif written:
                if self._nodes[memory.first].op == "placeholder":
                    raise CannotRecord(
                        f"{node.format_node()} writes into the microbatch, of which every stage has its own: "
                        "write into a copy of it, x = x.clone()"
                    )
                self._writes[memory.first] = index
                self._learns.update(memory.learns())  # writing may have given it gradients
        if node.op == "output":
            return
        refuse_sparse(f"the result of {node.name}", out)
        tensor = out if isinstance(out, torch.Tensor) else None
        if tensor is not None:
            key = memory_of(tensor)
            self._memories.setdefault(key, _Memory(index)).add(index, tensor)
            self._learns[index] = tensor.requires_grad
        if tensor is not None and node.op != "get_attr" and id(tensor) in self._params:
            self.weights.append((node, tensor))
        uses = [self._index[user] for user in node.users if user in self._index]
        if node.op not in ("placeholder", "get_attr") and uses:
            plain = _plain(out)
            self._values.append(
                Value(
                    name=node.name,
                    at=index,
                    last_use=max(uses),
                    nbytes=tensor.nbytes if tensor is not None else 0,
                    needs_grad=False,
                    plain=plain,
                    crosses=plain or (tensor is not None and tensor.layout == torch.strided),
                )
            )

    def writes(self) -> list[tuple[int, int]]:
        """Return spans without cuts: from the node that made a memory to its last write."""
        return list(self._writes.items())

    def values(self) -> tuple[Value, ...]:
        learns = self._learns
        return tuple(structs.replace(v, needs_grad=learns.get(v.at, False)) for v in self._values)


class _Memory:
    """Memory that tensors share, watched through weak references only."""

    def __init__(self, first: int) -> None:
        self.first = first
        # The tensors, with their nodes and versions. `x.data` counts what is written on its own.
        self._tensors: list[tuple[int, weakref.ref[torch.Tensor], int]] = []

    def add(self, node: int, tensor: torch.Tensor) -> None:
        self._tensors.append((node, weakref.ref(tensor), version_of(tensor)))

    def written(self) -> bool | None:
        """Return whether any of them has been written to since, or None if none is left."""
        alive = [(*each, tensor) for each in self._tensors if (tensor := each[1]()) is not None]
        self._tensors = [(node, ref, version_of(tensor)) for node, ref, _, tensor in alive]
        now = [version for _, _, version in self._tensors]
        return now != [version for _, _, version, _ in alive] if alive else None

    def learns(self) -> dict[int, bool]:
        alive = ((node, ref()) for node, ref, _ in self._tensors)
        return {node: tensor.requires_grad for node, tensor in alive if tensor is not None}


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.detach().nan_to_num(), other.detach().nan_to_num())


def _alike(one: Any, other: Any) -> bool:
    """Return whether all that can be compared in them is the same."""
    ones, others = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(ones) == len(others) and all(
        same_numbers(a, b)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else a is b or (isinstance(a, PLAIN) and isinstance(b, PLAIN) and a == b)
        for a, b in zip(ones, others, strict=True)
    )


def _switches(graph: fx.GraphModule) -> Iterator[tuple[int, int]]:
    """Yield spans that forbid a cut after a switch, which would equal the cut before it."""
    for index, node in enumerate(graph.graph.nodes):
        if autocast_nodes.is_switch(node):
            yield index, index + 1


def _plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_plain(item) for item in value)
    return isinstance(value, PLAIN)


def _buffer_uses(graph: fx.GraphModule, written: frozenset[str]) -> list[tuple[int, int]]:
    """Return spans from the first to the last use of every memory of a buffer that is written to."""
    spans: dict[int, tuple[int, int]] = {}
    buffers = dict(graph.named_buffers(remove_duplicate=False))
    marked = {memory_of(buffers[name]) for name in written}
    for index, node in enumerate(graph.graph.nodes):
        for memory in map(memory_of, used(graph, node)):
            if memory in marked:
                first, known = spans.get(memory, (index, index))
                last = max([index, *(_position(graph, user) for user in node.users)])
                spans[memory] = (first, max(known, last if node.op == "get_attr" else index))
    return [span for span in spans.values() if span[0] < span[1]]


def _weights_handed_out(
    graph: fx.GraphModule, found: Sequence[tuple[fx.Node, torch.Tensor]]
) -> Iterator[tuple[int, int]]:
    """Yield spans in which a value is a weight that is used under its own name later as well.

    A stage would add the gradients of each name on its own, and one backward adds them as they come.
    """
    nodes = list(graph.graph.nodes)
    for value, weight in found:
        named = [node for node in nodes if any(each is weight for each in used(graph, node))]
        uses = [
            node for each in named for node in (each.users if each.op == "get_attr" else [each])
        ]
        ends = [max(map(nodes.index, some), default=0) for some in (value.users, uses)]
        if nodes.index(value) < min(ends):
            yield nodes.index(value), min(ends)


def _derivatives(graph: fx.GraphModule) -> Iterator[tuple[int, int]]:
    """Yield spans from the first use of what the forward differentiates by to where it does."""
    nodes = list(graph.graph.nodes)
    for last, node in enumerate(nodes):
        if node.target is not torch.autograd.grad:
            continue
        by: Any = node.kwargs["inputs"] if "inputs" in node.kwargs else node.args[1]
        reached = set(pytree.tree_leaves(by))
        weights = {id(tensor) for each in reached for tensor in used(graph, each)}
        for index, each in enumerate(nodes[:last]):
            if {id(tensor) for tensor in used(graph, each)} & weights:
                reached.add(each)
            if reached.intersection(each.all_input_nodes):
                reached.add(each)
            if each in reached and each.op not in ("placeholder", "get_attr"):
                yield index, last
                break


def _position(graph: fx.GraphModule, node: fx.Node) -> int:
    return list(graph.graph.nodes).index(node)


def used(graph: torch.nn.Module, node: fx.Node) -> list[torch.Tensor]:
    """Return the parameters and buffers that a node takes from the model."""
    if node.op == "call_module":
        module = graph.get_submodule(str(node.target))
        return [*module.parameters(), *module.buffers()]
    if node.op == "get_attr":
        path, _, last = str(node.target).rpartition(".")
        thing = getattr(graph.get_submodule(path), last)
        return [thing] if isinstance(thing, torch.Tensor) else []
    return []
