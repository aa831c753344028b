"""Parameters stay as they are in the loop over `session.share(...)`, and so do buffers that cannot be summed.

A forward that writes to one does so as often as a worker has microbatches, and how many that are is another matter tomorrow.
Most writes show in a tensor's version counter; through `.data`, as codebooks and teachers that follow are often written,
they do not. So values are looked at, as one number for each parameter: in the steps 0, 1, 3, 7, ... of a worker.
"""

from collections.abc import Mapping, Sequence

import torch

from agent.errors import Misuse
from agent.tensors.away import is_away
from agent.tensors.shards import in_a_row
from agent.tensors.sums import is_summed

WORD = 8  # bytes are added in words


def version_of(tensor: torch.Tensor) -> int:
    """Another one when somebody has written to it. What was made in inference mode counts nothing."""
    return int(_sum(tensor)) if tensor.is_inference() else tensor._version


class Still:
    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._tensors: Mapping[str, torch.Tensor] = {
            name: tensor
            for model in models
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if isinstance(tensor, torch.nn.Parameter) or not is_summed(tensor)
        }
        self._steps = -1
        self._before: dict[str, int] = {}

    def step(self) -> None:
        """One begins."""
        self._steps += 1

    def begin(self) -> None:
        """Nothing but forwards and backwards will be from here on."""
        self._before = self._marks() if self._steps & (self._steps + 1) == 0 else {}

    def forget(self) -> None:
        """What is here has come from others."""
        self._before = {}

    def check(self, step: int) -> None:
        now = self._marks() if self._before else {}
        for name, mark in self._before.items():
            if now.get(name, mark) != mark:
                raise Misuse(f"step {step}: {self._what(name)}")
        self._before = {}

    def _what(self, name: str) -> str:
        tensor = self._tensors[name]
        if isinstance(tensor, torch.nn.Parameter):
            return (
                f"the parameter {name!r} is written to in the loop over session.share(...), where every "
                "worker has other microbatches: write to it behind the loop, or make it a buffer "
                "(register_buffer), of which each microbatch sees the step's start"
            )
        return (
            f"the buffer {name!r} of {tensor.dtype} is written to in the loop over session.share(...), and what several "
            "microbatches make of such a buffer is not known: make it torch.bool if it is a flag, torch.int64 if it "
            "counts, torch.float32 if it is an average, or write to it behind the loop"
        )

    def _marks(self) -> dict[str, int]:
        found = {name: _sum(each) for name, each in self._tensors.items() if not is_away(each)}
        return (
            dict(zip(found, torch.stack([*found.values()]).tolist(), strict=True)) if found else {}
        )


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Of its words."""
    raw = in_a_row(tensor)
    if raw.storage_offset() % WORD:
        raw = raw.clone()
    whole = raw.numel() // WORD * WORD
    return raw[:whole].view(torch.int64).sum() + raw[whole:].sum()
