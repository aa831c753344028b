"""What a script keeps for itself: which variables and attributes are named once they have changed."""

import copy
import random
import sys
from collections import deque

import numpy as np
import pytest
import torch

from agent.checks.attributes import Attributes, Registry
from agent.checks.own_values import CHARS_MAX, TOLD_MAX, OwnValues
from agent.checks.state import ScriptState
from agent.checks.variables import Variables
from agent.step import Mean

seen_globally = 0


class Meter:
    place: float

    def __init__(self) -> None:
        self.count, self.rows, self._hidden = 0, [], 0


class Counting(torch.nn.Linear):
    calls = 0


def made(*carried: Variables | Attributes, model: torch.nn.Module | None = None) -> OwnValues:
    model = model or torch.nn.Linear(2, 1)
    objects = {"model": model, **{str(at): each for at, each in enumerate(carried)}}
    return OwnValues(objects, {"model": model})


def test_variables_that_change_in_the_loop_are_named_and_others_are_not() -> None:
    own = made()
    count, losses, last, fixed, flag = 0, [], deque([1], maxlen=1), [3], False
    hidden, unset, weight = None, None, 1.0
    own.begin_loop(sys._getframe())
    for step in range(2):
        made_anew = step + fixed[0]  # was not there when the loop began
        count += made_anew
        losses.append(count)
        last.append(count)  # as long as before
        flag = True
        hidden, weight = torch.ones(2), torch.ones(2)
    globals()["seen_globally"] += 1
    assert own.changed() == ("seen_globally", "count", "losses", "last", "flag", "hidden")
    assert last and fixed == [3] and flag and (hidden, unset, weight)
    own.end_loop()
    assert own.changed() == ()


def test_a_variable_that_is_not_a_number_is_named_once_it_is_another_one() -> None:
    own, best, mean, last = made(), float("nan"), np.float64("nan"), float("nan")
    own.begin_loop(sys._getframe())
    assert own.changed() == ()
    last = 0.5
    assert own.changed() == ("last",)
    assert best != best and mean != mean and last  # noqa: PLR0124


def test_a_scaler_of_losses_that_is_not_given_is_named() -> None:
    model, scaler, idle = torch.nn.Linear(2, 1), *(torch.amp.GradScaler("cpu") for _ in range(2))
    own, optimizer = made(model=model), torch.optim.SGD(model.parameters())
    own.begin_loop(sys._getframe())
    scaler.scale(model(torch.ones(2))).sum().backward()
    scaler.step(optimizer)
    scaler.update()
    assert own.changed() == ("scaler",) and idle


def test_a_variable_for_a_list_that_session_state_keeps_is_not_named() -> None:
    state = ScriptState()
    own = OwnValues({"session.state": state}, {})
    memory, losses = state.setdefault("memory", []), []
    count = state["count"] = 1
    own.begin_loop(sys._getframe())
    memory.append(1)
    losses.append(1)
    count += 1
    state["count"] = count
    assert own.changed() == ("losses", "count")


def test_a_sum_of_losses_is_named() -> None:
    """It is of the kind of what backward returns."""
    own, total = made(), 0.0
    own.begin_loop(sys._getframe())
    total += Mean(0.5)
    assert own.changed() == ("total",)


def test_a_best_number_is_named_as_a_tensor_or_one_of_numpy_s_too() -> None:
    layer, meter, best, fitness, lowest = Counting(2, 1), Meter(), 0, 0.0, 9.0
    layer.calls = 0
    own = made(model=layer)
    own.begin_loop(sys._getframe())
    best, fitness, lowest = max(torch.tensor(0.5), best), np.array([0.5]), np.float32(0.5)
    meter.count, layer.calls = best, best
    assert own.changed() == ("meter.count", "best", "fitness", "lowest") and fitness and lowest


def test_attributes_of_the_script_s_own_objects_are_named_with_their_owner() -> None:
    model = Counting(2, 1)
    own = made(model=model)
    meter = Meter()
    own.begin_loop(sys._getframe())
    meter.count += 1
    meter._hidden += 1
    model.calls += 1
    assert own.changed() == ("Counting.calls", "meter.count")


