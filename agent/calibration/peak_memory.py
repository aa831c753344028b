"""The memory of a section at its fullest moment: what it keeps and what it works with.

Every storage that an operator makes is counted for as long as it is alive. That is the same on
every device, and does not ask the allocator, which may keep what has been freed.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agent.pipeline.stages.channel import Parcel
from agent.pipeline.stages.stage import Stage
from agent.pipeline.stages.stage_parts import Piece


class Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of living storages made inside, and the most that there were at any time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_bytes, self.most_bytes = 0, 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if id(storage) not in known and storage not in self._seen:
                self._seen.add(storage)
                weakref.finalize(storage, self._gone, storage.nbytes())
                self.now_bytes += storage.nbytes()
        self.most_bytes = max(self.most_bytes, self.now_bytes)
        return made

    def _gone(self, size_bytes: int) -> None:
        self.now_bytes -= size_bytes


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def most_bytes(piece: Piece, arrived: Parcel | None, example: Sequence[Any]) -> float:
    """Return the most bytes in a forward and backward, with the parameters' gradients."""
    living, stage = Living(), Stage(piece, microbatches=1)
    piece.module.zero_grad(set_to_none=True)
    with living:
        out = stage.forward(0, arrived, example)
        stage.backward(0, None if piece.last else stage.ones_for(out))
    stage.release(0)
    stage.clear()
    piece.module.zero_grad(set_to_none=True)
    return float(living.most_bytes)
