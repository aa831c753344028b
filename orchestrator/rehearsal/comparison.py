"""Comparing the states of two jobs: bit by bit or, if rounding may differ, nearly."""

import base64
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from agent.keeper.storage.backup import Backup
from agent.keeper.storage.versions import load
from agent.store.archive import Archive
from agent.store.encoding.format import Tensor
from agent.store.places.sinks import DiskSink

# The largest relative difference that counts as rounding: of all weights together, of all state of
# an optimizer, or of a plain number. It is large, because a step of Adam amplifies small ones.
NEAR = 1e-2
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "C64": np.float32}
# The name of the layer for state outside of all modules; no module can have this name.
REST = "~rest"
SESSION_STATE, VALUES = "state", "~values"
WEIGHTS = "model/"

Held = tuple[Tensor, memoryview]


def ended(checkpoints: Path, job: str) -> Backup:
    """Return the final state of a completed job."""
    archive = Archive(DiskSink(checkpoints / job), job, ours=False)
    manifest = archive.newest()
    if manifest is None:
        raise FileNotFoundError(f"{checkpoints / job} has no version in it")
    return load(archive, manifest).backup


def difference(one: Backup, other: Backup) -> str:
    """Return in words what differs in its bits, weights first; "" if nothing differs."""
    found = sorted(_differences(one, other))
    return found[0][1] if found else ""


def nearly(one: Backup, other: Backup) -> bool:
    """Return whether two states differ by no more than rounding."""
    apart, whole = defaultdict[str, float](float), defaultdict[str, float](float)
    for layer, name, (had, has) in _tensors(one, other):
        if had is None or has is None:
            return False
        (mine, a), (theirs, b) = had, has
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            return False
        x, y = _numbers(mine, a), _numbers(theirs, b)
        if x is None or y is None:
            if a != b and layer != REST:
                return False
            continue
        if not np.array_equal(np.isfinite(x), np.isfinite(y)):
            return False
        owner = name.partition("/")[0]
        with np.errstate(invalid="ignore"):
            apart[owner] += float(np.sum(np.square(x - y), where=np.isfinite(x)))
        whole[owner] += float(np.sum(np.square(x), where=np.isfinite(x)))
    near = all(apart[owner] <= NEAR * NEAR * whole[owner] for owner in apart)
    return near and all(_alike(a, b) for a, b in _values(one, other))


def _alike(one: Any, other: Any) -> bool:
    """Return whether two values have the same structure and nearly the same numbers."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        if one[:1] == other[:1] == [VALUES] and len(one) == len(other) == 2:
            return _alike(_opened(one[1]), _opened(other[1]))
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        same = one == other or (math.isnan(one) and math.isnan(other))
        return same or math.isclose(one, other, rel_tol=NEAR)
    return bool(one == other)


def _opened(packed: Any) -> Any:
    """Unpack a value that a script keeps; return it unchanged if it is not packed."""
    try:
        return msgspec.msgpack.decode(base64.b64decode(packed))
    except (TypeError, ValueError):
        return packed


def _differences(one: Backup, other: Backup) -> Iterator[tuple[int, str]]:
    """Yield each difference as its rank and its name; rank 0 is the gravest."""
    for layer, name, (mine, theirs) in _tensors(one, other):
        if mine is None or theirs is None or not _same(mine, theirs):
            yield _called(name, layer)
    for layer, key, (a, b) in _keys(one, other):
        if json.dumps(a, sort_keys=True) != json.dumps(b, sort_keys=True):
            yield _called(key, layer)


def _same(one: Held, other: Held) -> bool:
    (mine, a), (theirs, b) = one, other
    return (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape) and a == b


def _tensors(
    one: Backup, other: Backup
) -> Iterator[tuple[str, str, tuple[Held | None, Held | None]]]:
    """Yield every tensor of either state: its layer, its name, and both copies or None."""
    mine, theirs = _held(one), _held(other)
    for layer, name in sorted({*mine, *theirs}):
        yield layer, name, (mine.get((layer, name)), theirs.get((layer, name)))


def _held(state: Backup) -> dict[tuple[str, str], Held]:
    return {
        (layer.name, tensor.name): (tensor, state.bodies[layer.name][tensor.start : tensor.end])
        for layer in state.layers
        for tensor in layer.tensors
        if layer.layer_bytes
    }


def _keys(one: Backup, other: Backup) -> Iterator[tuple[str, str, tuple[Any, Any]]]:
    """Yield every plain value of either state, in the form of `_tensors`."""
    mine, theirs = _told(one), _told(other)
    for layer, key in sorted({*mine, *theirs}):
        yield layer, key, (mine.get((layer, key)), theirs.get((layer, key)))


def _values(one: Backup, other: Backup) -> Iterator[tuple[Any, Any]]:
    for _, _, pair in _keys(one, other):
        yield pair


def _told(state: Backup) -> dict[tuple[str, str], Any]:
    return {
        (layer.name, key): value
        for layer in state.layers
        for key, value in _sorted(json.loads(layer.values)).items()
    }


def _called(key: str, layer: str) -> tuple[int, str]:
    """Return the rank of a difference in this key, and the words for it."""
    owner = key.partition("/")[0].partition("@")[0]
    if layer == REST:
        return (1, "session.state") if owner == SESSION_STATE else (2, owner)
    if key.startswith(WEIGHTS):
        return 0, f"the weights of layer {layer}"
    return 2, f"what {owner} keeps of layer {layer}"


def _sorted(value: Any) -> Any:
    """Return the value with the entries of "$map" sorted, so that their order does not count."""
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    found = {key: _sorted(item) for key, item in value.items()}
    if isinstance(pairs := found.get("$map"), list):
        found["$map"] = sorted(pairs, key=repr)
    return found


def _numbers(tensor: Tensor, body: memoryview) -> npt.NDArray[Any] | None:
    """Return the tensor's numbers as float64, or None if its type does not round."""
    if tensor.dtype == "BF16":
        wide = np.frombuffer(body, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64)
    kind = FLOATS.get(tensor.dtype)
    return None if kind is None else np.frombuffer(body, kind).astype(np.float64)
