"""Find a buffer that a backward writes to, in a hook of a module or in an autograd.Function.

A stage gives each microbatch its own copies of buffers for the forward, so it would lose what a
backward writes. Nothing but a backward shows such a write, so one is done where a loss has code that
could write.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from agent.pipeline.tracing.recording.eager_trace import backward_hooks
from agent.tensors.shards import in_a_row
from agent.tensors.unchanged import version_of


def runs_code(model: torch.nn.Module, loss: torch.Tensor) -> bool:
    """Return whether a backward of `loss` runs code that is not torch's own."""
    if any(map(backward_hooks, model.modules())):
        return True
    found: set[Any] = {loss.grad_fn}
    waiting = [*found]
    for node in waiting:
        if isinstance(node, BackwardCFunction):
            return True
        after = {each for each, _ in getattr(node, "next_functions", ())} - found
        found |= after
        waiting += after
    return False


def written_back(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor]) -> str:
    """Return the name of a buffer that a backward of this loss writes to, or an empty text.

    The caller puts buffers and attributes back. Gradients are dropped one by one.
    """
    with _gradients_dropped(model):
        loss = loss_of()
        before = {name: _noted(buffer) for name, buffer in model.named_buffers()}
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    for name, buffer in model.named_buffers():
        there, version, raw = before[name]
        # The version does not count writes through `.data`.
        if buffer is not there or version_of(buffer) != version or not raw.equal(in_a_row(buffer)):
            return name
    return ""


def _noted(buffer: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
    return buffer, version_of(buffer), in_a_row(buffer).clone()


@contextmanager
def _gradients_dropped(model: torch.nn.Module) -> Iterator[None]:
    """Drop the gradient of each parameter as soon as a backward has made it."""
    learning = [param for param in model.parameters() if param.requires_grad]
    before = [param.grad for param in learning]
    for param in learning:
        _drop(param)
    hooks = [
        param.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
        for param in learning
    ]
    try:
        yield
    finally:
        for param, hook, gradient in zip(learning, hooks, before, strict=True):
            hook.remove()
            param.grad = gradient


def _drop(param: torch.Tensor) -> None:
    param.grad = None
