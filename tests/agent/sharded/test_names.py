"""Layers of several models are held under names of which no two are the same."""

from torch import nn

from agent.sharded.holdings import Holdings


def test_a_tensor_in_two_models_is_in_the_layer_of_the_first() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    held = Holdings({"model": first, "Linear1": second})
    assert held.layer_of[id(first.weight)] == "weight"
    assert held.layer_of[id(first.bias)] == "bias"
    assert held.layer_of[id(second.bias)] == "Linear1"
