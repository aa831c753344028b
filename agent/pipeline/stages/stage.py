"""One stage at work: forward, recompute, and the backward whole or in two halves.

The numbers are those of the model in one piece, to the bit:

* a value that only passes through is an output as well as an input, so that its gradients are added
  in the order in which one backward pass would have added them: the farthest use first;
* the same holds for a parameter of several stages: its gradient from later stages comes back with
  the other gradients, and goes into the backward before this stage's own share;
* each microbatch starts from the random stream where the previous stage left it, and from the
  buffers with their values at the beginning of the step.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from agent.errors import AgentError, Unplayed
from agent.pipeline import autocast_nodes
from agent.pipeline.stages.assumptions import Assumptions
from agent.pipeline.stages.channel import Parcel
from agent.pipeline.stages.split_backward import Halves, Owed
from agent.pipeline.stages.stage_parts import Piece
from agent.pipeline.tracing.recording.eager_trace import unsaved
from agent.pipeline.tracing.recording.loss_value import checked
from agent.pipeline.tracing.recording.places import where
from agent.tensors.device import set_stream_state, stream_state
from agent.tensors.metrics import Numbers
from agent.tensors.unchanged import memory_of

WORDS_MAX = 200  # of an error
Gradients = dict[str, torch.Tensor]
PieceOf = Callable[[Any], Piece]  # takes a microbatch
Written = tuple[torch.Tensor, list[tuple[torch.nn.Module, str]]]
Known = tuple[list[Written], bool]  # of a module: what it writes to, and whether it switches modes


class Held:
    """What a stage keeps of a microbatch between its forward and its backward."""

    def __init__(
        self, piece: Piece, parcel: Parcel | None, batch: tuple[Any, ...], stream: Any
    ) -> None:
        self.piece = piece
        self.parcel, self.batch, self.stream = parcel, batch, stream
        self.leaves: dict[str, torch.Tensor] = {}
        self.edges: dict[str, GradientEdge] = {}
        self.buffers: list[torch.Tensor] = []
        self.roots: tuple[list[GradientEdge], list[torch.Tensor]] = ([], [])
        self.owed: Owed | None = None
        self.numbers = Numbers()

    def let_go(self) -> None:
        """Forget the graph of the forward, because a recompute makes another."""
        self.leaves, self.edges, self.roots = {}, {}, ([], [])


class Stage:
    """A piece of the model, and the microbatches that are in it."""

    def __init__(self, piece: Piece, *, microbatches: int, piece_of: PieceOf | None = None) -> None:
        self.piece, self.module = piece, piece.module
        self._known = WeakKeyDictionary[fx.GraphModule, Known]()
        self._written = set[int]()  # the buffers of the module that any piece writes to
        self._piece_of = piece_of
        self._microbatches = microbatches
        self._held: dict[int, Held] = {}
        self._params = {
            name: param for name, param in self.module.named_parameters() if param.requires_grad
        }
        self._halves = Halves(list(self._params.values()))
        self._differentiates = False  # known to call autograd inside its forward
        self.shares = bool(piece.before.tied or piece.after.tied)

    def tied_param(self, name: str) -> torch.nn.Parameter:
        """Return a parameter that several stages have, by the name that all of them use."""
        return self.module.get_parameter(self.piece.names[name])

    # --- forward ----------------------------------------------------------------------------------

    def forward(
        self,
        microbatch: int,
        arrived: Parcel | None,
        batch: Sequence[Any],
        seed: Callable[[], None] | None = None,
        *,
        keep: bool = True,
    ) -> Parcel:
        """Return the values for the next stage; without `keep`, a `recompute` has to follow."""
        piece = self.piece if self._piece_of is None else self._piece_of(batch)
        stream = None
        if piece.before.stream:
            assert arrived is not None
            arriving = arrived.tensors[-1]
            assert arriving is not None
            stream = arriving.clone()  # `set_rng_state` reads from where the storage begins
        elif piece.draws and seed is not None:
            seed()
            stream = stream_state(piece.device)
        held = Held(piece, arrived, tuple(batch[i] for i in piece.batch), stream)
        self._held[microbatch] = held
        tensors, plains = self._run(held) if keep else self._run_untraced(held)
        if piece.after.stream:
            tensors.append(stream_state(piece.device) if piece.draws else stream)
        return Parcel(tensors=tuple(tensors), plain=plains)

    def writes(self, buffer: torch.Tensor) -> bool:
        """Return whether each microbatch has a copy of the buffer."""
        return id(buffer) in self._written

    def _of(self, piece: Piece) -> Known:
        """Return the buffers that a piece writes to with their places, and if it switches modes."""
        module = piece.module
        found = self._known.get(module)
        if found is None:
            written = [(module.get_buffer(n), _places(module, n)) for n in piece.written]
            found = written, any(autocast_nodes.switches(node) for node in module.graph.nodes)
            self._known[module] = found
            self._written |= {id(buffer) for buffer, _ in written}
        return found

    def recompute(self, microbatch: int) -> None:
        held = self._held[microbatch]
        buffers = held.buffers
        self._run(held)
        held.buffers = buffers

    def _run_untraced(self, held: Held) -> tuple[list[torch.Tensor | None], list[Any]]:
        """Run with gradients enabled, but save nothing for them.

        With gradients disabled torch takes another kernel for an LSTM, which rounds differently.
        """
        out = None
        if not self._differentiates:
            try:
                with unsaved():
                    out = self._run_once(held)
            except RuntimeError:  # it needs what it saves; any other error is raised again
                self._differentiates = True
        if out is None:
            out = self._run(held)
        held.let_go()
        return out

    def _run(self, held: Held) -> tuple[list[torch.Tensor | None], list[Any]]:
        """Run the piece; what fails there may succeed in `loss_of` itself, which decides."""
        try:
            return self._run_once(held)
        except (AgentError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise Unplayed(
                f"what was recorded of the loss fails on a microbatch, at {where(error)} "
                f"({type(error).__name__}: {str(error)[:WORDS_MAX]})"
            ) from error

    def _run_once(self, held: Held) -> tuple[list[torch.Tensor | None], list[Any]]:
        piece = held.piece
        if piece.draws and held.stream is not None:
            set_stream_state(held.stream, piece.device)
        inputs = self._inputs(held)
        assumed = Assumptions(piece, inputs)
        out = self._with_buffers(held, inputs)
        names = piece.after.tensors
        tensors = () if piece.last else out[: len(names)]
        assumed.check(names, tensors)
        if piece.last:
            return self._loss(held, out)
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.requires_grad and name in piece.after.differentiable:
                held.edges[name] = get_gradient_edge(tensor)
        first = {id(tensor): at for at, tensor in reversed([*enumerate(tensors)])}
        same = [first[id(tensor)] for tensor in tensors]
        sent = [t.detach() if same[at] == at else None for at, t in enumerate(tensors)]
        return sent, [*out[len(names) :], same]

    def _inputs(self, held: Held) -> list[Any]:
        held.leaves, held.edges = {}, {}
        if held.parcel is None:
            return [*held.batch]
        before = held.piece.before
        assert isinstance(held.parcel.plain, list)
        *plain, same = held.parcel.plain
        learning: dict[int, str] = {}  # a name of each tensor that has gradients, by its place
        for name, at in zip(before.tensors, same, strict=True):
            if name in before.differentiable:
                learning.setdefault(at, name)
        inputs: list[Any] = []
        for at, first in enumerate(same):
            tensor = inputs[first] if first < at else held.parcel.tensors[at]
            if first == at:
                assert tensor is not None
                tensor = tensor.detach()
                if at in learning:
                    held.leaves[learning[at]] = tensor.requires_grad_()
                    # An autocast would keep its cast of a leaf; `view_as` would change strides.
                    tensor = tensor[...]
            inputs.append(tensor)
        return [*inputs, *plain, *held.batch]

    def _with_buffers(self, held: Held, inputs: list[Any]) -> Any:
        """Run with copies of the buffers, so that a microbatch leaves no trace for the next."""
        written, switches = self._of(held.piece)
        held.buffers = _copies([buffer for buffer, _ in written])
        for copy, (_, places) in zip(held.buffers, written, strict=True):
            for owner, key in places:
                there = owner._buffers[key]
                if there is not None and there.shape == copy.shape:  # a table that has grown stays
                    owner._buffers[key] = copy
        try:
            with autocast_nodes.kept() if switches else nullcontext():
                return held.piece.module.forward(*inputs)
        finally:
            for index, (buffer, places) in enumerate(written):
                for owner, key in places:
                    there = owner._buffers[key]  # the forward may have put another buffer there
                    if there is not None and there.shape != buffer.shape:
                        continue  # a table that has grown
                    if there is not None and there is not held.buffers[index]:
                        held.buffers[index] = there.detach()
                    owner._buffers[key] = buffer

    def _loss(self, held: Held, out: Any) -> tuple[list[torch.Tensor | None], list[Any]]:
        loss, *metrics = out
        returned = checked(loss, dict(zip(held.piece.metrics, metrics, strict=True)))
        held.numbers = returned.numbers()
        scaled = loss / self._microbatches
        held.roots = ([get_gradient_edge(scaled)], [torch.ones_like(scaled)])
        return [], []

    # --- backward ---------------------------------------------------------------------------------

    def backward(self, microbatch: int, arrived: Parcel | None) -> Parcel:
        """Put gradients into the parameters, and return those that the previous stage waits for."""
        held = self._held[microbatch]
        relayed = self._find_roots(held, arrived)
        found = self._differentiate(held, list(held.leaves.values()))
        held.roots = ([], [])
        return self._back(held, relayed, dict(zip(held.leaves, found, strict=True)))

    def _differentiate(
        self, held: Held, leaves: list[torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        """Compute gradients with `autograd.grad`, which leaves their strides unchanged.

        Gathered in a leaf's `.grad` they would get the leaf's strides, and a kernel that sees other
        strides may round differently.
        """
        wanted = [*leaves, *self._params.values()]
        if not held.roots[0] or not wanted:
            return (None,) * len(leaves)
        edges, grads = held.roots
        if any(param.grad is not None for param in self._params.values()):
            return self._add(edges, grads, leaves)
        found = torch.autograd.grad(edges, wanted, grads, allow_unused=True)
        for param, gradient in zip(self._params.values(), found[len(leaves) :], strict=True):
            param.grad = gradient
        return found[: len(leaves)]

    def _add(
        self,
        edges: list[GradientEdge],
        grads: list[torch.Tensor],
        leaves: list[torch.Tensor],
    ) -> tuple[torch.Tensor | None, ...]:
        """Do the same where parameters have gradients, adding to each while it is in the cache."""
        found: list[torch.Tensor | None] = [None] * len(leaves)
        for index, leaf in enumerate(leaves):
            leaf.register_hook(partial(found.__setitem__, index))  # type: ignore[no-untyped-call]
        torch.autograd.backward(edges, grads, inputs=[*leaves, *self._params.values()])
        for leaf in leaves:
            leaf.grad = None
        return tuple(found)

    def input_gradient(self, microbatch: int, arrived: Parcel | None) -> tuple[Parcel, bool]:
        """Return what the previous stage waits for, and whether no second half is left to do."""
        if self.shares:
            return self.backward(microbatch, arrived), True
        held = self._held[microbatch]
        relayed = self._find_roots(held, arrived)
        found: Sequence[torch.Tensor | None] = (None,) * len(held.leaves)
        if held.leaves and held.roots[0]:
            found, held.owed = self._halves.first(held.roots, list(held.leaves.values()))
            if held.owed is not None:
                held.roots = ([], [])
        return self._back(held, relayed, dict(zip(held.leaves, found, strict=True))), False

    def weight_gradient(self, microbatch: int) -> None:
        held = self._held[microbatch]
        if held.owed is not None:
            self._halves.second(held.owed)
        else:
            self._differentiate(held, [])
        held.roots, held.owed = ([], []), None

    def _find_roots(self, held: Held, arrived: Parcel | None) -> Gradients:
        """Find where the backward starts; return the gradients that are only passed on."""
        after = held.piece.after
        if held.piece.last:
            return {}
        assert arrived is not None
        relayed = {}
        names = (*after.differentiable, *after.tied)
        for name, gradient in zip(names, arrived.tensors, strict=True):
            if gradient is None:
                continue
            edge = held.edges.get(name)
            if edge is None and name in self.piece.names:
                edge = get_gradient_edge(self.tied_param(name))
            if edge is not None:
                held.roots[0].append(edge)
                held.roots[1].append(gradient)
            elif name in held.piece.before.tied:
                relayed[name] = gradient
        held.edges = {}
        return relayed

    def _back(
        self, held: Held, relayed: Gradients, grads: dict[str, torch.Tensor | None]
    ) -> Parcel:
        before = held.piece.before
        tensors = [grads.get(name) for name in before.differentiable]
        for name in before.tied:
            if name in self.piece.names:
                param = self.tied_param(name)
                tensors.append(param.grad)
                param.grad = None
            else:
                tensors.append(relayed.get(name))
        held.leaves, held.parcel = {}, None
        return Parcel(tensors=tuple(tensors))

    def ones_for(self, sent: Parcel) -> Parcel:
        """Return gradients for a trial run."""
        after = self.piece.after
        found = {n: t for n, t in zip(after.tensors, sent.tensors, strict=False) if t is not None}
        ones = [torch.ones_like(found[n]) if n in found else None for n in after.differentiable]
        return Parcel(tensors=(*ones, *(None for _ in after.tied)))

    def release(self, microbatch: int) -> Numbers:
        """Finish the microbatch: write its buffers back, and return its loss and metrics."""
        held = self._held.pop(microbatch)
        written, _ = self._of(held.piece)
        with torch.no_grad():
            for copy, (buffer, _) in zip(held.buffers, written, strict=True):
                buffer.copy_(copy)
        return held.numbers

    def clear(self) -> None:
        """Drop everything of the step, because it is given up."""
        self._held.clear()
        self.module.zero_grad(set_to_none=True)


def _copies(buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies that share memory where the buffers do."""
    memories = {memory_of(buffer): buffer for buffer in buffers}
    if len(memories) == len(buffers):
        return [buffer.clone() for buffer in buffers]
    copied = {key: deepcopy(buffer.untyped_storage()) for key, buffer in memories.items()}
    return [
        buffer.new_empty(0).set_(
            copied[memory_of(buffer)], buffer.storage_offset(), buffer.shape, buffer.stride()
        )
        for buffer in buffers
    ]


def _places(module: torch.nn.Module, name: str) -> list[tuple[torch.nn.Module, str]]:
    """Return all modules that hold this buffer; a module that is used twice is there twice."""
    wanted = module.get_buffer(name)
    return [
        (owner, key)
        for owner in module.modules()
        for key, buffer in owner._buffers.items()
        if buffer is wanted
    ]
