"""What a recorded loop reads in other files is known: when it changes, the loop is recorded anew."""

import ast
import functools
import importlib
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from agent.calibration.calibrate import key_of
from agent.pipeline.record import record
from agent.source.heard import Heard
from agent.source.parcel import at_home
from agent.source.reads import Reads

BESIDE = """
import functools, settings, torch

WEIGHT = 1.0

def helped(x):
    return [x * each for each in (1, WEIGHT)][1]

def of(model, x):
    return helped(model(x)).mean()

def set_elsewhere(model, x):
    return model(x).mean() * settings.WEIGHT

def another(model, x):
    return model(x).mean()

def remembered(x):
    return sum(each.mean() for each in settings.memory)

class Settings:
    def __init__(self):
        self.weight, self.items = 1.0, {"weight": 1.0}

    @property
    def half(self):
        return self.weight / 2

class Asked:
    def __init__(self, settings):
        self.settings = settings

    def __call__(self, x):
        return x.mean() * self.settings.weight

def given(model, x, settings):
    return model(x).mean() * settings.weight

def named(model, x, *, settings):
    return model(x).mean() * settings.items["weight"]

def defaulted(x, items={"weight": 1.0}):
    return x.mean() * items["weight"]

def aliased(x):
    elsewhere = settings
    return x.mean() * elsewhere.WEIGHT

def summed(x):
    return sum(each(x) for each in (*PARTS, *MORE.values()))

def part(x):
    return x.mean() * settings.WEIGHT

PARTS = [part]
MORE = {"more": functools.partial(part)}

class Kind:
    weight = 1.0

    @classmethod
    def loss(cls, x):
        return x.mean() * cls.weight

    @staticmethod
    def other(x):
        return x.mean() * settings.WEIGHT

class Base:
    def loss(self, model, x):
        return self.weighed(model(x))

    def weighed(self, x):
        return x.mean() * self.settings.weight

class Trainer(Base):
    def __init__(self):
        self.settings = Settings()

class Net(torch.nn.Linear):
    def forward(self, x):
        return self.scaled(super().forward(x))

    def scaled(self, x):
        return x * settings.SCALE

class Asking(torch.nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x
"""


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[ModuleType]:
    """A module beside a script, and one beside that."""
    (tmp_path / "losses.py").write_text(BESIDE)
    (tmp_path / "settings.py").write_text("WEIGHT = 1.0\nSCALE = 1.0\n")
    with at_home(tmp_path, tmp_path / "train.py"):
        yield importlib.import_module("losses")


def reads(beside: ModuleType, body: str) -> tuple[Reads, dict[str, object]]:
    trainer = beside.Trainer()
    names: dict[str, object] = {"losses": beside, "model": beside.Net(4, 1), "x": torch.ones(2, 4)}
    names |= {"trainer": trainer, "settings": trainer.settings}
    names["part"] = functools.partial(beside.given, names["model"], settings=trainer.settings)
    names["asked"] = beside.Asked(trainer.settings)
    return reads_of(body, names)


def reads_of(body: str, names: dict[str, object]) -> tuple[Reads, dict[str, object]]:
    return Reads(ast.parse(body).body, names, list(names["model"].modules())), names


@pytest.mark.parametrize(
    ("body", "where", "what"),
    [
        ("loss = losses.of(model, x)", "losses", "WEIGHT"),
        ("loss = losses.set_elsewhere(model, x)", "settings", "WEIGHT"),
        ("loss = model(x)", "settings", "SCALE"),
        ("loss = losses.WEIGHT", "losses", "WEIGHT"),
        ("loss = losses.aliased(x)", "settings", "WEIGHT"),
        ("loss = losses.summed(x)", "settings", "WEIGHT"),
        ("loss = losses.PARTS[0](x)", "settings", "WEIGHT"),
        ("loss = losses.Kind.other(x)", "settings", "WEIGHT"),
    ],
    ids=[
        "through another function",
        "of another module",
        "in a method",
        "in the loop",
        "of a module by another name",
        "in functions of a list and a dict",
        "in a function of a list",
        "in a static method",
    ],
)
def test_a_number_beside_the_script_has_changed(
    beside: ModuleType, body: str, where: str, what: str
) -> None:
    """Wherever the code lies that reads it."""
    found, names = reads(beside, body)
    assert not found.changed(names)
    setattr(beside if where == "losses" else beside.settings, what, 2.0)
    assert found.changed(names)


@pytest.mark.parametrize(
    "body",
    [
        "loss = trainer.loss(model, x)",
        "loss = losses.given(model, x, settings)",
        "loss = losses.given(model, x, trainer.settings)",
        "loss = losses.named(model, x, settings=settings)",
        "loss = part(x=x)",
        "loss = asked(model(x))",
        "loss = model(x) * settings.half",
    ],
)
def test_a_number_in_what_a_function_is_given_has_changed(beside: ModuleType, body: str) -> None:
    """The object whose method it is, also one that is inherited and called by another, or one that goes in."""
    found, names = reads(beside, body)
    assert not found.changed(names)
    names["settings"].weight = names["settings"].items["weight"] = 2.0
    assert found.changed(names)


