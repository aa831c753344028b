"""Whether two jobs have come to the same state: by its bits or, where rounding may differ, nearly."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from agent.reliable.backup import Backup
from agent.reliable.saving import load
from agent.store.archive import Archive
from agent.store.format import Layer, Tensor
from agent.store.sinks import DiskSink

# Of the largest number of a tensor.
NEAR = 1e-3
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
# Of the layer of what belongs to no module; no module has such a name.
REST = "~rest"
SESSION_STATE = "state"
WEIGHTS = "model/"


class Likeness(msgspec.Struct, frozen=True, kw_only=True):
    """What differs, in words, the weights before all else; nothing if it is the same. `near`: by no more than rounding."""

    differs: str = ""
    near: bool = True


def ended(checkpoints: Path, job: str) -> Backup:
    """What a job that is done has come to."""
    archive = Archive(DiskSink(checkpoints / job), job, ours=False)
    manifest = archive.newest()
    if manifest is None:
        raise FileNotFoundError(f"{checkpoints / job} has no version in it")
    return load(archive, manifest).backup


def compare(one: Backup, other: Backup) -> Likeness:
    found = sorted(_differences(one, other))
    if not found:
        return Likeness()
    return Likeness(differs=found[0][1], near=all(near for _, _, near in found))


def _differences(one: Backup, other: Backup) -> Iterator[tuple[int, str, bool]]:
    """How grave each is, what it is, and whether it is no more than rounding."""
    theirs = {layer.name: layer for layer in other.layers}
    if [layer.name for layer in one.layers] != [layer.name for layer in other.layers]:
        yield 0, "the layers of the model", False
        return
    for layer in one.layers:
        yield from _of_tensors(layer, one, theirs[layer.name], other)
        yield from _of_values(layer, theirs[layer.name])


def _of_tensors(
    mine: Layer, one: Backup, theirs: Layer, other: Backup
) -> Iterator[tuple[int, str, bool]]:
    forms = {tensor.name: tensor for tensor in theirs.tensors}
    for tensor in mine.tensors:
        grave, name = _called(tensor.name, mine.name)
        twin = forms.pop(tensor.name, None)
        if twin is None or (twin.dtype, twin.shape) != (tensor.dtype, tensor.shape):
            yield grave, name, False
            continue
        a, b = one.bodies[mine.name][tensor.start : tensor.end], other.bodies[mine.name]
        b = b[twin.start : twin.end]
        if a != b:
            yield grave, name, _near(_numbers(tensor, a), _numbers(tensor, b))
    for left in forms:
        yield *_called(left, mine.name), False


def _of_values(mine: Layer, theirs: Layer) -> Iterator[tuple[int, str, bool]]:
    a, b = (_sorted(json.loads(layer.values)) for layer in (mine, theirs))
    for key in sorted({*a, *b}):
        if json.dumps(a.get(key), sort_keys=True) != json.dumps(b.get(key), sort_keys=True):
            yield *_called(key, mine.name), False


def _called(key: str, layer: str) -> tuple[int, str]:
    """What a person calls it, and how grave a difference in it is."""
    owner = key.partition("/")[0].partition("@")[0]
    if layer == REST:
        return (1, "session.state") if owner == SESSION_STATE else (2, owner)
    if key.startswith(WEIGHTS):
        return 0, f"the weights of layer {layer}"
    return 2, f"what {owner} keeps of layer {layer}"


def _sorted(value: Any) -> Any:
    """Mappings without the order of their keys."""
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"$map"}:
        return {"$map": sorted((_sorted(item) for item in value["$map"]), key=repr)}
    return {key: _sorted(item) for key, item in value.items()}


def _numbers(tensor: Tensor, body: memoryview) -> npt.NDArray[Any] | None:
    """None of what is not made of numbers that round."""
    if tensor.dtype == "BF16":
        return (np.frombuffer(body, np.uint16).astype(np.uint32) << 16).view(np.float32)
    kind = FLOATS.get(tensor.dtype)
    return None if kind is None else np.frombuffer(body, kind)


def _near(a: npt.NDArray[Any] | None, b: npt.NDArray[Any] | None) -> bool:
    if a is None or b is None:
        return False
    largest = float(np.max(np.abs(a), initial=0.0, where=np.isfinite(a)))
    return bool(np.allclose(a, b, rtol=NEAR, atol=NEAR * largest, equal_nan=True))
