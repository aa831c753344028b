"""The contents of a stage, and what passes between two stages."""

from collections.abc import Mapping

import msgspec
import torch
from torch import fx

from agent.pipeline.tracing.analysis import Value
from agent.tensors.device import CPU


class Boundary(msgspec.Struct, frozen=True, kw_only=True):
    """What goes to the next stage, in this order; gradients of `tied` come back as well."""

    values: tuple[Value, ...]
    stream: bool  # the state of the random stream goes with it
    tied: tuple[str, ...]  # parameters that are used on both sides

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.values if not value.plain)

    @property
    def plains(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.values if value.plain)

    @property
    def differentiable(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.values if value.needs_grad)


NOTHING = Boundary(values=(), stream=False, tied=())


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: its module takes `before`'s values and the microbatch, and returns `after`'s."""

    index: int
    last: bool
    module: fx.GraphModule
    batch: tuple[int, ...]  # which tensors of the microbatch it takes
    before: Boundary
    after: Boundary
    draws: bool
    foreign: bool  # it calls modules that are not torch's, of which nobody knows what they draw
    written: tuple[str, ...]  # its buffers that the forward writes to
    tied: Mapping[str, tuple[int, ...]]  # every parameter of several stages, with these stages
    names: Mapping[str, str]  # its own names of those that this stage uses
    metrics: tuple[str, ...] = ()  # of the last stage: the names of the numbers after its loss
    device: torch.device = CPU  # of the whole model, as a stage may have no tensor to show it
