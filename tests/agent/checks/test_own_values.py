"""What a script keeps for itself: which variables and attributes are named once they have changed."""

import sys
from collections import deque

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
    count, losses, last, fixed, flag = 0, [], deque([1], maxlen=1), 3, False
    best, hidden, unset, weight = None, None, None, 1.0
    own.begin_loop(sys._getframe())
    for step in range(2):
        made_anew = step + fixed  # was not there when the loop began
        count += made_anew
        losses.append(count)
        last.append(count)  # as long as before
        flag = True
        best, hidden, weight = count, torch.ones(2), torch.ones(2)
    globals()["seen_globally"] += 1
    assert own.changed() == ("seen_globally", "count", "losses", "flag", "best", "hidden")
    assert last and fixed == 3 and flag and (best, hidden, unset, weight)
    own.end_loop()
    assert own.changed() == ()


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
