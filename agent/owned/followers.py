"""What a script keeps that follows the weights: a copy, an average, a teacher.

Where each worker keeps its own layers only, the weights of the others are not-a-number here (`agent.tensors.away`), and so becomes
what is made of them, which nobody sees before it is used. So it is looked for behind each step, in whatever is in
the state and no optimizer trains.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from agent.errors import Misuse
from agent.owned.coupling import ROOM
from agent.store import values
from agent.tensors.away import is_none
from agent.tensors.shards import Stateful

WRITTEN = "more than one element of the written-to tensor refers to a single memory location"


def writes_away(error: BaseException) -> bool:
    """What torch says of who writes to a parameter that is not here."""
    return isinstance(error, RuntimeError) and WRITTEN in str(error)


class Followers:
    def __init__(self, objects: Mapping[str, Stateful]) -> None:
        self._modules = {k: v for k, v in objects.items() if isinstance(v, torch.nn.Module)}
        optimizers = [o for o in objects.values() if isinstance(o, torch.optim.Optimizer)]
        trained = {
            id(param)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for param in group["params"]
        }
        self._untrained = {
            f"{key}/{name}": param
            for key, module in self._modules.items()
            for name, param in module.named_parameters()
            if id(param) not in trained
        }
        self._others = {
            key: thing
            for key, thing in objects.items()
            if not isinstance(thing, torch.nn.Module | torch.optim.Optimizer)
        }
        self._before: set[str] | None = None  # what was not-a-number anyway
        self._due = False

    def begin(self) -> None:
        """From here on the script may use weights that are not here."""
        if self._before is None:
            self._before = set(self._broken())
        self._due = True

    def forget(self) -> None:
        """What is here has come from others."""
        self._before, self._due = None, False

    def check(self, step: int) -> None:
        """Once behind each step that has begun."""
        if not self._due or self._before is None:
            return
        self._due = False
        for name in self._broken():
            if name not in self._before:
                raise Misuse(
                    f"step {step}: {name} has become not-a-number. It takes in weights one by one, {ROOM}"
                )

    def _broken(self) -> Iterator[str]:
        for name, tensor in self._following():
            # The sum says it in one pass; of large numbers it is infinite as well.
            if not bool(tensor.sum().isfinite()) and bool(tensor.isnan().any()):
                yield name

    def _following(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, param in self._untrained.items():
            if not is_none(param):
                yield name, param.detach()
        kept = dict(self._kept())
        like = self._shapes() if kept else set()
        yield from ((name, tensor) for name, tensor in kept.items() if tensor.shape in like)

    def _kept(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is no parameter, and may be made of some."""
        for key, module in self._modules.items():
            yield from ((f"{key}/{name}", buffer) for name, buffer in module.named_buffers())
        for key, thing in self._others.items():
            yield from _tensors(thing.state_dict(), key).items()

    def _shapes(self) -> set[torch.Size]:
        """Of what is not here, and of all weights in one row."""
        found = set()
        for module in self._modules.values():
            params = list(module.parameters())
            found |= {param.shape for param in params if is_none(param)}
            found.add(torch.Size([sum(param.numel() for param in params)]))
        return found


def _tensors(state: Any, key: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def keep(path: str, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            found[path] = value.detach()
        return path in found

    values.strip(state, key, keep)
    return found
