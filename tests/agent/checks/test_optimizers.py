"""Parameters are trained by the optimizers and schedules that the session was given."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from agent.checks.optimizers import Optimizers
from agent.checks.registry import registered
from agent.checks.variables import Variables
from agent.errors import Misuse


@contextmanager
def optimizers(*objects: object) -> Iterator[Optimizers]:
    found = registered(objects)
    params = dict(found.models["model"].named_parameters())
    made = Optimizers(found.objects, params, lambda: 7)
    try:
        yield made
    finally:
        made.close()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_an_optimizer_that_was_not_given_is_refused_when_it_steps() -> None:
    model = nn.Linear(1, 1)
    mine, other = sgd(model), sgd(model)
    with optimizers(model, mine):
        mine.step()
        sgd(nn.Linear(1, 1)).step()
        with pytest.raises(Misuse, match="step 7: SGD trains parameters of the session, which was"):
            other.step()
    other.step()


def test_an_optimizer_that_takes_over_the_tensors_of_another_is_refused() -> None:
    """As the members of a population do from the best; torch copies nothing."""
    best, worst = nn.Linear(1, 1), nn.Linear(1, 1)
    one, other = (torch.optim.Adam(each.parameters()) for each in (best, worst))
    for model, optimizer in ((best, one), (worst, other)):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    with optimizers(best, one, worst, other):
        one.load_state_dict(one.state_dict())
        other.load_state_dict(copy.deepcopy(one.state_dict()))
        with pytest.raises(Misuse, match="step 7: two optimizers have the same tensors as their"):
            other.load_state_dict(one.state_dict())
    other.load_state_dict(one.state_dict())


def test_an_optimizer_that_wraps_another_without_torch_s_init_is_taken_with_it() -> None:
    """As public versions of Lookahead are written."""

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            self.base, self.param_groups, self.state = base, base.param_groups, {}

        def step(self) -> None:
            self.base.step()

    model = nn.Linear(1, 1)
    outer = Lookahead(sgd(model))
    with optimizers(model, outer), pytest.raises(Misuse, match="SGD trains parameters"):
        outer.step()
    with optimizers(model, outer.base, outer) as made:
        made.unused = True
        outer.step()
        assert not made.unused


def test_parameters_of_no_model_that_are_added_later_are_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    with optimizers(model, optimizer) as found:
        optimizer.add_param_group({"params": [model.bias]})
        found.check()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        with pytest.raises(Misuse, match=r"step 7: a parameter of shape \[3\] was added to SGD"):
            found.check()


class Counter:
    def __init__(self) -> None:
        self.count = 0


def test_a_schedule_that_was_not_given_is_refused() -> None:
    """Whatever else was given: the schedule of another optimizer, or what can hold none."""
    model, head = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer, other = sgd(model), sgd(head)
    schedule, others = (torch.optim.lr_scheduler.StepLR(one, 1) for one in (optimizer, other))
    for besides in ([], [head, other, others], [Variables(Counter(), "count")], [Counter()]):
        with (
            optimizers(model, optimizer, *besides) as found,
            pytest.raises(Misuse, match="step 7: SGD has a schedule that Session"),
        ):
            found.check()
        with optimizers(model, optimizer, *besides, schedule) as found:
            found.check()


class Warmup:
    """A schedule of the script that has one of torch in it."""

    def __init__(self, after: torch.optim.lr_scheduler.LRScheduler) -> None:
        self.after = after

    def state_dict(self) -> dict[str, object]:
        return self.after.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.after.load_state_dict(state)


def test_a_schedule_in_an_object_that_saves_it_is_taken() -> None:
    model = nn.Linear(1, 1)
    optimizer = sgd(model)
    with optimizers(
        model, optimizer, Warmup(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    ) as found:
        found.check()


def test_gradients_that_no_optimizer_used_are_refused_in_the_next_step() -> None:
    model = nn.Linear(1, 1)
    optimizer = sgd(model)
    with optimizers(model, optimizer) as found:
        model(torch.ones(1, 1)).sum().backward()
        found.unused = True
        with pytest.raises(Misuse, match="the gradients of step 6 are still there"):
            found.check()
        optimizer.step()
        found.check()
