"""One thing in two objects of a state, as an observation in a memory and in a variable.

Each object is written for itself, with all that is in it. Where something is in an object before it
as well, that is noted beside it, and what is read becomes one thing again. Otherwise the next row of
that memory would hold two equal things on a worker that has loaded the state, and one on the others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, Protocol

Kind = Literal["container", "tensor"]


class Written(Protocol):
    """What was written of one object: numbers of things by identity."""

    containers: dict[int, int]
    places: dict[int, int]


class Read(Protocol):
    """What was read of one object: things by their numbers."""

    containers: list[Any]
    made: dict[int, Any]


class Sharing:
    """The objects of one state, in their order, as they are written or read."""

    def __init__(self) -> None:
        self._key = ""
        self._written: dict[str, Written] = {}
        self._read: dict[str, Read] = {}

    @contextmanager
    def of(self, key: str) -> Iterator[None]:
        """Write or read the object of this name."""
        self._key = key
        token = _present.set(self)
        try:
            yield
        finally:
            _present.reset(token)

    def written(self, one: Written) -> None:
        self._written[self._key] = one

    def read(self, one: Read) -> None:
        self._read[self._key] = one

    def find(self, thing: object) -> tuple[str, Kind, int] | None:
        """Return in which object before this one a thing is, as what and under which number."""
        for key, one in self._written.items():
            if (number := one.containers.get(id(thing))) is not None:
                return key, "container", number
            if (number := one.places.get(id(thing))) is not None:
                return key, "tensor", number
        return None

    def thing(self, key: str, kind: Kind, number: int) -> Any:
        one = self._read[key]
        return one.containers[number] if kind == "container" else one.made[number]


_present: ContextVar[Sharing | None] = ContextVar("sharing", default=None)


def present() -> Sharing | None:
    """Return the state that an object is written or read for, if it is not for itself."""
    return _present.get()
