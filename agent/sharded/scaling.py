"""A scaled loss where a worker has the gradients of its own layers only.

Whether something overflowed is a question about all gradients. So the answer for every tensor is
sent with the sums of the step, and each worker's scaler decides by all of them: all skip the same
steps and choose the same scales.
"""

from typing import Any

import torch

from agent.sharded.gradients import params_of
from agent.sharded.holdings import Holdings
from agent.tensors.device import CPU
from agent.tensors.sums import Norm

Scaler = torch.amp.GradScaler


def measured(gradients: list[torch.Tensor], scaler: Scaler | None) -> list[Norm]:
    """Return the norms of gradients as summed, and after the scaler has unscaled them."""
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


def follow(scaler: Scaler, holdings: Holdings) -> None:
    """Make this scaler decide by all gradients, including those on other workers."""
    scaler._unscale_grads_ = _Unscale(scaler, holdings)  # type: ignore[method-assign]


class _Unscale:
    """Replaces, in one scaler, the method that unscales gradients and looks for overflows."""

    def __init__(self, scaler: Scaler, holdings: Holdings) -> None:
        self._scaler, self._holdings = scaler, holdings

    def __reduce__(self) -> tuple[Any, ...]:
        """Reduce to the method of its class.

        A copied scaler has no attributes yet when this name is looked up.
        """
        return getattr, (self._scaler, "_unscale_grads_")

    def __call__(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        gradients, params = self._holdings.gradients, params_of(optimizer)
        known = gradients.known("scaler.unscale_(...)", params, normed=False)
        with gradients.changing(params):
            original = type(self._scaler)._unscale_grads_
            found = original(self._scaler, optimizer, inv_scale, found_inf, allow_fp16)
        # With `allow_fp16` it only looks, for an optimizer that unscales by itself.
        if not allow_fp16:
            gradients.unscaled(params)
        # An overflow makes the scaler skip the step, which is also right if there are no gradients.
        astray = self._holdings.astray()
        overflown = astray or not all(norm.finite for norm in known.values())
        if known or astray:
            return {found_inf.device: torch.full_like(found_inf, float(overflown))}
        return found
