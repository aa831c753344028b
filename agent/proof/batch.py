"""The digest of a microbatch: any nest of tensors, arrays, numbers and strings.

Other objects count by their attributes, or pickled. What a script feeds its model has to be the
same on all workers. Only some parts of large tensors are looked at, because a digest may take no
longer than a small part of computing with them.
"""

import dataclasses
import hashlib
import math
import pickle
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from agent.proof.digest import digests
from agent.protocol import Digest

LEAF_BYTES = 1 << 20  # of a tensor; of a larger one some rows are looked at
BATCH = "batch"
DEPTH_MAX = 32
_MASK = (1 << 64) - 1


def batch_of(microbatch: object) -> Digest:
    """Digest a microbatch: its bits, and norms of its tensors where workers round differently.

    What cannot be pickled counts for nothing.
    """
    reading = _Reading()
    reading.take(microbatch, 0)
    (tensors,) = digests({BATCH: reading.tensors}, budget_bytes=1 << 62)
    words = int.from_bytes(reading.text.digest(), "little")
    return Digest(BATCH, (tensors.bits + words) & _MASK, tensors.norms)


class _Reading:
    """The tensors found in a microbatch, and a hash of everything else and of the nesting."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.text = hashlib.blake2b(digest_size=8)
        self._met: set[int] = set()

    def take(self, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self._say("tensor", str(value.dtype), str(tuple(value.shape)))
            self._take_tensor(value)
        elif isinstance(value, np.ndarray) and value.dtype.kind in "fiubc":
            self._say("array", str(value.dtype), str(value.shape))
            self._take_array(value)
        elif isinstance(value, Mapping) and depth < DEPTH_MAX:
            self._say("mapping", str(len(value)))
            self._take_all((each for pair in value.items() for each in pair), depth)
        elif isinstance(value, list | tuple) and depth < DEPTH_MAX:
            self._say("sequence", str(len(value)))
            self._take_all(value, depth)
        elif isinstance(value, set | frozenset):
            self._say("set", *sorted(map(repr, value)))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type) and depth < DEPTH_MAX:
            self._say(type(value).__qualname__)
            fields = dataclasses.fields(value)
            self._take_all((getattr(value, each.name, None) for each in fields), depth)
        elif isinstance(value, float):
            self.text.update(b"f" + struct.pack("<d", value))
        elif value is None or isinstance(value, bool | int | str | bytes):
            self._say(type(value).__name__, repr(value))
        elif hasattr(value, "__dict__") and not isinstance(value, type) and depth < DEPTH_MAX:
            self._take_attributes(value, depth)
        else:
            self._take_pickled(value)

    def _take_attributes(self, value: Any, depth: int) -> None:
        """Take a script-defined object by its attributes.

        Pickled, its tensors would be named by their addresses.
        """
        self._say(type(value).__qualname__)
        if id(value) not in self._met:
            self._met.add(id(value))
            # A copy may have been given its attributes in a different order.
            named = sorted(vars(value).items(), key=lambda pair: str(pair[0]))
            self._take_all((each for pair in named for each in pair), depth)

    def _take_all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            self.take(value, depth + 1)

    def _say(self, *words: str) -> None:
        self.text.update("\0".join((*words, "")).encode(errors="surrogatepass"))

    def _take_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_meta:
            self._say(str(tensor.layout))
            if tensor.layout is torch.sparse_coo and not tensor.is_meta:
                known = tensor.detach().coalesce()
                self.tensors += [known.indices(), known.values()]
            return
        self.tensors.append(_some(tensor.detach()))

    def _take_array(self, array: np.ndarray[Any, Any]) -> None:
        if array.nbytes > LEAF_BYTES and array.ndim:
            array = array[:: _every(array.nbytes, len(array))]
        data = np.ascontiguousarray(array)
        self.text.update(data.view(np.uint8).reshape(-1).data if data.size else b"")

    def _take_pickled(self, value: Any) -> None:
        try:
            self.text.update(pickle.dumps(value, protocol=4))
        except Exception:  # an object may raise anything when pickled
            self._say(type(value).__qualname__)


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor, or evenly spaced rows of a large one."""
    if tensor.nbytes <= LEAF_BYTES or not tensor.dim():
        return tensor
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor
    if flat.dim() == 1:
        rows = flat[: len(flat) // 1024 * 1024].view(-1, 1024)
        return rows[:: _every(tensor.nbytes, len(rows))]
    return flat[:: _every(tensor.nbytes, len(flat))]


def _every(size_bytes: int, rows: int) -> int:
    return max(1, min(rows, math.ceil(size_bytes / LEAF_BYTES)))
