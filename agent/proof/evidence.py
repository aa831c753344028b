"""What a worker shows of its steps, so that others can tell whether it does the same."""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import fx

from agent.errors import Misuse
from agent.net.beside import Beside
from agent.pipeline.flatten import flatten, unflatten
from agent.proof.batch import batch_of
from agent.proof.digest import Tensors
from agent.proof.graph import digest_of
from agent.proof.samples import Samples
from agent.protocol import Computed, Digest, Reached
from agent.replica import Replica
from agent.tensors.device import rounding, where
from agent.tensors.metrics import Numbers
from agent.tensors.sums import ALIGN_BYTES
from agent.tensors.unchanged import version_of

SPAN_MAX = 8  # a copy of a view takes at most so many times the view's size
# The most that two calls may differ if only their rounding differs.
NEAR = 1e-3
UNSTEADY = (
    "the same microbatch rounds differently when it is computed twice, because some kernel of this script is not "
    "deterministic here: what workers compute is compared within {:g} of it, and not bit for bit"
)

Found = Mapping[str, torch.Tensor | None]


class Staged(msgspec.Struct, frozen=True):
    """A microbatch in a stage of a pipeline, whose `gradients` are by the names of parameters.

    `written` is what it has left in buffers, which are None if it has not written to them.
    `numbers` are there if the stage is the last. `graph` is what was recorded of the loss, and
    `whole` asks for as many layers as may be.
    """

    microbatch: int
    generation: int
    stage: int
    given: object
    numbers: Numbers | None
    gradients: Found
    written: Found
    graph: fx.GraphModule
    whole: bool


class Evidence:
    """The samples of the step in flight: some microbatches, and the state at its boundary.

    What they are made from does not change before the script gets the sum of the step. So they are
    made `beside` the script's thread, if there is one, and are there when they are asked for.
    """

    def __init__(self, replica: Replica, beside: Beside | None = None) -> None:
        self._replica = replica
        space = replica.space
        device = where([*space.params.values()])
        self._samples = Samples(space.params, rounding(device), space.buffers)
        self._beside = beside if device.type == "cpu" else None
        # By microbatch and, in a pipeline, by generation and stage.
        self._computed: dict[tuple[int, ...], Computed] = {}
        self._asked: set[tuple[int, ...]] = set()
        self._reached: Reached | None = None

    @property
    def computed(self) -> tuple[Computed, ...]:
        self.settle()
        return tuple(self._computed.values())

    @property
    def reached(self) -> Reached | None:
        self.settle()
        return self._reached

    def settle(self) -> None:
        """Return when nothing is being looked at, so that it may change."""
        if self._beside is not None:
            self._beside.settle()

    def _do(self, thing: Callable[[], object]) -> None:
        if self._beside is not None:
            self._beside.do(thing)
        else:
            thing()

    def look(self, *, whole: bool = False) -> Reached:
        """Note the state that the script's step begins with."""
        self.look_beside(lambda _: None, whole=whole)
        reached = self.reached
        assert reached is not None
        return reached

    def look_beside(self, told: Callable[[Reached], None], *, whole: bool = False) -> None:
        """Note the state that the script's step begins with, and tell it."""
        replica = self._replica
        version, step, state = replica.version, replica.step, replica.collected()
        aside = replica.own_values.changed()

        def look() -> None:
            reached = self._samples.reached(version, step, state, whole=whole)
            self._reached = msgspec.structs.replace(reached, aside=aside)
            told(self._reached)

        self._do(look)

    def pass_over(self) -> None:
        """Note nothing of the state that this step begins with."""
        self._reached = None

    def begin(self) -> None:
        """Forget the microbatches of the phase before."""
        self._asked.clear()
        self._computed.clear()

    def has(self, microbatch: int) -> bool:
        return (microbatch,) in self._asked

    def sample(
        self, microbatch: int, given: object, numbers: Numbers, *, whole: bool = False
    ) -> None:
        """Note the results of a microbatch, whose gradients are in the model now."""
        space = self._replica.space
        gradients = {name: param.grad for name, param in space.params.items()}
        loss = _number(float(numbers.loss))
        self._note((microbatch,), given, loss, (gradients, space.written()), whole)

    def sample_stage(self, one: Staged) -> Computed:
        """Note the results of a microbatch in a stage, whose gradients may change afterwards."""
        loss = None if one.numbers is None else _number(float(one.numbers.loss))
        at = one.microbatch, one.generation, one.stage
        left = one.gradients, one.written
        self._note(at, one.given, loss, left, one.whole, digest_of(one.graph))
        self.settle()
        return self._computed[at]

    def _note(
        self,
        at: tuple[int, ...],
        given: object,
        loss: float | None,
        left: tuple[Found, Found],
        whole: bool,
        graph: int = 0,
    ) -> None:
        """Note what a microbatch has left: its gradients, and what it has written to buffers."""
        self._asked.add(at)
        step, (gradients, written) = self._replica.step, left
        where_ = self._replica.version, step, at[0]
        layers = self._samples.layers(step, gradients, whole=whole)
        buffers = self._samples.written(step, written, whole=whole)
        batch = batch_of(given)
        self._do(lambda: self._compare(at, where_, batch, loss, (layers, buffers), graph))

    def _compare(
        self,
        at: tuple[int, ...],
        where_: tuple[int, int, int],
        batch: Digest,
        loss: float | None,
        left: tuple[Mapping[str, Tensors], Mapping[str, Tensors]],
        graph: int,
    ) -> None:
        found = self._samples.computed(where_, batch, loss, *left)
        found = msgspec.structs.replace(found, graph=graph)
        before = self._computed.get(at)
        if before is not None and not _same(before, found):
            self._differs(before, found)
            found = msgspec.structs.replace(found, machine=self._samples.machine)
        if before is None or len(found.gradients) >= len(before.gradients):
            self._computed[at] = found

    def _differs(self, one: Computed, other: Computed) -> None:
        """Judge two results of one microbatch on this worker that are not equal.

        Raise `Misuse` if they differ by more than rounding explains; else stop comparing bits.
        """
        where_ = f"step {self._replica.turn}, microbatch {one.microbatch}"
        if one.batch.bits != other.batch.bits:
            raise Misuse(
                f"{where_}: microbatches[{one.microbatch}] was something else when it was asked for again; it has to be "
                "the same each time, because another worker may have to compute it again: loss_of may not write into it, and a "
                "data set or collate_fn may not count, or go on in a list or generator of its own (draw from torch, numpy or random)"
            )
        losses = [(each.loss or 0.0,) for each in (one, other)]
        near = _near(*losses) and all(_alike(a, b) for a, b in _shared(one, other))
        # One thread of a processor adds in one order only.
        if not near or (self._samples.machine and torch.get_num_threads() == 1):
            raise Misuse(
                f"{where_}: loss_of computed a loss of {_shown(other)} where it had computed {_shown(one)} (or other "
                "gradients) just before: it keeps something from one call to the next. Put that into the microbatch, "
                "into session.state after session.backward(...), or leave it out"
            )
        if self._samples.machine:
            sys.stderr.write(f"{UNSTEADY.format(NEAR)}\n")
            self._samples.machine = ""


