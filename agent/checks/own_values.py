"""The numbers, texts, collections, tensors, modules, streams, schedules and scalers that a script keeps.

What travels is what `Session` is given. A count in a variable, or one that a class of the script
keeps beside its `state_dict`, begins anew on a worker that joins, and so does an average of the
weights. Where such a worker comes to something else, it is said which of them have changed, because
one of them is the usual cause. Of tensors a few numbers are looked at.
"""

import contextlib
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from agent.checks.attributes import Attributes
from agent.checks.state import ScriptState
from agent.checks.variables import Variables
from agent.source.tracebacks import is_library, is_own_class
from agent.store.encoding import streams
from agent.tensors.absent import is_away
from agent.tensors.layer_names import Models, named_modules
from agent.tensors.shards import Stateful, in_a_row, tensors_of
from agent.tensors.unchanged import memory_of

TOLD_MAX, CHARS_MAX = 6, 60
TRAVELS = ("training",)
PLAIN = frozenset((bool, int, float, str, type(None)))
COLLECTIONS = frozenset((list, dict, set, deque, defaultdict, OrderedDict, Counter))
LOOKED_AT = 16  # tensors of a thing, and numbers of a tensor
Space = Mapping[str, Any]
OTHER = object()  # of a value of any other kind
COLLECTION = "collection"


class Mark(NamedTuple):
    """What shows that a thing has changed: its form, and where it stands."""

    form: object
    place: object


