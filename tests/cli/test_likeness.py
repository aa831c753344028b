"""Whether two states are the same, and what differs if they are not."""

import base64
import json
from typing import Any

import msgspec
import numpy as np
import pytest

from agent.keeper.storage.backup import Backup
from agent.store.encoding.format import lay_out
from orchestrator.rehearsal import comparison


def state(
    weights: tuple[float, ...] = (1.0, 2.0, 3.0),
    least: Any = 0.5,
    rate: float = 0.1,
    kept: tuple[float, ...] = (0.1, 0.2, 0.3),
) -> Backup:
    """One layer, what an optimizer keeps of it, and the script's own values."""
    forms = [("model/fc.weight", "F32", (3,)), ("SGD1/fc.weight/state/m", "F32", (3,))]
    fc = lay_out("fc", forms, json.dumps({"SGD1@fc/0": {"$map": [["lr", rate]]}}))
    packed = base64.b64encode(msgspec.msgpack.encode({"least": least})).decode()
    told = {"state": {"$map": [["~values", packed], ["~tensors", {"$map": []}]]}}
    rest = lay_out("~rest", [], json.dumps(told))
    body = np.array([*weights, *kept], np.float32).tobytes()
    return Backup(
        generation=1,
        version=10,
        layers=(fc, rest),
        bodies={"fc": memoryview(body), "~rest": memoryview(b"")},
    )


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (state(), ""),
        (state(weights=(1.0, 2.0, 3.0001)), "the weights of layer fc"),
        (state(least=0.25), "session.state"),
        (state(rate=0.2), "what SGD1 keeps of layer fc"),
        (state(kept=(0.1, 0.2, 0.4)), "what SGD1 keeps of layer fc"),
        (state(weights=(9.0, 2.0, 3.0), least=9, rate=9.0), "the weights of layer fc"),
    ],
)
def test_what_differs_is_named_the_weights_first(other, says):
    """To the bit."""
    assert comparison.difference(state(), other) == says


@pytest.mark.parametrize(
    ("other", "near"),
    [
        (state(weights=(1.0, 2.0, 3.0001), least=0.5000001), True),
        (state(weights=(1.0, 2.0, 3.5)), False),
        (state(weights=(1.0, 2.0, float("nan"))), False),
        (state(least=0.6), False),
        (state(least="0.5"), False),
        (state(rate=0.2), False),
    ],
)
def test_what_rounds_is_near(other, near):
    """Numbers only, and by little."""
    assert comparison.nearly(state(), other) == near


def test_another_model_is_not_near():
    """A layer that one of them has not."""
    one = state()
    other = msgspec.structs.replace(one, layers=one.layers[1:])
    assert comparison.difference(one, other) == "the weights of layer fc"
    assert not comparison.nearly(one, other)
