"""What a recorded loop reads in other files is known: when it changes, the loop is recorded anew."""

import ast
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from agent.calibrate import key_of
from agent.parcel import at_home
from agent.pipeline.reads import Reads
from agent.pipeline.record import record

BESIDE = """
import settings, torch

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
    return Reads(ast.parse(body).body, names, names["model"], ()), names


@pytest.mark.parametrize(
    ("body", "where", "what"),
    [
        ("loss = losses.of(model, x)", "losses", "WEIGHT"),
        ("loss = losses.set_elsewhere(model, x)", "settings", "WEIGHT"),
        ("loss = model(x)", "settings", "SCALE"),
        ("loss = losses.WEIGHT", "losses", "WEIGHT"),
    ],
    ids=["through another function", "of another module", "in a method", "in the loop"],
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
