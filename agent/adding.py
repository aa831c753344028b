"""Two microbatches' contributions become a sum, or go into one.

The gradients of the later one may be added as they come out of its backward, while they are still in the cache: each is let go
of before the next is there, and needs no memory of its own. Nobody else may look at them then, so this is for
the backward of a stage, which no script sees.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from agent.sums import Contribution, Sum

PIECE_NUMBERS = 1 << 16


class Adding:
    """into = one + other, if it is `fresh`; else into += one + other. In one pass over the memory.

    `other` may come bit by bit, by `arrive`; `finish` is for what did not.
    """

    def __init__(self, into: Sum, one: Contribution, *, fresh: bool) -> None:
        self._into, self._one, self._fresh = into, one, fresh
        self._arrived: dict[int, torch.Tensor] = {}

    def arrive(self, index: int, gradient: torch.Tensor, instead: torch.Tensor) -> None:
        """Entry `index` of the other one; `instead` will stand in its place."""
        self._put(index, self._one.found[index], gradient)
        self._one.found[index] = None
        self._arrived[index] = instead

    def finish(self, other: Contribution) -> Sum:
        loss = self._one.loss + other.loss
        if self._fresh:
            self._into.loss.zero_()
        self._into.loss += loss
        for index, (a, b) in enumerate(zip(self._one.found, other.found, strict=True)):
            if index not in self._arrived:
                self._put(index, a, b)
            elif b is not self._arrived[index] and b is not None:  # it was changed since
                self._into.views[index].add_(b)
        return self._into

    def _put(self, index: int, a: torch.Tensor | None, b: torch.Tensor | None) -> None:
        into, view = self._into, self._into.views[index]
        there = a is not None or b is not None
        if self._fresh:
            into.present[index] = there
            one, other = (b, a) if a is None else (a, b)
            if one is None:
                view.zero_()
            else:
                torch.add(one, 0 if other is None else other, out=view)
            return
        into.present[index] |= there
        # -0.0 becomes 0.0, as by adding a zero
        if a is not None and b is not None:
            _add_pair(view, a, b)
        else:
            view.add_((0 if a is None else a) + (0 if b is None else b))


class Ear:
    """Hears the gradients of these parameters as they are found, while it is open."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self.adding: Adding | None = None
        self._params = tuple(params)
        # What a gradient that was added leaves behind: it has the shape, and no memory.
        self._instead = tuple(param.new_zeros(()).expand(param.shape) for param in self._params)
        self._hooks: list[RemovableHandle] = []

    def open(self) -> None:
        self.close()
        self._hooks = [
            param.register_hook(partial(self._hear, index))  # type: ignore[no-untyped-call]
            for index, param in enumerate(self._params)
        ]

    def close(self) -> None:
        """A model that is looked at elsewhere has no hooks of ours."""
        self.adding = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hear(self, index: int, gradient: torch.Tensor) -> torch.Tensor | None:
        if self.adding is None or gradient.is_sparse:
            return None
        self.adding.arrive(index, gradient, self._instead[index])
        return self._instead[index]


def _add_pair(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """into += a + b, in pieces that stay in the cache, where all lie in one row."""
    count = into.numel()
    if count <= PIECE_NUMBERS or not (a.is_contiguous() and b.is_contiguous()):
        into.add_(a + b)
        return
    into, a, b = into.view(-1), a.view(-1), b.view(-1)
    for start in range(0, count, PIECE_NUMBERS):
        end = start + PIECE_NUMBERS
        into[start:end].add_(a[start:end] + b[start:end])