def _number(loss: float) -> float:
    """Replace every not-a-number by the same one."""
    return math.nan if math.isnan(loss) else loss


def _shown(one: Computed) -> str:
    return "another stage's" if one.loss is None else f"{one.loss:.7g}"


def _same(one: Computed, other: Computed) -> bool:
    """Return whether two calls have computed the same bits."""
    losses = one.loss == other.loss or math.isnan((one.loss or 0.0) + (other.loss or 0.0))
    same = all(a.bits == b.bits for a, b in _shared(one, other))
    return losses and one.batch.bits == other.batch.bits and same


def _shared(one: Computed, other: Computed) -> list[tuple[Digest, Digest]]:
    """Pair what both show of gradients and buffers; one of the two may show more layers."""
    pairs = []
    for mine, theirs in ((one.gradients, other.gradients), (one.written, other.written)):
        others = {each.name: each for each in theirs}
        pairs += [(each, others[each.name]) for each in mine if each.name in others]
    return pairs


def _alike(one: Digest, other: Digest) -> bool:
    return one.bits == other.bits or _near(one.norms, other.norms)


def _near(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    largest = max((abs(each) for each in (*one, *other) if math.isfinite(each)), default=0.0)
    return all(
        math.isclose(a, b, rel_tol=NEAR, abs_tol=NEAR * NEAR * largest) or not math.isfinite(a + b)
        for a, b in zip(one, other, strict=True)
    )


def copied(given: Any) -> Any:
    """Copy a microbatch, for a loss function that writes into it."""
    leaves, spec = flatten(given)
    return unflatten([_copy(leaf) for leaf in leaves], spec)


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return _copy_of(leaf.detach()).requires_grad_(leaf.requires_grad)


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with its strides and alignment.

    Kernels round differently if rows are apart, or begin at another alignment.
    """
    odd = type(tensor) is not torch.Tensor or tensor.is_conj() or tensor.is_neg()
    if odd or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return tensor.clone()
    strides, sizes = tensor.stride(), tensor.size()
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if span > SPAN_MAX * tensor.numel() or tensor.is_quantized:
        return tensor.clone()
    offset = tensor.data_ptr() % ALIGN_BYTES // tensor.itemsize
    laid = torch.empty(offset + span, dtype=tensor.dtype, device=tensor.device)
    laid[offset:] = tensor.as_strided((span,), (1,), tensor.storage_offset())
    return laid.as_strided(sizes, strides, offset)


def versions_of(given: Any) -> list[object]:
    """Return marks of a microbatch that differ after something was written into it."""
    leaves, _ = flatten(given)
    return [
        leaf.tobytes() if isinstance(leaf, np.ndarray) else version_of(leaf)
        for leaf in leaves
        if isinstance(leaf, torch.Tensor | np.ndarray)
    ]
