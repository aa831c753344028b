"""What a script may set in a data set between epochs: `dataset.set_epoch(epoch)`, `dataset.size = 8`.

It may set that in the transforms of a data set as well, `dataset.transform.strength = 0.3`, in its
collate_fn, and in the numbers and texts among the globals that their code names. Processes that
fetch have all of these as they were when they were begun. Attributes are compared, not what lies in
them: a number or text by its value, anything else by which object it is.
"""

from collections.abc import Container, Iterator
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

from torch.utils.data import Dataset

from agent.source.tracebacks import codes, is_library, is_own_class

PLAIN = (bool, int, float, complex, str, bytes)
FUNCTIONS = (type, BuiltinFunctionType, MethodType)  # which have none of their own
PLACES_MAX = 256
Attributes = list[tuple[str, Any]]


def attributes(*things: Any) -> Attributes:
    """Return the attributes of data sets and transforms, and of those in them, as in a `Subset`."""
    found: Attributes = []
    coming = [each.__self__ if isinstance(each, MethodType) else each for each in things]
    seen = {*map(id, coming)}
    while coming:
        for name, value in [*_named_by(coming.pop())]:
            found.append((name, value))
            for inner in _within(value):
                if id(inner) not in seen and len(seen) < PLACES_MAX:
                    seen.add(id(inner))
                    coming.append(inner)
    return found


def _named_by(thing: Any) -> Attributes:
    """Return the attributes of an object, and the globals that its code names.

    A global with the name of an attribute counts as the attribute, which is what the code means.
    """
    if isinstance(thing, FunctionType):
        return _globals(thing, ())
    found = [*getattr(thing, "__dict__", {}).items()]
    kinds = [*filter(is_own_class, type(thing).__mro__)]
    attributes = dir(thing) if kinds else ()
    for kind in kinds:
        for method in [*vars(kind).values()]:
            if isinstance(method, FunctionType):
                found += _globals(method, attributes)
    return found


def _globals(function: FunctionType, besides: Container[str]) -> Attributes:
    """Return numbers, texts and functions among the globals that code of the script's names."""
    code, there = function.__code__, function.__globals__
    if is_library(code.co_filename):
        return []
    names = sorted(_words(code) & there.keys())
    found = [(name, there[name]) for name in names if name not in besides]
    return [each for each in found if isinstance(each[1], (*PLAIN, FunctionType))]


@lru_cache(1024)
def _words(code: CodeType) -> frozenset[str]:
    return frozenset(name for each in codes(code) for name in each.co_names)


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


def changed(some: Attributes, others: Attributes) -> list[str]:
    """Return the names of what is not what it was, each once."""
    names, before = [name for name, _ in some], [name for name, _ in others]
    if names != before:
        return sorted({*names} ^ {*before}) or sorted({*names})
    pairs = zip(some, others, strict=True)
    return sorted({name for (name, a), (_, b) in pairs if not _is_same(a, b)})


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    return isinstance(value, PLAIN) and type(value) is type(other) and bool(value == other)
