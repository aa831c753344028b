"""Streams of random numbers that a script makes itself, as an environment's `np_random`.

A stream is its kind and its place. The streams of the process itself have none of theirs in a
state: the session seeds these in every step.
"""

import random
from typing import Any

import numpy as np
import torch

# Each by what is called to make it, of the name of its kind.
KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
# What NumPy's streams draw their bits from; a library's own could not be made by its name.
BITS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def of_process(stream: object) -> bool:
    """Return whether it is the one that torch.rand, np.random.rand or random.random draws from."""
    own = (np.random.mtrand._rand, random._inst, torch.default_generator)
    return any(stream is one for one in own)


def kind_of(stream: Any) -> str:
    match stream:
        case np.random.Generator():
            return f"numpy {type(stream.bit_generator).__name__}"
        case np.random.RandomState():
            return f"legacy {stream.get_state(legacy=False)['bit_generator']}"
        case torch.Generator():
            return f"torch {stream.device}"
    return "python"


def is_known(kind: str) -> bool:
    """Return whether a stream of this kind can be made."""
    family, _, name = kind.partition(" ")
    return name in BITS if family in ("numpy", "legacy") else family in ("torch", "python")


def made(kind: str) -> Any:
    """Return a stream of this kind, at any place."""
    family, _, name = kind.partition(" ")
    match family:
        case "numpy":
            return np.random.Generator(getattr(np.random, name)())
        case "legacy":
            return np.random.RandomState(getattr(np.random, name)())
        case "torch":
            return torch.Generator(name)
    return random.Random()  # noqa: S311 - a script's own, and no secret


def place_of(stream: Any) -> Any:
    """Return where it is, in plain values."""
    match stream:
        case np.random.Generator():
            return _plain(stream.bit_generator.state)
        case np.random.RandomState():
            return _plain(stream.get_state(legacy=False))
        case torch.Generator():
            return stream.get_state()
    return stream.getstate()


def move(stream: Any, place: Any) -> None:
    """Bring a stream to a place that `place_of` has told."""
    match stream:
        case np.random.Generator():
            stream.bit_generator.state = _of_numpy(place)
        case np.random.RandomState():
            stream.set_state(_of_numpy(place))
        case torch.Generator():
            stream.set_state(place)
        case _:
            stream.setstate(place)


def _plain(value: Any) -> Any:
    """Return NumPy's word for a place, with its arrays, which may be of uint64, as bytes."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.tobytes()
    return value.item() if isinstance(value, np.generic) else value


def _of_numpy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _of_numpy(item) for key, item in value.items()}
    return np.frombuffer(value[1], value[0]).copy() if isinstance(value, tuple) else value
