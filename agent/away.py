"""Parameters that are not here.

What is away has its name, its shape and no memory: it is one number that is not a number, as wide as the parameter.
Whoever computes with it by mistake sees at once that it is not there; whoever looks for what a forward writes to sees
that as well. Where the time counts that something takes, something stands in for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def nothing(param: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """What a parameter like this holds while it is away: where it is, or on `device`."""
    floating = param.dtype.is_floating_point or param.dtype.is_complex
    device = param.device if device is None else device
    one = torch.full((), float("nan") if floating else 0, dtype=param.dtype, device=device)
    return one.expand(param.shape)


def is_away(param: torch.Tensor) -> bool:
    return param.numel() > 1 and not any(param.stride())


def any_away(module: torch.nn.Module) -> bool:
    return any(is_away(param) for param in module.parameters())


@contextmanager
def stood_in(module: torch.nn.Module) -> Iterator[None]:
    """Zeros with memory of their own stand in, so that kernels take the time that they take."""
    away = [param for param in module.parameters() if is_away(param)]
    for param in away:
        # Written, or the kernel would map all of it to one page that is always in the cache.
        param.data = torch.empty(param.shape, dtype=param.dtype, device=param.device).zero_()
    try:
        yield
    finally:
        for param in away:
            param.data = nothing(param)
