"""Models keep the form that they had when the session was made."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from agent.checks.form import Form
from agent.errors import Misuse


class Lazy(nn.Module):
    def __init__(self, *, saved: bool) -> None:
        super().__init__()
        self.saved = saved

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(3), persistent=self.saved)
        return x * self.mask


def form_of(model: nn.Module, frozen: frozenset[str] = frozenset()) -> Form:
    summed = {id(param) for name, param in model.named_parameters() if name not in frozen}
    return Form({"model": model}, summed)


def test_a_table_that_a_forward_registers_is_no_change_nor_is_taking_it_back() -> None:
    model = Lazy(saved=False)
    form = form_of(model)
    model(torch.ones(3))
    form.check(1)
    del model.mask
    form.check(2)


def test_a_saved_buffer_that_a_forward_registers_is_refused() -> None:
    model = Lazy(saved=True)
    form = form_of(model)
    model(torch.ones(3))
    with pytest.raises(Misuse, match=r"step 1: the buffer .mask. is torch\.float32"):
        form.check(1)


def test_layers_may_be_frozen_and_unfrozen() -> None:
    model = nn.Linear(1, 1)
    form = form_of(model)
    model.requires_grad_(False)
    form.check(1)
    model.requires_grad_(True)
    form.check(2)


def test_what_a_sum_has_no_room_for_cannot_be_unfrozen() -> None:
    model = nn.Linear(1, 1)
    model.bias.requires_grad_(False)
    form = form_of(model, frozenset(["bias"]))
    form.check(1)
    model.bias.requires_grad_(True)
    with pytest.raises(
        Misuse,
        match=r"step 2: the parameter 'bias' was unfrozen, .* Session\(..., unfreezes=True\)",
    ):
        form.check(2)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "the parameter 'weight' is not the same object": lambda m: setattr(
        m, "weight", nn.Parameter(torch.ones(1, 1))
    ),
    "the parameter 'more' was not there": lambda m: m.register_parameter(
        "more", nn.Parameter(torch.ones(1))
    ),
    "the parameter 'bias' was taken out": lambda m: setattr(m, "bias", None),
    "the parameter 'weight' is torch.float64": lambda m: m.double(),
    "'extra' was put into the model": lambda m: m.add_module("extra", nn.Identity()),
    "'other' was put into the model": lambda m: m.register_parameter("other", m.weight),
}


@pytest.mark.parametrize("said", CHANGES)
def test_a_change_of_form_is_named(said: str) -> None:
    model = nn.Linear(1, 1)
    form = form_of(model)
    CHANGES[said](model)
    with pytest.raises(Misuse, match=f"step 3: {said}"):
        form.check(3)


def test_of_two_models_the_later_ones_name_begins_with_its_key() -> None:
    models = {"model": nn.Linear(1, 1), "Linear1": nn.Linear(1, 1)}
    form = Form(models, {id(p) for model in models.values() for p in model.parameters()})
    models["Linear1"].bias = None
    with pytest.raises(Misuse, match=r"the parameter 'Linear1.bias' was taken out"):
        form.check(0)
