"""What a loss function closes over: the names it reads, and the values there now.

A graph contains the numbers that the function had when it was recorded. If a name that the function
reads has another number or another object, the function is recorded again. This is a hint and no
proof, because a function may reach a number in ways that no name shows; the session finds these by
recording it again from time to time.

The walk visits closure cells, defaults, arguments of partial functions, the object of a method, the
globals that the code names, functions of the person's own found there, and those attributes of
objects that the code names. Of a module it visits all numbers and hooks. It runs none of the
person's code.
"""

import functools
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from agent.errors import AgentError
from agent.source.tracebacks import codes, is_library, is_own_class

PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
CONTAINERS = (list, tuple, dict, set, frozenset, deque, UserDict)
ITEMS_MAX, BYTES_MAX = 256, 1 << 16
NUMBER_BYTES = 8
NUMBERS_OF_LARGE = 2048
TENSORS_MAX = 4096  # items, where they are tensors, of which a large model may have one per weight
LEVELS_MAX = 4  # of attributes and items below a name
PLACES_MAX = 1 << 16
# What every module has, and most have nothing in, such as hooks.
EMPTY_AT_FIRST = frozenset(key for key, value in vars(torch.nn.Module()).items() if not value)
MADE_ANEW = (*CONTAINERS, MethodType, functools.partial, np.generic)
MISSING = object()
START, LENGTH = "loss_of", " (length)"
Found = Iterator[tuple[str, object]]


class _Same:
    """An object, compared by identity; it may be freed meanwhile."""

    def __init__(self, thing: object) -> None:
        self._thing: Callable[[], object] = lambda: thing
        with suppress(TypeError):  # a list, or an object with `__slots__`
            self._thing = weakref.ref(thing)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        mine = self._thing()
        return mine is not None and mine is other._thing()

    __hash__ = None  # type: ignore[assignment]


class Closure:
    """The values under all names, to be compared with later ones.

    `parents` has the name through which each name was found.
    """

    def __init__(
        self,
        marks: Mapping[str, Any],
        parents: Mapping[str, str],
        loose: frozenset[str] = frozenset(),
    ) -> None:
        self._marks, self._parents, self._loose = marks, parents, loose

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Closure) and not self.changed(other)

    __hash__ = None  # type: ignore[assignment]

    def changed(self, now: "Closure") -> str:
        """Return the name of something that has changed, or "" if nothing has."""
        return min(self._changes(now), default="", key=lambda name: (len(name), name))

    def settled(self, behind: "Closure") -> "Closure":
        """Return the values after a call; what the call changed is ignored from then on.

        The function does not depend on what it changes itself.
        """
        names = {name.removesuffix(LENGTH) for name in self._changes(behind)}
        if not names:
            return self
        return Closure(behind._marks, behind._parents, self._loose | names)

    def of_same_function(self, other: "Closure") -> bool:
        """Return whether both are of the same code, or of the same called object."""
        return _equal(self._marks[START], other._marks[START])

    def _changes(self, now: "Closure") -> list[str]:
        mine, theirs = self._marks, now._marks
        names = mine.keys() | theirs.keys()
        changes = [n for n in names if not _equal(mine.get(n, MISSING), theirs.get(n, MISSING))]
        return [name for name in changes if not self._is_loose(name, now)]

    def _is_loose(self, name: str, now: "Closure") -> bool:
        """Return whether the name, or one that it was found through, is ignored."""
        at: str | None = name
        while at is not None and at not in self._loose:
            at = now._parents.get(at, self._parents.get(at))
        return at is not None


def closed_over(loss_of: Callable[..., Any]) -> Closure:
    """Look at what the function closes over; this is cheap enough for each step."""
    walk = walked(loss_of)
    return Closure(walk.marks, walk.parents)


def walked(loss_of: object) -> "Walk":
    """Walk through all that it names, until no code found on the way adds a name.

    Code found late may name attributes of what was found before. Of a library's wrapper only the
    wrapped function is visited.
    """
    while isinstance(loss_of, FunctionType) and is_library(loss_of.__code__.co_filename):
        if not hasattr(loss_of, "__wrapped__"):
            break
        loss_of = loss_of.__wrapped__
    walk = Walk(loss_of, frozenset())
    while walk.words != walk.known_words:
        walk = Walk(loss_of, walk.words)
    return walk


