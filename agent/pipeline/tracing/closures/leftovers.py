"""Remove placeholders that a recording leaves in the objects that a loss function reads.

A noise schedule, a loss or a table keeps its last value (`self.betas = self.betas.to(x.device)`).
It would still hold a placeholder, an `fx.Proxy`, and the first real microbatch would trip over it.
What `functools.lru_cache` has kept meanwhile cannot be looked at, so all of it is forgotten. The
model's own modules are handled elsewhere.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import fx

from agent.pipeline.tracing.closures.closure import Walk

LEVELS_MAX, PLACES_MAX = 4, 4096
Place = dict[Any, Any] | list[Any] | CellType


@contextmanager
def placeholders_removed(model: torch.nn.Module, walk: Walk) -> Iterator[list[object]]:
    """Remove placeholders from all that was reached; other values put there meanwhile stay.

    The list has the places that had some, afterwards.
    """
    removed = list[object]()
    before = [(place, _content(place)) for place in _places(model, walk)]
    caches = [each for each in walk.things if isinstance(each, functools._lru_cache_wrapper)]
    made = [each.cache_info().misses for each in caches]
    try:
        yield removed
    finally:
        removed += [place for place, earlier in before if _restore(place, earlier)]
        for cache, misses in zip(caches, made, strict=True):
            if cache.cache_info().misses != misses:
                cache.cache_clear()
                removed.append(cache)


def _restore(place: Place, earlier: Any) -> bool:
    """Put back what placeholders have replaced; return whether there were any."""
    match place:
        case CellType():
            if found := _is_placeholder(_content(place)):
                place.cell_contents = earlier
            return found
        case list():
            if found := any(map(_is_placeholder, place)):
                place[:] = earlier
            return found
        case _:
            keys = [key for key, value in [*place.items()] if _is_placeholder(value)]
            for key in keys:
                if key in earlier:
                    place[key] = earlier[key]
                else:
                    del place[key]
            return bool(keys)


def _is_placeholder(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(each, fx.Proxy) for each in value)
    return isinstance(value, fx.Proxy)


def _places(model: torch.nn.Module, walk: Walk) -> list[Place]:
    """Return the namespaces and cells of functions, and nested objects, lists and dicts."""
    known = {id(module) for module in model.modules()}
    found: list[Place] = [cell for each in walk.functions for cell in each.__closure__ or ()]
    found += {id(each.__globals__): each.__globals__ for each in walk.functions}.values()
    around: list[object] = [*walk.things, *_held_by(model)]
    for _ in range(LEVELS_MAX):
        new = list[Any]()
        for thing in around:
            place = _inside(thing)
            if place is not None and not known.intersection((id(thing), id(place))):
                known.add(id(place))
                new.append(place)
        found += new
        if len(found) > PLACES_MAX:
            break
        around = [*itertools.islice((v for place in new for v in _values(place)), PLACES_MAX)]
    return found[:PLACES_MAX]


def _held_by(model: torch.nn.Module) -> Iterable[object]:
    """Yield the dicts and lists in the attributes of modules."""
    for module in model.modules():
        yield from (each for each in vars(module).values() if type(each) in (dict, list))


def _values(place: Any) -> list[Any]:
    return [*(place if isinstance(place, list) else place.values())]


def _content(place: Place) -> Any:
    """Copy a place, without `copy.copy`, which a class of the person's own may redefine."""
    if isinstance(place, CellType):
        try:
            return place.cell_contents
        except ValueError:  # not set yet
            return None
    return list(place) if isinstance(place, list) else dict(place)


def _inside(thing: object) -> Any:
    """Return the attributes of an object, without running the person's code."""
    if isinstance(thing, dict):
        return thing
    if isinstance(thing, list):  # a long list holds data, and no placeholder
        return thing if len(thing) <= PLACES_MAX else None
    if issubclass(type(thing), type | ModuleType | FunctionType | torch.Tensor):
        return None
    try:
        place = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return place if type(place) is dict else None
