"""A worker's report of its steps, so that others can compare: see `agent.keeper.proofs`."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping

import msgspec
import torch

from agent.proof.digest import Rotation, Size, Tensors, digests
from agent.protocol import Computed, Digest, Reached
from agent.store.encoding.format import REST
from agent.store.layers import Collected, block_of

GRADIENTS_BYTES, GRADIENTS_MAX = 2 << 20, 32
STATE_BYTES, STATE_MAX = 1 << 19, 8  # of the parameters; optimizers keep as much again, or twice
WHOLE_BYTES, WHOLE_MAX = 1 << 25, 1 << 10


class Samples:
    """The digests of one session.

    `machine` says how this worker rounds; it is empty if its kernels are not deterministic.
    """

    def __init__(self, params: Mapping[str, torch.Tensor], machine: str) -> None:
        self.machine = machine
        self._layers: dict[str, list[str]] = defaultdict(list)
        for name in params:
            self._layers[block_of(name)].append(name)
        sizes = {
            layer: Size(sum(params[name].nbytes for name in names), len(names))
            for layer, names in self._layers.items()
        }
        self._gradients = Rotation(sizes, GRADIENTS_BYTES, GRADIENTS_MAX)
        self._state = Rotation(sizes, STATE_BYTES, STATE_MAX)
        self._whole = Rotation(sizes, WHOLE_BYTES, WHOLE_MAX)

    def layers(
        self, script_step: int, gradients: Mapping[str, torch.Tensor | None], *, whole: bool = False
    ) -> dict[str, Tensors]:
        """Return the gradients, by the names of parameters, that are looked at, by layers.

        A layer is looked at if all of its parameters are among them. `whole` looks at as many
        layers as may be: in the step after a snapshot, and on a worker that is asked to prove
        itself.
        """
        rotation = self._whole if whole else self._gradients
        return {
            layer: [gradients.get(name) for name in self._layers[layer]]
            for layer in rotation.at(script_step)
            if all(name in gradients for name in self._layers[layer])
        }

    def computed(
        self,
        at: tuple[int, int, int],
        batch: Digest,
        loss: float | None,
        layers: Mapping[str, Tensors],
    ) -> Computed:
        """Return what became of a microbatch that began with `batch`.

        `at` is its version, its step of the script, and its number.
        """
        version, script_step, microbatch = at
        return Computed(
            version=version,
            microbatch=microbatch,
            batch=batch,
            loss=loss,
            gradients=digests(layers, script_step),
            machine=self.machine,
        )

    def reached(
        self, version: int, script_step: int, state: Collected, *, whole: bool = False
    ) -> Reached:
        """Return the state at the boundary before `script_step`, by layers.

        What belongs to no layer is listed object by object, by its name.
        """
        rotation = self._whole if whole else self._state
        looked, odd = frozenset(rotation.at(script_step)), list[Digest]()
        layers: dict[str, list[torch.Tensor]] = defaultdict(list)
        told: dict[str, list[object]] = defaultdict(list)
        for name, tensors, values in state.contents():
            if name == REST:
                odd += _apart(tensors, values)
            elif name in looked or name not in self._layers:
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
