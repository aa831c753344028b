"""Clip gradients by the norm of all of them, including those on other workers."""

import math
from collections.abc import Sequence

import torch

from agent.errors import Misuse
from agent.sharded.holdings import Holdings
from agent.sharded.refusals import APART, ROOM

CALL = "session.clip_grad_norm_(...)"


def clip_grad_norm_(
    holdings: Holdings, params: Sequence[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale gradients to a norm of at most `max_norm`; return the norm with the usual bits.

    Its bits are those that one process with all gradients would get.
    """
    if not hasattr(max_norm, "__float__"):
        raise Misuse(
            f"{CALL}: the norm is a {type(max_norm).__name__}: give the number first, session.clip_grad_norm_(1.0), which "
            "clips all that is trained, or session.clip_grad_norm_(1.0, parameters=model.parameters())"
        )
    gradients = holdings.gradients
    if not gradients.norms:
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
    if norm_type != 2.0:
        raise Misuse(f"{CALL}: norm_type={norm_type}, but {APART}: use norm_type=2, or {ROOM}")
    with gradients.changing(params):
        known = gradients.known(CALL, params)
        norms = [
            torch.tensor(known[id(param)].norm, dtype=param.dtype, device=param.device)
            for param in params
            if id(param) in known
        ]
        # The norm of a number is that number, so only the norm of the norms is taken.
        total = torch.nn.utils.get_total_norm(norms)
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)
    # An infinite `max_norm` only asks for the norm.
    if max_norm != math.inf:
        gradients.clipped(params)
    return total


def clip_grad_value_(holdings: Holdings, params: Sequence[torch.Tensor], clip_value: float) -> None:
    """Clip every number of the gradients that are here."""
    gradients = holdings.gradients
    with gradients.changing(params):
        if any(param.grad is not None for param in params):
            torch.nn.utils.clip_grad_value_(params, clip_value)
    gradients.clipped(params)
