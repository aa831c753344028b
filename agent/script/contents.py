"""What is in a thing of the script's, in a few numbers: enough to tell whether it is another than before."""

from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np
import torch

ITEMS_MAX = 10_000
NUMBERS_MAX = 1 << 14


def content_of(thing: object, mine: Collection[int] = ()) -> tuple[str, ...]:
    """Of a tensor, an array, or a list, a tuple or a dict of these and of numbers; nothing of anything else, nor of what
    lies in the memory that is `mine`."""
    found = (_told(each, mine) for each in islice(_inside(thing), ITEMS_MAX))
    return tuple(each for each in found if each)


def _inside(thing: object) -> Iterable[object]:
    match thing:
        case dict():
            return dict.values(thing)
        case list() | tuple():
            return thing
        case torch.Tensor() | np.ndarray():
            return [thing]
    return []


def _told(thing: object, mine: Collection[int]) -> str:
    match thing:
        case torch.Tensor() if can_be_told(thing) and memory_of(thing) not in mine:
            return f"{[*thing.shape]} {total_of(thing)}"
        case np.ndarray():
            return f"{thing.shape} {crc32(thing.tobytes())}"
        case int() | float():
            return repr(thing)
    return ""


def can_be_told(tensor: torch.Tensor) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_complex()
    return plain and not tensor.requires_grad


def total_of(tensor: torch.Tensor) -> float:
    """Of some of the numbers, in which a swap of two shows as well."""
    flat = tensor.detach().reshape(-1)
    some = flat[:: 1 + len(flat) // NUMBERS_MAX].double()
    return float(some @ torch.linspace(1, 2, len(some), dtype=some.dtype, device=some.device))


def memory_of(thing: Any) -> int:
    """What tells it from other memory; a sparse tensor, for one, is several, and none of them is a model's."""
    try:
        return int(thing.untyped_storage()._cdata)
    except NotImplementedError:
        return id(thing)
