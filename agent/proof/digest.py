"""Digests of tensors: sums over their bits, by which workers find out whether they have the same.

A tensor is taken as words of 32 bits. Each is multiplied by the weight of its place in its layer, and the products are added
modulo 2**64: so the order of additions does not matter, a host and a device come to the same digest, and a change of
one word always shows. All tensors of a type are laid end to end first, because a call for each would take longer than
reading them. Beside the bits stand norms, for those whose bits may differ.
"""

import functools
import math
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from agent.protocol import Digest

BUDGET_BYTES = 4 << 20
TENSORS_MAX = 64  # that are looked at in one turn, however small they are
WORDS_MIN = 1 << 16
MASK = (1 << 64) - 1
_NOTHING = 0x9E3779B97F4A7C15  # where there is no tensor
# Not-a-numbers have bits that nobody asks for.
_NAN = 0x7FF8
_SPREAD = 0xD1342543DE82EF95  # between parts of one digest

Tensors = Sequence[torch.Tensor | None]
_Kind = tuple[torch.device, torch.dtype]
_weights = np.empty(0, dtype=np.int64)


class Size(NamedTuple):
    """What it takes to look at a layer."""

    size_bytes: int
    tensors: int


class Rotation:
    """Which layers are looked at in which turn: all if they fit, else each in its turn.

    It depends on the arguments only, so all workers look at the same layers. A turn is a step of the script, because with
    several commits in a step the versions of its boundaries skip some.
    """

    def __init__(
        self, sizes: Mapping[str, Size], budget_bytes: int = BUDGET_BYTES, most: int = TENSORS_MAX
    ) -> None:
        self.budget_bytes = budget_bytes
        self._groups, filled, count = [list[str]()], 0, 0
        for name in sorted(sizes):
            size, tensors = min(sizes[name].size_bytes, budget_bytes), sizes[name].tensors
            if self._groups[-1] and (filled + size > budget_bytes or count + tensors > most):
                self._groups.append([])
                filled = count = 0
            self._groups[-1].append(name)
            filled, count = filled + size, count + tensors

    def at(self, turn: int) -> list[str]:
        return self._groups[turn % len(self._groups)]


def digests(
    layers: Mapping[str, Tensors], turn: int = 0, budget_bytes: int = BUDGET_BYTES
) -> tuple[Digest, ...]:
    """Digest every layer. Of one that is larger than the budget a window is looked at, another one each turn."""
    found: dict[_Kind, _Laid] = defaultdict(_Laid)
    bits, norms = [0] * len(layers), [[0.0] * len(tensors) for tensors in layers.values()]
    for at, whole in enumerate(layers.values()):
        for place, tensor in enumerate(windows(whole, turn, budget_bytes)):
            if tensor is None:
                bits[at] += (place + 1) * _NOTHING
            elif tensor.numel():
                found[tensor.device, tensor.dtype].add(at, place, tensor)
    for laid, sums, lengths in _answered(list(found.values())):
        # Which types a worker comes by first depends on the layers that it has.
        number = zlib.crc32(str(laid.tensors[0].dtype).encode())
        for at, one in zip(laid.layers, sums, strict=True):
            bits[at] += one * (2 * number * _SPREAD + 1)
        for (at, place), length in zip(laid.owners, lengths, strict=True):
            norms[at][place] = length
    return tuple(
        Digest(name, _NAN if any(map(math.isnan, lengths)) else one & MASK, tuple(lengths))
        for name, one, lengths in zip(layers, bits, norms, strict=True)
    )


def windows(tensors: Tensors, turn: int, budget_bytes: int) -> Tensors:
    """All of each tensor, or where that is too much so many rows of it, from another one on each turn."""
    total = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    if total <= budget_bytes:
        return tensors
    share = budget_bytes / total
    return [None if tensor is None else _window(tensor, turn, share) for tensor in tensors]