class Walk:
    """A walk from a function to all that it reaches through these words."""

    def __init__(self, start: object, words: frozenset[str]) -> None:
        self.marks: dict[str, Any] = {}
        self.parents: dict[str, str] = {}
        self.functions: list[FunctionType] = []
        self.things: list[object] = []  # the objects, lists and dicts that it reaches
        self.known_words = self.words = words
        self._seen = dict[int, object]()  # kept alive, so that no id is used again
        around: list[tuple[str, object, int]] = [(START, start, 0)]
        for name, thing, level in around:  # the list grows meanwhile
            for each, inside in self._look(name, thing, level):
                below = 0 if isinstance(thing, FunctionType) else level + 1
                if each not in self.marks:
                    self.parents.setdefault(each, name)
                around.append((each, inside, below))

    def _look(self, name: str, thing: object, level: int) -> Found:
        if isinstance(thing, PLAIN):
            self.marks[name] = thing
            return
        self.marks[name] = _Same(thing)
        if isinstance(thing, torch.Tensor):
            return
        if id(thing) in self._seen or level > LEVELS_MAX or len(self._seen) > PLACES_MAX:
            return
        self._seen[id(thing)] = thing
        if isinstance(thing, MADE_ANEW):  # it may be new in each step, so its contents are compared
            self.marks[name] = type(thing)
        yield from self._inside(name, thing)

    def _inside(self, name: str, thing: object) -> Found:
        match thing:
            case FunctionType():
                yield from self._function(name, thing)
            case MethodType() | functools.partial() | staticmethod() | classmethod() | property():
                yield from _around(name, thing)
            case functools._lru_cache_wrapper():
                self.things.append(thing)
                yield name, thing.__wrapped__
            case np.generic():
                self.marks[name] = thing.item()
            case np.ndarray():
                yield f"{name}[:]", _bits(thing)
            case torch.nn.Module():
                yield from self._modules(name, thing)
            case type() | ModuleType():
                if not _is_librarys(thing):
                    yield from self._named(name, vars(thing))
            case _:
                self.things.append(thing)
                yield from self._object(name, thing)

    def _function(self, name: str, function: FunctionType) -> Found:
        code = function.__code__
        self.marks[name] = _Same(code)  # a function that is made in each step has the same code
        if is_library(code.co_filename):
            return
        self.functions.append(function)
        named = _words(code)
        self.words |= named
        for each, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # not set yet
                yield each, cell.cell_contents
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for index, default in enumerate(defaults):
            yield f"{code.co_name}({index})", default
            self.words |= {default} if isinstance(default, str) else set()
        there = function.__globals__
        yield from ((each, there[each]) for each in sorted(named & there.keys()))

    def _object(self, name: str, thing: object) -> Found:
        if isinstance(thing, CONTAINERS):
            if len(thing) <= BYTES_MAX // NUMBER_BYTES and _are_plain(thing):
                self.marks[f"{name}[:]"] = _copied(thing)
            yield from _items(name, thing)
        if type(thing) not in CONTAINERS:
            yield from self._named(name, _attributes(thing))
            yield from self._of_kind(type(thing), {"__call__"})
            yield from self._of_session(name, thing)

    def _modules(self, name: str, whole: torch.nn.Module) -> Found:
        """Yield what may be set on any part of a model, such as a mode, rate, hook or forward."""
        kinds = dict[type, None]()
        for path, module in whole.named_modules():
            self._seen[id(module)] = module
            kinds[type(module)] = None
            at = f"{name}.{path}" if path else name
            for key, value in vars(module).items():
                if key in EMPTY_AT_FIRST and not value:
                    continue
                if isinstance(value, PLAIN):
                    if not key.startswith("_"):
                        self.marks[f"{at}.{key}"] = value
                elif key.endswith("_hooks") and value:
                    if not _is_ours(value):
                        hooks = [hook for hook in value.values() if not _is_ours(hook)]
                        yield from ((f"{at}.{key}", hook) for hook in hooks)
                elif (
                    key in self.known_words or isinstance(value, FunctionType | MethodType)
                ) and not _is_ours(value):
                    yield f"{at}.{key}", value
        for kind in kinds:
            yield from self._of_kind(kind, {"forward"})

    def _of_kind(self, kind: type, besides: set[str]) -> Found:
        """Yield methods and numbers of its class, if the class is the person's own."""
        for each in kind.__mro__:
            if is_own_class(each):
                wanted = {key: v for key, v in vars(each).items() if key in besides}
                yield from ((f"{each.__name__}.{key}", value) for key, value in wanted.items())
                yield from self._named(each.__name__, vars(each))

    def _of_session(self, name: str, thing: object) -> Found:
        """Yield the properties of the session that code names, such as the step.

        Reading them runs only our own code.
        """
        for kind in type(thing).__mro__ if type(thing).__module__ == "agent.session" else ():
            for key in self.known_words & vars(kind).keys():
                if isinstance(vars(kind)[key], property):
                    with suppress(AgentError):  # not available at this time
                        yield f"{name}.{key}", getattr(thing, key)

    def _named(self, name: str, there: Mapping[str, object]) -> Found:
        for key in self.known_words & there.keys():
            yield f"{name}.{key}", there[key]


