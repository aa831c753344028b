"""Parameters stay as they are in the loop over `session.share(...)`.

A forward that writes to one does so as often as a worker has microbatches, and how many that are is another matter tomorrow.
Most writes show in a tensor's version counter; through `.data`, as codebooks and teachers that follow are often written,
they do not. So values are looked at, as one number for each parameter: in the steps 0, 1, 3, 7, ... of a worker.
"""

from collections.abc import Mapping, Sequence

import torch

from agent.away import is_away
from agent.errors import Misuse

WORD = 8  # bytes are added in words


def version_of(tensor: torch.Tensor) -> int:
    """Another one when somebody has written to it. What was made in inference mode counts nothing."""
    return int(_sum(tensor)) if tensor.is_inference() else tensor._version


class Still:
    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._params: Mapping[str, torch.Tensor] = {
            name: param for model in models for name, param in model.named_parameters()
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
                raise Misuse(
                    f"step {step}: the parameter {name!r} is written to in the loop over session.share(...), where every "
                    "worker has other microbatches: write to it behind the loop, or make it a buffer "
                    "(register_buffer), of which each microbatch sees the step's start"
                )
        self._before = {}

    def _marks(self) -> dict[str, int]:
        found = {name: _sum(each) for name, each in self._params.items() if not is_away(each)}
        return (
            dict(zip(found, torch.stack([*found.values()]).tolist(), strict=True)) if found else {}
        )


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Of its words."""
    raw = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    if raw.storage_offset() % WORD:
        raw = raw.clone()
    whole = raw.numel() // WORD * WORD
    return raw[:whole].view(torch.int64).sum() + raw[whole:].sum()
