"""A microbatch taken apart into tensors and numbers, and put together again.

It may consist of tuples, lists, dicts, and objects that hold tensors. Libraries hand out their own
dictionaries (`UserDict`), and scripts have a class for a batch. Such an object is made again from
one that was seen, with other tensors and numbers in it; what it holds besides has to be the same in
every microbatch.
"""

import copy
from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

INT_MAX = 2**63  # the bound of what can be sent as a number
SHOWN_MAX = 200  # characters of a microbatch's form
KEPT = (complex, str, bytes, type(None), torch.dtype, torch.device)


class _Like:
    """What an object is without its tensors, and where these belong."""

    def __init__(self, empty: Any, keys: tuple[Any, ...], kept: dict[str, Any]) -> None:
        self.empty, self.keys, self.kept = empty, keys, kept

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Like) or type(self.empty) is not type(other.empty):
            return False
        return (self.keys, self.kept) == (other.keys, other.kept)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        kept = [f"{name}={value!r}" for name, value in self.kept.items()]
        return f"{type(self.empty).__name__}({', '.join([*map(str, self.keys), *kept])})"

    def filled(self, parts: Sequence[Any]) -> Any:
        made = copy.copy(self.empty)
        held = dict(zip(self.keys, parts, strict=True))
        if isinstance(made, UserDict):
            made.data = held
        else:
            vars(made).update(held)
        return made


class _Opened:
    """An object, for `pytree` to go through."""

    def __init__(self, like: _Like, parts: list[Any]) -> None:
        self.like, self.parts = like, parts


pytree.register_pytree_node(
    _Opened,
    lambda opened: (opened.parts, opened.like),
    lambda parts, like: like.filled(list(parts)),
)


class _Nothing:
    """None in the place of a tensor, in every microbatch."""


pytree.register_pytree_node(_Nothing, lambda _: ([], None), lambda _, __: None)


def flatten(batch: object) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a microbatch, and a specification of how it is made of them.

    The specifications of two microbatches are equal if they are made in the same way.
    """
    leaves, spec = pytree.tree_flatten(batch)
    if all(map(is_leaf, leaves)):
        return leaves, spec
    return pytree.tree_flatten(pytree.tree_map(_opened, batch))


def is_leaf(value: object) -> bool:
    """Return whether it is a tensor or a Python number; numpy's numbers compute differently."""
    if type(value) is int:
        return -INT_MAX <= value < INT_MAX
    return isinstance(value, torch.Tensor) or type(value) in (bool, float)


def shown(batch: object) -> str:
    """Return the form of a microbatch as text for people."""

    def named(leaf: object) -> "_Named":
        opened = _opened(leaf)
        if isinstance(opened, _Opened):
            return _Named(opened.like)
        return _Named(None if leaf is None else type(leaf).__name__)

    return repr(pytree.tree_map(named, batch))[:SHOWN_MAX]


class _Named(str):
    __slots__ = ()
    __repr__ = str.__str__


def cloned(leaves: Sequence[Any]) -> list[Any]:
    """Clone the tensors, so that code that writes into its microbatch writes into clones."""
    return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def unflatten(leaves: Sequence[Any], spec: pytree.TreeSpec) -> Any:
    return pytree.tree_unflatten(list(leaves), spec)


def with_mappings_opened(batch: Any) -> Any:
    """Return the batch as `pytree` can go through its mappings, those of libraries as well.

    What `pytree` makes of it has the libraries' own dictionaries again. A batch that is another
    mapping becomes a dict.
    """
    if isinstance(batch, Mapping) and pytree.tree_is_leaf(batch):
        batch = batch if isinstance(batch, UserDict) else dict(batch)
    return pytree.tree_map(
        lambda value: _opened(value) if isinstance(value, UserDict) else value, batch
    )


def _opened(value: Any) -> Any:
    """Open an object that holds tensors, and otherwise only plain values; and None."""
    if value is None:
        return _Nothing()
    if isinstance(value, UserDict):
        empty = copy.copy(value)
        empty.data = {}
        return _Opened(_Like(empty, tuple(value.data), {}), _each(value.data.values()))
    if isinstance(value, torch.Tensor | torch.nn.Module) or not hasattr(value, "__dict__"):
        return value
    parts = {key: each for key, each in vars(value).items() if not isinstance(each, KEPT)}
    leaves = [leaf for each in _each(parts.values()) for leaf in pytree.tree_leaves(each)]
    if not all(map(is_leaf, leaves)) or not any(map(torch.is_tensor, leaves)):
        return value
    kept = {key: each for key, each in vars(value).items() if key not in parts}
    try:
        empty = copy.copy(value)
    except Exception:  # its class may refuse to be copied
        return value
    for key in parts:
        del vars(empty)[key]
    return _Opened(_Like(empty, tuple(parts), kept), _each(parts.values()))


def _each(values: Any) -> list[Any]:
    return [pytree.tree_map(_opened, value) for value in values]
