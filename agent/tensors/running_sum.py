"""The sum of a step that a worker has so far, in the memory of one gradient, as in torch."""

from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import TypeVar

import torch

from agent.tensors.device import CPU, settle
from agent.tensors.metrics import Numbers
from agent.tensors.sums import Contribution, Last, Sum, SumSpace

T = TypeVar("T")


class Running:
    """One sum of all the microbatches that this worker has computed.

    It outlives a change of layout if the new share has all of them; else they are computed again by
    the workers that then have them.
    """

    def __init__(self, space: SumSpace) -> None:
        self.space = space
        self._sum: Sum | None = None
        self._grads = list[torch.Tensor]()  # views of it, each with a separate version counter
        self._versions: list[int] = []  # of the views that are lent
        self._done: set[int] = set()
        self._copy: Sum | None = None

    held = 1

    def reserve(self) -> None:
        self._begun()

    def clear(self) -> None:
        self._done.clear()
        self._versions.clear()

    def let_go(self) -> None:
        self.clear()
        self._sum, self._copy, self._grads = None, None, []

    def missing(self, first: int, count: int) -> list[int]:
        share = range(first, first + count)
        if not self._done <= {*share}:
            self.clear()
        return [microbatch for microbatch in share if microbatch not in self._done]

    def lend(self, microbatch: int, first: int, count: int) -> None:  # noqa: ARG002 - there is one sum for all
        self._begun()
        for param, gradient in zip(self.space.params.values(), self._grads, strict=True):
            param.grad = gradient
        self._versions = [gradient._version for gradient in self._grads]

    def add(self, microbatch: int, numbers: Numbers, first: int, count: int) -> None:  # noqa: ARG002
        total = self._begun()
        one = self.space.take(numbers)
        for index, version in enumerate(self._versions):
            found, there = one.found[index], self._grads[index]
            if found is not None and found.data_ptr() == there.data_ptr():
                one.found[index] = None  # its backward has added it
                total.present[index] |= there._version != version
        self.space.gain(total, one)
        self._versions.clear()
        self._done.add(microbatch)

    def last(self, microbatch: int, first: int, count: int) -> Last | None:
        """Return a way to add the last missing microbatch entry by entry."""
        if {*range(first, first + count)} - self._done != {microbatch}:
            return None
        total = self._begun()
        self._done.add(microbatch)
        one = Contribution(Numbers(), [None] * len(self.space.tensors))
        return Last(one, [partial(self.space.gain, total, one)], [total])

    def _begun(self) -> Sum:
        """Return the sum, which is empty as long as nothing is done."""
        if self._sum is None:
            self._sum = Sum(self.space, self.space.device)
            views = self._sum.views[: len(self.space.params)]
            self._grads = [view.data for view in views]
        elif not self._done and not self._versions:
            self._sum.clear()
        return self._sum

    def keys(self, first: int, count: int) -> tuple[int, ...]:
        return (first,) if count else ()

    def fold(self, parts: Mapping[int, T], add: Callable[[T, T], T]) -> T:
        return reduce(add, (parts[first] for first in sorted(parts)))

    def sums(self, first: int, count: int) -> list[Sum]:
        if not count:
            return []
        assert self._sum is not None
        assert self._done == {*range(first, first + count)}
        return [self._sum]

    def nodes(self, first: int, count: int) -> list[Sum]:
        sums = self.sums(first, count)
        if self.space.device == CPU or not sums:
            return sums
        self._copy = self._copy or Sum(self.space)
        self._copy.copy_(sums[0])
        settle(self.space.device)
        return [self._copy]
