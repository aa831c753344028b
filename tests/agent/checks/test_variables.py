"""Variables of a script that travel with its job."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agent.checks.variables import Variables
from agent.errors import Misuse


def test_variables_come_back_exactly() -> None:
    there: dict[str, Any] = {"best": 0.1, "hidden": (torch.ones(2), torch.zeros(3)), "other": 1}
    here: dict[str, Any] = {"best": 9.0, "late": 5, "other": 2}
    saved = Variables(there, "best", "hidden", "late").state_dict()
    Variables(here, "best", "hidden", "late").load_state_dict(saved)
    assert (here["best"], here["other"], "late" in here) == (0.1, 2, False)
    assert [each.tolist() for each in here["hidden"]] == [[1.0, 1.0], [0.0] * 3]


def test_attributes_of_an_object_are_variables_too() -> None:
    trainer = SimpleNamespace(best=1, wait=2, model=torch.nn.Linear(1, 1))
    saved = Variables(trainer, "best", "wait").state_dict()
    trainer.best, trainer.wait = 7, 8
    Variables(trainer, "best", "wait").load_state_dict(saved)
    assert (trainer.best, trainer.wait) == (1, 2)


def test_a_name_without_a_value_is_refused_after_a_step() -> None:
    variables = Variables({"best": 1}, "best", "bset")
    variables.state_dict()
    with pytest.raises(
        Misuse, match=r"step 3: .*'bset'.*before the loop, bset = None;.*declare it `global`"
    ):
        variables.check(3)


def test_a_value_that_cannot_be_saved_is_named() -> None:
    weight = torch.ones(1, requires_grad=True)
    with pytest.raises(Misuse, match=r'step 2: Variables\["hidden"\] is a tensor that still has'):
        Variables({"hidden": weight * 2}, "hidden").check(2)


def test_an_object_among_variables_is_told_where_it_is_saved() -> None:
    """A trainer's state, which is a dataclass as a rule."""
    trainer = SimpleNamespace(state=SimpleNamespace(step=1))
    with pytest.raises(Misuse, match=r'\["state"\] is a SimpleNamespace.*Session\(...\) by itself'):
        Variables(trainer, "state").check(2)


@pytest.mark.parametrize("names", [(), (1,)])
def test_names_are_expected(names: Any) -> None:
    with pytest.raises(Misuse, match="give the names"):
        Variables({}, *names)
