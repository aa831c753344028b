"""Check that `loss_of` leaves parameters unchanged, and buffers that cannot be summed.

A forward that writes to one does so once per microbatch of its worker, and the number of these
depends on the layout. Most writes show in a tensor's version counter, but writes through `.data` do
not, and codebooks and averaged teachers are often written so. So the values are compared, as one
number for each parameter, in the steps 0, 1, 3, 7, ... of a worker. They are also compared between the
start of a step, or of an epoch, and its first phase, because other workers may read the state there.
"""

from collections.abc import Mapping

import torch

from agent.errors import Misuse
from agent.tensors.absent import is_away
from agent.tensors.layer_names import (
    Models,
    named_buffers,
    named_modules,
    named_parameters,
    prefixes,
)
from agent.tensors.shards import in_a_row
from agent.tensors.sums import is_summed

# Bytes are added in words.
WORD = 8


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that changes when the tensor is written to.

    A tensor made in inference mode does not count writes, so its values are summed.
    """
    if not tensor.is_inference():
        return tensor._version
    with torch._C.DisableTorchFunction():  # a loss that is being recorded does not ask for it
        return int(_sum(tensor))


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number that tensors have in common which lie in one memory."""
    return int(tensor.untyped_storage()._cdata)


def seldom(count: int) -> bool:
    """Return whether values are compared in a step, or an epoch, that so many came before."""
    return count & (count + 1) == 0


class Still:
    """The values of parameters and unsummable buffers, compared over a phase."""

    def __init__(self, models: Models) -> None:
        self._models = models
        buffers = named_buffers(models).items()
        self._tensors: Mapping[str, torch.Tensor] = {
            **named_parameters(models),
            **{name: buffer for name, buffer in buffers if not is_summed(buffer)},
        }
        self._steps = -1
        self._before: dict[str, int] = {}
        self._open: dict[str, int] = {}

    def open(self, count: int) -> None:
        """Note the values at a step's start, or an epoch's; `count` is how many there were before."""
        self._open = self._marks() if seldom(count) else {}

    def take_changed(self) -> str:
        """Return the name of what was written to since the step's start, as far as that was noted.

        It is answered once for each start.
        """
        before, self._open = self._open, {}
        now = self._marks() if before else {}
        return next((name for name, mark in before.items() if now.get(name, mark) != mark), "")

    def step(self) -> None:
        """Note that a phase begins."""
        self._steps += 1

    def begin(self) -> None:
        """Note the values; only forwards and backwards follow until the check."""
        self._before = self._marks() if seldom(self._steps) else {}

    def forget(self) -> None:
        """Forget the values, because the present ones have come from other workers."""
        self._before, self._open = {}, {}

    def check(self, step: int) -> None:
        now = self._marks() if self._before else {}
        for name, mark in self._before.items():
            if now.get(name, mark) != mark:
                raise Misuse(f"step {step}: {self._what(name)}")
        self._before = {}

    def what(self, path: str) -> str:
        """Return what is wrong if loss_of has written to the tensor saved at `path`."""
        key, _, name = path.partition("/")
        name = prefixes(self._models).get(key, "") + name
        if key in self._models and name in self._tensors:
            return self._what(name)
        return (
            f"loss_of changes {path!r}, but every worker calls it for other microbatches: change that after "
            "session.backward(...)"
        )

    def what_early(self, path: str) -> str:
        """Return what is wrong if the tensor saved at `path` was written to before backward."""
        key, _, name = path.partition("/")
        name = prefixes(self._models).get(key, "") + name if key in self._models else path
        if name in named_buffers(self._models):
            return (
                f"the buffer {name!r} was changed before session.backward(...), as a forward in train mode changes averages: "
                "call the model in loss_of only, which may return metrics beside its loss, or in eval mode; what the script "
                "sets itself, such as an observer that it turns off, belongs after session.backward(...)"
            )
        return (
            f"{name!r} was changed before session.backward(...); what changes the model or the optimizer belongs after it, at "
            "the end of an epoch and not at the start of the next; and what is tried and taken back, as a range test of the "
            "learning rate, before Session(...)"
        )

    def _what(self, name: str) -> str:
        tensor = self._tensors[name]
        for path, module in named_modules(self._models).items():
            if getattr(module, "max_norm", None) is not None and module.weight is tensor:
                return (
                    f"the forward of {path or 'the model'!r} shortens rows of its weight to max_norm={module.max_norm}, but every "
                    "worker calls it for other microbatches: leave max_norm out, and shorten them before the loop and after each "
                    f"optimizer.step(), with torch.no_grad(): weight.renorm_({module.norm_type}, 0, {module.max_norm})"
                )
        if isinstance(tensor, torch.nn.Parameter):
            return (
                f"loss_of writes to the parameter {name!r}, but every worker calls it for other microbatches: write to "
                "it after session.backward(...), or make it a buffer (register_buffer), of which each microbatch sees "
                "the value at the start of the step; what only the first batch sets, one forward before Session(...) sets"
            )
        return (
            f"loss_of writes to the buffer {name!r} of {tensor.dtype}, and it is not known how the changes of several "
            "microbatches add up in such a buffer: make it torch.bool if it is a flag, torch.int64 if it counts, "
            "torch.float32 if it is an average, or write to it after session.backward(...)"
        )

    def _marks(self) -> dict[str, int]:
        found = {name: _sum(each) for name, each in self._tensors.items() if not is_away(each)}
        return (
            dict(zip(found, torch.stack([*found.values()]).tolist(), strict=True)) if found else {}
        )


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Add up its words; a sparse tensor counts how often it was written to."""
    if tensor.layout is not torch.strided:
        return torch.tensor(tensor._version)
    raw = in_a_row(tensor)
    if raw.storage_offset() % WORD:
        raw = raw.clone()
    whole = raw.numel() // WORD * WORD
    return raw[:whole].view(torch.int64).sum() + raw[whole:].sum()
