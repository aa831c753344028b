"""The sums of a step that a worker has so far: of the microbatches that it has computed, before all are added up.

In which order is a choice. `Canonical` has one for every layout, so that the numbers are the same to the bit whatever
happens, and holds a sum for each doubling of the microbatches. `Running` adds to one sum as it goes, as torch does.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from agent.tensors.numbers import Numbers
from agent.tensors.running import Running
from agent.tensors.sums import Sum, SumSpace
from agent.tensors.tree import Canonical

T = TypeVar("T")


class Partial(Protocol):
    space: SumSpace

    @property
    def held(self) -> int:
        """How many sums there are at most, if this worker computes all of a step, and its backward adds to what was lent."""

    def reserve(self) -> None:
        """Have the memory of a sum before there is one."""

    def clear(self) -> None:
        """Nothing is computed yet."""

    def let_go(self) -> None:
        """Nothing is computed here for now: not the memory either."""

    def missing(self, first: int, count: int) -> list[int]:
        """What of a share is not computed yet. What is and does not belong to it may be lost."""

    def lend(self, microbatch: int, first: int, count: int) -> None:
        """Put what this one is to be added to into the model's gradients, if it can be: its backward adds to them as
        it goes, and needs no memory for all of its own. Only for a backward that no script sees."""

    def add(self, microbatch: int, numbers: Numbers, first: int, count: int) -> None:
        """Take in what the model's gradients hold now."""

    def nodes(self, first: int, count: int) -> list[Sum]:
        """The sums of a share that is computed, in host memory."""

    def keys(self, first: int, count: int) -> Sequence[Any]:
        """By what `fold` knows the nodes of this share, whoever has it."""

    def fold(self, parts: Mapping[Any, T], add: Callable[[T, T], T]) -> T:
        """The sum of the step, from the nodes of all shares."""


def partial_of(space: SumSpace, microbatches: int, *, deterministic: bool) -> Partial:
    return Canonical(space, microbatches) if deterministic else Running(space)
