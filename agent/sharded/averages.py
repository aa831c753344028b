"""What a script keeps that follows the weights: a copy, an average, a teacher.

The weights of other workers' layers are not-a-number here (`agent.tensors.absent`), and so is what is
computed from them, which shows only when it is used. So each step is followed by a search in what
no optimizer trains: in parameters, and in other tensors that have the shape of an absent parameter
or of all parameters in a row. Anything else computed from weights differs between workers that keep
different layers, so the comparison of their states finds it.
"""

from collections.abc import Iterator, Mapping

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from agent.errors import Misuse
from agent.sharded.gradients import params_of
from agent.sharded.refusals import AVERAGE
from agent.tensors.absent import is_none
from agent.tensors.layer_names import named_buffers, named_parameters
from agent.tensors.shards import Stateful


class Averages:
    def __init__(self, objects: Mapping[str, Stateful]) -> None:
        self._objects = objects
        self._models = {k: v for k, v in objects.items() if isinstance(v, torch.nn.Module)}
        self._before: set[str] | None = None  # what was not-a-number already

    def begin(self) -> None:
        """Note what is not-a-number before the script may use weights that are elsewhere."""
        if self._before is None:
            self._before = set(self._broken())

    def forget(self) -> None:
        """Forget what was noted, because the present values come from other workers."""
        self._before = None

    def check(self, step: int) -> None:
        if self._before is None:
            return
        if broken := sorted(set(self._broken()) - self._before):
            raise Misuse(
                f"step {step}: {broken[0]} has become not-a-number. It takes in weights one by one, and {AVERAGE}"
            )

    def _broken(self) -> Iterator[str]:
        params, trained = named_parameters(self._models), set[int]()
        shapes = {param.shape for param in params.values() if is_none(param)}
        shapes.add(torch.Size([sum(param.numel() for param in params.values())]))
        kept: dict[str, torch.Tensor] = {n: p for n, p in params.items() if not is_none(p)}
        kept |= named_buffers(self._models)
        for key, thing in self._objects.items():
            if isinstance(thing, torch.optim.Optimizer):
                trained |= {id(param) for param in params_of(thing)}
            elif key not in self._models:
                leaves = tree_flatten_with_path(thing.state_dict())[0]
                kept |= {key + keystr(p): t for p, t in leaves if isinstance(t, torch.Tensor)}
        for name, tensor in kept.items():
            follows = isinstance(tensor, torch.nn.Parameter) or tensor.shape in shapes
            if follows and id(tensor) not in trained and bool(tensor.isnan().any()):
                yield name
