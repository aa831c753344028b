"""`clip_grad_norm_` and `clip_grad_value_` where a worker has the gradients of its own layers only.

The norm is one of all gradients, so those of every tensor are told with the sums of the step, and put together in
the order in which one process would. Nothing waits for others here, and nothing changes where all is at hand.
"""

import functools
import math
from collections.abc import Callable, Iterable

import torch
from torch.nn.utils import clip_grad

from agent.owned.holdings import Holdings

_by_norm, _by_value = clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_


def follow(holdings: Callable[[], Holdings | None]) -> None:
    """From now on the scripts of this process clip by the norm of all gradients, and each value of those that are here."""

    @functools.wraps(_by_norm)
    def clip_grad_norm_(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        here = holdings()
        if here is None or not here.norms:
            return _by_norm(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        with here.ours():
            total = here.norm(params, norm_type)
            if error_if_nonfinite and not torch.isfinite(total):
                raise RuntimeError(
                    f"the norm of the gradients is {float(total)}, so they cannot be clipped"
                )
            torch.nn.utils.clip_grads_with_norm_(params, max_norm, total, foreach)
        if max_norm != math.inf:  # which is for a look at the norm
            here.clip(params)
        return total

    @functools.wraps(_by_value)
    def clip_grad_value_(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        clip_value: float,
        foreach: bool | None = None,
    ) -> None:
        here = holdings()
        if here is None or not here.norms:
            return _by_value(parameters, clip_value, foreach)
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        with here.ours():
            if any(param.grad is not None for param in params):
                _by_value(params, clip_value, foreach)
        return here.clip(params)

    torch.nn.utils.clip_grad_norm_ = clip_grad.clip_grad_norm_ = clip_grad_norm_
    torch.nn.utils.clip_grad_value_ = clip_grad.clip_grad_value_ = clip_grad_value_
