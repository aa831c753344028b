"""What a script keeps that follows the weights: a copy, an average, a teacher.

Where each worker keeps its own layers only, the weights of the others are not-a-number here (`agent.away`), and so becomes
what is made of them, which nobody sees before it is used. So it is looked for behind each step, in whatever is in
the state and no optimizer trains.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from agent.away import is_away
from agent.coupling import ROOM
from agent.errors import Misuse
from agent.shards import Stateful
from agent.store import values

WRITTEN = "more than one element of the written-to tensor refers to a single memory location"


def writes_away(error: BaseException) -> bool:
    """What torch says of who writes to a parameter that is not here."""
    return isinstance(error, RuntimeError) and WRITTEN in str(error)


class Followers:
    def __init__(self, objects: Mapping[str, Stateful]) -> None:
        self._objects = objects
        self._trained = {
            id(param)
            for thing in objects.values()
            if isinstance(thing, torch.optim.Optimizer)
            for group in thing.param_groups
            for param in group["params"]
        }
        self._before: set[str] | None = None  # what was not-a-number anyway

    def begin(self) -> None:
        """From here on the script may use weights that are not here."""
        if self._before is None:
            self._before = set(self._broken())

    def forget(self) -> None:
        """What is here has come from others."""
        self._before = None

    def check(self, step: int) -> None:
        broken = [] if self._before is None else list(self._broken())
        for name in broken:
            if name not in (self._before or ()):
                raise Misuse(
                    f"step {step}: {name} has become not-a-number. It takes in weights one by one, {ROOM}"
                )

    def _broken(self) -> Iterator[str]:
        for name, tensor in self._following():
            total = tensor.sum()
            if not bool(total.isfinite()) and bool(tensor.isnan().any()):
                yield name

    def _following(self) -> Iterator[tuple[str, torch.Tensor]]:
        modules = {k: v for k, v in self._objects.items() if isinstance(v, torch.nn.Module)}
        away = [p for each in modules.values() for p in each.parameters() if is_away(p)]
        like = {each.shape for each in away} | {
            torch.Size([sum(p.numel() for p in each.parameters())]) for each in modules.values()
        }
        for key, module in modules.items():
            for name, param in module.named_parameters():
                if id(param) not in self._trained and not is_away(param):
                    yield f"{key}/{name}", param.detach()
            for name, buffer in module.named_buffers():
                if buffer.shape in like:
                    yield f"{key}/{name}", buffer
        for key, thing in self._objects.items():
            if not isinstance(thing, torch.nn.Module | torch.optim.Optimizer):
                found = _tensors(thing.state_dict(), key)
                yield from ((name, each) for name, each in found.items() if each.shape in like)


def _tensors(state: Any, key: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def keep(path: str, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            found[path] = value.detach()
        return path in found

    values.strip(state, key, keep)
    return found