def _window(tensor: torch.Tensor, turn: int, share: float) -> torch.Tensor:
    flat = tensor.detach()
    if flat.is_contiguous():
        flat = flat.view(-1)
    if not flat.dim() or len(flat) < 2:
        return flat
    count = max(1, int(share * len(flat)))
    parts = -(-len(flat) // count)
    start = turn % parts * count
    return flat[start : start + count]


class _Laid:
    """The tensors of one type on one device, to be laid end to end."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.owners: list[tuple[int, int]] = []  # the layer of each, and its place there
        self.layers: list[int] = []
        self._counts: list[int] = []  # of tensors, by layer

    def add(self, layer: int, place: int, tensor: torch.Tensor) -> None:
        if not self.layers or self.layers[-1] != layer:
            self.layers.append(layer)
            self._counts.append(0)
        self._counts[-1] += 1
        self.owners.append((layer, place))
        self.tensors.append(tensor)

    def ask(self) -> tuple[Any, Any]:
        """The sums of the layers and the norms of the tensors; of a device, where they lie there."""
        flat = _flat(self.tensors)
        sizes = tuple(tensor.numel() for tensor in self.tensors)
        words = _words(flat)
        plan = _plan(sizes, tuple(self._counts), len(words) / sum(sizes))
        if flat.device.type == "cpu":
            return _sums_here(words, plan), _norms_here(flat, plan)
        return _sums_there(words, plan), _norms_there(self.tensors)


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0].detach().reshape(-1)
    with torch.no_grad():
        laid: torch.Tensor = torch._C._nn.flatten_dense_tensors([*tensors])
    return laid


def _words(flat: torch.Tensor) -> torch.Tensor:
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.itemsize >= 4:
        return flat.view(torch.int32)
    return flat.view(torch.int16 if flat.itemsize == 2 else torch.int8)


def _sums_here(words: torch.Tensor, plan: "_Plan") -> npt.NDArray[Any]:
    ints: npt.NDArray[Any] = words.numpy()
    return np.add.reduceat(ints * plan.weights, plan.layers)


def _sums_there(words: torch.Tensor, plan: "_Plan") -> torch.Tensor:
    """The same on a device, which has no sum over parts: differences of a running one."""
    far = plan.on(words.device)
    running = (words.to(torch.int64) * far.weights).cumsum(0)[far.ends]
    return torch.diff(running, prepend=running.new_zeros(1))


def _norms_here(flat: torch.Tensor, plan: "_Plan") -> npt.NDArray[Any]:
    numbers = flat.abs() if flat.is_complex() else flat
    if numbers.dtype not in (torch.float32, torch.float64):
        numbers = numbers.to(torch.float32)
    array: npt.NDArray[Any] = numbers.numpy()
    # An infinite norm is one that can be compared.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.sqrt(np.add.reduceat(array * array, plan.tensors))


def _norms_there(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if not tensors[0].dtype.is_floating_point:
        tensors = [tensor.to(torch.float32) for tensor in tensors]
    return torch.stack(torch._foreach_norm(list(tensors)))


def _answered(laid: Sequence[_Laid]) -> list[tuple[_Laid, list[int], list[float]]]:
    """In Python's numbers, with one wait for each device."""
    asked = [one.ask() for one in laid]
    there: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for pair in asked:
        if isinstance(pair[0], torch.Tensor):
            device = pair[0].device
            there[device] += [pair[0], pair[1].to(torch.float64).view(torch.int64)]
    came = {device: iter(_split(parts)) for device, parts in there.items()}
    found: list[tuple[_Laid, list[int], list[float]]] = []
    for one, (sums, norms) in zip(laid, asked, strict=True):
        if isinstance(sums, torch.Tensor):
            numbers = came[sums.device]
            ints, floats = next(numbers), next(numbers).view(torch.float64)
        else:
            ints, floats = sums, norms
        found.append((one, ints.tolist(), floats.tolist()))
    return found


def _split(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    lengths = [len(part) for part in parts]
    return torch.split(torch.cat(list(parts)).cpu(), lengths)


class _Plan:
    """Where layers and tensors begin in words and elements that lie end to end, and the weight of every word."""

    def __init__(self, sizes: Sequence[int], counts: Sequence[int], factor: float) -> None:
        starts = np.concatenate(([0], np.cumsum(sizes)))
        edges = np.concatenate(([0], np.cumsum(counts)))
        self.tensors = starts[:-1]
        bounds = (starts[edges] * factor).astype(np.int64)
        self.layers = bounds[:-1]
        lengths = np.diff(bounds)
        table = _table(int(lengths.max()))
        self.weights = np.concatenate([table[:length] for length in lengths])
        self._bounds = bounds

    @functools.lru_cache(4)  # noqa: B019 - plans are few, and themselves in such a cache
    def on(self, device: torch.device) -> "_Far":
        return _Far(
            torch.from_numpy(self.weights).to(device),
            torch.from_numpy(self._bounds[1:] - 1).to(device),
        )


class _Far:
    """A plan on a device."""

    def __init__(self, weights: torch.Tensor, ends: torch.Tensor) -> None:
        self.weights, self.ends = weights, ends


@functools.lru_cache(16)
def _plan(sizes: tuple[int, ...], counts: tuple[int, ...], factor: float) -> _Plan:
    return _Plan(sizes, counts, factor)


def _table(count: int) -> npt.NDArray[np.int64]:
    """As many weights: odd, and the same in every process."""
    global _weights  # noqa: PLW0603 - a table that grows
    if len(_weights) < count:
        size = max(WORDS_MIN, 1 << math.ceil(math.log2(count)))
        drawn = np.random.Generator(np.random.PCG64(31)).integers(
            -(1 << 63), 1 << 63, size, dtype=np.int64
        )
        _weights = drawn | 1
    return _weights
