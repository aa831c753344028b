"""What objects of the person's own classes are asked for while a loop is recorded, whatever they are called there.

What stands in the source as a name and what lies there is followed by `reads`. `cfg = self.cfg; cfg.beta` is no such thing, nor is
`getattr(cfg, key)`, nor an object that is handed on or lies in a list. So the asking itself is listened to. Losses that are modules
of torch's own are looked at when they are called.
"""

import argparse
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from agent.source.own import is_own_class

PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
CONTAINERS = (list, tuple, dict, set, frozenset, deque, UserDict, SimpleNamespace)
HELD = (torch.Tensor, torch.nn.Module, np.ndarray, FunctionType, MethodType, *CONTAINERS)
ITEMS_MAX, BYTES_MAX, DEPTH_MAX = 256, 1 << 16, 3
ALL = "__dict__"


class Items(tuple[Any, ...]):
    """What a container has now."""


class _It:
    """This very object."""

    def __init__(self, it: object) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _It) and other.it is self.it

    __hash__ = None  # type: ignore[assignment]


def now(value: Any, depth: int = DEPTH_MAX) -> Any:
    """To be compared later: numbers and words as they are, also in containers that are not large; else which object it is."""
    if isinstance(value, np.ndarray) and value.nbytes <= BYTES_MAX:
        return Items((_It(value), value.tobytes()))
    if not isinstance(value, CONTAINERS) or not depth:
        return value
    inside = vars(value) if isinstance(value, SimpleNamespace) else value
    if len(inside) > ITEMS_MAX:
        return value
    inside = sorted(inside, key=repr) if isinstance(inside, set | frozenset) else inside
    pairs = inside.items() if isinstance(inside, Mapping) else enumerate(inside)
    return Items((key, type(each), _in_container(each, depth - 1)) for key, each in pairs)


def _in_container(value: Any, depth: int) -> Any:
    found = now(value, depth)
    return found if isinstance(found, (*PLAIN, Items)) else _It(found)


def same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return (
        isinstance(one, (*PLAIN, Items, MethodType))
        and type(one) is type(other)
        and bool(one == other)
    )


class Heard:
    """`names` are what the person's own code has names for: of what classes there are."""

    def __init__(self, names: Iterable[object] = ()) -> None:
        self._kinds = _roots(names)
        self._found: dict[tuple[int, str], tuple[Callable[[], Any], Any]] = {}

    @contextmanager
    def listening(self, model: torch.nn.Module) -> Iterator[None]:
        known = {id(module) for module in model.modules()}
        asked = dict[tuple[int, str], tuple[Callable[[], Any], Any]]()

        def note(owner: Any, name: str, value: Any) -> None:
            if (id(owner), name) not in asked and _goes_by(owner, name, value, known):
                asked[id(owner), name] = _weakly(owner), now(lying(owner, name))

        def called(module: torch.nn.Module, _: object) -> None:
            """A loss that is a module of torch's, and none of the model's."""
            for name in vars(module) if id(module) not in known else ():
                note(module, name, vars(module)[name])

        with ExitStack() as stack:
            for kind in self._kinds:
                stack.enter_context(_told(kind, note))
            stack.callback(register_module_forward_pre_hook(called).remove)
            yield
        for place, (weak, before) in asked.items():
            owner = weak()
            # What the loop itself puts there it does not go by: a list of what a module has computed.
            if owner is not None and same(now(lying(owner, place[1])), before):
                self._found.setdefault(place, (weak, before))

    def settle(self) -> None:
        for place, (weak, _) in self._found.items():
            if (owner := weak()) is not None:
                self._found[place] = weak, now(lying(owner, place[1]))

    def changed(self) -> str:
        for (_, name), (owner, before) in self._found.items():
            there = owner()
            if there is not None and not same(now(lying(there, name)), before):
                return f"{type(there).__name__}.{name}"
        return ""


def _goes_by(owner: Any, name: str, value: Any, known: Collection[int]) -> bool:
    """Whether a loop may be another one when it gets something else there. What a module of the model has is looked at anyway,
    or belongs to a node that is called as it is."""
    if name.startswith("__") and name != ALL:
        return False
    if isinstance(owner, torch.nn.Module) and (
        name.startswith("_")
        or isinstance(value, torch.nn.Module | torch.Tensor)
        or (id(owner) in known and isinstance(value, PLAIN))
    ):
        return False
    if isinstance(value, MethodType):  # most are their class's
        return isinstance(lying(owner, name), MethodType)
    return isinstance(value, (*PLAIN, *HELD)) or is_own_class(type(value))


def lying(owner: Any, name: str) -> Any:
    """What lies there: nothing of the script's is run to find it out, nor is it heard."""
    own: Mapping[str, Any] = {}
    with suppress(AttributeError):
        own = object.__getattribute__(owner, ALL)
    if name == ALL:
        return dict(own)
    if name in own:
        return own[name]
    parts = own.get("_modules") if isinstance(owner, torch.nn.Module) else None
    if parts and name in parts:
        return parts[name]
    found = of_kind(type(owner), name)
    if isinstance(found, MemberDescriptorType):  # `__slots__`
        with suppress(AttributeError):
            return found.__get__(owner)
    return found


def of_kind(kind: type, name: str) -> Any:
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


def _weakly(owner: Any) -> Callable[[], Any]:
    """What is made for one microbatch goes, and nobody asks it for anything."""
    try:
        return weakref.ref(owner)
    except TypeError:  # a class with `__slots__`
        return lambda: owner


def _roots(names: Iterable[object]) -> list[type]:
    """The classes of one's own of which others are made, and the one that arguments of scripts are of."""
    kinds = {thing if isinstance(thing, type) else type(thing) for thing in names}
    own = {each for kind in kinds for each in kind.__mro__ if is_own_class(each)}
    own = {kind for kind in own if not issubclass(kind, type | torch.Tensor | BaseException)}
    return [argparse.Namespace, *(k for k in own if not own.intersection(k.__mro__[1:]))]


@contextmanager
def _told(kind: type, note: Callable[[Any, str, Any], None]) -> Iterator[None]:
    before = of_kind(kind, "__getattribute__")
    had = "__getattribute__" in vars(kind)

    def asked(owner: Any, name: str) -> Any:
        value = before(owner, name)
        note(owner, name, value)
        return value

    # Past a metaclass that might not have it.
    type.__setattr__(kind, "__getattribute__", asked)
    try:
        yield
    finally:
        if had:
            type.__setattr__(kind, "__getattribute__", before)
        else:
            type.__delattr__(kind, "__getattribute__")
