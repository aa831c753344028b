"""State as bytes: a model, its optimizer and its schedules <-> one range of named bytes.

The form is that of a safetensors file, so that what lies in the keeper's memory, what travels and what
a checkpoint holds are the same bytes, and any tool can read them:

    header length (u64) | JSON header: name -> dtype, shape, place | all tensors, end to end

Everything that is not a tensor (step counts, learning rates, nesting) is a JSON skeleton in the
header's metadata, in which a tensor is `{"$tensor": name}`. Nothing is pickled. The bytes behind the
header can be cut anywhere: each holder of a state sends a slice of its own, and any number of
slices makes the whole again.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec
import torch

from agent.errors import StateError

DTYPES = {
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
SKELETON = "skeleton"


class Stateful(Protocol):
    """A model, an optimizer, a schedule, a scaler: whatever can give and take its state."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class StateBytes(msgspec.Struct, frozen=True):
    """A state as it is now: a header, and its live tensors, in order, uncopied."""

    header: bytes
    tensors: tuple[torch.Tensor, ...]

    @property
    def total(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def versions(self) -> list[int]:
        """Changes whenever a tensor is written to."""
        return [tensor._version for tensor in self.tensors]

    def pieces(self, start: int, end: int) -> list[memoryview]:
        """The live memory of the bytes `start .. end - 1`."""
        found, at = [], 0
        for tensor in self.tensors:
            low, high = max(start - at, 0), min(end - at, tensor.nbytes)
            if low < high:
                found.append(bytes_of(tensor)[low:high])
            at += tensor.nbytes
        return found


def cut(total: int, parts: int, index: int, align: int = 64) -> tuple[int, int]:
    """The range of part `index` when `total` bytes are shared out among `parts`."""
    units = -(-total // align)
    start, end = units * index // parts * align, units * (index + 1) // parts * align
    return min(start, total), min(end, total)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a dense CPU tensor (of a copy, if it lies elsewhere or not end to end)."""
    dense = tensor.detach().to("cpu").contiguous()
    return dense.view(-1).view(torch.uint8).numpy().data


def write(objects: Mapping[str, Stateful]) -> StateBytes:
    """The state of all objects, named `object/where/in/its/state_dict`."""
    tensors: dict[str, torch.Tensor] = {}
    skeleton = {name: _strip(thing.state_dict(), name, tensors) for name, thing in objects.items()}
    # Wide types first keeps every tensor aligned to its own size.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    entries: dict[str, Any] = {"__metadata__": {SKELETON: json.dumps(skeleton)}}
    at = 0
    for name in order:
        tensor = tensors[name]
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return StateBytes(
        header=struct.pack("<Q", len(text)) + text,
        tensors=tuple(tensors[name].detach() for name in order),
    )


def read(header: bytes | memoryview, body: memoryview, objects: Mapping[str, Stateful]) -> None:
    """Give every object the state that was written. The body must outlive nothing: it is copied."""
    try:
        entries = json.loads(bytes(header[8:]))
        skeleton = json.loads(entries.pop("__metadata__")[SKELETON])
        tensors = {name: _tensor(entry, body) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"this is not a state of ours: {error!r}") from error
    if set(skeleton) != set(objects):
        raise StateError(
            f"the state holds {sorted(skeleton)}, but the session was made with {sorted(objects)}: "
            "give Session the same objects in the same order as before"
        )
    for name, thing in objects.items():
        try:
            thing.load_state_dict(_fill(skeleton[name], tensors))
        except (RuntimeError, ValueError, KeyError) as error:
            raise StateError(f"{name} does not take the state that was saved: {error}") from error


def weights_sha(weights: Mapping[str, torch.Tensor]) -> str:
    """A digest of names, types, shapes and bytes: equal if and only if the weights are."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(f"{name} {DTYPES[tensor.dtype]} {list(tensor.shape)}\n".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def _tensor(entry: dict[str, Any], body: memoryview) -> torch.Tensor:
    start, end = entry["data_offsets"]
    dtype = DTYPES_BY_NAME[entry["dtype"]]
    if start == end:
        return torch.empty(entry["shape"], dtype=dtype)
    return torch.frombuffer(body[start:end], dtype=dtype).view(entry["shape"])


def _strip(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` without its tensors, which go to `tensors` under their path."""
    if isinstance(value, torch.Tensor):
        if value.dtype not in DTYPES or value.is_sparse or value.is_quantized:
            raise StateError(f"{path}: a tensor of {value.dtype} ({value.layout}) cannot be saved")
        tensors[path] = value
        return {"$tensor": path}
    if isinstance(value, Mapping):
        return {
            "$map": [
                [_key(key, path), _strip(item, f"{path}/{key}", tensors)]
                for key, item in value.items()
            ]
        }
    if isinstance(value, list):
        return _strip_all(value, path, tensors)
    if isinstance(value, tuple):
        return {"$tuple": _strip_all(value, path, tensors)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise StateError(
        f"{path} is a {type(value).__name__}: a state may hold tensors, numbers, strings, "
        "lists, tuples and mappings of them"
    )


def _strip_all(values: Iterable[Any], path: str, tensors: dict[str, torch.Tensor]) -> list[Any]:
    return [_strip(item, f"{path}/{index}", tensors) for index, item in enumerate(values)]


def _key(key: Any, path: str) -> Any:
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise StateError(f"{path}: key {key!r} is neither a string nor an integer")
    return key


def _fill(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `_strip`. Tensors are fresh copies: nothing aliases what was read."""
    if isinstance(value, list):
        return [_fill(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]].clone()
    if "$tuple" in value:
        return tuple(_fill(item, tensors) for item in value["$tuple"])
    return {key: _fill(item, tensors) for key, item in value["$map"]}
