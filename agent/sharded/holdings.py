"""Which layers are here. A worker of a deep layout may keep only those of its stages.

A layer that is not here has its name, its shape and no memory: see `agent.tensors.absent`. The layers
of an unbuilt model are away from the start; they can be born as long as no step has changed them.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from agent.pipeline.deferred.initial_values import Unborn
from agent.sharded.averages import Averages
from agent.sharded.gradients import Gradients
from agent.store.layers import block_of, collect
from agent.tensors.absent import is_away, nothing
from agent.tensors.layer_names import Models, named_buffers, named_modules, named_parameters
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
        # Buffers that are in no layer, but with the flags that are alike on all workers.
        self.unsaved = set[int]()
        self._strides: dict[int, tuple[int, ...]] = {}  # by the identity of parameters
        self._note({k: v for k, v in objects.items() if isinstance(v, torch.nn.Module)})
        self.here: frozenset[str] | None = None
        self.gradients, self._averages = Gradients(objects, self._is_here), Averages(objects)
        # Whether gradients are meaningless, because the job went on without this worker.
        self.astray: Callable[[], bool] = lambda: False
        self.borrowed: frozenset[str] = frozenset()  # here only for the script to look at
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
        for module in named_modules(models).values():
            self.unsaved |= {
                id(module._buffers.get(key)) for key in module._non_persistent_buffers_set
            }

    @property
    def all(self) -> frozenset[str]:
        if self._counted != len(self._objects):
            self._all = frozenset(collect(self._objects).sizes())
            self._counted = len(self._objects)
        return self._all

    def _is_here(self, param: torch.Tensor) -> bool:
        """Return whether this worker keeps the parameter, and has not just borrowed it."""
        return self.here is None or self.layer_of.get(id(param)) in self.here

    def lacking(self, wanted: Collection[str]) -> frozenset[str]:
        return frozenset() if self.here is None else frozenset(wanted) - self.here

    def make_room(self, layers: Collection[str]) -> None:
        """Allocate memory for layers that will be filled."""
        for layer in layers:
            for param in self._params.get(layer, ()):
                if is_away(param):
                    param.data = self._room(param)

    def _room(self, param: torch.nn.Parameter) -> torch.Tensor:
        """Allocate with the earlier strides, because kernels depend on them and round differently.

        A parameter that was not here yet gets the usual strides.
        """
        strides = self._strides[id(param)]
        if not any(strides):
            strides = torch.empty(param.shape, device="meta").stride()
        return torch.empty_strided(param.shape, strides, dtype=param.dtype, device=param.device)

    def bear(self, layers: Collection[str]) -> None:
        """Give those of these layers that have no values their initial values."""
        wanted = [param for layer in layers for param in self._bearable.get(layer, ())]
        for each in self._unborn:
            each.bear(wanted)

    def unbear(self, but: frozenset[str]) -> None:
        """Drop all layers that can be born again, except `but`."""
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
        """Drop borrowed layers, because they are of one version only."""
        if self.borrowed and self.here is not None:
            self.keep(self.here)

    def keep(self, layers: frozenset[str]) -> None:
        """Drop all other layers."""
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
                elif param.numel() == 1 and not self._unborn:  # unborn models keep single numbers
                    param.data = torch.empty_like(param.data).copy_(nothing(param))

    def begin(self) -> None:
        """Begin a phase, in which there are no gradients yet."""
        self.gradients.check_weights()
        self.gradients.begin()

    def hear(self, norms: dict[int, Norm], added: Collection[int] = ()) -> None:
        """Note that gradients with these norms are in the parameters; no norms if all are here.

        `added` are the identities of parameters whose gradients contain an earlier phase's.
        """
        self.gradients.hear(norms, added)
        if self.here is not None:
            self._averages.begin()

    def check(self, step: int) -> None:
        """End the step, refusing what the script has computed from a part of the layers."""
        if self.here is not None:
            self.gradients.check_weights()
            self._averages.check(step)

    def forget(self) -> None:
        """Forget what was noted, because other values are about to come from other workers."""
        self.gradients.forget_weights()
        self._averages.forget()
