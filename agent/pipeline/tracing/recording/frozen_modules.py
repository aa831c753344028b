"""Modules that a loss asks and does not train: a teacher, a reference, a frozen encoder.

The session does not know of a guest, so no stage owns any of it. It is one node, called unchanged
on every worker that has the node. Its values are computed as late as possible, where the model's
own values meet them, so that they do not cross a cut.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from agent.errors import CannotRecord
from agent.pipeline import autocast_nodes
from agent.pipeline.tracing.recording.module_names import rewrite
from agent.tensors.shards import tensors_of
from agent.tensors.unchanged import version_of

Autocast = tuple[Any, ...] | None  # the settings of an autocast; None outside of all
IN_PLACE = [
    *("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("iand", "ior", "ixor", "ilshift", "irshift"),
]


class Guest(torch.nn.Module):
    """A module with gradients enabled or not, as the loss had it."""

    def __init__(self, module: torch.nn.Module, *, enabled: bool) -> None:
        super().__init__()
        self.called = (module,)  # in a tuple, so that none of its weights is a stage's
        self.enabled = enabled

    def forward(self, *args: object, **kwargs: object) -> object:
        (module,) = self.called
        before = [version_of(tensor) for tensor in tensors_of(module)]
        with torch.set_grad_enabled(self.enabled):
            out = module(*args, **kwargs)
        if before != [version_of(tensor) for tensor in tensors_of(module)]:
            raise CannotRecord(
                f"loss_of asks a {type(module).__name__} that Session(...) does not know of, and its "
                "forward writes to its buffers, which would be others on every worker: say eval() to it, or train with depth 1"
            )
        return out

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(tensor.shape) for tensor in tensors_of(self.called[0])]

    def extra_repr(self) -> str:
        return repr(self.called)


def received(whole: torch.nn.Module, module: torch.nn.Module) -> str | None:
    """Return the name in `whole` under which a module from outside is called as a guest.

    It is None for a module that learns where it is called, shares something with `whole`, or has no
    tensors.
    """
    tensors, enabled = list(tensors_of(module)), torch.is_grad_enabled()
    if not tensors or (enabled and any(tensor.requires_grad for tensor in tensors)):
        return None
    if {id(tensor) for tensor in tensors} & {id(tensor) for tensor in tensors_of(whole)}:
        return None
    known = {name: each for name, each in whole.named_children() if isinstance(each, Guest)}
    for name, guest in known.items():
        if guest.called[0] is module and guest.enabled == enabled:
            return name
    name = f"guest_{len(known)}"
    whole.add_module(name, Guest(module, enabled=enabled))
    return name


def guests(graph: fx.GraphModule) -> list[Guest]:
    return [each for each in graph.children() if isinstance(each, Guest)]


def postpone(graph: fx.GraphModule) -> set[fx.Node]:
    """Move what guests compute of the microbatch to right before the model's values meet it.

    What depends on that alone moves too. It has no gradient, so it may leave a stretch without
    gradients; its autocast moves with it. Any write comes after it, as before. Return what was
    moved, because what draws random numbers would draw in another order.
    """
    held: list[fx.Node] = []
    apart = set[fx.Node]()  # depends on guests
    given = set[fx.Node]()  # depends on the microbatch, and on no guest
    autocast = theirs = None
    for node in list(graph.graph.nodes):
        sources = set(node.all_input_nodes)
        free = bool(sources) and sources <= apart | given and not autocast_nodes.switches(node)
        if free and (_is_guest(graph, node) or (sources & apart and _is_plain_call(node))):
            if autocast != theirs:
                _put(graph.graph, held, node, theirs, autocast)
                held, theirs = [], autocast
            held.append(node)
            apart.add(node)
            continue
        if node.op == "placeholder" or (free and not sources & apart and _is_plain_call(node)):
            given.add(node)
        if sources & apart or node.op == "output" or writes(node):
            _put(graph.graph, held, node, theirs, autocast)
            held = []
        if autocast_nodes.is_switch(node):
            autocast = None if node.target is autocast_nodes.leave else node.args
    if apart:
        rewrite(graph)
    return apart


def _put(
    graph: fx.Graph, held: list[fx.Node], before: fx.Node, theirs: Autocast, around: Autocast
) -> None:
    """Put these nodes there, under their own autocast."""
    if held and theirs != around:
        outside = autocast_nodes.outside(list(graph.nodes))
        with graph.inserting_before(before):
            graph.call_function(
                autocast_nodes.change if around else autocast_nodes.enter, theirs or outside
            )
            last = graph.call_function(
                autocast_nodes.change if around else autocast_nodes.leave, around or outside
            )
        before = last
    for node in held:
        before.prepend(node)


def of_batch(graph: fx.GraphModule | torch.nn.Module, nodes: Iterable[fx.Node]) -> bool:
    """Return whether all nodes depend on the microbatch, and on none of the model's weights."""
    waiting, seen = list(nodes), set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        if node.op == "get_attr" or (node.op == "call_module" and not _is_guest(graph, node)):
            return False
        seen.add(node)
        waiting += node.all_input_nodes
    return True


def _is_guest(graph: torch.nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and isinstance(graph.get_submodule(str(node.target)), Guest)


def _is_plain_call(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method")


def writes(node: fx.Node) -> bool:
    """Return whether a call writes into what it is given, by its name."""
    if not _is_plain_call(node):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    inplace = "out" in node.kwargs or bool(node.kwargs.get("inplace"))
    return (
        inplace or name.strip("_") in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    )
