"""Search the graph of a loss for parameters that are trained and not registered."""

import weakref
from collections.abc import Container, Iterator
from typing import Any

import torch

from agent.errors import Misuse

NODES_MAX = 100_000
LOOKS = 8
REGISTER = "give its module to Session(...)"


def leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that a backward of `loss` gives gradients to.

    Only the first 100,000 nodes of its graph are searched.
    """
    if loss.grad_fn is None:
        yield from (loss,) if loss.requires_grad else ()
        return
    found, waiting = {loss.grad_fn}, [loss.grad_fn]
    while waiting and len(found) < NODES_MAX:
        node: Any = waiting.pop()
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            yield leaf
        for after, _ in node.next_functions:
            if after is not None and after not in found:
                found.add(after)
                waiting.append(after)


class Outside:
    """The tensors outside of all registered modules that losses have gradients for.

    A network that only measures a loss stays unchanged, and a tensor that `loss_of` made is gone by
    the next step. A tensor that is still there and was written to is trained, by an optimizer that
    was not registered or by hand.
    """

    def __init__(self, known: Container[int]) -> None:
        self._known = known
        self._looks = 0
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def look(self, loss: torch.Tensor) -> None:
        """Note such tensors of a loss, once per phase before its backward.

        Its graph is searched the first times, and then rarely.
        """
        self._looks += 1
        if self._looks > LOOKS and self._looks & (self._looks - 1):
            return
        for leaf in leaves(loss):
            if id(leaf) not in self._known and not leaf.is_inference():
                self._found[id(leaf)] = weakref.ref(leaf), leaf._version

    def check(self, step: int) -> None:
        """Refuse a tensor that was trained, at the end of a step."""
        for number, (found, version) in [*self._found.items()]:
            leaf = found()
            if leaf is None:
                del self._found[number]
            elif leaf._version != version:
                kind = "parameter" if isinstance(leaf, torch.nn.Parameter) else "tensor"
                raise Misuse(
                    f"step {step}: a {kind} of shape {[*leaf.shape]} is trained that is in no registered module, so it "
                    f"would be in no sum and in no state: {REGISTER}, or put it into one, `torch.nn.ParameterList([...])`"
                )
