"""What is trained and not registered is found in the graph of a loss."""

import pytest
import torch
from torch import nn

from agent.checks.graph import Outside, leaves
from agent.errors import Misuse


def known(*models: nn.Module) -> set[int]:
    return {id(param) for model in models for param in model.parameters()}


def test_a_loss_without_a_graph_has_no_leaves() -> None:
    assert [*leaves(torch.ones(()))] == []
    leaf = torch.ones((), requires_grad=True)
    assert [*leaves(leaf)] == [leaf]


def test_a_long_graph_is_walked_without_recursion() -> None:
    model = nn.Linear(1, 1)
    loss = model(torch.ones(1, 1)).sum()
    for _ in range(20_000):
        loss = loss + 1
    assert {id(leaf) for leaf in leaves(loss)} == known(model)


def loss_of(model: nn.Module, other: nn.Module) -> torch.Tensor:
    x = torch.ones(1, 2).requires_grad_()
    return other(model(x)).sum() + x.sum()


def test_a_network_that_only_measures_is_let_be() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    outside = Outside(known(model))
    for step in range(3):
        loss = loss_of(model, other)
        outside.look(loss)
        loss.backward()
        del loss
        outside.check(step)


def test_one_that_an_unregistered_optimizer_trains_is_named() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    outside, optimizer = Outside(known(model)), torch.optim.SGD(other.parameters(), lr=0.1)
    loss = loss_of(model, other)
    outside.look(loss)
    loss.backward()
    optimizer.step()
    with pytest.raises(Misuse, match=r"step 4: a parameter of shape \[2.*is trained that is in no"):
        outside.check(4)


def test_a_tensor_that_is_trained_by_hand_is_named() -> None:
    model, weights = nn.Linear(2, 2), torch.zeros(2, requires_grad=True)
    outside = Outside(known(model))
    loss = (model(torch.ones(1, 2)) * weights).sum()
    outside.look(loss)
    loss.backward()
    with torch.no_grad():
        weights -= 0.1 * weights.grad
    with pytest.raises(Misuse, match=r"a tensor of shape \[2\] is trained"):
        outside.check(0)
