"""A microbatch taken apart into tensors and numbers, and put together again.

It may consist of tuples, lists, dicts, and objects that hold tensors. Libraries hand out their own
dictionaries (`UserDict`), and scripts have a class for a batch. Such an object is made again from
one that was seen, with other tensors and numbers in it; what it holds besides has to be the same in
every microbatch. Names, paths and whatever else is neither tensor nor number may differ: a loss
that is recorded cannot read them, and is refused if it does.
"""

import copy
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from agent.errors import CannotRecord

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
    try:
        return pytree.tree_flatten(pytree.tree_map(_opener(), batch))
    except RecursionError:  # a long chain of objects
        return leaves, spec


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


class _Row:
    """A list of names and the like, which may be of any length."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Unread:
    """What stands for a name or the like while a loss is recorded; nobody may look at it."""

    __slots__ = ("_kind",)

    def __init__(self, value: Any) -> None:
        self._kind = _kind(value)

    def _refuse(self, *_: object) -> Any:
        raise CannotRecord(
            f"session.backward(loss_of, microbatches): loss_of reads a {self._kind} of its microbatch; cutting the model into "
            "stages needs tensors and numbers, or tuples, lists, dicts and objects of them: let the data give what is made "
            "of it, or train with depth 1"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    __eq__ = __ne__ = __hash__ = __bool__ = __str__ = __repr__ = __format__ = _refuse
    __len__ = __iter__ = __getitem__ = __contains__ = __add__ = __radd__ = __mul__ = _refuse
    __rmul__ = __sub__ = __truediv__ = __lt__ = __gt__ = __float__ = __int__ = __index__ = _refuse


class Form:
    """How a microbatch is made of tensors and numbers, and where something else is in it.

    The forms of two microbatches are equal if they are made in the same way, whatever else is in
    them.
    """

    def __init__(self, values: Sequence[Any], spec: pytree.TreeSpec) -> None:
        self._read, self._spec = [*map(is_leaf, values)], spec
        self._else = [each for each in values if not is_leaf(each)]
        self.kinds = sorted({*map(_kind, values)})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Form):
            return False
        return self._read == other._read and bool(self._spec == other._spec)

    __hash__ = None  # type: ignore[assignment]

    def filled(self, leaves: Sequence[Any], *, whole: bool = False) -> Any:
        """Return a microbatch of these tensors and numbers.

        What else belongs into it is in it if it is to be `whole`; otherwise it may not be looked
        at.
        """
        known, rest = iter(leaves), map(_value if whole else Unread, self._else)
        return unflatten([next(known if read else rest) for read in self._read], self._spec)


def apart(batch: object) -> tuple[list[Any], Form]:
    """Return the tensors and numbers of a microbatch, and how it is made of them."""
    values, spec = flatten(batch)
    if not all(map(is_leaf, values)):
        rows = pytree.tree_map(lambda x: _Row(x) if _is_row(x) else x, batch, is_leaf=_is_row)
        values, spec = flatten(rows)
    return [each for each in values if is_leaf(each)], Form(values, spec)


def _is_row(node: object) -> bool:
    if not isinstance(node, list | tuple):
        return False
    leaves = pytree.tree_leaves(node)
    return bool(leaves) and all(isinstance(each, str | bytes) for each in leaves)


def _value(value: Any) -> Any:
    return value.value if isinstance(value, _Row) else value


def _kind(value: Any) -> str:
    name = type(_value(value)).__name__
    return f"{name} of texts" if isinstance(value, _Row) else name


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
    return _opener()(value)


def _opener() -> Callable[[Any], Any]:
    """Return what opens an object that holds tensors, and otherwise only plain values; and None.

    An object that leads back to itself, as a node of a tree to its parent, is left as it is.
    """
    met: dict[int, Any] = {}

    def opened(value: Any) -> Any:
        if id(value) not in met:
            met[id(value)] = value
            met[id(value)] = _taken_apart(value, opened)
        return met[id(value)]

    return opened


def _taken_apart(value: Any, opened: Callable[[Any], Any]) -> Any:
    if value is None:
        return _Nothing()
    if isinstance(value, UserDict):
        empty = copy.copy(value)
        empty.data = {}
        found = [pytree.tree_map(opened, each) for each in value.data.values()]
        return _Opened(_Like(empty, tuple(value.data), {}), found)
    if isinstance(value, torch.Tensor | torch.nn.Module) or not hasattr(value, "__dict__"):
        return value
    parts = {key: each for key, each in vars(value).items() if not isinstance(each, KEPT)}
    found = [pytree.tree_map(opened, each) for each in parts.values()]
    leaves = pytree.tree_leaves(found)
    if not all(map(is_leaf, leaves)) or not any(map(torch.is_tensor, leaves)):
        return value
    kept = {key: each for key, each in vars(value).items() if key not in parts}
    try:
        empty = copy.copy(value)
    except Exception:  # its class may refuse to be copied
        return value
    for key in parts:
        del vars(empty)[key]
    return _Opened(_Like(empty, tuple(parts), kept), found)
