"""What a script may set in a data set between epochs: `dataset.set_epoch(epoch)`, `dataset.size = 8`.

It may set that in the transforms of a data set as well, `dataset.transform.strength = 0.3`, and in
its collate_fn. Processes that fetch have all of these as they were when they were begun. Attributes
are compared, not what lies in them: a number or text by its value, anything else by which object it
is.
"""

from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch.utils.data import Dataset

PLAIN = (bool, int, float, complex, str, bytes)
FUNCTIONS = (type, FunctionType, BuiltinFunctionType, MethodType)  # which have none of their own
PLACES_MAX = 256
Attributes = list[tuple[str, Any]]


def attributes(*things: Any) -> Attributes:
    """Return the attributes of data sets and transforms, and of those in them, as in a `Subset`."""
    found: Attributes = []
    coming = [each.__self__ if isinstance(each, MethodType) else each for each in things]
    seen = {*map(id, coming)}
    while coming:
        for name, value in [*getattr(coming.pop(), "__dict__", {}).items()]:
            found.append((name, value))
            for inner in _within(value):
                if id(inner) not in seen and len(seen) < PLACES_MAX:
                    seen.add(id(inner))
                    coming.append(inner)
    return found


def _within(value: Any) -> Iterator[Any]:
    """Yield what is read or called for a sample: the value, or each of several."""
    several = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list | tuple) or not _serves(next(iter(several), None)):
        several = (value,)
    yield from filter(_serves, several)


def _serves(value: Any) -> bool:
    """Return whether it is a data set, or a transform that may hold settings."""
    settings = callable(value) and not isinstance(value, FUNCTIONS)
    return isinstance(value, Dataset) or settings


def same(some: Attributes, others: Attributes) -> bool:
    """Return whether all are what they were."""
    return len(some) == len(others) and all(
        name == other_name and _is_same(value, other)
        for (name, value), (other_name, other) in zip(some, others, strict=True)
    )


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    return isinstance(value, PLAIN) and type(value) is type(other) and bool(value == other)
