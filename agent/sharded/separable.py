"""Refuse optimizers that make a parameter depend on others, maybe on another worker.

A norm of one layer's tensors, as LAMB computes, is complete wherever the layer is. A norm of all
layers is not. So an optimizer is tried on three tensors: its result for one may not depend on
whether the others and their gradients are here.
"""

import itertools
from collections.abc import Iterable

import torch
from torch.optim.swa_utils import AveragedModel

from agent.checks.optimizers import twin_of
from agent.errors import Misuse
from agent.pipeline.tracing.recording.trace import streams_kept
from agent.sharded.refusals import APART, AVERAGE, ROOM, WRITTEN
from agent.tensors.absent import is_away, nothing
from agent.tensors.device import CPU
from agent.tensors.layer_names import Models, named_buffers, named_parameters
from agent.tensors.unchanged import memory_of

STEPS = 4


def refuse(objects: Iterable[object]) -> None:
    """Refuse them; to be called before a step is trained with a part of the layers."""
    for thing in objects:
        if isinstance(thing, torch.optim.Optimizer) and (why := _why_not(thing)):
            raise Misuse(f"{type(thing).__name__} {why}, and {APART}: {ROOM}")
        if isinstance(thing, AveragedModel):
            raise Misuse(f"{type(thing).__name__} takes in all weights one by one, and {AVERAGE}")


def refuse_one_memory(models: Models) -> None:
    """Refuse tensors that lie in one another's memory, before a worker drops some of them.

    An update of one is an update of the other, and they may be on different workers.
    """
    named = (*named_parameters(models).items(), *named_buffers(models).items())
    spans = sorted(
        (*_span(tensor), name)
        for name, tensor in named
        if tensor.layout is torch.strided and tensor.numel() and not is_away(tensor)
    )
    for (memory, _, end, name), (other, start, _, another) in itertools.pairwise(spans):
        if memory == other and start < end:
            raise Misuse(
                f"{name!r} and {another!r} lie in one memory, so that an update of one is one of the other, and {APART}: "
                f"let both be one parameter (head.weight = embed.weight), or {ROOM}"
            )


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the memory of a tensor, and from where to where of it the tensor lies."""
    size = tensor.element_size()
    length = 1 + sum(
        (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.storage_offset() * size
    return memory_of(tensor), int(start), int(start + length * size)


def _why_not(optimizer: torch.optim.Optimizer) -> str:
    """Try a twin, and return why the optimizer is refused, or "".

    A twin that cannot be made, or does not step by itself, is not known to be right.
    """
    try:
        with streams_kept(CPU):
            together, apart = _tried(optimizer, others=True), _tried(optimizer, others=False)
    except Exception as error:
        if WRITTEN in str(error):
            return "writes to a parameter that has no gradient (leave it out: `if p.grad is None: continue`)"
        return f"could not be tried on tensors of its own ({type(error).__name__}: {error})"
    if all(torch.equal(a, b) for a, b in zip(together, apart, strict=True)):
        return ""
    return "makes something else of a parameter when others are not here"


def _tried(optimizer: torch.optim.Optimizer, *, others: bool) -> list[torch.Tensor]:
    """Return what a few steps make of one tensor of three, and of the settings of all."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    # `capturable` is for devices.
    twin = twin_of(optimizer, params, capturable=False)
    grads = torch.randn(STEPS, 3, 4, 4)
    if not others:
        for param in (params[0], params[2]):
            param.data = nothing(param)
    # Random numbers for the others are not drawn where these are absent.
    torch.manual_seed(1)
    found = []
    for step in range(STEPS):
        for index, param in enumerate(params):
            param.grad = grads[step, index].clone() if others or index == 1 else None
        twin.step()
        found.append(params[1].detach().clone())
        found += [
            torch.as_tensor(value, dtype=torch.float64).clone()
            for group in twin.param_groups
            for value in group.values()
            if isinstance(value, int | float | torch.Tensor)
        ]
    return found
