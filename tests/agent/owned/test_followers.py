"""What a script keeps of weights that are not here is not-a-number, and is found where it is kept."""

import copy

import pytest
import torch
from torch import nn

from agent.errors import Misuse
from agent.owned.followers import Followers, writes_away
from agent.tensors.away import nothing


class Kept:
    def __init__(self, **names: torch.Tensor) -> None:
        self.names = names

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.names

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.names = state


@pytest.fixture
def student() -> nn.Sequential:
    """Its first layer is not here."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    for param in model[0].parameters():
        param.data = nothing(param)
    return model


@torch.no_grad()
def taken_in(follower: nn.Module, model: nn.Module) -> None:
    for mine, weight in zip(follower.parameters(), model.parameters(), strict=True):
        mine.lerp_(weight, 0.5)


def looked_for(*things: object) -> Followers:
    followers = Followers({f"{type(each).__name__}{i}": each for i, each in enumerate(things)})
    followers.begin()
    return followers


def test_a_teacher_that_takes_in_what_is_not_here(student: nn.Sequential) -> None:
    teacher = nn.ModuleDict({"teacher": nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))})
    followers = looked_for(student, teacher)
    followers.check(0)
    followers.begin()
    taken_in(teacher, student)
    with pytest.raises(
        Misuse, match=r"step 1: ModuleDict1/teacher\.0\.weight has become not-a-number"
    ):
        followers.check(1)


def test_a_buffer_and_a_list_of_tensors(student: nn.Sequential) -> None:
    shadow = nn.Module()
    shadow.register_buffer("weight", torch.zeros(2, 3))
    kept = Kept(flat=torch.zeros(sum(each.numel() for each in student.parameters())))
    for what, tensor in (("Module1/weight", shadow.weight), ("Kept2/flat", kept.names["flat"])):
        followers = looked_for(student, shadow, kept)
        tensor[0] = torch.nan
        with pytest.raises(Misuse, match=what):
            followers.check(0)
        tensor.zero_()


def test_what_is_not_made_of_weights(student: nn.Sequential) -> None:
    """What was not-a-number before, what has another shape, large numbers, and what an optimizer trains."""
    kept = Kept(
        unset=torch.full((2, 3), torch.nan), seen=torch.zeros(7), large=torch.full((2, 3), 3e38)
    )
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    followers = looked_for(student, optimizer, kept)
    kept.names["seen"][0] = torch.nan
    with torch.no_grad():
        student[1].weight[0] = torch.nan
    followers.check(0)


def test_what_has_come_anew_is_looked_at_anew(student: nn.Sequential) -> None:
    kept = Kept(average=torch.zeros(2, 3))
    followers = looked_for(student, kept)
    kept.names["average"][0] = torch.nan
    followers.forget()
    followers.check(0)
    followers.begin()
    followers.check(1)


def test_writing_to_what_is_not_here_is_known_by_what_torch_says(student: nn.Sequential) -> None:
    with pytest.raises(RuntimeError) as found:
        taken_in(student, copy.deepcopy(student))
    assert writes_away(found.value)
