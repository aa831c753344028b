"""What a loss function keeps once it is made, in a table, a cache or a global: it is recorded alike before and after."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from agent.pipeline.tracing.loss import record_loss
from agent.proof.graph import digest_of

Made = Callable[[int, torch.device], torch.Tensor]
MASKS: dict[Any, torch.Tensor] = {}
mask_made: torch.Tensor | None = None


def in_dict(size: int, device: torch.device) -> torch.Tensor:
    if size not in MASKS:
        MASKS[size] = torch.ones(size, size, device=device).tril()
    return MASKS[size]


@functools.lru_cache
def in_cache(size: int, device: torch.device) -> torch.Tensor:
    return torch.ones(size, size, device=device).tril()


def in_global(size: int, device: torch.device) -> torch.Tensor:
    global mask_made  # noqa: PLW0603
    if mask_made is None:
        mask_made = torch.ones(size, size, device=device).tril()
    return mask_made


class Masked(nn.Module):
    def __init__(self, mask: Made) -> None:
        super().__init__()
        self.layer, self.mask = nn.Linear(4, 4), (mask,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ self.mask[0](self.layer.weight.shape[0], x.device)


def batches() -> list[torch.Tensor]:
    return [*torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("mask", [in_dict, in_cache, in_global])
def test_a_worker_that_has_a_mask_records_as_one_that_makes_it(mask: Made) -> None:
    """Else a worker that joins would be taken for one that computes something else."""
    MASKS.clear()
    in_cache.cache_clear()
    globals()["mask_made"] = None
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Masked(mask))

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    fresh = digest_of(record_loss(model, loss_of, batches()).graph)
    loss_of(batches()[0])
    assert digest_of(record_loss(model, loss_of, batches()).graph) == fresh


def test_a_cache_keeps_no_placeholders() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    @functools.lru_cache
    def norm() -> torch.Tensor:
        return model[0].weight.norm().detach()

    record_loss(model, lambda x: model(x).square().mean() * norm(), batches())
    assert type(norm()) is torch.Tensor
