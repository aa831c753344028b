"""What a worker has seen of a step, in a few numbers: enough to tell when others see something else."""

import dis
import functools
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
import torch
from torch.utils import _pytree as pytree

from agent.protocol import Seen
from agent.script.pointers import refuse_pointers
from agent.source.own import is_own, is_own_class, is_torchs, overheard_by
from agent.tensors.away import is_away
from agent.tensors.device import rounding, where

NUMBERS = 4
LEAVES_MAX = 4
WORDS = 997  # so few that two of them are never near to each other
STEPS_MAX = 8
TOLD_MAX = 16
KINDS_MAX = 1024
PLAIN = (bool, int, float, str)
CALLED = (FunctionType, BuiltinFunctionType)
KEPT = (*PLAIN, *CALLED, NoneType)
ROUNDED = 64  # a change of fewer units in the last place says nothing

Change = tuple[tuple[float, ...], float]  # and what a unit in the last place is
NOTHING: Change = (), 0.0


class Eyes:
    """Of the last microbatch some numbers, and of one parameter or buffer how a step has changed some:
    another one each step."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models, self._has_looked = models, False
        self._modules = [module for model in models for module in model.modules()]
        self._tensors = [
            tensor
            for model in models
            for tensor in (*model.parameters(), *model.buffers())
            if tensor.dtype.is_floating_point
        ]
        self._begun = [  # what only a script changes in modules, as it is now
            (name, there, key, there[key])
            for model in models
            for name, there, key in gone_by_of(model)
            if isinstance(there[key], KEPT)
        ]
        self._then: list[object] = []
        self._hooks = [
            (name, module, len(_own_hooks(module)))
            for model in models
            for name, module in model.named_modules()
        ]
        self._pulled = [
            (name, param, len(_own_pulls(param)))
            for model in models
            for name, param in model.named_parameters()
        ]
        self._machine = rounding(where(self._tensors))
        self._before: tuple[int, list[float]] = (-1, [])
        self.seen: deque[Seen] = deque(maxlen=STEPS_MAX)

    def look(self, step: int, batches: Sequence[Any], *, whole: bool = True) -> None:
        """At the beginning of a step. Where not all is here, what is here has come from others meanwhile."""
        if not self._has_looked:
            self._has_looked = True
            refuse_pointers(self._models, len(batches))
        change, grain = self._change(step - 1) if whole else NOTHING
        self.seen.append(
            Seen(
                step=step,
                batches=_of_batches(batches),
                change=change,
                grain=grain,
                machine=self._machine,
                training=sum(module.training for module in self._modules),
                told=tuple(itertools.islice(self._others(), TOLD_MAX)),
            )
        )
        self._before = (step, self._numbers(step)) if whole else (-1, [])
        self._then = [there.get(key) for _, there, key, _ in self._begun]

    def look_again(self) -> None:
        """Behind the microbatches: what has become another in their loop is of this worker's, and told by nobody."""
        both = zip(self._begun, self._then, strict=True)
        self._begun = [one for one, then in both if _is_still(one[1].get(one[2]), then)]

    def goes_by(self, told: dict[str, float]) -> None:
        """What the loop's code goes by in this step, where it was looked at."""
        if told and self.seen:
            self.seen[-1] = msgspec.structs.replace(self.seen[-1], goes_by=told)

    def forget(self) -> None:
        """The state was taken over from others."""
        self._before = (-1, [])
        self.seen.clear()

    def _others(self) -> Iterator[str]:
        for name, there, key, begun in self._begun:
            now = there.get(key)
            if isinstance(now, KEPT) and not _is_still(now, begun):
                yield f"{name} = {getattr(now, '__qualname__', now) if isinstance(now, CALLED) else repr(now)}"
        for name, module, begun in self._hooks:
            if (now := len(_own_hooks(module))) != begun:
                yield f"{name or 'the model'} with {now} forward hook{'s' * (now != 1)}"
        for name, param, begun in self._pulled:
            if (now := len(_own_pulls(param))) != begun:
                yield f"{name} with {now} hook{'s' * (now != 1)} on its gradient"

    def _numbers(self, step: int) -> list[float]:
        param = self._of(step)
        return [] if param is None or is_away(param) else _some(param)

    def _of(self, step: int) -> torch.Tensor | None:
        return self._tensors[step % len(self._tensors)] if self._tensors else None

    def _change(self, step: int) -> Change:
        """What became of the numbers that were noted down at this step."""
        at, before = self._before
        now, param = self._numbers(step) if at == step else [], self._of(step)
        change = tuple(b - a for a, b in zip(before, now, strict=False))
        if not change or param is None or not all(map(math.isfinite, change)):
            return NOTHING
        grain = torch.finfo(param.dtype).eps * max(map(abs, now))
        return (change, grain) if max(map(abs, change)) > ROUNDED * grain else NOTHING


