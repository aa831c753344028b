"""What a script gives to its session is looked at before anything is done with it."""

import pytest
import torch
from torch import nn

from agent.checks.arguments import (
    check_exchange,
    check_modules,
    check_stragglers,
    check_trained,
    scaler_of,
)
from agent.errors import Misuse


def with_buffer(tensor: torch.Tensor) -> nn.Module:
    model = nn.Linear(1, 1)
    model.register_buffer("odd", tensor)
    return model


def with_weight(tensor: torch.Tensor) -> nn.Module:
    model = nn.Linear(1, 1)
    model.odd = nn.Parameter(tensor, requires_grad=False)
    return model


class Renames(nn.Linear):
    def state_dict(self, *args, **named):
        found = super().state_dict(*args, **named)
        return {f"net.{name}": item for name, item in found.items()}


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (Renames(1, 1), r"the state_dict\(\) of Renames does not have its parameter 'weight'"),
        (nn.Sequential(nn.LazyLinear(1)), "'0.weight' of Sequential has no shape yet: run the"),
        (
            with_buffer(torch.zeros(2, dtype=torch.complex128)),
            "'odd' of Linear: a tensor of torch.complex128 .* keep it as complex64",
        ),
        (with_buffer(torch.eye(2).to_sparse()), "'odd' of Linear: a tensor .*: keep it dense"),
        (with_buffer(torch.ones(3, 1).expand(3, 4)), r"'odd' of Linear: .*: keep .clone\(\) of it"),
        (with_weight(torch.ones(3, 1).expand(3, 4)), r"'odd' of Linear: .*: keep .clone\(\) of it"),
    ],
)
def test_a_model_that_cannot_be_saved_by_name_is_refused(model: nn.Module, what: str) -> None:
    with pytest.raises(Misuse, match=what):
        check_modules({"model": model}, built=True)


def test_models_with_the_same_names_are_no_misuse() -> None:
    check_modules({"model": nn.Linear(1, 1), "Linear1": nn.Linear(1, 1)}, built=True)


def test_a_buffer_in_another_order_is_no_misuse() -> None:
    check_modules({"model": with_buffer(torch.ones(3, 4).t()[::2])}, built=True)


def test_an_optimizer_of_an_unregistered_parameter_is_refused() -> None:
    model, extra = nn.Linear(1, 1), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    with pytest.raises(Misuse, match=r"SGD trains a parameter of shape \[2\] that is in no model"):
        check_trained({"model": model}, [optimizer])
    check_trained({"model": model, "ParameterList1": nn.ParameterList([extra])}, [optimizer])


@pytest.mark.parametrize(
    ("exchange", "dtype", "deterministic", "what"),
    [
        ("float16", torch.float32, True, r"exchanged as one of \('float32', 'bfloat16'\)"),
        (
            "bfloat16",
            torch.float32,
            False,
            "with deterministic=False: where the order of additions",
        ),
        ("bfloat16", torch.float64, True, "no parameter is of torch.float32"),
    ],
)
def test_a_format_that_would_not_hold_what_it_promises_is_refused(
    exchange: str, dtype: torch.dtype, deterministic: bool, what: str
) -> None:
    models = {"model": nn.Linear(1, 1, dtype=dtype)}
    with pytest.raises(Misuse, match=what):
        check_exchange(exchange, models, deterministic=deterministic)
    check_exchange("bfloat16", {**models, "other": nn.Linear(1, 1)}, deterministic=True)
    check_exchange("float32", models, deterministic=False)


@pytest.mark.parametrize(
    ("stragglers", "deterministic", "what"),
    [
        ("help", True, r"it is one of \('wait', 'flexrr'\)"),
        ("flexrr", False, "has no fixed place in the sum"),
    ],
)
def test_help_for_late_workers_that_has_no_meaning_is_refused(
    stragglers: str, deterministic: bool, what: str
) -> None:
    with pytest.raises(Misuse, match=what):
        check_stragglers(stragglers, deterministic=deterministic)
    check_stragglers("flexrr", deterministic=True)
    check_stragglers("wait", deterministic=False)


def test_one_scaler_scales_the_loss() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    assert scaler_of([nn.Linear(1, 1), scaler]) is scaler
    assert scaler_of([torch.amp.GradScaler("cpu", enabled=False)]) is None
    with pytest.raises(Misuse, match="two GradScalers"):
        scaler_of([scaler, torch.amp.GradScaler("cpu")])
