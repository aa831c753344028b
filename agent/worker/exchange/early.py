"""Take the gradients of a share's last microbatch as its backward makes them.

What is complete is added up and leaves at once, so that a sum is on its way while the rest is
computed. A gradient is taken to be complete when the backward has accumulated it. That is so unless
several parts of a graph accumulate into it by themselves, as reentrant checkpoints do, or a hook
changes it afterwards. So a worker first watches one backward, and nothing leaves early where it has
seen that. If it happens later all the same, what has left is void, and is computed and sent again.

The backward of a device runs on a thread of its own, and on the stream of the forward. What was
computed on a stream that is not the script's would be read too early, so nothing leaves early then.
"""

from functools import partial
from typing import TYPE_CHECKING, Self

import torch

from agent.tensors.device import CPU
from agent.tensors.metrics import Numbers
from agent.tensors.sums import Last

if TYPE_CHECKING:
    from agent.worker.exchange.exchange import Exchange


class Early:
    """One backward of the last microbatch; without `last` it is only watched."""

    def __init__(self, exchange: "Exchange", last: Last | None) -> None:
        self._exchange, self._partial, self._last = exchange, exchange.partial, last
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._found: dict[int, tuple[torch.Tensor, int]] = {}  # by entry, with their versions
        self._fresh: dict[int, torch.Tensor] = {}  # those that are not added yet
        self._given = 0  # rounds
        self._lacking = [0] * exchange.rounds  # entries without which a round cannot leave
        for turns in exchange.rounds_of:
            for turn in turns:
                self._lacking[turn] += 1
        self._stream = self._present_stream()
        self.over = self.spoilt = False
        """Whether the microbatch was added, and whether a gradient was not complete when it came."""

    def _present_stream(self) -> torch.Stream | None:
        device = self._partial.space.device
        return None if device == CPU else torch.accelerator.current_stream(device)

    def __enter__(self) -> Self:
        for entry, param in enumerate(self._partial.space.params.values()):
            if param.requires_grad and param.is_leaf:
                hook = param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._come, entry)
                )
                self._handles.append(hook)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _come(self, entry: int, param: torch.Tensor) -> None:
        gradient = param.grad
        self.spoilt |= self._stream != self._present_stream()
        if gradient is None or gradient.is_sparse or entry in self._found:
            self.spoilt |= entry in self._found
            return
        self._found[entry] = gradient, gradient._version
        if self._last is None or self.spoilt:
            return
        self._fresh[entry] = self._partial.space.given(entry, gradient)
        for turn in self._exchange.rounds_of[entry + 1]:
            self._lacking[turn] -= 1
        given = self._given
        while given < len(self._lacking) and not self._lacking[given]:
            given += 1
        if given > self._given:
            self._give(self._last, given)

    def _give(self, last: Last, rounds: int) -> None:
        """Add up what has come, send the rounds that are complete, and do what can be done."""
        last.add(self._fresh)
        self._fresh, self._given = {}, rounds
        self._exchange.give(rounds)
        while not self._exchange.done and self._exchange.ready():
            self._exchange.advance()

    def add(self, microbatch: int, numbers: Numbers, first: int, count: int) -> bool:
        """Add the microbatch, or what is left of it. Return False if what has left is void."""
        params = [*self._partial.space.params.values()]
        for entry, (gradient, version) in self._found.items():
            same = params[entry].grad is gradient and gradient._version == version
            self.spoilt |= not same
        self._found, self.over = {}, True
        if self._last is None:
            self._partial.add(microbatch, numbers, first, count)
            return True
        one, last, self._last = self._partial.space.take(numbers), self._last, None
        if self.spoilt:
            self._partial.let_go()  # what has left may still be on its way out of this memory
        else:
            last.end(one)
        self._exchange.give(void=self.spoilt)
        return not self.spoilt
