"""The loss of a microbatch and the numbers returned beside it, and how they add up.

They are part of the sum of a step, in float64 and in its order, so that every worker has the same
means to the bit.
"""

from collections.abc import Iterable

import msgspec
import torch

from agent.errors import Misuse

METRICS_MAX = 31
WIDTH = 1 + METRICS_MAX

Number = float | torch.Tensor
Names = tuple[str, ...]


class Numbers(msgspec.Struct, frozen=True):
    """A loss and, by sorted names, the metrics beside it. On a device they are not waited for."""

    names: Names = ()
    values: tuple[Number, ...] = (0.0,)

    @property
    def loss(self) -> Number:
        return self.values[0]

    def plus(self, other: "Numbers") -> "Numbers":
        names = alike((self.names, other.names))
        values = tuple(a + b for a, b in zip(self.values, other.values, strict=True))
        return Numbers(names or (), values)

    def on(self, device: torch.device) -> "Numbers":
        """Return the same numbers where sums are added up; plain floats stay unchanged."""
        values = (v.to(device) if isinstance(v, torch.Tensor) else v for v in self.values)
        return Numbers(self.names, tuple(values))


def alike(found: Iterable[Names | None]) -> Names | None:
    """Return the names that all of these have, or None if none of them has computed anything."""
    known: Names | None = None
    for names in found:
        if names is None:
            continue
        if known is not None and names != known:
            one, other = _listed(known), _listed(names)
            raise Misuse(
                f"session.backward(loss_of, ...): loss_of returned {one} beside the loss of one microbatch and {other} "
                "beside that of another; return the same names for every microbatch, because each is averaged over all"
            )
        known = names
    return known


def _listed(names: Names) -> str:
    return " and ".join(map(repr, names)) or "nothing"


def encoded(present: bytes | bytearray, names: Names | None) -> bytes:
    """Encode what a sum was contributed to, and the names of its numbers."""
    return bytes(present) + (b"" if names is None else f"={chr(10).join(names)}".encode())


def decoded(marks: bytes, entries: int) -> tuple[bytes, Names | None]:
    rest = marks[entries:].decode()
    if not rest:
        return marks[:entries], None
    return marks[:entries], tuple(rest[1:].split("\n")) if rest[1:] else ()
