"""Values drawn from the schema of a type: at its edges, inside, and beyond them."""

import math
from random import Random
from typing import Any

import msgspec
from msgspec import inspect

TEXTS = ("", "w1", "two\nlines", "\x00", "\u202eü", "x" * 70)
INTS = (-(2**63), -5, -1, 0, 1, 2, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**64 - 1)
FLOATS = (-1e300, -1.0, 0.0, 5e-324, 0.5, 1e10, 1e18, 1e300, math.nan, math.inf, -math.inf)
LENGTHS = (0, 1, 1, 2, 5)


class Drawer:
    """The same seed draws the same values. `wildness` is the share that may be out of range."""

    def __init__(self, seed: int, wildness: float) -> None:
        self._dice, self._wildness = Random(seed), wildness

    def value(self, kind: inspect.Type) -> Any:  # noqa: PLR0911
        """Plain values, as a decoder gets them."""
        dice = self._dice
        match kind:
            case inspect.IntType():
                return self._number(kind, INTS, dice.randrange(100))
            case inspect.FloatType():
                return self._number(kind, FLOATS, dice.random())
            case inspect.StrType(max_length=most):
                wild = most is not None and most < 1 << 13 and self._wild()
                return "x" * (most + 1) if wild and most is not None else dice.choice(TEXTS)
            case inspect.BoolType():
                return dice.random() < 0.5
            case inspect.BytesType():
                return dice.randbytes(dice.choice(LENGTHS))
            case inspect.NoneType():
                return None
            case inspect.LiteralType(values=values):
                return "neither" if self._wild() else dice.choice(values)
            case inspect.UnionType(types=kinds):
                return self.value(dice.choice(kinds))
            case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
                return [self.value(item) for _ in range(dice.choice(LENGTHS))]
            case inspect.TupleType(item_types=items):
                return [self.value(item) for item in items]
            case inspect.DictType(key_type=key, value_type=item):
                return {self.value(key): self.value(item) for _ in range(dice.choice(LENGTHS))}
            case inspect.StructType():
                return self._struct(kind)
        raise TypeError(f"nothing is drawn for {kind}")

    def _wild(self) -> bool:
        return self._dice.random() < self._wildness

    def _number(self, kind: Any, beyond: tuple[Any, ...], inside: Any) -> Any:
        edges = [edge for edge in (kind.ge, kind.le) if edge is not None]
        if self._wild():
            step = 1 if isinstance(inside, int) else max(map(abs, edges), default=1)
            return self._dice.choice(
                (*beyond, *(edge + s for edge in edges for s in (-step, step)))
            )
        low = 0 if kind.ge is None else kind.ge
        high = low + 1000 if kind.le is None else kind.le
        return self._dice.choice((*edges, min(max(inside, low), high), min(max(1, low), high)))

    def _struct(self, kind: inspect.StructType) -> Any:
        given = {
            field.encode_name: self.value(field.type)
            for field in kind.fields
            if field.required or kind.array_like or self._dice.random() < 0.5
        }
        if kind.array_like:
            return list(given.values())
        return given if kind.tag_field is None else {kind.tag_field: kind.tag, **given}


def kinds_of(union: Any) -> tuple[inspect.StructType, ...]:
    """The types of a union, each with its schema."""
    info = inspect.type_info(union)
    assert isinstance(info, inspect.UnionType)
    return tuple(each for each in info.types if isinstance(each, inspect.StructType))


def encoded(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)
