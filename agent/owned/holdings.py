"""Which layers of the state are here. A worker of a deep layout may keep those of its own stages only.

What is not here has its name, its shape and no memory: see `agent.tensors.away`. What a model that was handed over unbuilt
has not got yet is away from the start; it can be born as long as no step has changed it.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import torch

from agent.errors import Misuse
from agent.owned.followers import Followers
from agent.pipeline.births import Unborn
from agent.store.layers import block_of, collect
from agent.tensors.away import is_away, nothing
from agent.tensors.device import CPU
from agent.tensors.naming import Models, named_buffers, named_parameters
from agent.tensors.shards import Stateful
from agent.tensors.sums import Norm

Mark = tuple[int, int]  # which tensor, and how often it was written to


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
        self.norms: dict[int, Norm] = {}  # of this step's gradients, wherever they are
        self._as_told: list[Mark] = []  # the gradients here that these norms are of
        self._touched = False  # they are others now
        self._clipped: set[int] = set()  # so are those of these parameters, wherever they are
        self.astray = False  # there are no gradients, for the job went on without this worker
        self.borrowed: frozenset[str] = frozenset()  # here for the script to look at
        self.followers = Followers(objects)  # of weights that may not be here
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

    def hear(self, norms: dict[int, Norm]) -> None:
        """Norms of the gradients as they are now."""
        self.norms, self._touched, self._clipped = norms, False, set()
        self._as_told = self._marks()

    def _marks(self) -> list[Mark]:
        params = [param for layer in self._params.values() for param in layer] if self.norms else []
        return [(id(p.grad), p.grad._version) for p in params if p.grad is not None]

    @contextmanager
    def ours(self) -> Iterator[None]:
        """What becomes of gradients in here is known of their norms."""
        self._touched |= self._marks() != self._as_told
        yield
        self._as_told = self._marks()

    def clip(self, params: Collection[torch.Tensor]) -> None:
        self._clipped |= {id(param) for param in params}

    def unscale(self, params: Collection[torch.Tensor]) -> None:
        """The scaler has taken its scale out of these gradients."""
        for param in params:
            known = self.norms[id(param)]
            self.norms[id(param)] = msgspec.structs.replace(known, norm=known.unscaled)

    def norm(self, params: Collection[torch.Tensor], norm_type: float) -> torch.Tensor:
        """The norm of all gradients, whoever has them: the bits that one process would have, or none."""
        if norm_type != 2.0:
            raise Misuse(
                f"clip_grad_norm_(norm_type={norm_type}): where each worker keeps its own layers only, the "
                "norm of the gradients is known for norm_type=2"
            )
        if self._touched or any(id(param) in self._clipped for param in params):
            raise Misuse(
                "clip_grad_norm_(...): where each worker keeps its own layers only, the norm is known of the gradients as "
                "they come out of session.share(...), and something has changed them since: clip by the norm once, and "
                "do what else changes gradients behind it"
            )
        known = [self.norms[id(param)].norm for param in params if id(param) in self.norms]
        first = next(iter(params), None)
        dtype, device = (torch.float32, CPU) if first is None else (first.dtype, first.device)
        norms = torch.tensor(known, dtype=dtype, device=device)
        total: torch.Tensor = torch.linalg.vector_norm(norms)
        return total
