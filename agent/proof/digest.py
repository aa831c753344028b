"""Digests of tensors: sums over their bits, which show workers whether they have the same.

A tensor is taken as words of 64 bits, the last one filled up with zeros. Each word is multiplied by
the odd weight of its place in its layer, and the products are added modulo 2**64. So the order of
additions does not matter, a host and a device get the same digest, and a change of one word always
shows. A host reads large tensors where they lie. Small tensors of a type are laid end to end first,
because a call for each would take longer than reading them. Beside the bits there are norms, for
workers whose bits may differ.
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

from agent.proof.turns import drawn
from agent.protocol import Digest

BUDGET_BYTES = 4 << 20
TENSORS_MAX = 64  # looked at in one step, however small they are
LARGE_BYTES = 1 << 14  # a tensor that is worth a call
WORDS_MIN = 1 << 15
MASK = (1 << 64) - 1
_NOTHING = 0x9E3779B97F4A7C15  # the word for a missing tensor
# The bits of all not-a-numbers, whose own bits do not matter.
_NAN = 0x7FF8
_SPREAD = 0xD1342543DE82EF95  # between parts of one digest

Tensors = Sequence[torch.Tensor | None]
_Kind = tuple[torch.device, torch.dtype]
_weights = np.empty(0, dtype=np.int64)


class Size(NamedTuple):
    """The cost of looking at a layer."""

    size_bytes: int
    tensors: int


class Rotation:
    """The layers that are looked at in a step of the script: all if they fit, else some.

    It depends on the arguments only, so all workers look at the same layers.
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

    def at(self, step: int) -> list[str]:
        return self._groups[drawn(step, len(self._groups))]


def digests(
    layers: Mapping[str, Tensors], step: int = 0, budget_bytes: int = BUDGET_BYTES
) -> tuple[Digest, ...]:
    """Digest every layer.

    Of a layer that is larger than the budget a window is looked at, a different one in each step.
    """
    seen = {name: windows(tensors, step, budget_bytes) for name, tensors in layers.items()}
    return tuple(
        Digest(name, _NAN if any(map(math.isnan, norms)) else bits, tuple(norms))
        for name, bits, norms in _digests(seen, normed=True)
    )


def windows(tensors: Tensors, step: int, budget_bytes: int) -> Tensors:
    """Return the tensors, or if they are too large a window of rows of each.

    The window is a different one in each step.
    """
    total = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    if total <= budget_bytes:
        return tensors
    share = budget_bytes / total
    return [None if tensor is None else _window(tensor, step, share) for tensor in tensors]


