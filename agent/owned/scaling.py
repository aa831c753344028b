"""A scaled loss where a worker has the gradients of its own layers only.

Whether something overflowed is one question of all gradients, so it is told of every tensor with the sums of the step,
and so is its norm without the scale. Each worker's scaler is answered for all of them then: all skip the same steps and
take the same scales.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext

import torch

from agent.owned.holdings import Holdings
from agent.tensors.device import CPU
from agent.tensors.sums import Norm

Scaler = torch.amp.GradScaler
_original = Scaler._unscale_grads_


def measured(gradients: list[torch.Tensor], scaler: Scaler | None) -> list[Norm]:
    """As they are summed, and as the scaler will make them."""
    if not gradients:
        return []
    norms = [float(norm) for norm in torch._foreach_norm(gradients)]
    if scaler is None:
        return [Norm(norm) for norm in norms]
    device = gradients[0].device
    scale = torch.tensor(scaler.get_scale(), dtype=torch.float64, device=CPU)
    inverse = scale.reciprocal().float().to(device)
    found = []
    for gradient, norm in zip(gradients, norms, strict=True):
        copy, overflown = gradient.clone(), torch.zeros(1, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_([copy], overflown, inverse)
        found.append(Norm(norm, float(torch._foreach_norm([copy])[0]), not overflown))
    return found


def follow(holdings: Callable[[], Holdings | None]) -> None:
    """From now on the scalers of this process look at all gradients."""

    @functools.wraps(_original)
    def _unscale_grads_(
        self: Scaler,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        here = holdings()
        with nullcontext() if here is None else here.ours():
            found = _original(self, optimizer, inv_scale, found_inf, allow_fp16)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        known = [] if here is None else [param for param in params if id(param) in here.norms]
        if here is not None and here.astray:
            return {found_inf.device: torch.ones_like(found_inf)}  # nothing is what it skips
        if here is None or not known:
            return found
        overflown = not all(here.norms[id(param)].finite for param in known)
        if not allow_fp16:  # or it only looks, for an optimizer that takes the scale out itself
            here.unscale(known)
        return {found_inf.device: torch.full_like(found_inf, float(overflown))}

    Scaler._unscale_grads_ = _unscale_grads_  # type: ignore[method-assign]
