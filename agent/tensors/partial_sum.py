"""The sums of a step that a worker has so far, of the microbatches that it has computed.

The order of adding is a choice. `Canonical` uses the same order in every layout, so that the
numbers are always the same to the bit, and holds a sum for each doubling of the microbatches.
`Running` adds each microbatch to one sum, as torch does.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from agent.tensors.metrics import Numbers
from agent.tensors.running_sum import Running
from agent.tensors.sums import Last, Sum, SumSpace
from agent.tensors.tree import Canonical

T = TypeVar("T")


class Partial(Protocol):
    space: SumSpace

    @property
    def held(self) -> int:
        """The most sums at a time, if this worker computes a whole step with lent gradients."""

    def reserve(self) -> None:
        """Allocate the memory of a sum before there is one."""

    def clear(self) -> None:
        """Drop all that is computed."""

    def let_go(self) -> None:
        """Drop all that is computed, and free its memory, because nothing is computed for now."""

    def missing(self, first: int, count: int) -> list[int]:
        """Return what of a share is not computed yet; what lies outside of it may be lost."""

    def lend(self, microbatch: int, first: int, count: int) -> None:
        """Put what this microbatch is added to into the model's gradients, if it can be.

        Its backward then adds to them on the way, and needs no separate memory for all gradients.
        Only for a backward that no script sees.
        """

    def add(self, microbatch: int, numbers: Numbers, first: int, count: int) -> None:
        """Take what the model's gradients hold now."""

    def last(self, microbatch: int, first: int, count: int) -> Last | None:
        """Return a way to add the last missing microbatch of a share entry by entry.

        Return None if the sums cannot be made so. Else the microbatch counts as added, and no other
        method may be called until `Last.end`.
        """

    def sums(self, first: int, count: int) -> list[Sum]:
        """Return the sums of a computed share, on the device that has added them up."""

    def nodes(self, first: int, count: int) -> list[Sum]:
        """Return the sums of a computed share, in host memory."""

    def keys(self, first: int, count: int) -> Sequence[Any]:
        """Return the keys that `fold` expects for the nodes of this share, on any worker."""

    def fold(self, parts: Mapping[Any, T], add: Callable[[T, T], T]) -> T:
        """Return the sum of the step, from the nodes of all shares."""


def partial_of(space: SumSpace, microbatches: int, *, deterministic: bool) -> Partial:
    return Canonical(space, microbatches) if deterministic else Running(space)
