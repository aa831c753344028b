"""Graphs in which sizes are numbers: one for each shape that a microbatch has had.

They have to be the same but for these numbers. Then the cuts, and all else that is known of one, hold for the others, and a
stage takes that of its microbatch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from agent.errors import CannotRecord

SHAPES_MAX = 64  # are kept; one that comes up again behind more others than that is recorded again
Shapes = tuple[tuple[int, ...], ...]


def shapes_of(batch: Sequence[torch.Tensor]) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in batch)


class Others:
    """`record` makes the graph for a microbatch of another shape."""

    def __init__(
        self,
        graph: fx.GraphModule,
        example: Sequence[torch.Tensor],
        record: Callable[[Sequence[torch.Tensor]], fx.GraphModule],
    ) -> None:
        self._first, self._form, self._record = shapes_of(example), form_of(graph), record
        self.graph = graph
        self._found: dict[Shapes, fx.GraphModule] = {}

    def graph_of(self, batch: Sequence[torch.Tensor]) -> fx.GraphModule:
        shapes = shapes_of(batch)
        if shapes == self._first:
            return self.graph
        found = self._found.pop(shapes, None) or self._recorded(batch)
        self._found[shapes] = found
        if len(self._found) > SHAPES_MAX:
            del self._found[next(iter(self._found))]
        return found

    def _recorded(self, batch: Sequence[torch.Tensor]) -> fx.GraphModule:
        graph = self._record(batch)
        if form_of(graph) != self._form:
            shapes = [[list(each) for each in one] for one in (shapes_of(batch), self._first)]
            raise CannotRecord(
                f"session.share(batches): a microbatch of {shapes[0]} is computed in another way than the recorded one, of "
                f"{shapes[1]}, since the loop asks how large its inputs are, or what is in them: make all alike, or train with depth 1"
            )
        return graph


def form_of(graph: fx.GraphModule) -> str:
    """What a graph computes, but for whole numbers."""
    return "\n".join(
        f"{node.op} {node.name} {_name(node.target)} {_form(node.args)} {_form(node.kwargs)}"
        for node in graph.graph.nodes
    )


def _name(target: Any) -> str:
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _form(value: Any) -> str:
    match value:
        case list() | tuple():
            return f"{type(value).__name__}({', '.join(map(_form, value))})"
        case dict():
            return f"dict({', '.join(f'{key}: {_form(each)}' for key, each in value.items())})"
        case slice():
            return f"slice{_form((value.start, value.stop, value.step))}"
        case int() if not isinstance(value, bool):
            return "#"
    return repr(value)
