"""What a stage is made of, and what passes between two of them."""

from collections.abc import Mapping

import msgspec
import torch
from torch import fx

from agent.pipeline.examine import Value
from agent.tensors.device import CPU


class Boundary(msgspec.Struct, frozen=True, kw_only=True):
    """What goes from one stage to the next, in this order; gradients of `tied` come back as well."""

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
    """One stage: its module takes `before`'s values and the microbatch, and gives `after`'s."""

    index: int
    last: bool
    module: fx.GraphModule
    batch: tuple[int, ...]  # which tensors of the microbatch it takes
    before: Boundary
    after: Boundary
    draws: bool
    written: tuple[str, ...]  # its buffers that the forward writes to
    tied: Mapping[str, tuple[int, ...]]  # every parameter of several stages, and which they are
    names: Mapping[str, str]  # of those that this stage uses: what it calls them itself
    metrics: tuple[str, ...] = ()  # of the last stage: what the numbers behind its loss are called
    device: torch.device = CPU  # of the whole model: a stage may have nothing that tells
