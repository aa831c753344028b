"""A hundred thousand messages drawn from their schema: each is taken as it is, or refused in one sentence.

`SPOT_FUZZ=1000000` draws a million, here and in `test_fuzzed_events.py`.
"""

import os
from collections import Counter

import msgspec
import pytest
from msgspec import inspect

from agent.layout import Layout
from agent.messages import JobOrder, WorkerOrder
from agent.protocol import AnyMessage
from cloud.ranges import explain
from tests.simulation.drawn import Drawer, encoded, kinds_of

MESSAGES = int(os.environ.get("SPOT_FUZZ", "100000"))
UNCHECKED = {  # numbers that no decision rests on, and those that may be anything
    "Digest.bits",
    "Digest.norms",
    "Computed.loss",
    "Computed.graph",
    "Prepared.loss",
    "Numbers.steps",
    "OutputFile.checksum",
    "OutputFile.marks",
    "Profile.version",
}


@pytest.mark.parametrize("wildness", [0.0, 0.02, 0.2])
def test_a_message_is_taken_or_refused_in_one_sentence(wildness):
    """What is taken is the same after it was sent on; no other error leaves the door."""
    decode, kinds = msgspec.msgpack.Decoder(AnyMessage).decode, kinds_of(AnyMessage)
    taken: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    drawer = Drawer(int(100 * wildness), wildness)
    for nth in range(MESSAGES // 3):
        kind = kinds[nth % len(kinds)]
        said = drawer.value(kind)
        data = encoded(said)
        try:
            message = decode(data)
        except msgspec.ValidationError as error:
            sentence = explain(error, msgspec.msgpack.decode(data))
            assert sentence and "\n" not in sentence and len(sentence) < 500
            refused[kind.cls.__name__] += 1
        else:
            again = encoded(message)
            assert encoded(decode(again)) == again
            taken[kind.cls.__name__] += 1
    assert {kind.cls.__name__ for kind in kinds} == (taken | refused).keys()
    assert sum(taken.values()) > MESSAGES // 15
    if wildness:
        assert sum(refused.values()) > MESSAGES // 60


def numbers_without_range(kind: object, where: str = "") -> set[str]:
    """The fields in a schema that hold a number or a text with no bound."""
    match kind:
        case inspect.StructType():
            return {
                found
                for field in kind.fields
                for found in numbers_without_range(field.type, f"{kind.cls.__name__}.{field.name}")
            }
        case inspect.IntType() | inspect.FloatType():
            return {where} if (kind.ge is None and kind.gt is None) or kind.le is None else set()
        case inspect.StrType():
            return {where} if kind.max_length is None and kind.pattern is None else set()
    found: set[str] = set()
    for name in ("types", "item_types"):
        for each in getattr(kind, name, ()):
            found |= numbers_without_range(each, where)
    for name in ("item_type", "key_type", "value_type"):
        if (each := getattr(kind, name, None)) is not None:
            found |= numbers_without_range(each, where)
    return found


@pytest.mark.parametrize("union", [AnyMessage, JobOrder, WorkerOrder, Layout])
def test_every_field_of_a_message_has_a_range(union):
    """A field that is added without one is named here."""
    assert numbers_without_range(inspect.type_info(union)) <= UNCHECKED
