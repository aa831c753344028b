"""The trained model: named tensors, digest, and a safetensors file. No torch here."""

import hashlib
import json
import os
import struct
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from agent.errors import CheckpointError
from agent.store.encoding.format import Layer

Weights = dict[str, tuple[str, tuple[int, ...], memoryview]]  # name -> type, shape, bytes


def weights_of(
    layers: Iterable[Layer], bodies: Mapping[str, memoryview], prefix: str = "model/"
) -> Weights:
    """Return the tensors of one object of a state, under all names of its state_dict."""
    layers = [*layers]
    weights: Weights = {}
    # A tensor that two objects share lies under the name that it has in the first.
    aliases = {a: name for layer in layers for a, name in layer.aliases if a.startswith(prefix)}
    wanted = {*aliases.values()}
    for layer in layers:
        for tensor in layer.tensors:
            if tensor.name.startswith(prefix) or tensor.name in wanted:
                data = bodies[layer.name][tensor.start : tensor.end] if layer.layer_bytes else b""
                weights[tensor.name] = (tensor.dtype, tensor.shape, memoryview(data))
    for alias, name in aliases.items():
        if name in weights:
            weights[alias] = weights[name]
    return {
        name.removeprefix(prefix): weight
        for name, weight in weights.items()
        if name.startswith(prefix)
    }


def digest(weights: Weights) -> str:
    """Return a digest of names, types, shapes and bytes: equal if and only if the weights are."""
    total = hashlib.sha256()
    for name in sorted(weights):
        dtype, shape, data = weights[name]
        total.update(f"{name} {dtype} {list(shape)}\n".encode())
        total.update(data)
    return total.hexdigest()


def write(path: Path, weights: Weights) -> None:
    """Write a whole file or none, in the place of the previous one."""
    entries: dict[str, object] = {}
    at = 0
    for name, (dtype, shape, data) in weights.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + data.nbytes]}
        at += data.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(struct.pack("<Q", len(text)))
            file.write(text)
            for _, _, data in weights.values():
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # its folder does not exist
            draft.unlink(missing_ok=True)
