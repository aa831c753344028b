"""What a script may set in a data set between epochs: `dataset.set_epoch(epoch)`, `dataset.size = 8`.

Processes that fetch have the data set as it was when they were begun. Attributes are compared, not
what lies in them: a number or text by its value, anything else by which object it is.
"""

from typing import Any

from torch.utils.data import Dataset

PLAIN = (bool, int, float, complex, str, bytes)
Attributes = list[tuple[str, Any]]


def attributes(dataset: Any) -> Attributes:
    """Return the attributes of a data set, and of data sets in it, as in a `Subset`."""
    found: Attributes = []
    coming, seen = [dataset], {id(dataset)}
    while coming:
        for name, value in [*getattr(coming.pop(), "__dict__", {}).items()]:
            found.append((name, value))
            several = isinstance(value, list | tuple) and value and isinstance(value[0], Dataset)
            for inner in value if several else (value,):
                if isinstance(inner, Dataset) and id(inner) not in seen:
                    seen.add(id(inner))
                    coming.append(inner)
    return found


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
