"""Write all but the tensors of a state as JSON; nothing is pickled. No torch here.

A tensor is `{"$tensor": name}`, with its strides if its axes are not in their usual order, a tuple
`{"$tuple": [...]}`, and a mapping `{"$map": [[key, value], ...]}`, so that keys may be integers and
keep their order. One that is a `Counter`, as the milestones of a schedule, has `"$kind"` beside it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from agent.errors import StateError

Keep = Callable[[str, Any], bool | Sequence[int]]
COUNTER = "Counter"
TensorOf = Callable[[str, Sequence[int] | None], Any]


def strip(value: Any, path: str, keep: Keep) -> Any:
    """Return `value` as JSON, in which what `keep(path, value)` takes is only named."""
    if kept := keep(path, value):
        return named(path, kept)
    if isinstance(value, float | np.generic):
        value = _of_python(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [strip(item, f"{path}/{at}", keep) for at, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [strip(item, f"{path}/{at}", keep) for at, item in enumerate(value)]}
    if isinstance(value, Mapping):
        stripped = (
            [_key(key, path), strip(item, f"{path}/{key}", keep)] for key, item in value.items()
        )
        kind = {"$kind": COUNTER} if isinstance(value, Counter) else {}
        return {"$map": list(stripped), **kind}
    raise StateError(
        f"{path} is a {type(value).__name__}: a state may hold tensors, numbers, strings, "
        "lists, tuples and mappings of them"
    )


def _of_python(number: float | np.generic) -> Any:
    """Return Python's number of the same value, of NumPy's or of a result of `session.backward`."""
    if isinstance(number, float):
        return float(number)
    return number.item() if isinstance(number, np.integer | np.bool_) else number


def named(path: str, kept: bool | Sequence[int]) -> dict[str, Any]:
    """Return the name of what was kept, with its strides if there are any."""
    return {"$tensor": path} if kept is True else {"$tensor": path, "$strides": kept}


def fill(value: Any, tensor_of: TensorOf) -> Any:
    """Return the value that `strip` was given."""
    if isinstance(value, list):
        return [fill(item, tensor_of) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensor_of(value["$tensor"], value.get("$strides"))
    if "$tuple" in value:
        return tuple(fill(item, tensor_of) for item in value["$tuple"])
    found = {key: fill(item, tensor_of) for key, item in value["$map"]}
    return Counter(found) if value.get("$kind") == COUNTER else found


def _key(key: Any, path: str) -> Any:
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise StateError(f"{path}: key {key!r} is neither a string nor an integer")
    return key
