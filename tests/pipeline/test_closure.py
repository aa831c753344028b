"""What a loss function closes over is known by its names: when it changes, the loss is recorded anew."""

import collections
import dataclasses
import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from agent.data.batch import cut, supervised
from agent.pipeline.tracing.closures.closure import closed_over
from agent.pipeline.tracing.loss import record_loss
from agent.worker.rerecording import Anew

RATE = 1.0


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * RATE


def helped(x: torch.Tensor) -> torch.Tensor:
    return [scaled(each) for each in (x, x)][1]


class Config:
    rate = 1.0

    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)

    @property
    def half(self) -> Any:
        return self.factor / 2

    @classmethod
    def of_kind(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.rate


@dataclasses.dataclass(slots=True)
class Slotted:
    factor: float = 1.0


class Rated(nn.Sequential):
    rate = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (self.rate + RATE)


class Task:
    """Everything that a trainer may have, and its loss, which is a method."""

    def __init__(self) -> None:
        self.config, self.slotted = Config(factor=1.0), Slotted()
        self.table = {"loss": {"factor": 1.0}}
        self.last = collections.deque([1.0], maxlen=1)
        self.array, self.number, self.words = np.ones(2), np.int64(1), {"one", "other"}
        self.memory: Any = torch.ones(2)
        self.phase: Any = self.first
        self.criterion, self.count = nn.CrossEntropyLoss(), 0
        self.model = Rated(nn.Linear(2, 2), nn.Dropout(0.5))

    def attribute(self, x: torch.Tensor) -> Any:
        config = self.config
        return x * config.factor

    def by_its_name(self, x: torch.Tensor, name: str = "factor") -> Any:
        return x * getattr(self.config, name)

    def half(self, x: torch.Tensor) -> Any:
        return x * self.config.half

    def kind(self, x: torch.Tensor) -> Any:
        return Config.of_kind(x)

    def slots(self, x: torch.Tensor) -> Any:
        return x * self.slotted.factor

    def table_in_a_table(self, x: torch.Tensor) -> Any:
        return x * self.table["loss"].get("factor", 0.0)

    def last_of_all(self, x: torch.Tensor) -> Any:
        return x * sum(self.last)

    def an_array(self, x: torch.Tensor) -> Any:
        return x * float(self.array[1])

    def numpys(self, x: torch.Tensor) -> Any:
        return x * int(self.number)

    def a_set(self, x: torch.Tensor) -> Any:
        return x * len(self.words)

    def a_tensor(self, x: torch.Tensor) -> Any:
        return x * self.memory

    def another_method(self, x: torch.Tensor) -> Any:
        return self.phase(x)

    def first(self, x: torch.Tensor) -> Any:
        return x

    def second(self, x: torch.Tensor) -> Any:
        return x * 2

    def a_loss(self, x: torch.Tensor) -> Any:
        return self.criterion(x, x)

    def a_mode(self, x: torch.Tensor) -> Any:
        return self.model(x)

    a_rate = another_forward = a_hook = of_a_class = a_mode

    def a_global(self, x: torch.Tensor) -> Any:
        return helped(x)

    def nothing(self, x: torch.Tensor) -> Any:
        return x * 2


def one_more(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
    return out + 1


CHANGES: dict[str, Callable[[Task], object]] = {
    **dict.fromkeys(("attribute", "by_its_name", "half"), lambda t: t.config.__init__(factor=2.0)),
    "kind": lambda t: setattr(Config, "rate", 2.0),
    "slots": lambda t: setattr(t.slotted, "factor", 2.0),
    "table_in_a_table": lambda t: t.table["loss"].update(factor=2.0),
    "last_of_all": lambda t: t.last.append(2.0),
    "an_array": lambda t: t.array.put(1, 2.0),
    "numpys": lambda t: setattr(t, "number", np.int64(2)),
    "a_set": lambda t: t.words.discard("one"),
    "a_tensor": lambda t: setattr(t, "memory", torch.ones(2)),
    "another_method": lambda t: setattr(t, "phase", t.second),
    "a_loss": lambda t: setattr(t.criterion, "label_smoothing", 0.1),
    "a_mode": lambda t: t.model[1].eval(),
    "a_rate": lambda t: setattr(t.model, "rate", 1.0),
    "of_a_class": lambda t: setattr(Rated, "rate", 1.0),
    "another_forward": lambda t: setattr(t.model[0], "forward", lambda x: x),
    "a_hook": lambda t: t.model[0].register_forward_hook(one_more),
    "a_global": lambda t: globals().update(RATE=2.0),
}


@pytest.fixture(autouse=True)
def unchanged() -> Any:
    yield
    Config.rate, Rated.rate = 1.0, 0.0
    globals().update(RATE=1.0)


@pytest.mark.parametrize("how", CHANGES)
def test_what_it_comes_by_has_changed(how: str) -> None:
    """However it comes by it. What it does not name may change."""
    task = Task()
    for loss_of in (getattr(task, how), functools.partial(getattr(task, how))):
        before = closed_over(loss_of)
        task.count, task.config.unread = task.count + 1, task.count
        assert closed_over(getattr(task, how)).changed(closed_over(getattr(task, how))) == ""
        assert closed_over(loss_of) == before
    before, other = closed_over(getattr(task, how)), closed_over(task.nothing)
    CHANGES[how](task)
    assert closed_over(getattr(task, how)) != before
    assert closed_over(task.nothing) == other


LARGE: dict[str, Callable[[np.ndarray], object]] = {
    "all of it": lambda array: np.multiply(array, 0.5, out=array),
    "a column": lambda array: array[:, 3].fill(2.0),
    "some rows": lambda array: array[100:140].fill(2.0),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("how", LARGE)
def test_a_large_array_has_changed_in_place(how: str, turned: bool) -> None:
    """Too large to be compared whole in each step; it need not lie in one piece."""
    task, array = Task(), np.ones((1024, 1024))
    task.array = array.T[:, :512] if turned else array
    before = closed_over(task.an_array)
    assert closed_over(task.an_array) == before
    LARGE[how](array)
    assert closed_over(task.an_array) != before


def test_an_array_in_a_file_is_not_read(tmp_path: Path) -> None:
    """As the tokens of a corpus are, which no step may read through."""
    task, file = Task(), tmp_path / "tokens.bin"
    file.write_bytes(bytes(1 << 20))
    task.array = np.memmap(file, np.uint16, mode="r+")
    before = closed_over(task.an_array)
    task.array[:] = 1
    assert closed_over(task.an_array) == before


def test_what_a_function_has_around_it() -> None:
    """Cells, defaults and arguments of a partial function; the same ones in a function that is made once more are the same."""

    def made(weight: float, model: nn.Module) -> Any:
        return lambda x, other=weight: model(x) * weight * other

    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    one = closed_over(made(1.0, model))
    assert one == closed_over(made(1.0, model))
    assert one.changed(closed_over(made(2.0, model))) == "weight"
    assert one.changed(closed_over(made(1.0, other))).startswith("model")

    def loss(weight: float, x: torch.Tensor, *, table: dict[str, float]) -> Any:
        return x * weight * table["a"]

    one = closed_over(functools.partial(loss, 1.0, table={"a": 1.0}))
    assert one == closed_over(functools.partial(loss, 1.0, table={"a": 1.0}))
    assert one != closed_over(functools.partial(loss, 2.0, table={"a": 1.0}))
    assert one != closed_over(functools.partial(loss, 1.0, table={"a": 2.0}))


def test_another_function_is_another_one() -> None:
    assert not closed_over(helped).of_same_function(closed_over(scaled))
    assert closed_over(Task().kind).of_same_function(closed_over(Task().kind))
    assert closed_over(helped) != closed_over(scaled)


def test_no_code_of_the_persons_is_run() -> None:
    class Loud:
        __slots__ = ("__dict__",)

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

        def __eq__(self, other: object) -> bool:
            raise AssertionError

        __hash__ = None  # type: ignore[assignment]

        @property
        def rate(self) -> float:
            raise AssertionError

    loud = Loud()
    loss_of = lambda x: x * loud.rate  # noqa: E731
    assert closed_over(loss_of) == closed_over(loss_of)


def test_what_goes_round_in_a_circle() -> None:
    """And what is deeper than anybody looks."""
    ring: dict[str, Any] = {}
    ring["again"] = ring
    deep: list[Any] = [1.0]
    for _ in range(100):
        deep = [deep]
    loss_of = lambda x: x * ring["again"]["again"]["rate"] * deep[0]  # noqa: E731
    before = closed_over(loss_of)
    assert closed_over(loss_of) == before
    ring["rate"] = float("nan")
    assert closed_over(loss_of) == closed_over(loss_of)
    assert closed_over(loss_of) != before


def test_a_loss_that_is_recorded_anew_in_each_step_is_said_to_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Once, and by what it closes over; not where it is so now and then, nor where a step has several losses."""
    model, batch = nn.Linear(2, 2), torch.ones(1, 2)
    box = types.SimpleNamespace(rate=0.0)
    kept: Any = None

    def record(loss_of: Any) -> Any:
        nonlocal kept
        because = "" if kept is None else kept.closure.changed(closed_over(loss_of))
        if kept is None or because:
            found = record_loss(model, loss_of, [(batch,)])
            kept = type(found)(found.variants, found.form, found.closure, because)
        return kept

    def loss_of(batch: Any) -> Any:
        return model(batch[0]).sum() * box.rate

    for every, said in ((2, 0), (1, 1)):
        anew, kept = Anew(), None
        for step in range(8):
            box.rate = float(step // every)
            anew.recorded(step, lambda: record(loss_of))
        assert capsys.readouterr().err.count("it closes over `box.rate`, which has changed") == said

    anew, losses = (
        Anew(),
        [record_loss(model, lambda b, f=f: model(b[0]).sum() * f, [(batch,)]) for f in (1.0, 2.0)],
    )
    for step in range(16):
        anew.recorded(step, lambda step=step: losses[step % 2])
    assert capsys.readouterr().err == ""


def test_a_batchs_loss_is_known_by_the_function_that_gets_its_parts() -> None:
    def made(factor, other=False):
        if other:
            return cut(lambda x, y: (x + y * factor).sum(), (torch.ones(2),) * 2, 0, 2)[0]
        return cut(lambda x, y: (x * y * factor).sum(), (torch.ones(2),) * 2, 0, 2)[0]

    assert not closed_over(made(1)).changed(closed_over(made(1)))
    assert closed_over(made(1)).changed(closed_over(made(2))) == "factor"
    assert closed_over(made(1)).of_same_function(closed_over(made(2)))
    assert not closed_over(made(1)).of_same_function(closed_over(made(1, other=True)))


def test_a_supervised_loss_is_known_by_its_criterion_and_metrics() -> None:
    def near(low):
        return lambda output, target: (output > low).sum()

    def made(low):
        return closed_over(supervised(net, F.mse_loss, near=near(low)))

    net = nn.Linear(1, 1)
    assert not made(1).changed(made(1))
    assert made(1).changed(made(2)) == "low"


@pytest.mark.parametrize("count", [3, 400])
def test_each_tensor_of_a_table_counts_for_large_models_too(count: int) -> None:
    """As the anchors of a penalty, one for each parameter: a recording has them as constants."""
    anchors = {f"{each}.weight": torch.zeros(1) for each in range(count)}

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x - anchor).sum() for anchor in anchors.values()]).sum()

    before = closed_over(loss_of)
    assert before.changed(closed_over(loss_of)) == ""
    anchors["2.weight"] = torch.zeros(1)
    assert before.changed(closed_over(loss_of)) == "anchors['2.weight']"
    anchors = {name: anchor.clone() for name, anchor in anchors.items()}
    assert before.changed(closed_over(loss_of)) == "anchors['0.weight']"


@pytest.mark.parametrize("count", [3, 300, 5000])
@pytest.mark.parametrize("kind", [list, dict, collections.deque])
def test_a_number_of_a_long_list_counts_when_it_is_set(count: int, kind: type) -> None:
    """As the weights of many classes: a recording has them as constants."""
    pairs = [(each, 1.0) for each in range(count)]
    weights = dict(pairs) if kind is dict else kind(weight for _, weight in pairs)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return x.sum() * weights[2]

    before = closed_over(loss_of)
    assert before.changed(closed_over(loss_of)) == ""
    weights[2] = 2.0
    assert before.changed(closed_over(loss_of)).startswith("weights[")
