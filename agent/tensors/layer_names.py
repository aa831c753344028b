"""Give the tensors of several models names of which no two are the same.

Sums, layers and optimizer states identify a tensor by its name. A model keeps the names that torch
gives it. If one of them is taken by a model before it, all names of the later model begin with the
key under which it is registered: `Critic2.0.weight`. A tensor that several models share has one
name, that of the first.
"""

from collections.abc import Container, Iterator, Mapping
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

Models = Mapping[str, nn.Module]
T = TypeVar("T")


# Names are needed in every step, and models keep their form once they are registered.
_known = WeakKeyDictionary[nn.Module, tuple[list[tuple[str, int]], dict[str, str]]]()


def prefixes(models: Models) -> dict[str, str]:
    """Return what the names of each model begin with: nothing, or its key and a dot."""
    if len(models) < 2:
        return dict.fromkeys(models, "")
    first = next(iter(models.values()))
    asked = [(key, id(model)) for key, model in models.items()]
    if first not in _known or _known[first][0] != asked:
        _known[first] = asked, _prefixes(models)
    return _known[first][1]


def _prefixes(models: Models) -> dict[str, str]:
    taken = dict[str, int]()
    found = dict[str, str]()
    for key, model in models.items():
        own = _own_names(model)
        prefix = ""
        while any(taken.get(prefix + name, place) != place for name, place in own.items()):
            prefix = f"{prefix[:-1]}_." if prefix else f"{key}."
        found[key] = prefix
        taken.update({prefix + name: place for name, place in own.items()})
    return found


def _own_names(model: nn.Module) -> dict[str, int]:
    """Return every name of a tensor, those of tied ones too, with the identity of the tensor."""
    return {
        name: id(tensor)
        for pairs in (
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
        for name, tensor in pairs
    }


def named_parameters(models: Models) -> dict[str, nn.Parameter]:
    """Return every parameter once, under its name among all models."""
    return dict(
        _once((p + name, t) for p, m in _prefixed(models) for name, t in m.named_parameters())
    )


def named_buffers(models: Models) -> dict[str, torch.Tensor]:
    """Return every buffer once, under its name among all models; unsaved ones too."""
    return dict(_once((p + name, t) for p, m in _prefixed(models) for name, t in m.named_buffers()))


def named_modules(models: Models) -> dict[str, nn.Module]:
    """Return every module once, under its name among all models."""
    return dict(
        _once((p + name, m) for p, one in _prefixed(models) for name, m in one.named_modules())
    )


def summed_parameters(models: Models, trained: Container[int] = ()) -> dict[str, nn.Parameter]:
    """Return the parameters that a step's sum has room for.

    These require a gradient now, or are `trained` by a registered optimizer (by identity) and may
    be frozen for a while. Any other parameter is never trained, so a frozen teacher takes no room.
    """
    return {
        name: param
        for name, param in named_parameters(models).items()
        if param.requires_grad
        or (id(param) in trained and (param.is_floating_point() or param.is_complex()))
    }


def _prefixed(models: Models) -> list[tuple[str, nn.Module]]:
    return [(prefix, models[key]) for key, prefix in prefixes(models).items()]


def _once(pairs: Iterator[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    seen = set[int]()
    for name, thing in pairs:
        if id(thing) not in seen:
            seen.add(id(thing))
            yield name, thing
