"""What a script registers is named, saved in some way, or refused in one line."""

import copy
import logging
import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from carried import carry
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from agent.checks.registry import registered
from agent.checks.variables import Variables
from agent.errors import Misuse, StateError


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Counter:
    def __init__(self, decay=0.9):
        self.decay, self.step = decay, 0


def test_the_first_module_is_the_model_wherever_it_stands() -> None:
    model, head = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = optimizer_of(model)
    one, other = registered([optimizer, model, head]), registered([model, optimizer, head])
    assert (
        [*one.objects]
        == [*other.objects]
        == ["model", "SGD1", "Linear2", "session.state", "session.modules", "session.groups"]
    )
    assert one.models == {"model": model, "Linear2": head}
    assert one.said == []
    assert id(model.weight) in one.trained


def test_an_object_without_state_dict_is_saved_by_its_attributes_and_that_is_said() -> None:
    model = nn.Linear(1, 1)
    counter, fresh = Counter(), Counter()
    found = registered([model, counter])
    assert found.said == [
        "Session: Counter has no state_dict, so its attributes decay, step are saved"
    ]
    counter.step, counter.best, counter.seen = 7, torch.ones(2), deque([1], maxlen=3)
    carry(found.objects, registered([model, fresh]).objects)
    assert (fresh.step, fresh.best.tolist(), fresh.seen) == (7, [1, 1], deque([1], maxlen=3))
    assert fresh.seen.maxlen == 3


def test_attributes_that_are_gone_are_gone() -> None:
    model = nn.Linear(1, 1)
    early, late = Counter(), Counter()
    late.best = 3
    carry(registered([model, early]).objects, registered([model, late]).objects)
    assert not hasattr(late, "best")


class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0