class OwnValues:
    """The values beside what travels, as they were when the session or the loop began."""

    def __init__(self, objects: Mapping[str, Stateful], models: Models) -> None:
        optimizers = [one for one in objects.values() if isinstance(one, torch.optim.Optimizer)]
        things = [*named_modules(models).values(), *optimizers]
        self._given = objects
        self._saved = {id(thing): _saved_of(thing) for thing in objects.values()}
        self._states = [one for one in objects.values() if isinstance(one, ScriptState)]
        self._carried = [one for one in objects.values() if isinstance(one, Variables | Attributes)]
        held = self._held()
        self._objects = [
            (type(thing).__name__, thing, self._of_object(thing, held))
            for thing in things
            if is_own_class(type(thing))
        ]
        self._loop: list[tuple[FrameType, tuple[dict[str, object], ...]]] = []
        # Of classes of the script, by the names of their variables.
        self._kept: list[tuple[str, object, dict[str, object]]] = []

    def begin_loop(self, frame: FrameType | None) -> None:
        """Note the variables of the code that has the script's loop, and of its own that calls it."""
        self._loop, spaces, held = [], list[Space](), self._held()
        while frame is not None:
            if not is_library(frame.f_code.co_filename):
                found = _spaces(frame)
                self._loop.append((frame, tuple(self._of(space, held) for space in found)))
                spaces += found
            frame = frame.f_back
        kept = {id(thing): (name, thing) for space in spaces for name, thing in _objects(space)}
        for owner, one in [*kept.values()]:  # as a trainer has its controllers
            for key, thing in _objects(vars(one)):
                if id(one) not in self._saved and not self._carries(vars(one), key):
                    kept.setdefault(id(thing), (f"{owner}.{key}", thing))
        self._kept = [(name, thing, self._of_object(thing, held)) for name, thing in kept.values()]

    def end_loop(self) -> None:
        self._loop, self._kept = [], []

    def changed(self) -> tuple[str, ...]:
        """Name some of those that have changed since: variables, and attributes with their owner."""
        return tuple(dict.fromkeys(each[:CHARS_MAX] for each in self._changed()))[:TOLD_MAX]

    def _changed(self) -> Iterator[str]:
        held = self._held()
        for name, thing, begun in (*self._objects, *self._kept):
            for key, value in self._of_object(thing, held).items():
                shown = type(value) is Mark and value.form is not COLLECTION
                was = begun.get(key)
                # A module may show what its last forward has made.
                made = isinstance(thing, torch.nn.Module) and type(was) in PLAIN
                if shown and (was is None or made):
                    continue
                if key not in begun or _differs(was, value):
                    yield f"{name}.{key}"
        kept = {id(value) for state in self._states for value in state.values()}
        for frame, noted in self._loop:
            for space, values in zip(_spaces(frame), noted, strict=True):
                # One that the loop makes anew in each step was not there when it began.
                for key, value in values.items():
                    # A list in session.state is changed under its own name, too.
                    now = space.get(key, OTHER)
                    if now is OTHER or (id(now) in kept and type(now) not in PLAIN):
                        continue
                    if _differs(value, self._plain(now, held)):
                        yield key

    def _of_object(self, thing: object, held: Container[int]) -> dict[str, object]:
        """Return its attributes without those that its `state_dict` saves."""
        saved = self._saved.get(id(thing), frozenset())
        found = self._of(vars(thing), held)
        return {key: value for key, value in found.items() if key not in saved}

    def _of(self, space: Space, held: Container[int]) -> dict[str, object]:
        return {
            key: plain
            for key, value in [*space.items()]
            if (plain := self._plain(value, held)) is not OTHER
            and key not in TRAVELS
            and not key.startswith("_")
            and not self._carries(space, key)
        }

    def _held(self) -> set[int]:
        """Return the memories of what travels, which a script may have under other names, too."""
        tensors = [one for thing in self._given.values() for one in tensors_of(thing)]
        nested = [_state_of(thing) for thing in self._given.values()]
        tensors += [one for one in tree_leaves(nested) if isinstance(one, torch.Tensor)]
        return {memory_of(one) for one in tensors if one.layout is torch.strided}

    def _plain(self, value: object, held: Container[int]) -> object:
        """Return a number, a text and None as they are, of other things a mark, or `OTHER`."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if isinstance(value, np.number):
            return value.item()
        if isinstance(value, float):  # a sum of losses
            return float(value)
        if kind in COLLECTIONS:
            several: Any = value.values() if isinstance(value, dict) else value
            some = [*islice(several, LOOKED_AT)]
            plain = [one for one in some if type(one) in PLAIN]
            return Mark(COLLECTION, (len(several), plain, _marked(some, held)))
        if id(value) in self._saved:
            return OTHER
        tensors = tensors_of(value) if isinstance(value, torch.nn.Module) else (value,)
        return _standing(value) or _marked(tensors, held) or OTHER

    def _carries(self, space: Space, key: str) -> bool:
        return any(one.carries(space, key) for one in self._carried)


def _objects(space: Space) -> Iterator[tuple[str, object]]:
    """Yield the classes of the script, and the objects of these that torch does not know."""
    for name, thing in [*space.items()]:
        torchs = isinstance(thing, torch.nn.Module | torch.optim.Optimizer | LRScheduler)
        kind = thing if isinstance(thing, type) else type(thing)
        if not torchs and is_own_class(kind) and hasattr(thing, "__dict__"):
            yield name, thing


def _saved_of(thing: Stateful) -> frozenset[str]:
    if isinstance(thing, torch.optim.Optimizer):
        return frozenset(("state", "param_groups"))
    return frozenset(map(str, _state_of(thing)))


def _state_of(thing: Stateful) -> Mapping[str, Any]:
    """Return what of an object travels, without what is known of it otherwise."""
    if isinstance(thing, ScriptState):
        return {**thing}
    if isinstance(thing, torch.nn.Module | torch.optim.Optimizer | Variables | Attributes):
        return {}
    # What fails here fails when the state is collected, too, and is explained there.
    with contextlib.suppress(Exception):
        return thing.state_dict()
    return {}


def _differs(begun: object, now: object) -> bool:
    """Return whether a value is another one; what got another form is another thing by its name.

    A best loss that begins as 0 may become a tensor or an array, of one number still.
    """
    if now is OTHER or isinstance(now, Mark) is not isinstance(begun, Mark):
        return begun is None or now is None or (type(begun) in (int, float) and _is_number(now))
    if isinstance(now, Mark) and isinstance(begun, Mark):
        return now.form == begun.form and now.place != begun.place
    # Not a number is no other value than before, though it equals none.
    return now != begun and (repr(now), repr(begun)) != ("nan", "nan")


def _is_number(thing: object) -> bool:
    form = thing.form if isinstance(thing, Mark) else None
    return isinstance(form, list) and [math.prod(shape) for shape, _ in form] == [1]


def _standing(thing: object) -> Mark | None:
    """Return the mark of a schedule, a scaler of losses or a stream; None of other things."""
    if isinstance(thing, LRScheduler):
        return Mark(type(thing), thing.last_epoch)
    if isinstance(thing, torch.amp.GradScaler):
        return Mark(type(thing), thing.state_dict())
    if isinstance(thing, streams.KINDS) and not streams.of_process(thing):
        place = streams.place_of(thing)  # torch says it in a tensor, and numpy in plain values
        return Mark(type(thing), place.tolist() if isinstance(place, torch.Tensor) else place)
    return None


def _marked(things: Iterable[object], held: Container[int]) -> Mark | None:
    """Return a mark of the tensors and arrays among these that do not travel; None of none."""
    found = [one for one in things if _has_numbers(one, held)]
    some = found[:: -(-len(found) // LOOKED_AT) or 1]
    return Mark([(one.shape, one.dtype) for one in some], [*map(_few, some)]) if some else None


def _has_numbers(thing: object, held: Container[int]) -> TypeGuard[torch.Tensor | np.ndarray]:
    if isinstance(thing, np.ndarray):
        return thing.dtype.kind in "biufc"
    plain = type(thing) in (torch.Tensor, torch.nn.Parameter)
    return (
        plain
        and isinstance(thing, torch.Tensor)
        and thing.layout is torch.strided
        and not (thing.is_quantized or thing.is_nested or thing.is_meta or is_away(thing))
        and thing.numel() > 0 < thing.untyped_storage().nbytes()
        and memory_of(thing) not in held
    )


def _few(numbers: torch.Tensor | np.ndarray) -> bytes:
    """Return some of the numbers, from all over."""
    if isinstance(numbers, np.ndarray):
        return numbers.flat[:: max(1, numbers.size // LOOKED_AT)].tobytes()
    reach = sum((n - 1) * far for n, far in zip(numbers.shape, numbers.stride(), strict=True)) + 1
    some = numbers.detach().as_strided((min(reach, LOOKED_AT),), (max(1, reach // LOOKED_AT),))
    return in_a_row(some).cpu().numpy().tobytes()


def _spaces(frame: FrameType) -> tuple[Space, ...]:
    local = frame.f_locals
    return (local,) if local is frame.f_globals else (frame.f_globals, local)
