"""What models are made of stays what it was, as far as whoever joins would have to know of it."""

import pytest
import torch

from agent.errors import Misuse
from agent.pipeline.record import attributes_kept
from agent.script.form import Form


class Lazy(torch.nn.Module):
    def __init__(self, *, saved: bool) -> None:
        super().__init__()
        self.saved = saved

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(3), persistent=self.saved)
        return x * self.mask


def test_a_table_that_was_registered_in_a_forward_and_taken_back_is_no_change() -> None:
    """A recording does so, on a worker whose stage has another part of the model."""
    model = Lazy(saved=False)
    form = Form([model])
    with attributes_kept(model):
        model(torch.ones(3))
    form.check(1)
    model(torch.ones(3))
    form.check(2)


def test_a_saved_one_is() -> None:
    model = Lazy(saved=True)
    form = Form([model])
    model(torch.ones(3))
    with pytest.raises(Misuse, match="step 1"):
        form.check(1)
