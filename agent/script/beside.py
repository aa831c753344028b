"""What a script keeps from step to step beside its session: whoever joins later would begin it anew.

An average of the weights, a schedule, an iterator that batches are drawn from: looked for under the names that the
person's own code has (see `agent.source.own`). What is the same object as before, and has moved on, is refused. Looked at in few
steps only, ever more seldom.
"""

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import GeneratorType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from agent.errors import Misuse
from agent.script.alongside import refuse_alongside
from agent.script.carried import STATE, counted, refuse_carried, timed
from agent.script.contents import content_of, memory_of
from agent.script.for_good import refuse_for_good
from agent.script.held import counts_of
from agent.script.order import Stream, state_of
from agent.script.replaced import replaced, seeded
from agent.script.seen import gone_by_of
from agent.source import own
from agent.source.found import Caller, found_loop
from agent.source.loops import emptied_in
from agent.tensors.still import version_of

NAMES_MAX = 10_000

TOLD = ("state", "param_groups", "defaults")  # of an optimizer, in its state or made with it
GROUP = 'keep it in its groups, `group["t"] += 1`, or in its `state`, which its state_dict has'
BUFFER = (
    'keep it in a buffer, `register_buffer("tau", torch.tensor(1.0))`, which the model\'s state has'
)

GIVE = "give it to the session, Session(model, optimizer, {}, ...)"
SEED = "make it anew in each step, or seed it, from its number"
ANEW = "make the microbatches of a step anew from its number"

Mark = tuple[Any, ...]


class Written:
    """How often each of these tensors was written to; what has come or gone since is not asked."""

    def __init__(self, things: Iterable[object], mine: set[int]) -> None:
        tensors = [t for t in islice(things, NAMES_MAX) if isinstance(t, torch.Tensor)]
        self._tensors = [tensor for tensor in tensors if memory_of(tensor) not in mine]
        self._versions = {id(tensor): version_of(tensor) for tensor in self._tensors}

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Written)
        both = self._versions.keys() & other._versions.keys()
        return all(self._versions[one] == other._versions[one] for one in both)

    __hash__ = None  # type: ignore[assignment]


class Beside:
    """`given` is what the session has."""

    def __init__(self, given: Mapping[str, object]) -> None:
        self._given = given
        self._calls, self._counts, self._timed = 0, set[str](), set[str]()
        self._replaced, self._seeded = set[str](), set[str]()
        self._before: dict[str, tuple[object, Mark]] = {}
        self._steps: Callable[[], Iterator[int] | None] = lambda: None

    def given_out(self, steps: Iterator[int]) -> Iterator[int]:
        """What the script has its numbers of steps from."""
        self._steps = weakref.ref(steps)
        return steps

    def look(self, caller: Caller, step: int, total: int) -> None:
        self._calls += 1
        if self._calls & (self._calls - 1):
            return
        if self._calls == 1:
            steps = self._steps()
            if step == 0 and steps is not None:  # a newcomer has no time for it
                refuse_alongside(steps)
                refuse_for_good(caller, self._given.values(), total)
            refuse_carried(caller, self._given.values(), total)
            sources = own.sources(caller.frame)
            self._counts, self._timed = counted(sources), timed(sources)
            self._replaced, self._seeded = replaced(sources), seeded(sources)
        found = dict(self._marked(caller))
        for name, (thing, mark) in found.items():
            before = self._before.get(name)
            if before is not None and before[0] is thing and not _same(before[1], mark):
                raise Misuse(
                    f"step {step}: `{name}` goes on from step to step, and Session(...) does not know of it, so whoever "
                    f"joins later would begin it anew: {_advice(name, thing, mark)}"
                )
        self._before = found

    def _marked(self, caller: Caller) -> Iterator[tuple[str, tuple[object, Mark]]]:
        given = [*self._given.values()]
        known = {id(each) for each in [*given, *_parts(given)]}
        models = [thing for thing in given if isinstance(thing, torch.nn.Module)]
        keys = {name for model in models for name, _ in model.named_parameters()}
        tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
        mine = {memory_of(tensor) for tensor in tensors}
        found = own.names(caller.frame, held=True)
        names = [*found.items()][:NAMES_MAX]
        anew = emptied_in(found_loop(caller))
        # What is in a thing that the session has is for that thing to tell.
        inside = tuple(
            within
            for name, thing in names
            if id(thing) in known
            for within in (
                [f"{name}.{each}" for each in TOLD] if _tells_little(thing) else [f"{name}."]
            )
        )
        told = {id(thing) for name, thing in names if name in anew or name.startswith(inside)}
        left = known | told  # by whatever name
        for name, thing in names:
            if name in anew or name.startswith(("__", *inside)):
                continue
            if isinstance(thing, torch.amp.GradScaler) and thing.is_enabled():
                _refuse_scaler(name, known=id(thing) in known)
            owner, _, attribute = name.rpartition(".")
            is_left = id(thing) in left or (attribute in self._timed and _are_numbers(thing))
            is_left |= isinstance(thing, Stream) and attribute in self._seeded
            mark = None if is_left else _mark(thing, mine, keys)
            if mark is not None:
                yield name, (thing, mark)
            holder = found.get(owner)  # none, where a name is only called as an attribute is
            if own.is_holder(holder) and attribute in vars(holder):
                if attribute in self._counts and isinstance(thing, int | float):
                    yield name, (holder, (thing,))
                elif attribute in self._replaced and not is_left:
                    yield name, (holder, content_of(thing, mine))
        for name, count in counts_of(found.values()):
            if id(count[0]) not in left:
                yield name, count
        for name, thing in self._given.items():
            if isinstance(thing, torch.nn.Module):
                yield from self._counting(name, thing)

    def _counting(
        self, name: str, model: torch.nn.Module
    ) -> Iterator[tuple[str, tuple[object, Mark]]]:
        """Numbers that a model goes by, and that change behind the loop by what they are: no state has them."""
        for path, there, key in gone_by_of(model, name):
            if key in self._counts and isinstance(there[key], int | float):
                yield path, (model, (there[key],))


