"""A worker's report of its steps, so that others can compare: see `agent.keeper.proofs`."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
import torch

from agent.proof.digest import Rotation, Size, Tensors, digests
from agent.protocol import Computed, Digest, Reached
from agent.store.encoding.format import REST
from agent.store.layers import Collected, block_of

GRADIENTS_BYTES, GRADIENTS_MAX = 2 << 20, 32
STATE_BYTES, STATE_MAX = 1 << 19, 8  # of the parameters; optimizers keep as much again, or twice
WHOLE_BYTES, WHOLE_MAX = 1 << 25, 1 << 10


class _ByLayer:
    """The names of some tensors by their layers, and the layers that are looked at in a step."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.names: dict[str, list[str]] = defaultdict(list)
        for name in tensors:
            self.names[block_of(name)].append(name)
        self.sizes = {
            layer: Size(sum(tensors[name].nbytes for name in names), len(names))
            for layer, names in self.names.items()
        }
        self._some = Rotation(self.sizes, GRADIENTS_BYTES, GRADIENTS_MAX)
        self.whole = Rotation(self.sizes, WHOLE_BYTES, WHOLE_MAX)

    def looked_at(
        self, script_step: int, found: Mapping[str, torch.Tensor | None], *, whole: bool
    ) -> dict[str, Tensors]:
        rotation = self.whole if whole else self._some
        return {
            layer: [found[name] for name in self.names[layer]]
            for layer in rotation.at(script_step)
            if all(name in found for name in self.names[layer])
        }


class Samples:
    """The digests of one session.

    `machine` says how this worker rounds; it is empty if its kernels are not deterministic.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        machine: str,
        buffers: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self.machine = machine
        self._params, self._buffers = _ByLayer(params), _ByLayer(buffers)
        self._state = Rotation(self._params.sizes, STATE_BYTES, STATE_MAX)

    def layers(
        self, script_step: int, gradients: Mapping[str, torch.Tensor | None], *, whole: bool = False
    ) -> dict[str, Tensors]:
        """Return the gradients, by the names of parameters, that are looked at, by layers.

        A layer is looked at if all of its parameters are among them. `whole` looks at as many
        layers as may be: in the step after a snapshot, and on a worker that is asked to prove
        itself.
        """
        return self._params.looked_at(script_step, gradients, whole=whole)

    def written(
        self, script_step: int, buffers: Mapping[str, torch.Tensor | None], *, whole: bool = False
    ) -> dict[str, Tensors]:
        """Return what a forward has left in the buffers that are looked at, in the same way."""
        return self._buffers.looked_at(script_step, buffers, whole=whole)

    def computed(
        self,
        at: tuple[int, int, int],
        batch: Digest,
        loss: float | None,
        layers: Mapping[str, Tensors],
        written: Mapping[str, Tensors] = MappingProxyType({}),
    ) -> Computed:
        """Return what became of a microbatch that began with `batch`.

        `at` is its version, its step of the script, and its number. `layers` are its gradients.
        """
        version, script_step, microbatch = at
        return Computed(
            version=version,
            microbatch=microbatch,
            batch=batch,
            loss=loss,
            gradients=digests(layers, script_step),
            written=digests(written, script_step),
            machine=self.machine,
        )

    def reached(
        self, version: int, script_step: int, state: Collected, *, whole: bool = False
    ) -> Reached:
        """Return the state at the boundary before `script_step`, by layers.

        What belongs to no layer is listed object by object, by its name.
        """
        rotation = self._params.whole if whole else self._state
        looked, odd = frozenset(rotation.at(script_step)), list[Digest]()
        layers: dict[str, list[torch.Tensor]] = defaultdict(list)
        told: dict[str, list[object]] = defaultdict(list)
        for name, tensors, values in state.contents():
            if name == REST:
                odd += _apart(tensors, values)
            elif name in looked or name not in self._params.names:
                layers[name] += tensors
                told[name].append(values)
        marks = digests(layers, script_step)
        found = (_joined(mark, told[mark.name]) for mark in marks)
        return Reached(version=version, layers=(*found, *odd), machine=self.machine)


def _joined(mark: Digest, told: list[object]) -> Digest:
    return Digest(mark.name, mark.bits ^ _words(told), mark.norms)


def _words(told: object) -> int:
    """Digest the plain values of a state."""
    said = hashlib.blake2b(msgspec.json.encode(told), digest_size=8)
    return int.from_bytes(said.digest(), "little")


def _apart(tensors: list[torch.Tensor], values: Mapping[str, object]) -> list[Digest]:
    """Digest each object that is not a module, so that it shows which one differs."""
    (mark,) = digests({REST: tensors})
    found = [Digest(name, _words(value)) for name, value in values.items()]
    return [mark, *found] if tensors else found