def _bits(array: np.ndarray[Any, Any]) -> bytes:
    """Return the bits of an array; of a large one, evenly spaced numbers; none of a file.

    Every so-manieth is an odd number, so they lie in all columns of a table.
    """
    if array.nbytes <= BYTES_MAX:
        return array.tobytes()
    if isinstance(array, np.memmap):
        return b""
    return array.flat[:: array.size // NUMBERS_OF_LARGE | 1].tobytes()


def _around(name: str, thing: Any) -> Found:
    """Yield the function that a wrapper calls, and what it calls it with."""
    match thing:
        case functools.partial():
            yield name, thing.func
            yield f"{name} keywords", thing.keywords
            yield from ((f"{name}({at})", each) for at, each in enumerate(thing.args))
        case MethodType():
            yield name, thing.__func__
            yield type(thing.__self__).__name__, thing.__self__
        case property():
            yield name, thing.fget
        case _:
            yield name, thing.__func__


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    # NaN counts as equal to NaN.
    return type(one) is type(other) and bool(one == other or (one != one and other != other))  # noqa: PLR0124


@functools.lru_cache(1024)
def _words(code: CodeType) -> frozenset[str]:
    """Return all non-local names in code, and its strings, because these may be such names."""
    found = set[str]()
    for each in codes(code):
        found.update(each.co_names, (const for const in each.co_consts if isinstance(const, str)))
    return frozenset(found)


def _holds_tensors(thing: Any) -> bool:
    return isinstance(
        next(iter(thing.values() if isinstance(thing, Mapping) else thing), None), torch.Tensor
    )


def _are_plain(thing: Any) -> bool:
    """Return whether there are so many numbers or strings in it that none is looked at by itself."""
    several = (thing, thing.values()) if isinstance(thing, Mapping) else (thing,)
    return len(thing) > ITEMS_MAX and all({*map(type, each)} <= {*PLAIN} for each in several)


def _copied(thing: Any) -> Any:
    if isinstance(thing, Mapping):
        return tuple(thing.items())
    return frozenset(thing) if isinstance(thing, set | frozenset) else tuple(thing)


def _items(name: str, thing: Any) -> Found:
    yield f"{name}{LENGTH}", len(thing)
    if len(thing) > (TENSORS_MAX if _holds_tensors(thing) else ITEMS_MAX):
        return
    inside = sorted(thing, key=repr) if isinstance(thing, set | frozenset) else thing
    pairs = inside.items() if isinstance(inside, Mapping) else enumerate(inside)
    yield from ((f"{name}[{key!r}]", value) for key, value in [*pairs])


def _attributes(thing: object) -> Mapping[str, object]:
    """Return attributes and `__slots__` of an object, without running the person's code."""
    found: dict[str, object] = {}
    for kind in type(thing).__mro__:
        for key, slot in vars(kind).items():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):
                    found[key] = slot.__get__(thing)
    with suppress(AttributeError):
        found |= object.__getattribute__(thing, "__dict__")
    return found


def _is_ours(thing: object) -> bool:
    """Return whether the session set it, as it does for layers that other workers hold."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    maker = getattr(thing, "__module__", None) or type(thing).__module__
    return str(maker).startswith("agent.")


def _is_librarys(thing: type | ModuleType) -> bool:
    if isinstance(thing, ModuleType):
        return is_library(vars(thing).get("__file__"))
    return not is_own_class(thing)
