"""Which layers of the state are here. A worker of a deep layout may keep those of its own stages only.

What is not here has its name, its shape and no memory: see `agent.tensors.away`. What a model that was handed over unbuilt
has not got yet is away from the start; it can be born as long as no step has changed it.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from agent.owned.averages import Averages
from agent.owned.gradients import Gradients
from agent.pipeline.births import Unborn
from agent.store.layers import block_of, collect
from agent.tensors.away import is_away, nothing
from agent.tensors.naming import Models, named_buffers, named_parameters
from agent.tensors.shards import Stateful
from agent.tensors.sums import Norm


class Holdings:
    """The layers of a session's objects. `here` is None as long as all of them are here."""

    def __init__(
        self,
        objects: Mapping[str, Stateful],
        unborn: Sequence[Unborn[torch.nn.Module]] = (),
    ) -> None:
        self._objects, self._unborn = objects, unborn
        self._params: dict[str, list[torch.nn.Parameter]] = defaultdict(list)
        self.layer_of: dict[int, str] = {}  # by the identity of parameters and buffers
        self._strides: dict[int, tuple[int, ...]] = {}  # by the identity of parameters
        self._note({k: v for k, v in objects.items() if isinstance(v, torch.nn.Module)})
        self.here: frozenset[str] | None = None
        self.gradients, self._averages = Gradients(objects, self._is_here), Averages(objects)
        # Whether gradients say nothing, because the job went on without this worker.
        self.astray: Callable[[], bool] = lambda: False
        self.borrowed: frozenset[str] = frozenset()  # here for the script to look at
        self._all: frozenset[str] = frozenset()
        self._counted = 0
        self._bearable: dict[str, list[torch.nn.Parameter]] = defaultdict(list)
        for param in [param for each in unborn for param in each.params]:
            self._bearable[self.layer_of[id(param)]].append(param)
        if unborn:
            self.here = self.all - self._bearable.keys()

    def _note(self, models: Models) -> None:
        for name, param in named_parameters(models).items():
            self._params[block_of(name)].append(param)
            self._strides[id(param)] = param.stride()
            self.layer_of.setdefault(id(param), block_of(name))
        for name, buffer in named_buffers(models).items():
            self.layer_of.setdefault(id(buffer), block_of(name))

    @property
    def all(self) -> frozenset[str]:
        if self._counted != len(self._objects):
            self._all = frozenset(collect(self._objects).sizes())
            self._counted = len(self._objects)
        return self._all

    def _is_here(self, param: torch.Tensor) -> bool:
        """For good, and not just borrowed."""
        return self.here is None or self.layer_of.get(id(param)) in self.here

    def lacking(self, wanted: Collection[str]) -> frozenset[str]:
        return frozenset() if self.here is None else frozenset(wanted) - self.here

    def make_room(self, layers: Collection[str]) -> None:
        """Memory for what will be filled."""
        for layer in layers:
            for param in self._params.get(layer, ()):
                if is_away(param):
                    param.data = self._room(param)

    def _room(self, param: torch.nn.Parameter) -> torch.Tensor:
        """As it lay before: kernels are chosen by that, and round otherwise. One that was not here yet had no place."""
        strides = self._strides[id(param)]
        if not any(strides):
            strides = torch.empty(param.shape, device="meta").stride()
        return torch.empty_strided(param.shape, strides, dtype=param.dtype, device=param.device)

    def bear(self, layers: Collection[str]) -> None:
        """Initial values for those of these layers that have none."""
        wanted = [param for layer in layers for param in self._bearable.get(layer, ())]
        for each in self._unborn:
            each.bear(wanted)

    def unbear(self, but: frozenset[str]) -> None:
        """Let go of whatever can be born again, but for these layers."""
        going = self._bearable.keys() - but
        for param in [param for layer in going for param in self._bearable[layer]]:
            if not is_away(param):
                param.data = nothing(param)
        self.here = (self.all if self.here is None else self.here) - going
        self.borrowed -= going

    def arrived(self, layers: Collection[str]) -> None:
        if self.here is not None:
            self.here |= frozenset(layers)
            if self.here >= self.all:
                self.here = None

    def borrow(self, layers: frozenset[str]) -> None:
        self.borrowed |= layers
        self.make_room(layers)

    def give_back(self) -> None:
        """What was looked at is of one version only."""
        if self.borrowed and self.here is not None:
            self.keep(self.here)

    def keep(self, layers: frozenset[str]) -> None:
        """Let go of everything else."""
        if layers != self.here:
            self.gradients.forget_weights()
        self.here, self.borrowed = layers, frozenset()
        optimizers = [o for o in self._objects.values() if isinstance(o, torch.optim.Optimizer)]
        for layer, params in self._params.items():
            if layer in layers:
                continue
            for param in params:
                param.grad = None
                for optimizer in optimizers:
                    optimizer.state.pop(param, None)
                if param.numel() > 1 and not is_away(param):
                    param.data = nothing(param)
                elif param.numel() == 1 and not self._unborn:  # which are born with one number
                    param.data = torch.empty_like(param.data).copy_(nothing(param))

    def begin(self) -> None:
        """A phase begins: there are no gradients yet."""
        self.gradients.check_weights()
        self.gradients.begin()

    def hear(self, norms: dict[int, Norm], added: Collection[int] = ()) -> None:
        """Gradients of these norms are in the parameters; none if all are here.

        `added` are the identities of parameters whose gradients have an earlier phase's in them.
        """
        self.gradients.hear(norms, added)
        if self.here is not None:
            self._averages.begin()

    def check(self, step: int) -> None:
        """The step is over: refuse what the script has made of a part of the layers."""
        if self.here is not None:
            self.gradients.check_weights()
            self._averages.check(step)

    def forget(self) -> None:
        """What is here is about to come from other workers."""
        self.gradients.forget_weights()
        self._averages.forget()
