"""A script's own state goes through layers and back, and what it cannot hold is named at once."""

import math

import pytest
import torch
from carried import carry
from torch import nn

from agent.checks.state import ScriptState
from agent.errors import Misuse
from agent.store.layers import collect


def test_state_through_layers_comes_back_exactly() -> None:
    state = ScriptState(
        best=0.1,
        plan=(1, None, True, "x"),
        nested={1: {"empty": [], "none": {}}, "nan": math.nan, "inf": -math.inf},
        history=[0.5 * at for at in range(50_000)],
        queue=torch.arange(4, dtype=torch.int16),
        half=torch.ones(2, 2, dtype=torch.bfloat16).T,
    )
    other = ScriptState(stale=1)
    model = nn.Linear(1, 1)
    carry({"model": model, "state": state}, {"model": model, "state": other})
    assert "stale" not in other
    assert other["plan"] == (1, None, True, "x")
    assert other["plan"][2] is True
    assert other["nested"][1] == {"empty": [], "none": {}}
    assert math.isnan(other["nested"]["nan"])
    assert other["history"] == state["history"]
    assert torch.equal(other["queue"], state["queue"])
    assert other["queue"].dtype == torch.int16
    assert torch.equal(other["half"], state["half"])
    assert [*other] == [*state]


def test_an_empty_state_comes_back_empty() -> None:
    other = ScriptState(stale=1)
    model = nn.Linear(1, 1)
    carry({"model": model, "state": ScriptState()}, {"model": model, "state": other})
    assert other == {}


def test_what_is_collected_does_not_change_with_the_state() -> None:
    """The state is that of the start of the step, whatever the script sets in it after."""
    state = ScriptState(history=[1.0], mean=torch.zeros(2))
    model = nn.Linear(1, 1)
    kept = collect({"model": model, "state": state})
    versions = kept.versions()
    state["history"].append(2.0)
    state["mean"].add_(1)
    assert kept.versions() == versions
    (rest,) = [layer for layer in kept.finish() if layer.form.name == "~rest"]
    assert [tensor.tolist() for tensor in rest.tensors] == [[0, 0]]


def test_what_cannot_be_saved_is_named_in_the_step_that_sets_it() -> None:
    state = ScriptState(net={"x": nn.Conv2d(1, 1, 1)})
    with pytest.raises(
        Misuse, match=r'^step 3: session.state\["net"\]\["x"\] is a Conv2d: give it'
    ):
        state.check(3)
    state["net"] = 1
    state.check(4)
