"""What cutting assumes of each microbatch because it was so of the one that was looked at.

A graph is looked at once, and what a call does may depend on shapes or values. Nothing is drawn at a
rate of 0, or where a mask is empty; `contiguous()` is a copy of three rows and no copy of one. So
each stage compares what it has computed with what was found out, and refuses what is different.
"""

from collections.abc import Sequence

import torch

from agent.errors import CannotRecord
from agent.pipeline.stages.stage_parts import Piece
from agent.tensors.device import PythonStreams, stream_state
from agent.tensors.unchanged import version_of


class Assumptions:
    """What is to be compared once a piece has computed a microbatch of these inputs."""

    def __init__(self, piece: Piece, inputs: Sequence[object]) -> None:
        self._piece = piece
        tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
        self._versions = [(tensor, version_of(tensor)) for tensor in tensors]
        self._stream = None if piece.draws else stream_state(piece.device)
        self._others = PythonStreams() if piece.foreign else None

    def check(self, names: Sequence[str], sent: Sequence[torch.Tensor]) -> None:
        """Compare, where the piece has computed these tensors for the next one."""
        if self._stream is not None and not torch.equal(
            self._stream, stream_state(self._piece.device)
        ):
            raise _unlike("draws random numbers, which it", "draw them for every microbatch")
        if self._others is not None and self._others.moved:
            raise _unlike(
                "draws from Python's or numpy's random stream, which it", "draw from torch"
            )
        if any(version_of(tensor) != version for tensor, version in self._versions):
            raise _unlike("writes into what another stage has as well, which it", "write to a copy")
        differentiable = self._piece.after.differentiable
        learning = {id(t) for name, t in zip(names, sent, strict=True) if name in differentiable}
        if any(tensor.requires_grad and id(tensor) not in learning for tensor in sent):
            raise _unlike(
                "gives a value gradients, which it", "let the same values learn in every microbatch"
            )


def _unlike(what: str, instead: str) -> CannotRecord:
    return CannotRecord(
        f"the forward of a microbatch {what} did not where it was looked at, and stages were cut by that: {instead}, "
        "or train with depth 1"
    )