class Trainer:
    def __init__(self) -> None:
        self.meter, self.saved = Meter(), Meter()


def test_objects_of_an_object_are_named_with_it() -> None:
    trainer, other, model = Trainer(), Trainer(), torch.nn.Linear(2, 1)
    whole = Attributes(other, Registry({}, {"model": model}))
    own = made(Variables(trainer, "saved"), whole, model=model)
    meter = trainer.saved.rows = Meter()
    own.begin_loop(sys._getframe())
    for each in (trainer.meter, trainer.saved, other.meter, meter):
        each.count += 1
    assert own.changed() == ("meter.count", "trainer.meter.count")


def test_attributes_of_the_script_s_own_classes_are_named() -> None:
    class Settings:
        rate, drawn = 0.1, 0

    own = made()
    own.begin_loop(sys._getframe())
    Settings.drawn += 1
    assert own.changed() == ("Settings.drawn",)


class ShadowWeights:
    """As the averages of many repositories: some in a module, some in a dict."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.module = copy.deepcopy(model)
        self.shadow = {name: param.detach().clone() for name, param in model.named_parameters()}

    def update(self, model: torch.nn.Module) -> None:
        for mine, param in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.data.lerp_(param.data, 0.5)
        for name, param in model.named_parameters():
            self.shadow[name] = self.shadow[name].lerp(param.detach(), 0.5)


def test_tensors_and_modules_beside_the_session_are_named() -> None:
    """Also if they are written to through `.data`, which no counter of torch sees."""
    model, teacher, frozen = (torch.nn.Linear(2, 1) for _ in range(3))
    own, average = made(model=model), ShadowWeights(model)
    centre, rewards, rows, turned = torch.zeros(3), np.zeros(3), torch.ones(4, 2), torch.ones(9, 4)
    turned = turned.t()
    own.begin_loop(sys._getframe())
    assert own.changed() == ()
    teacher.weight.data.add_(1.0)
    model.weight.data.add_(1.0)
    average.update(model)
    rewards[2] = 1.0
    centre = centre + 1
    turned.add_(1.0)
    rows = torch.ones(2, 2)  # a batch, by the name of the data
    found = {"average.module", "average.shadow", "teacher", "centre", "rewards", "turned"}
    assert {*own.changed()} == found
    assert frozen and len(rows)


def test_streams_and_schedules_beside_the_session_are_named() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    own = made(optimizer, model=model)
    drawn, rng, old = torch.Generator(), np.random.default_rng(0), random.Random(0)
    untouched, legacy = random.Random(0), np.random.RandomState(0)
    own.begin_loop(sys._getframe())
    assert own.changed() == ()
    optimizer.step()
    schedule.step()
    torch.rand(1, generator=drawn)
    for each in (rng, old, legacy):
        each.random()
    assert {*own.changed()} == {"schedule", "drawn", "rng", "old", "legacy"}
    assert untouched


def test_other_names_of_what_travels_are_not_named() -> None:
    model, state = torch.nn.BatchNorm1d(2), ScriptState()
    own = OwnValues({"model": model, "session.state": state}, {"model": model})
    weight, weights, net = model.weight, [*model.parameters()], torch.nn.Sequential(model)
    mean, rng = model.running_mean, state.setdefault("rng", np.random.default_rng(0))
    labels = state.setdefault("labels", torch.zeros(4))
    queue = state.setdefault("memory", {"queue": [torch.zeros(4)]})["queue"]
    own.begin_loop(sys._getframe())
    weight.data.add_(1.0)
    mean.add_(1.0)
    labels.view(2, 2).add_(1.0)
    rng.random()
    queue[0].add_(1.0)
    assert own.changed() == ()
    assert weights and net


class Shows(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)
        self.seen, self.mean = None, torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen, self.later = x, x
        return super().forward(x)


def test_what_a_forward_leaves_in_a_module_is_not_named_and_what_it_begins_with_is() -> None:
    model = Shows()
    own = made(model=model)
    own.begin_loop(sys._getframe())
    model(torch.ones(3, 2))
    assert own.changed() == ()
    model.mean += 1
    assert own.changed() == ("Shows.mean",)


class OwnSchedule(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        self.asked = self.last_epoch
        return self.base_lrs


class OwnMomentum(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        for p in self.param_groups[0]["params"]:
            self.state[p]["momentum"] = p.grad


class Average:
    def __init__(self) -> None:
        self.updates = self.shown = 0

    def state_dict(self):
        return {"updates": self.updates}

    def load_state_dict(self, state):
        self.updates = state["updates"]


def test_what_the_state_of_a_registered_object_has_is_not_named() -> None:
    model, average = Counting(2, 1), Average()
    optimizer = OwnMomentum(model.parameters())
    schedule = OwnSchedule(optimizer)
    own = OwnValues({"model": model, "0": optimizer, "1": schedule, "2": average}, {"model": model})
    own.begin_loop(sys._getframe())
    optimizer.step()
    schedule.step()
    average.updates = average.shown = 1
    assert own.changed() == ("OwnMomentum.steps", "average.shown")


class Shadow:
    """Its state has its tensors under other names."""

    def __init__(self) -> None:
        self.shadow, self.other = {"weight": torch.zeros(2)}, {"weight": torch.zeros(2)}

    def state_dict(self) -> dict[str, object]:
        return {"s": self.shadow, "n": 1}

    def load_state_dict(self, state: dict[str, object]) -> None: ...


def test_tensors_in_the_state_of_a_registered_object_are_not_named() -> None:
    model, ema = torch.nn.Linear(2, 1), Shadow()
    own = OwnValues({"model": model, "0": ema}, {"model": model})
    own.begin_loop(sys._getframe())
    ema.shadow["weight"].add_(1.0)
    ema.other["weight"].add_(1.0)
    assert own.changed() == ("ema.other",)


def test_what_variables_carry_is_not_named() -> None:
    meter = Meter()
    own = made(Variables(meter, "count"), Variables(globals(), "seen_globally"))
    own.begin_loop(sys._getframe())
    meter.count += 1
    meter.rows.append(1)
    globals()["seen_globally"] += 1
    assert own.changed() == ("meter.rows",)


def test_what_a_given_object_without_a_state_dict_has_is_not_named() -> None:
    """All its attributes travel, those too that it gets later, as a simulated world in its first reset."""
    world, beside = Meter(), Meter()
    own = made(Attributes(world, Registry({}, {})))
    own.begin_loop(sys._getframe())
    world.count, world.place, beside.count = 1, 0.5, 1
    assert own.changed() == ("beside.count",)


def test_variables_of_the_code_that_calls_the_loop_s_are_named() -> None:
    """As a best score in the script's first file is, which a callback of a trainer's loop sets."""
    own, _script = made(), {"made": Meter, "sys": sys}
    _script["own"] = own
    exec(compile("def loop():\n own.begin_loop(sys._getframe())", "/trainer.py", "exec"), _script)
    _first = {"loop": _script["loop"], "best": 0, "mine": 0, "count": 7}
    _script["mine"] = 0
    exec(compile("count = 0\nloop()", "/train.py", "exec"), _first)
    _first["best"] = 1
    assert own.changed() == ("best",)
    _script["mine"] = 1
    assert own.changed() == ("mine", "best")


def test_frames_of_libraries_are_passed_over() -> None:
    """As those of a progress bar that goes through the steps."""
    own = made()
    count = 0
    space = {"__name__": "library", "own": own, "sys": sys}
    exec(compile("own.begin_loop(sys._getframe())", "<library>", "exec"), space)
    count += 1
    assert own.changed() == ("count",)


def test_a_few_are_named_and_none_at_length(monkeypatch: pytest.MonkeyPatch) -> None:
    own = made()
    names = [f"{'long' * 30}{at}" for at in range(2)] + [f"v{at}" for at in range(9)]
    for name in names:
        monkeypatch.setitem(globals(), name, 0)
    own.begin_loop(sys._getframe())
    for name in names:
        globals()[name] = 1
    found = own.changed()
    assert len(found) == TOLD_MAX
    assert max(map(len, found)) == CHARS_MAX
