"""What a recording leaves in objects of the script that are no modules of the model, and in lists and dicts of these: nothing.

A schedule of noise, a loss or a table keeps what it was given last (`self.betas = self.betas.to(x.device)`), and would keep a
placeholder, upon which the first microbatch would come.
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import fx

DEPTH_MAX, PLACES_MAX = 4, 4096
Place = dict[Any, Any] | list[Any]


@contextmanager
def placeholders_removed(model: torch.nn.Module, names: Iterable[object]) -> Iterator[None]:
    """From what is come by from these names. Whatever else is put there meanwhile, by another thread for one, stays."""
    before = [(place, _copy(place)) for place in _places(model, names)]
    try:
        yield
    finally:
        for place, earlier in before:
            if isinstance(place, list):
                if any(map(_is_placeholder, place)):
                    place[:] = earlier
                continue
            for key in [key for key, value in [*place.items()] if _is_placeholder(value)]:
                if key in earlier:
                    place[key] = earlier[key]
                else:
                    del place[key]


def _is_placeholder(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(each, fx.Proxy) for each in value)
    return isinstance(value, fx.Proxy)


def _places(model: torch.nn.Module, names: Iterable[object]) -> list[Place]:
    known = {id(module) for module in model.modules()}
    found, around = list[Place](), [*names]
    for _ in range(DEPTH_MAX):
        new = list[Place]()
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


def held_by(model: torch.nn.Module) -> Iterator[object]:
    """What lies in the attributes of modules; these themselves are looked after where the loop is recorded."""
    for module in model.modules():
        yield from (each for each in vars(module).values() if type(each) in (dict, list))


def _values(place: Place) -> list[Any]:
    return [*(place if isinstance(place, list) else place.values())]


def _copy(place: Place) -> Place:
    """Not by `copy.copy`, for which a class of the person's own may have another meaning."""
    return list(place) if isinstance(place, list) else dict(place)


def _inside(thing: object) -> Place | None:
    """Its attributes: nothing of the script's is run to find them."""
    if isinstance(thing, dict):
        return thing
    if isinstance(thing, list):  # a long one holds data, and no placeholder among them
        return thing if len(thing) <= PLACES_MAX else None
    if issubclass(type(thing), type | ModuleType | FunctionType | torch.Tensor):
        return None
    try:
        place = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return place if type(place) is dict else None
