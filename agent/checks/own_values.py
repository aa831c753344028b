"""The numbers, texts and collections that a script keeps for itself.

What travels is what `Session` is given. A count in a variable, or one that a class of the script
keeps beside its `state_dict`, begins anew on a worker that joins. Where such a worker comes to
something else, it is said which of them have changed, because one of them is the usual cause.
"""

import contextlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from agent.checks.attributes import Attributes
from agent.checks.state import ScriptState
from agent.checks.variables import Variables
from agent.source.tracebacks import is_library, is_own_class
from agent.tensors.layer_names import Models, named_modules
from agent.tensors.shards import Stateful

TOLD_MAX, CHARS_MAX = 6, 60
TRAVELS = ("training",)
PLAIN = frozenset((bool, int, float, str, type(None)))
COLLECTIONS = frozenset((list, dict, set, deque, defaultdict, OrderedDict, Counter))
Space = Mapping[str, Any]
OTHER = object()  # of a value of any other kind


class OwnValues:
    """The values beside what travels, as they were when the session or the loop began."""

    def __init__(self, objects: Mapping[str, Stateful], models: Models) -> None:
        optimizers = [one for one in objects.values() if isinstance(one, torch.optim.Optimizer)]
        things = [*named_modules(models).values(), *optimizers]
        self._saved = {id(thing): _saved_of(thing) for thing in objects.values()}
        self._states = [one for one in objects.values() if isinstance(one, ScriptState)]
        self._carried = [one for one in objects.values() if isinstance(one, Variables | Attributes)]
        self._objects = [
            (type(thing).__name__, thing, self._of_object(thing))
            for thing in things
            if is_own_class(type(thing))
        ]
        self._loop: FrameType | None = None
        self._variables: dict[str, object] = {}
        # Of classes of the script, by the names of their variables.
        self._kept: list[tuple[str, object, dict[str, object]]] = []

    def begin_loop(self, frame: FrameType | None) -> None:
        """Note the variables of the code that has the script's loop."""
        while frame is not None and is_library(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return
        self._loop, spaces = frame, _spaces(frame)
        self._variables = {
            name: value for space in spaces for name, value in self._of(space).items()
        }
        kept = {id(thing): (name, thing) for space in spaces for name, thing in _objects(space)}
        for owner, one in [*kept.values()]:  # as a trainer has its controllers
            for key, thing in _objects(vars(one)):
                if id(one) not in self._saved and not self._carries(vars(one), key):
                    kept.setdefault(id(thing), (f"{owner}.{key}", thing))
        self._kept = [(name, thing, self._of_object(thing)) for name, thing in kept.values()]

    def end_loop(self) -> None:
        self._loop, self._variables, self._kept = None, {}, []

    def changed(self) -> tuple[str, ...]:
        """Name some of those that have changed since: variables, and attributes with their owner."""
        return tuple(dict.fromkeys(each[:CHARS_MAX] for each in self._changed()))[:TOLD_MAX]

    def _changed(self) -> Iterator[str]:
        for name, thing, begun in (*self._objects, *self._kept):
            for key, value in self._of_object(thing).items():
                if key not in begun or value != begun[key]:
                    yield f"{name}.{key}"
        kept = {id(value) for state in self._states for value in state.values()}
        for space in () if self._loop is None else _spaces(self._loop):
            # One that the loop makes anew in each step was not there when it began.
            for key, value in self._variables.items():
                other = OTHER if value is None else value
                # A list in session.state is changed under its own name, too.
                if key not in space or (id(space[key]) in kept and type(space[key]) in COLLECTIONS):
                    continue
                if _plain(space[key], other) != value:
                    yield key

    def _of_object(self, thing: object) -> dict[str, object]:
        """Return its attributes without those that its `state_dict` saves."""
        saved = self._saved.get(id(thing), frozenset())
        return {key: value for key, value in self._of(vars(thing)).items() if key not in saved}

    def _of(self, space: Space) -> dict[str, object]:
        return {
            key: plain
            for key, value in [*space.items()]
            if (plain := _plain(value, OTHER)) is not OTHER
            and key not in TRAVELS
            and not key.startswith("_")
            and not self._carries(space, key)
        }

    def _carries(self, space: Space, key: str) -> bool:
        return any(one.carries(space, key) for one in self._carried)


def _objects(space: Space) -> Iterator[tuple[str, object]]:
    """Yield the objects of classes of the script that torch does not know."""
    for name, thing in [*space.items()]:
        torchs = isinstance(thing, torch.nn.Module | torch.optim.Optimizer | LRScheduler)
        if not torchs and is_own_class(type(thing)) and hasattr(thing, "__dict__"):
            yield name, thing


def _saved_of(thing: Stateful) -> frozenset[str]:
    if isinstance(thing, torch.optim.Optimizer):
        return frozenset(("state", "param_groups"))
    if isinstance(thing, torch.nn.Module | Variables | Attributes):
        return frozenset()
    # What fails here fails when the state is collected, too, and is explained there.
    with contextlib.suppress(Exception):
        return frozenset(map(str, thing.state_dict()))
    return frozenset()


def _plain(value: object, other: object) -> object:
    """Return a number, a text and None as they are, of a collection its length, or else `other`."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, float):  # a sum of losses
        return float(value)
    return len(value) if kind in COLLECTIONS else other  # type: ignore[arg-type]


def _spaces(frame: FrameType) -> tuple[Space, ...]:
    local = frame.f_locals
    return (local,) if local is frame.f_globals else (frame.f_globals, local)