def _own_hooks(module: torch.nn.Module) -> list[object]:
    """What the script has hung up there; libraries do so when a forward comes by."""
    return [hook for hook in overheard_by(module) if is_own(hook)]


def _own_pulls(param: torch.Tensor) -> list[object]:
    """What the script has done to a gradient when it comes by."""
    hooks = (param._backward_hooks, param._post_accumulate_grad_hooks)
    return [hook for each in hooks if each for hook in each.values() if is_own(hook)]


def _is_still(now: object, then: object) -> bool:
    return now is then or (isinstance(now, PLAIN) and isinstance(then, PLAIN) and now == then)


def gone_by_in(module: torch.nn.Module) -> frozenset[str]:
    """The attributes that its methods go by, and that only a script changes."""
    return _gone_by(_kinds(module)) & vars(module).keys()


def gone_by_of(
    model: torch.nn.Module, prefix: str = ""
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """All of them in a model: by what name, and where each lies."""
    for path, module in model.named_modules(prefix=prefix):
        for key in gone_by_in(module):
            yield f"{path}.{key}".lstrip("."), vars(module), key


def _kinds(module: torch.nn.Module) -> tuple[type, ...]:
    kinds = type(module).__mro__
    return kinds[: kinds.index(torch.nn.Module)]


@functools.lru_cache(KINDS_MAX)
def _gone_by(kinds: tuple[type, ...]) -> frozenset[str]:
    """What methods of a module go by, and do not change: that is left to scripts. What only those change that no forward
    calls, `model.anneal()` behind the loop, is meant as well where the forward goes by it. Of libraries nobody knows."""
    if not all(is_torchs(each) or is_own_class(each) for each in kinds):
        return frozenset()
    methods: dict[str, list[tuple[set[str], set[str]]]] = {}
    for each in kinds:
        for name, method in vars(each).items():
            if isinstance(method, FunctionType) and name != "__init__":
                methods.setdefault(name, []).append(_read_and_changed(method))
    read, changed = _together(methods, methods.keys())
    asked, written = _together(methods, _called(methods, "forward"))
    return frozenset((read - changed) | (asked - written)) - {"training"}


Named = dict[str, list[tuple[set[str], set[str]]]]  # what methods of a name read and change


def _read_and_changed(method: FunctionType) -> tuple[set[str], set[str]]:
    read, changed = set[str](), set[str]()
    for step in dis.get_instructions(method):
        (changed if step.opname == "STORE_ATTR" else read).add(str(step.argval))
    return read, changed


def _called(methods: Named, first: str) -> set[str]:
    """By this method, and by those that it calls."""
    met, after = set[str](), {first}
    while after:
        met |= after
        after = (_together(methods, after)[0] & methods.keys()) - met
    return met


def _together(methods: Named, names: Iterable[str]) -> tuple[set[str], set[str]]:
    found = [one for name in names for one in methods.get(name, [])]
    return set().union(*(read for read, _ in found)), set().union(*(new for _, new in found))


def _some(array: torch.Tensor | np.ndarray[Any, Any]) -> list[Any]:
    flat = array.reshape(-1)
    every = max(1, len(flat) // NUMBERS)
    found: list[Any] = flat[: every * NUMBERS : every].tolist()
    return found


def _of_batches(batches: Sequence[Any]) -> tuple[float, ...]:
    """Of what is at hand: a sequence of the script's own might load what it is asked for."""
    if not isinstance(batches, list | tuple | torch.Tensor):
        return ()
    leaves = pytree.tree_leaves(batches[-1])[:LEAVES_MAX]
    found: list[float] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor | np.ndarray) and _is_plain(leaf):
            found += [*leaf.shape, *_some(leaf)]
        elif isinstance(leaf, int | float):
            found.append(leaf)
        elif isinstance(leaf, str):
            found.append(crc32(leaf.encode()) % WORDS)
    return tuple(float(each) for each in found)


def _is_plain(leaf: torch.Tensor | np.ndarray[Any, Any]) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.layout is torch.strided and not leaf.is_complex()
    return leaf.dtype.kind in "fiub"