def _tells_little(thing: object) -> bool:
    """An optimizer of a person's own that says of itself what those of torch do."""
    return (
        isinstance(thing, torch.optim.Optimizer)
        and own.is_own_class(type(thing))
        and type(thing).state_dict is torch.optim.Optimizer.state_dict
    )


def _are_numbers(thing: object) -> bool:
    """As times are, which go on differently on every machine anyway."""
    some = islice(thing, NAMES_MAX) if isinstance(thing, list | deque) else ()
    return all(isinstance(each, int | float) for each in some)


def _parts(things: Iterable[object]) -> Iterator[object]:
    """Schedules may be made of others."""
    for thing in things:
        inner = getattr(thing, "_schedulers", None)
        if isinstance(inner, list):
            yield from inner
            yield from _parts(inner)


def _refuse_scaler(name: str, *, known: bool) -> None:
    """At once: what it scales too much in the first step is no failure of that step."""
    if not known:
        raise Misuse(
            f"`{name}` is a GradScaler that Session(...) does not know of, so whoever joins later would begin with "
            f"another scale: {GIVE.format(name)}"
        )


def _mark(thing: object, mine: set[int], keys: set[str]) -> Mark | None:
    """How far it is; None for what is not looked at."""
    found: Mark | None = None
    match thing:
        case torch.nn.Module():
            found = _versions([*thing.parameters()], mine)
        # What lies in a dict is asked of `dict`: a class of its own may load what is not there yet.
        case dict() if dict.keys(thing) & keys:
            values = [value for value in dict.values(thing) if isinstance(value, torch.Tensor)]
            found = _versions(values, mine)
        case dict():
            found = (Written(dict.values(thing), mine),)
        case list() | deque():
            found = (len(thing), Written(thing, mine))
        case torch.Tensor():
            found = (Written([thing], mine),)
        case tuple():
            found = (Written(thing, mine),)
        case LRScheduler():
            found = (thing.last_epoch,)
        case _BaseDataLoaderIter():
            found = (thing._num_yielded,)
        case GeneratorType():
            found = _progress(thing)
        case _ if isinstance(thing, Stream):
            found = (state_of(thing),)
        case type():  # `itertools.repeat` itself has what its instances have
            pass
        case _ if type(thing).__module__ in ("builtins", "itertools"):
            found = _place(thing)
    return found


def _place(thing: Any) -> Mark | None:
    """How far an iterator of Python's own is: by what is left, or by those that it is made of, `itertools.cycle(rows)`."""
    if hasattr(thing, "__length_hint__"):
        return (thing.__length_hint__(),)
    if not hasattr(thing, "__next__"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # later Pythons will not tell any more
            parts = thing.__reduce__()[1:]
    except (TypeError, AttributeError):
        return None
    flat = [each for part in parts for each in (part if isinstance(part, tuple) else (part,))]
    numbers = tuple(each for each in flat if isinstance(each, int))
    inner = tuple(_mark(each, set(), set()) for each in flat if hasattr(each, "__next__"))
    return (*numbers, *(each for each in inner if each)) or None


def _versions(tensors: list[torch.Tensor], mine: set[int]) -> Mark | None:
    """Nothing of what is the model's own, under another name: a `state_dict()` that is kept goes along with it."""
    others = [tensor for tensor in tensors if memory_of(tensor) not in mine]
    return tuple((tensor, version_of(tensor)) for tensor in others) or None


def _progress(thing: Any) -> Mark | None:
    frame = thing.gi_frame
    if frame is None or frame.f_code.co_filename.startswith(own.OURS):
        return None
    inner = thing.gi_yieldfrom  # what it hands on, `yield from loader` for one
    return (frame.f_lasti, *frame.f_locals.values(), *(_mark(inner, set(), set()) or ()))


def _same(one: Mark, other: Mark) -> bool:
    return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return _same(a, b)
    plain = int | float | str | bytes | Written
    return a is b or (isinstance(a, plain) and isinstance(b, plain) and a == b)


def _advice(name: str, thing: object, mark: Mark) -> str:
    if isinstance(thing, torch.optim.Optimizer):
        return GROUP
    if isinstance(thing, torch.nn.Module) and isinstance(mark[0], int | float):
        return BUFFER
    if isinstance(thing, torch.nn.Module | LRScheduler):
        return GIVE.format(name)
    if isinstance(thing, Stream):
        return SEED
    return ANEW if hasattr(thing, "__next__") else STATE
