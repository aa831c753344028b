"""What a script sets in its modules beside their weights travels with the replica."""

import pytest
import torch
from carried import carry
from torch import nn

from agent.checks.modes import Modes
from agent.checks.registry import registered
from agent.errors import StateError
from agent.tensors.layer_names import summed_parameters
from agent.tensors.sums import SumSpace


class Masked(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        self.register_buffer("mask", torch.tril(torch.ones(size, size)), persistent=False)
        self.register_buffer("turns", torch.ones(2, dtype=torch.complex64), persistent=False)
        self.register_buffer("late", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sum() + self.mask.sum()


def objects(model: nn.Module, *others: object) -> dict:
    return registered([model, *others]).objects


def test_modes_and_frozen_parameters_come_back() -> None:
    one, other = Masked(), Masked()
    first, second = objects(one), objects(other)
    one.eval()
    one.inner[1].train()
    one.inner[0].weight.requires_grad_(False)
    carry(first, second)
    assert [m.training for m in other.modules()] == [m.training for m in one.modules()]
    assert [p.requires_grad for p in other.parameters()] == [False, True]
    one.train()
    one.inner[0].weight.requires_grad_(True)
    carry(first, second)
    assert all(m.training for m in other.modules())
    assert all(p.requires_grad for p in other.parameters())


def carried(modes: Modes) -> set[str]:
    return {*modes.state_dict()["buffers"]}


def test_only_unsaved_buffers_with_another_value_are_carried() -> None:
    model = Masked()
    modes = Modes({"model": model})
    assert carried(modes) == set()
    model.mask.mul_(1)  # written, and the same
    assert carried(modes) == set()
    model.mask = model.mask.clone()
    assert carried(modes) == set()
    model.mask = model.mask * 2
    model.turns.mul_(1j)
    assert carried(modes) == {"mask", "turns"}
    model.mask = model.mask / 2
    assert carried(modes) == {"turns"}


def test_a_table_that_a_forward_makes_larger_is_not_carried() -> None:
    model = Masked()
    modes = Modes({"model": model})
    model.mask, model.late = torch.ones(9, 9), torch.ones(1)
    assert carried(modes) == set()
    modes.load_state_dict(modes.state_dict())
    assert model.mask.shape == (9, 9)


def test_unsaved_buffers_come_back_also_to_what_they_were() -> None:
    """Into the tensor that was there when the session was made, whatever lies in its place."""
    one, other = Masked(), Masked()
    first, second = objects(one), objects(other)
    one.mask = torch.full((4, 4), 3.0)
    one.turns.mul_(1j)
    home = other.mask
    carry(first, second)
    assert other.mask is home
    assert torch.equal(other.mask, one.mask)
    assert torch.equal(other.turns, one.turns)
    carry(objects(Masked()), second)
    assert torch.equal(other.mask, Masked().mask)
    assert torch.equal(other.turns, Masked().turns)
    assert other.mask is home


def test_the_same_value_is_remembered_once() -> None:
    model = nn.ModuleList(Masked() for _ in range(5))
    modes = Modes({"model": model})
    assert len({id(buffer._original) for buffer in modes._buffers.values()}) == 2


def test_two_models_with_the_same_names_keep_their_own_modes() -> None:
    one, other = [Masked(), Masked()], [Masked(), Masked()]
    first, second = objects(*one), objects(*other)
    one[1].eval()
    one[0].inner[0].bias.requires_grad_(False)
    one[1].mask.zero_()
    carry(first, second)
    assert [model.training for model in other] == [True, False]
    assert [model.inner[0].bias.requires_grad for model in other] == [False, True]
    assert [float(model.mask.sum()) for model in other] == [10, 0]


def test_modes_of_other_models_are_refused() -> None:
    state = Modes({"model": Masked()}).state_dict()
    with pytest.raises(
        StateError, match="is of 4 modules and 2 parameters, but there are 1 and 2 here"
    ):
        Modes({"model": nn.Linear(1, 1)}).load_state_dict(state)


def test_a_sum_has_room_for_what_may_be_trained() -> None:
    """A layer that is frozen for a while is in an optimizer; a teacher is in none."""
    model, teacher = Masked(), nn.Linear(2, 2).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.inner[0].bias.requires_grad_(False)
    found = registered([model, optimizer, teacher])
    space = SumSpace(found.models, found.trained)
    assert [*space.params] == ["inner.0.weight", "inner.0.bias"]
    assert [*summed_parameters(found.models)] == ["inner.0.weight"]


def test_room_for_much_that_is_frozen_is_said() -> None:
    model = nn.Sequential(nn.Linear(9, 9).requires_grad_(False), nn.Linear(9, 1))
    (said,) = registered([model, torch.optim.SGD(model.parameters(), lr=0.1)]).said
    assert "an optimizer has frozen parameters of 0.0 MB" in said
    assert registered([model, torch.optim.SGD(model[1].parameters(), lr=0.1)]).said == []


def test_a_frozen_layer_has_no_gradient_and_an_unfrozen_one_has() -> None:
    model = Masked()
    space = SumSpace({"model": model})
    space.begin()
    model.inner[0].bias.requires_grad_(False)
    model(torch.ones(1, 2)).backward()
    assert model.inner[0].bias.grad is None
    model.inner[0].bias.requires_grad_(True)
    model(torch.ones(1, 2)).backward()
    assert model.inner[0].bias.grad is not None
