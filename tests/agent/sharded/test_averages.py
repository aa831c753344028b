"""What a script keeps of weights that are elsewhere is not-a-number, and is found where it is kept."""

import copy

import pytest
import torch
from torch import nn

from agent.errors import Misuse
from agent.sharded.averages import Averages
from agent.sharded.refusals import cause_of
from agent.tensors.absent import nothing


class Kept:
    def __init__(self, **names: torch.Tensor) -> None:
        self.names = names

    def state_dict(self) -> dict[str, object]:
        return {"nested": [self.names]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise NotImplementedError


@pytest.fixture
def student() -> nn.Sequential:
    """Its first layer is elsewhere."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    for param in model[0].parameters():
        param.data = nothing(param)
    return model


@torch.no_grad()
def taken_in(follower: nn.Module, model: nn.Module) -> None:
    for mine, weight in zip(follower.parameters(), model.parameters(), strict=True):
        mine.lerp_(weight, 0.5)


def looked_for(*things: object) -> Averages:
    averages = Averages({f"{type(each).__name__}{i}": each for i, each in enumerate(things)})
    averages.begin()
    return averages


def test_a_teacher_that_takes_in_what_is_elsewhere(student: nn.Sequential) -> None:
    teacher = nn.ModuleDict({"teacher": nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))})
    averages = looked_for(student, teacher)
    averages.check(0)
    averages.begin()
    taken_in(teacher, student)
    said = r"^step 1: teacher\.0\.bias has become not-a-number.*average the values of model\.state_dict"
    with pytest.raises(Misuse, match=said):
        averages.check(1)


def test_a_buffer_and_a_list_of_tensors(student: nn.Sequential) -> None:
    shadow = nn.Module()
    shadow.register_buffer("weight", torch.zeros(2, 3))
    kept = Kept(flat=torch.zeros(sum(each.numel() for each in student.parameters())))
    for what, tensor in (
        ("weight", shadow.weight),
        (r"Kept2\['nested'\]\[0\]\['flat'\]", kept.names["flat"]),
    ):
        averages = looked_for(student, shadow, kept)
        tensor[0] = torch.nan
        with pytest.raises(Misuse, match=what):
            averages.check(0)
        tensor.zero_()


def test_what_is_not_made_of_weights(student: nn.Sequential) -> None:
    """What was not-a-number before, what has another shape, large numbers, and what an optimizer trains."""
    kept = Kept(
        unset=torch.full((2, 3), torch.nan), seen=torch.zeros(7), large=torch.full((2, 3), 3e38)
    )
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    averages = looked_for(student, optimizer, kept)
    kept.names["seen"][0] = torch.nan
    with torch.no_grad():
        student[1].weight[0] = torch.nan
    averages.check(0)


def test_what_has_come_from_others_is_looked_at_again(student: nn.Sequential) -> None:
    kept = Kept(average=torch.zeros(2, 3))
    averages = looked_for(student, kept)
    kept.names["average"][0] = torch.nan
    averages.forget()
    averages.check(0)
    averages.begin()
    averages.check(1)


def test_errors_of_a_script_have_a_cause(student: nn.Sequential) -> None:
    """It writes to a parameter that is elsewhere, or changes a gradient that is."""
    with pytest.raises(RuntimeError) as written:
        taken_in(student, copy.deepcopy(student))
    assert "average the values of model.state_dict()" in cause_of(written.value)
    with pytest.raises(AttributeError) as missing:
        student[0].weight.grad.clamp_(-1, 1)
    assert "the layers of other workers have none here" in cause_of(missing.value)
    with pytest.raises(TypeError) as added:
        student[0].weight.grad += 1
    assert "the layers of other workers have none here" in cause_of(added.value)
    assert cause_of(AttributeError("'Linear' object has no attribute 'wieght'")) == ""
