"""One sentence about a value that is out of its range: which field, which value, which range."""

import math

import msgspec
import pytest

from cloud.ranges import Count, Name, Time, flaw_in


class Inner(msgspec.Struct, array_like=True):
    count: Count = 0


class Outer(msgspec.Struct):
    at_s: Time = 0.0
    name: Name = ""
    inner: tuple[Inner, ...] = ()
    counts: dict[str, Count] = {}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Outer(), ""),
        (Outer(at_s=math.nan), "at_s is nan: expected `float` >= -10000000000.0"),
        (Outer(at_s=math.inf), "at_s is inf: expected `float` <= 10000000000.0"),
        (Outer(inner=(Inner(), Inner(-1))), "inner[1][0] is -1: expected `int` >= 0"),
        (Outer(inner=(Inner(10**400),)), "inner[0].count is a number of 1329 bits: it cannot be"),
        (Outer(counts={"a": -1}), "counts[...]: expected `int` >= 0"),
        (Outer(name="x" * 5000), f"name is {'x' * 60!r}... of length 5000: expected `str` of"),
        (Outer(name="\ud800"), "Outer: it cannot be written down ("),
    ],
)
def test_a_flaw_is_one_sentence(value: Outer, said: str) -> None:
    """It is short whatever the value is."""
    flaw = flaw_in(value, Outer)
    assert flaw.startswith(said) and bool(flaw) == bool(said)
    assert len(flaw) < 400 and "\n" not in flaw