def test_what_lies_there_is_another_tensor(beside: ModuleType) -> None:
    """A memory that is filled anew: what it had is a constant of the recording."""
    beside.settings.memory = (torch.ones(2),)
    for body in (
        "loss = sum(each.mean() for each in losses.settings.memory)",
        "losses.remembered(x)",
    ):
        found, names = reads(beside, body)
        assert not found.changed(names)
        beside.settings.memory = (torch.ones(2),)
        assert found.changed(names)


def test_a_list_has_another_number(beside: ModuleType) -> None:
    """It is the same list."""
    beside.settings.memory = [1.0, 2.0]
    found, names = reads(beside, "loss = losses.remembered(x)")
    assert not found.changed(names)
    beside.settings.memory[1] = 3.0
    assert found.changed(names)


def test_a_number_of_a_class_has_changed(beside: ModuleType) -> None:
    """Which a method of the class reads."""
    found, names = reads(beside, "loss = losses.Kind.loss(x)")
    assert not found.changed(names)
    beside.Kind.weight = 2.0
    assert found.changed(names)


def test_a_number_in_a_default_has_changed(beside: ModuleType) -> None:
    """A dict that nobody hands in."""
    found, names = reads(beside, "loss = losses.defaulted(x)")
    assert not found.changed(names)
    beside.defaulted.__defaults__[0]["weight"] = 2.0
    assert found.changed(names)


@pytest.mark.parametrize(
    ("held", "change"),
    [
        (np.ones(2), lambda held: held.put(1, 2.0)),
        ({"one", "other"}, lambda held: held.discard("one")),
        (UserDict(one=1.0), lambda held: held.update(one=2.0)),
        ([1.0] * 100, lambda held: held.append(1.0)),
    ],
    ids=["an array", "a set", "a dict of its own kind", "a list"],
)
def test_what_is_written_to_where_it_lies(
    beside: ModuleType, held: Any, change: Callable[[Any], None]
) -> None:
    """It is the same object."""
    beside.settings.memory = held
    found, names = reads(beside, "loss = losses.remembered(x)")
    assert not found.changed(names)
    change(held)
    assert found.changed(names)


def test_another_method_lies_there(beside: ModuleType) -> None:
    """A phase of training, kept in an attribute; the same method, asked for once more, is no other."""
    _, names = reads(beside, "loss = trainer.phase(x)")
    names["trainer"].phase = names["trainer"].weighed
    found, _ = reads_of("loss = trainer.phase(x)", names)
    names["trainer"].phase = names["trainer"].weighed
    assert not found.changed(names)
    names["settings"].weight = 2.0
    assert found.changed(names)
    names["settings"].weight = 1.0
    names["trainer"].phase = names["trainer"].loss
    assert found.changed(names)


def test_a_module_runs_another_forward() -> None:
    """Set on it or on its class. One that it has of its own is looked into."""
    scale, model = 1.0, torch.nn.Sequential(torch.nn.Tanh())
    reads = Reads([], {}, list(model.modules()))
    assert reads.changed({}) == ""
    model[0].forward = lambda x: x * scale
    assert reads.changed({}) == "Tanh.forward"
    reads = Reads([], {}, list(model.modules()))
    assert reads.changed({}) == ""
    scale = 2.0
    assert reads.changed({}).startswith("scale")


def test_a_number_of_a_loss_has_changed(beside: ModuleType) -> None:
    """It is torch's own, and none of the model's."""
    loss, model = torch.nn.CrossEntropyLoss(), torch.nn.Linear(2, 2)
    heard = Heard()
    with heard.listening(model):
        loss(model(torch.ones(1, 2)), torch.tensor([1]))
    assert not heard.changed()
    loss.label_smoothing = 0.1
    assert heard.changed() == "CrossEntropyLoss.label_smoothing"


def test_a_function_beside_the_script_is_another_one(beside: ModuleType) -> None:
    """By the same name in the same module."""
    found, names = reads(beside, "loss = losses.of(model, x)")
    beside.of = beside.another
    assert found.changed(names)


def test_what_nobody_reads_may_change(beside: ModuleType) -> None:
    """A count in the same module is not part of the recording."""
    found, names = reads(beside, "loss = losses.another(model, x)")
    beside.WEIGHT = 2.0
    assert not found.changed(names)


def _key(model: torch.nn.Module, code: str) -> str:
    batch = [torch.ones(2, 4, 4)]
    graph = record(model, lambda net, x: net(x).mean(), batch)
    return key_of(graph, {2: batch}, "a machine", code)


def test_what_was_measured_is_of_this_code(beside: ModuleType) -> None:
    """What the graph shows by its name only is told by the files of the job; where it shows all, an edit changes
    nothing."""
    whole = torch.nn.Sequential(torch.nn.Linear(4, 4), beside.Asking())
    assert _key(whole, "one") != _key(whole, "another")
    apart = torch.nn.Sequential(beside.Net(4, 4))
    assert _key(apart, "one") == _key(apart, "another")


def test_what_was_measured_is_of_these_settings() -> None:
    """Two layers of the same shape that do another amount of work."""
    one, other = (torch.nn.Conv1d(4, 4, 1, stride=stride) for stride in (1, 2))
    assert _key(one, "") != _key(other, "")