def _window(tensor: torch.Tensor, step: int, share: float) -> torch.Tensor:
    flat = tensor.detach()
    if flat.is_contiguous():
        flat = flat.view(-1)
    if not flat.dim() or len(flat) < 2:
        return flat
    count = max(1, int(share * len(flat)))
    parts = -(-len(flat) // count)
    start = drawn(step, parts, 1) * count
    return flat[start : start + count]


def _digests(
    layers: Mapping[str, Tensors], *, normed: bool = False
) -> list[tuple[str, int, list[float]]]:
    """Return name, bits and norms of every layer."""
    found: dict[_Kind, _Laid] = defaultdict(_Laid)
    bits = [0] * len(layers)
    norms = [[0.0] * len(tensors) for tensors in layers.values()]
    for at, tensors in enumerate(layers.values()):
        starts: dict[_Kind, int] = defaultdict(int)
        for place, tensor in enumerate(tensors):
            if tensor is None:
                bits[at] += (place + 1) * _NOTHING
                continue
            if not tensor.numel():
                continue
            kind = tensor.device, tensor.dtype
            start = starts[kind]
            starts[kind] += -(-tensor.nbytes // 8)
            if _is_large(tensor):
                flat = tensor.detach().view(-1)
                bits[at] += _sum_of(flat, start) * _factor(tensor.dtype)
                norms[at][place] = _norm_of(flat) if normed else 0.0
            else:
                found[kind].add(at, place, start, tensor)
    asked = [laid.ask(normed=normed) for laid in found.values()]
    for laid, sums, lengths in _answered(list(found.values()), asked):
        factor = _factor(laid.tensors[0].dtype)
        for at, one in zip(laid.layers, sums, strict=True):
            bits[at] += one * factor
        for (at, place), length in zip(laid.owners, lengths, strict=True):
            norms[at][place] = length
    return [
        (name, one & MASK, lengths) for name, one, lengths in zip(layers, bits, norms, strict=True)
    ]


@functools.cache
def _factor(dtype: torch.dtype) -> int:
    """Return a factor that tells types apart.

    It depends on the type alone, because the order in which a worker meets types depends on its
    layers.
    """
    return 2 * zlib.crc32(str(dtype).encode()) * _SPREAD + 1


def _is_large(tensor: torch.Tensor) -> bool:
    return (
        tensor.nbytes >= LARGE_BYTES
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_complex()
        and not tensor.is_neg()
    )


def _sum_of(flat: torch.Tensor, start: int) -> int:
    """Sum the words of one tensor, which begins at the place `start` of its layer."""
    raw: npt.NDArray[Any] = _words(flat).numpy()
    lanes = 8 // raw.itemsize
    count, left = divmod(len(raw), lanes)
    weights = _table(start + count + 1)[start:]
    # No product is kept, so it takes as long as reading the words.
    found = int(np.dot(raw[: count * lanes].view(np.int64), weights[:count]))
    if left:
        found += int.from_bytes(raw[-left:].tobytes(), "little") * int(weights[count])
    return found


def _norm_of(flat: torch.Tensor) -> float:
    numbers = flat if flat.dtype in (torch.float32, torch.float64) else flat.to(torch.float32)
    # An infinite norm is allowed, because it can be compared.
    return math.sqrt(float(torch.dot(numbers, numbers)))


class _Laid:
    """The tensors of one type on one device, to be laid end to end."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.owners: list[tuple[int, int]] = []  # the layer of each, and its place there
        self.layers: list[int] = []
        self._counts: list[int] = []  # of tensors, by layer
        self._starts: list[int] = []  # in words of the layer

    def add(self, layer: int, place: int, start: int, tensor: torch.Tensor) -> None:
        if not self.layers or self.layers[-1] != layer:
            self.layers.append(layer)
            self._counts.append(0)
        self._counts[-1] += 1
        self._starts.append(start)
        self.owners.append((layer, place))
        self.tensors.append(tensor)

    def ask(self, *, normed: bool) -> tuple[Any, Any]:
        """Return the sums of the layers and the norms of the tensors.

        Those of tensors on a device are left there, as tensors.
        """
        flat = _flat(self.tensors)
        sizes = tuple(tensor.numel() for tensor in self.tensors)
        words = _words(flat)
        factor = len(words) // sum(sizes)
        plan = _plan(sizes, tuple(self._counts), tuple(self._starts), factor, words.itemsize)
        if flat.device.type == "cpu":
            return _sums_here(words, plan), _norms_here(flat, plan) if normed else ()
        sums = _sums_there(words, plan)
        return sums, _norms_there(self.tensors) if normed else sums.new_empty(0)


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(tensors) == 1:
        # Made of its own bits, one after another, as those of several are.
        return tensors[0].detach().reshape(-1).contiguous().resolve_conj().resolve_neg()
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
    ints: npt.NDArray[Any] = words.numpy().view(f"u{words.itemsize}")
    return np.add.reduceat(ints * plan.weights, plan.layers)


def _sums_there(words: torch.Tensor, plan: "_Plan") -> torch.Tensor:
    """Return the sums on a device, as differences of a running sum.

    A device has no sum over parts.
    """
    far = plan.on(words.device)
    ints = words.to(torch.int64) & ((1 << 8 * words.itemsize) - 1)
    running = (ints * far.weights).cumsum(0)[far.ends]
    return torch.diff(running, prepend=running.new_zeros(1))


def _norms_here(flat: torch.Tensor, plan: "_Plan") -> npt.NDArray[Any]:
    numbers = flat.abs() if flat.is_complex() else flat
    if numbers.dtype not in (torch.float32, torch.float64):
        numbers = numbers.to(torch.float32)
    array: npt.NDArray[Any] = numbers.numpy()
    # An infinite norm is allowed, because it can be compared.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.sqrt(np.add.reduceat(array * array, plan.tensors))


def _norms_there(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if not tensors[0].dtype.is_floating_point:
        tensors = [tensor.to(torch.float32) for tensor in tensors]
    return torch.stack(torch._foreach_norm(list(tensors)))


def _answered(
    laid: Sequence[_Laid], asked: Sequence[tuple[Any, Any]]
) -> list[tuple[_Laid, list[int], list[float]]]:
    """Return the results as Python's numbers, with one wait for each device."""
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
        found.append((one, ints.tolist(), floats.tolist() if len(floats) else _none(one)))
    return found


def _none(laid: _Laid) -> list[float]:
    return [0.0] * len(laid.tensors)


def _split(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    lengths = [len(part) for part in parts]
    return torch.split(torch.cat(list(parts)).cpu(), lengths)


class _Plan:
    """Where layers and tensors begin in parts of words laid end to end, with part weights."""

    def __init__(
        self,
        sizes: Sequence[int],
        counts: Sequence[int],
        starts: Sequence[int],
        factor: int,
        part_bytes: int,
    ) -> None:
        bounds = np.concatenate(([0], np.cumsum(sizes)))
        self.tensors = bounds[:-1]
        edges = bounds[np.concatenate(([0], np.cumsum(counts)))] * factor
        self.layers, self._ends = edges[:-1], edges[1:] - 1
        lanes = 8 // part_bytes
        places = [
            np.arange(size * factor) + start * lanes
            for size, start in zip(sizes, starts, strict=True)
        ]
        laid = np.concatenate(places)
        table = _table(int(laid.max()) // lanes + 1)
        self.weights = table[laid // lanes] << laid % lanes * (8 * part_bytes)

    @functools.lru_cache(4)  # noqa: B019 - plans are few, and themselves in such a cache
    def on(self, device: torch.device) -> "_Far":
        return _Far(
            torch.from_numpy(self.weights).to(device),
            torch.from_numpy(self._ends).to(device),
        )


class _Far:
    """A plan on a device."""

    def __init__(self, weights: torch.Tensor, ends: torch.Tensor) -> None:
        self.weights, self.ends = weights, ends


@functools.lru_cache(16)
def _plan(
    sizes: tuple[int, ...],
    counts: tuple[int, ...],
    starts: tuple[int, ...],
    factor: int,
    part_bytes: int,
) -> _Plan:
    return _Plan(sizes, counts, starts, factor, part_bytes)


def _table(count: int) -> npt.NDArray[np.int64]:
    """Return at least `count` weights: odd, and the same in every process."""
    global _weights  # noqa: PLW0603 - a table that grows
    if len(_weights) < count:
        size = max(WORDS_MIN, 1 << math.ceil(math.log2(count)))
        drawn = np.random.Generator(np.random.PCG64(31)).integers(
            -(1 << 63), 1 << 63, size, dtype=np.int64
        )
        _weights = drawn | 1
    return _weights
