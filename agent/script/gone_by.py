"""What the loop over `session.share(...)` goes by, in a few numbers: whoever joins later may have it as the script begins.

`if step == 100: cfg.beta = 0.5` is right on whoever was there in step 100. So workers tell each other, by names, which numbers the
code of the loop reads (`agent.source.reads`), and of words, functions and losses which ones they are.
"""

import functools
from collections.abc import Iterator
from itertools import islice
from types import FunctionType
from typing import Any
from zlib import crc32

import torch

from agent.errors import CannotRecord
from agent.script.carried import clocked, timed
from agent.script.contents import can_be_told, total_of
from agent.script.parts import left_by
from agent.script.seen import gone_by_in
from agent.source import own
from agent.source.found import Caller, find, names_of
from agent.source.heard import Items
from agent.source.reads import Reads, forward_of
from agent.tensors.still import version_of

NAMES_MAX = 64
EVERY = 8
DEVICES = {"cpu", "cuda", "mps", "xpu", "meta"}
WORDS = 997.0  # so few that two of them are never near to each other


class GoneBy:
    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._modules = model, list(_of_each_kind(model))
        self._members = {id(module) for module in model.modules()}
        self._left: set[str] | None = None
        self._generation = -1
        self._first: dict[str, tuple[torch.Tensor, int]] | None = None
        self._first_forwards = dict[str, float]()
        self._has_begun, self._handed = False, set[str]()

    def begin(self) -> None:
        """Before the first microbatches that this worker computes."""
        if not self._has_begun:
            self._has_begun = True
            self._first = {path: (t, version_of(t)) for path, t in _unsaved(self._model)}
            self._first_forwards = _forwards(self._model)

    def look_again(self) -> None:
        """Behind them: what modules hand each other by attributes is of this worker's last microbatch, and told by nobody."""
        if self._first is None:
            return
        for path, tensor in _unsaved(self._model):
            then, version = self._first.get(path, (None, 0))
            if then is not tensor or version_of(tensor) != version:
                self._handed.add(path)
        now = _forwards(self._model)  # a library may set one in the first forward
        self._handed |= {name for name in now if self._first_forwards.get(name) != now[name]}
        self._first = None

    def at(self, caller: Caller, step: int, generation: int) -> dict[str, float]:
        """In some of the steps, if there are others: who comes when all were lost goes through some again."""
        return self.now(caller) if generation >= 0 and step % EVERY == 0 else {}

    def entering(self, caller: Caller, generation: int) -> dict[str, float]:
        """In the first step that is computed in a layout, in which somebody may be new."""
        before, self._generation = self._generation, generation
        return {} if generation == before else self.now(caller)

    def now(self, caller: Caller) -> dict[str, float]:
        """By the words that stand in the source; where these mean several things, they are told if all are the same."""
        if self._left is None:
            sources = own.sources(caller.frame)
            self._left = clocked(sources) | timed(sources)
        told, unlike = dict[str, float](), set[str]()
        for words, value in self._reads(caller).said(names_of(caller.frame)):
            if words.split()[0].rpartition(".")[2] in self._left:
                continue
            for name, number in self._numbers(words, value):
                if told.setdefault(name, number) != number:
                    unlike.add(name)
        some = {name: told[name] for name in sorted(told.keys() - unlike)[:NAMES_MAX]}
        kept = ((path, t) for path, t in _unsaved(self._model) if path not in self._handed)
        # By their sizes: a table may have grown on one worker only.
        forwards = _forwards(self._model).items()
        some |= {name: number for name, number in forwards if name not in self._handed}
        return some | {
            f"{path}{[*t.shape]}": total_of(t)
            for path, t in islice(kept, NAMES_MAX)
            if can_be_told(t)
        }

    def _numbers(self, words: str, value: Any) -> Iterator[tuple[str, float]]:
        yield from _numbers(words, value)
        is_loss = isinstance(value, torch.nn.Module) and next(value.parameters(), None) is None
        if is_loss and id(value) not in self._members:  # those of the model tell of themselves
            yield from _of_loss(words, value)

    def _reads(self, caller: Caller) -> Reads:
        """Anew in each step: names may stand for other objects then."""
        try:
            loop = find(caller).whole
        except CannotRecord:
            return Reads([], {}, self._modules)
        return Reads([loop.target, *loop.body], names_of(caller.frame), self._modules)


def _of_each_kind(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Whose code is no other's: what modules have themselves is looked at elsewhere (`agent.script.seen`)."""
    met = set[type]()
    for module in model.modules():
        if type(module) not in met:
            met.add(type(module))
            yield module


def _numbers(words: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Items):
        for each in value:
            if isinstance(each, tuple) and isinstance(each[2], bool | int | float):
                yield f"{words}[{each[0]!r}]", float(each[2])
    elif isinstance(value, bool | int | float):
        yield words, float(value)
    elif isinstance(value, str | torch.nn.Module | FunctionType | functools.partial):
        yield words, _word(value)


def _of_loss(words: str, module: torch.nn.Module) -> Iterator[tuple[str, float]]:
    """What a module without parameters weighs with: in no state, since the session does not know it."""
    where, _, function = words.partition(" in ")
    reader = f" in {function}" if function else ""
    for path, each in module.named_modules(prefix=where):
        kind: type = type(each)
        left = left_by(kind)
        for key, value in {**vars(each), **each._buffers}.items():
            if key in left:
                continue
            if isinstance(value, int | float):
                yield f"{path}.{key}{reader}", float(value)
            elif isinstance(value, torch.Tensor) and can_be_told(value):
                yield f"{path}.{key}{[*value.shape]}{reader}", total_of(value)


def _unsaved(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that modules go by and that are in no state."""
    for path, module in model.named_modules():
        tables = module._non_persistent_buffers_set
        for key in sorted(gone_by_in(module) | tables):
            value = vars(module).get(key, module._buffers.get(key) if key in tables else None)
            if isinstance(value, torch.Tensor):
                yield f"{path}.{key}".lstrip("."), value


def _forwards(model: torch.nn.Module) -> dict[str, float]:
    """Which code the modules of each kind run: it may be set on a class, or on one of them."""
    found = dict[str, list[str]]()
    for module in model.modules():
        found.setdefault(f"{type(module).__name__}.forward", []).append(_code(forward_of(module)))
    return {name: _word(" ".join(found[name])) for name in sorted(found)[:NAMES_MAX]}


def _code(function: Any) -> str:
    """By where it stands in the person's own files. A file is in another folder on every machine."""
    if isinstance(function, functools.partial):
        return f"partial {_code(function.func)}"
    function = getattr(function, "__func__", function)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if isinstance(function, FunctionType) and own.is_own(function):
        return f"{name}:{function.__code__.co_firstlineno}"
    return str(name)


def _word(value: Any) -> float:
    """A path is another on every machine, and so may be a device."""
    name = value if isinstance(value, str) else getattr(value, "__qualname__", type(value).__name__)
    own = "/" in name or name.partition(":")[0] in DEVICES
    return 0.0 if own else 1 + crc32(name.encode()) % WORDS
