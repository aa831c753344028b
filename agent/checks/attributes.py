"""Save an object that has no `state_dict` by its attributes, if these are plain values."""

import enum
import logging
import types
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from agent.errors import Misuse
from agent.store.encoding.plain import Object, Reference, Unsavable, packed, unpacked
from agent.tensors.layer_names import Models, named_modules, named_parameters
from agent.tensors.shards import tensors_of

HEAP_TYPE = 1 << 9
OURS = "agent."  # such as the session itself, and what its `data` returns
# Kinds of objects that a script makes alike on every worker, and that hold no state.
LEFT = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    torch.device,
    torch.dtype,
    np.dtype,
    enum.Enum,
    PurePath,
    logging.Logger,
    DataLoader,
    Dataset,
    Sampler,
)


class Registry:
    """The registered objects, modules and parameters by name, as attributes may refer to them."""

    def __init__(self, objects: Mapping[str, Any], models: Models) -> None:
        self.things: dict[str, Any] = {
            **{f"parameter {name}": param for name, param in named_parameters(models).items()},
            **{f"module {name}": module for name, module in named_modules(models).items()},
            **objects,
        }
        self._names = {id(thing): name for name, thing in self.things.items()}

    def name_of(self, thing: object) -> str | None:
        return self._names.get(id(thing))


class Attributes:
    """A stand-in for `thing` that has a `state_dict`.

    `saved` are the attributes that are saved, `left` those that are not.
    """

    def __init__(self, thing: object, registry: Registry) -> None:
        self._thing, self._registry = thing, registry
        kind = type(thing).__name__
        if not _is_python_object(thing):
            raise Misuse(
                f"Session: a {kind} has neither state_dict and load_state_dict nor attributes of its own, so nothing of "
                "it can be saved: leave it out, or keep what matters of it in session.state"
            )
        self.state_dict("Session: ")
        found = {name: self._open(value) for name, value in _attributes(thing).items()}
        self.left = sorted(name for name, one in found.items() if one == Reference(""))
        self.saved = sorted(n for n, one in found.items() if not isinstance(one, Reference))

    def carries(self, space: Mapping[str, Any], name: str) -> bool:
        """Return whether this name of a namespace is an attribute of the object; all of them travel."""
        return getattr(self._thing, "__dict__", None) is space and name not in self.left

    def check(self, step: int) -> None:
        self.state_dict(f"step {step}: ")

    def state_dict(self, when: str = "") -> dict[str, Any]:
        try:
            return packed(self._thing, self._open)
        except Unsavable as error:
            kind = type(self._thing).__name__
            raise Misuse(
                f"{when}{kind}{error.path} {error.what}; or, in place of this {kind}, give only those of its attributes that "
                'matter: Variables(it, "name")'
            ) from None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        unpacked(state, self._thing, self._open, self._registry.things)

    def _open(self, value: Any) -> Object | Reference | None:
        name = self._registry.name_of(value)
        if name is not None and value is not self._thing:
            return Reference(name)
        if isinstance(value, LEFT) or type(value).__module__.startswith(OURS) or _is_bare(value):
            return Reference("")
        if not _is_python_object(value):
            return None
        if value is not self._thing and hasattr(value, "state_dict"):
            return None
        return Object(type(value).__qualname__, _attributes(value))


def _is_bare(thing: object) -> bool:
    """Return whether this is a module without a tensor, such as a criterion."""
    return isinstance(thing, torch.nn.Module) and not any(True for _ in tensors_of(thing))


def _is_python_object(thing: object) -> bool:
    """Return whether an object has nothing but attributes.

    So it is if its classes are written in Python, and it is pickled as usual.
    """
    kinds = type(thing).__mro__[:-1]
    if isinstance(thing, torch.nn.Module | torch.optim.Optimizer | BaseException):
        return False
    return (
        all(kind.__flags__ & HEAP_TYPE and _is_made_in_python(kind) for kind in kinds)
        and type(thing).__reduce_ex__ is object.__reduce_ex__
        and type(thing).__reduce__ is object.__reduce__
        and (hasattr(thing, "__dict__") or any(_slots(type(thing))))
    )


def _is_made_in_python(kind: type) -> bool:
    made = vars(kind).get("__new__")
    return made is None or isinstance(made, staticmethod)


def _attributes(thing: object) -> dict[str, Any]:
    slots = {name: getattr(thing, name) for name in _slots(type(thing)) if hasattr(thing, name)}
    return {**slots, **getattr(thing, "__dict__", {})}


def _slots(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield f"_{each.__name__.lstrip('_')}{name}" if _is_private(name) else name


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")