class Trainer:
    """With all that such classes have: the model, its parts, a device, a function, meters."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.head = model, optimizer, model[1]
        self.params = list(model.parameters())
        self.groups = optimizer.param_groups
        self.device, self.log, self.rate = torch.device("cpu"), logging.getLogger("x"), lambda s: s
        self.kind, self.criterion = np.dtype("float32"), nn.NLLLoss()
        self.data = DataLoader(TensorDataset(torch.ones(1)))
        self.meters = {"loss": Meter(), "accuracy": Meter()}
        self.loss = self.meters["loss"]
        self.shadow = {name: param.detach().clone() for name, param in model.named_parameters()}


def trainer() -> tuple[list[object], Trainer]:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    optimizer = optimizer_of(model)
    made = Trainer(model, optimizer)
    return [model, optimizer, made], made


def test_references_to_what_is_registered_are_left_and_objects_inside_are_saved() -> None:
    (objects, one), (others, other) = trainer(), trainer()
    first = registered(objects)
    assert first.said == [
        "Session: Trainer has no state_dict, so its attributes groups, loss, meters, params, shadow are saved"
        + "; criterion, data, device, kind, log, rate stay as the script makes them"
    ]
    one.meters["loss"].total = 2.5
    one.shadow["0.weight"].add_(1)
    kept = other.shadow["0.weight"]
    carry(first.objects, registered(others).objects)
    assert other.loss is other.meters["loss"]
    assert other.loss.total == 2.5
    assert other.shadow["0.weight"] is kept
    assert torch.equal(kept, one.shadow["0.weight"])
    assert other.model is others[0]
    assert other.params[0] is others[0][0].weight
    assert other.groups is others[1].param_groups
    assert other.groups[0]["params"][0] is others[0][0].weight


class Env:
    def __init__(self):
        self.norm, self.seen = Counter(), [0]


@pytest.mark.parametrize("inner_first", [True, False])
def test_an_object_and_what_holds_it_are_registered_in_either_order(inner_first: bool) -> None:
    """As an environment and the running mean in it, which is one object again in both."""
    model, one, other = nn.Linear(1, 1), Env(), Env()
    one.norm.step, one.seen = 7, [1, 2]
    order = slice(None, None, 1 if inner_first else -1)
    first, second = (registered([model, *[each.norm, each][order]]) for each in (one, other))
    kept = other.norm
    carry(first.objects, second.objects)
    assert other.norm is kept
    assert (kept.step, other.seen) == (7, [1, 2])


@dataclass(frozen=True)
class Frozen:
    history: list = field(default_factory=list)


@dataclass(slots=True)
class Slotted:
    count: int = 0


def test_dataclasses_are_saved_frozen_or_with_slots() -> None:
    model = nn.Linear(1, 1)
    first = [Frozen(), Slotted()]
    first[0].history.append(1)
    first[1].count = 2
    others = [Frozen(), Slotted()]
    carry(registered([model, *first]).objects, registered([model, *others]).objects)
    assert others == first


class Holds:
    def __init__(self, thing):
        self.inner = {"thing": thing}


@pytest.mark.parametrize(
    ("thing", "what"),
    [
        (nn.Linear(1, 1), "is a Linear: give it to Session"),
        (threading.Lock(), "is a lock: keep numbers"),
        (iter([1]), "is a list_iterator"),
    ],
)
def test_an_attribute_that_cannot_be_saved_is_named(thing: object, what: str) -> None:
    with pytest.raises(Misuse) as raised:
        registered([nn.Linear(1, 1), Holds(thing)])
    assert str(raised.value).startswith('Session: Holds.inner["thing"] is a ')
    assert what in str(raised.value)
    assert str(raised.value).endswith(
        'in place of this Holds, give only those of its attributes that matter: Variables(it, "name")'
    )


def test_an_attribute_that_cannot_be_saved_later_is_named_with_its_step() -> None:
    counter = Counter()
    found = registered([nn.Linear(1, 1), counter])
    found.check(1)
    counter.handle = threading.Lock()
    with pytest.raises(Misuse, match=r"step 2: Counter\.handle is a lock"):
        found.check(2)
    del counter.handle
    found.state["x"] = object()
    with pytest.raises(Misuse, match=r'step 2: session.state\["x"\] is a object'):
        found.check(2)


def test_an_object_that_is_not_there_yet_on_a_joining_worker_is_named() -> None:
    model, one, other = nn.Linear(1, 1), Counter(), Counter()
    one.meter = Meter()
    with pytest.raises(StateError, match="has a Meter where this worker has a NoneType"):
        carry(registered([model, one]).objects, registered([model, other]).objects)


class Half:
    def state_dict(self):
        return {}


@pytest.mark.parametrize(
    ("thing", "what"),
    [
        (
            DataLoader(TensorDataset(torch.ones(1))),
            "a DataLoader was given, but the data is not state",
        ),
        (TensorDataset(torch.ones(1)), "a TensorDataset was given, but the data"),
        (lambda: 0, "<lambda> is a function"),
        (len, "len is a function"),
        (nn.Linear, "Linear is a class: give an object of it"),
        (nn.Parameter(torch.zeros(2)), r"a Parameter of shape \[2\] was given: if it is trained"),
        ({"a": 1}, "a dict was given: keep it in session.state"),
        (3, "a int was given"),
        (Half(), "Half has state_dict but no load_state_dict"),
        (object(), "a object has neither state_dict"),
        (threading.Lock(), "a lock has neither state_dict"),
    ],
)
def test_what_cannot_be_registered_is_refused_in_one_line(thing: object, what: str) -> None:
    with pytest.raises(Misuse, match=what) as raised:
        registered([nn.Linear(1, 1), thing])
    assert "\n" not in str(raised.value)


def test_without_a_module_or_with_one_twice_there_is_no_session() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(Misuse, match=r"SGD was given, but no torch\.nn\.Module"):
        registered([optimizer_of(model)])
    with pytest.raises(Misuse, match="nothing was given"):
        registered([])
    with pytest.raises(Misuse, match="given twice"):
        registered([model, model])


def test_what_is_none_is_left_out() -> None:
    """A scaler that there is only on a device, for one."""
    model = nn.Linear(1, 1)
    assert [*registered([model, None]).objects] == [
        "model",
        "session.state",
        "session.modules",
        "session.groups",
    ]


def net(width: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 1))


def alike(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def step(models: list[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    sum(model(torch.randn(4, 2)).square().mean() for model in models).backward()
    optimizer.step()


def test_two_models_with_the_same_names_and_one_optimizer_come_back() -> None:
    def made() -> list[object]:
        models = [net(), net()]
        params = [param for model in models for param in model.parameters()]
        return [*models, torch.optim.AdamW(params, lr=0.1)]

    one, other = made(), made()
    step(one[:2], one[2])
    carry(registered(one).objects, registered(other).objects)
    for a, b in zip(one[:2], other[:2], strict=True):
        assert alike(a, b)
        for x, y in zip(a.parameters(), b.parameters(), strict=True):
            assert torch.equal(one[2].state[x]["exp_avg"], other[2].state[y]["exp_avg"])


def test_a_tensor_in_two_models_is_saved_once_and_stays_shared() -> None:
    def made() -> list[object]:
        first, second = net(), net()
        second[0].weight = first[0].weight
        second[1] = first[1]
        params = {id(p): p for model in (first, second) for p in model.parameters()}
        return [first, second, torch.optim.AdamW(params.values(), lr=0.1)]

    one, other = made(), made()
    step(one[:2], one[2])
    carry(registered(one).objects, registered(other).objects)
    assert other[1][0].weight is other[0][0].weight
    for a, b in zip(one[:2], other[:2], strict=True):
        assert alike(a, b)
    shared, theirs = one[0][0].weight, other[0][0].weight
    assert torch.equal(one[2].state[shared]["exp_avg"], other[2].state[theirs]["exp_avg"])


def test_an_average_of_the_model_comes_back() -> None:
    def made() -> list[object]:
        model = net()
        return [model, copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)]

    one, other = made(), made()
    one[2].update_parameters(one[0])
    carry(registered(one).objects, registered(other).objects)
    assert other[2].n_averaged == 1
    assert torch.equal(one[1][0].weight, other[1][0].weight)


def test_tensors_that_only_an_optimizer_has_are_kept() -> None:
    """As the temperature of soft actor-critic, or the strengths of an architecture, which no module has."""
    model, alpha, fresh = nn.Linear(1, 1), *(torch.zeros(3, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.Adam([alpha], lr=0.1)
    found = registered([model, optimizer_of(model), optimizer])
    assert [*found.models] == ["model", "ParameterList3"]
    assert next(iter(found.models["ParameterList3"].parameters())) is alpha
    assert found.said == ["Session: tensors of no module that are trained are kept as well ([3])"]
    (alpha * torch.arange(3)).sum().backward()
    optimizer.step()
    others = [model, optimizer_of(model), torch.optim.Adam([fresh], lr=0.1)]
    carry(found.objects, registered(others).objects)
    assert torch.equal(fresh, alpha) and alpha.any()


def test_a_tensor_may_be_all_that_is_trained() -> None:
    """As a picture whose style is changed."""
    picture = torch.zeros(1, 3, 4, 4, requires_grad=True)
    found = registered([torch.optim.SGD([picture], lr=0.1)])
    assert next(iter(found.models["model"].parameters())) is picture


def test_a_parameter_of_a_module_that_was_not_given_is_not_taken_for_a_tensor() -> None:
    critic = nn.Linear(1, 1)
    assert [*registered([nn.Linear(1, 1), optimizer_of(critic)]).models] == ["model"]


@pytest.mark.parametrize(
    "keep",
    [
        lambda m, _: m.state_dict(),
        lambda m, _: m.weight[0].detach().numpy(),
        lambda _, o: o.state_dict(),
    ],
)
def test_what_goes_on_changing_with_a_model_is_no_state(keep) -> None:
    """As best weights that nobody copied: a joining worker would get those of one moment."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    space = {"hidden": torch.ones(2), "best": None}
    found = registered([model, optimizer, Variables(space, "best", "hidden")])
    found.state["seen"], found.state["best"] = torch.zeros(0), copy.deepcopy(keep(model, optimizer))
    found.check(3)
    found.state["best"] = keep(model, optimizer)
    with pytest.raises(
        Misuse, match=r"step 3: session.state\['best'\] is no copy of what (model|Adam1) has"
    ):
        found.check(3)
    space["best"] = found.state.pop("best")
    with pytest.raises(Misuse, match=r"step 3: Variables\(..., 'best'\) is no copy"):
        found.check(3)
