"""Tensors of several models have names of which no two are the same."""

import torch
from torch import nn

from agent.tensors.layer_names import named_buffers, named_parameters, prefixes
from agent.tensors.sums import SumSpace


def test_one_model_keeps_its_names() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    assert [*named_parameters({"model": model})] == [name for name, _ in model.named_parameters()]
    assert [*named_buffers({"model": model})] == [name for name, _ in model.named_buffers()]


def test_of_two_models_the_later_has_its_key_before_all_its_names() -> None:
    models = {"model": nn.Linear(1, 1), "Head1": nn.Sequential(), "Critic2": nn.Linear(1, 1)}
    models["Critic2"].register_buffer("own", torch.zeros(1))
    assert [*named_parameters(models)] == ["weight", "bias", "Critic2.weight", "Critic2.bias"]
    assert [*named_buffers(models)] == ["Critic2.own"]


def test_models_without_a_common_name_keep_theirs() -> None:
    models = {"model": nn.Linear(1, 1), "Sequential1": nn.Sequential(nn.Linear(1, 1))}
    assert [*named_parameters(models)] == ["weight", "bias", "0.weight", "0.bias"]


def test_a_key_that_is_the_name_of_a_part_is_made_another() -> None:
    first = nn.Module()
    first.weight, first.Linear1 = nn.Parameter(torch.zeros(1)), nn.Linear(1, 1)
    models = {"model": first, "Linear1": nn.Linear(1, 1)}
    assert prefixes(models)["Linear1"] == "Linear1_."
    assert len(named_parameters(models)) == 5


def test_a_tensor_in_two_models_counts_once() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    models = {"model": first, "Linear1": second}
    assert [*named_parameters(models)] == ["weight", "bias", "Linear1.bias"]
    space = SumSpace(models)
    assert len(space.params) == 3


def test_a_part_of_a_model_that_is_registered_as_well_has_the_first_name() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert [*named_parameters({"model": model, "Linear1": model[1]})] == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    ]
