"""Tensors as bytes, and ranges of bytes. `agent.store.layers` says what a whole state is."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

DTYPES = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


class Stateful(Protocol):
    """An object that can give and take its state: a model, optimizer, schedule or scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def tensors_of(thing: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a module or an optimizer."""
    if isinstance(thing, torch.nn.Module):
        yield from (*thing.parameters(), *thing.buffers())
    elif isinstance(thing, torch.optim.Optimizer):
        values = (value for state in thing.state.values() for value in state.values())
        yield from (value for value in values if isinstance(value, torch.Tensor))


def cut(total: int, parts: int, index: int, align: int = 64) -> tuple[int, int]:
    """Return the range of part `index` when `total` bytes are shared out among `parts`."""
    units = -(-total // align)
    start, end = units * index // parts * align, units * (index + 1) // parts * align
    return min(start, total), min(end, total)


def in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, or of a copy if it does not lie end to end.

    One number that was expanded counts as lying end to end, with a stride of 0.
    """
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a dense CPU tensor, or of a copy of any other tensor."""
    return in_a_row(tensor.cpu()).numpy().data


def weights_sha(weights: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of names, types, shapes and bytes: equal if and only if the weights are."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(f"{name} {DTYPES[tensor.dtype]} {list(tensor.shape)}\n".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()
