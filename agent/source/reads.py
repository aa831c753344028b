"""What a loop's body reads besides its microbatch: recorded with other values it may be another graph.

    names          step, weight      numbers and words by value, all else by which object it is
    places         cfg.alpha         attributes and items of what is named: numbers and words, and which function, tensor or
                                     list it is
    functions      losses.of(cfg)    the names and places that functions of the person's own read outside of themselves, and
                                     those of what they are given: the object whose method it is, or `cfg`
    modules        self.training     numbers and words in the modules that were taken apart, and what learns in them
    hooks          what is hung up at modules: it is recorded with them, and may keep what it is told
    asked          c = cfg; c.alpha  what objects of the person's own classes were asked for meanwhile (see `heard.py`)

Modules that were kept whole are called as they are, and what they read is read anew every time; of guests (see `guests.py`)
it is looked at whether they train, since what draws random numbers has its turn.
"""

import ast
import dis
import functools
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from agent.source.heard import HELD, ITEMS_MAX, PLAIN, Heard, Items, lying, now, of_kind, same
from agent.source.own import held_by, is_library, is_own_class, overheard_by

ABSENT = object()
FUNCTIONS = (FunctionType, MethodType, functools.partial)


class Reads:
    """Everything that one recording was made with, and how to look at it again. Of `modules` it is looked at what they have, too."""

    def __init__(
        self,
        parts: Sequence[ast.AST],
        names: dict[str, Any],
        modules: Sequence[torch.nn.Module],
        asked: Sequence[torch.nn.Module] = (),
        heard: Heard | None = None,
        overheard: Sequence[torch.nn.Module] = (),
    ) -> None:
        self._heard, self._overheard = heard or Heard(), overheard
        nodes = [node for part in parts for node in ast.walk(part)]
        stored = {
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        paths = list[list[Any]]()
        for node in nodes:
            if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
                path = _path(node)
                if path and path[0] in names and path[0] not in stored:
                    paths.append(path)
        self._paths = paths
        self._modules = modules
        known = {name: value for name, value in names.items() if name not in stored}
        called = [_call(node, known) for node in nodes if isinstance(node, ast.Call)]
        called += [call for path in paths for call in _calls_at(path, names)]
        called += [call for one in self._modules for _, call in methods(one)]
        self._calls = list(_reached(called))
        apart = {id(module) for module in self._modules}
        met = set[FunctionType]()
        for call in self._calls:
            call.leave_out(apart, met)
        self._asked = [each for one in asked for each in one.modules()]
        self._found = list(self._look(names))

    def changed(self, names: dict[str, Any]) -> str:
        """What reads otherwise now; nothing if all is as it was."""
        found = list(self._look(names))
        for (path, value), (_, before) in zip(found, self._found, strict=False):
            if not same(value, before):
                return _words(path)
        return self._heard.changed() if len(found) == len(self._found) else "a function"

    def settle(self, names: dict[str, Any]) -> None:
        """The loop was recorded to look at it, and what it puts somewhere itself is another object now."""
        self._found = list(self._look(names))
        self._heard.settle()

    def said(self, names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """What the body and its functions read now, and by which words."""
        yield from ((_words(path), _lying(path, names)) for path in self._paths)
        for call in self._calls:
            where = call.function.__qualname__
            yield from ((f"{_words(path)} in {where}", value) for path, value in call.look())

    def _look(self, names: dict[str, Any]) -> Iterator[tuple[list[Any], Any]]:
        for path in self._paths:
            yield path, _lying(path, names)
        for call in self._calls:
            yield from call.look()
        for module in self._modules:
            yield [type(module).__name__, ("attribute", "forward")], forward_of(module)
            for name, value in vars(module).items():
                if isinstance(value, PLAIN):
                    yield [type(module).__name__, ("attribute", name)], value
        for module in self._asked:
            yield [type(module).__name__, ("attribute", "training")], module.training
        yield ["hooks"], Items(_hooks(self._overheard))


def _hooks(modules: Sequence[torch.nn.Module]) -> Iterator[object]:
    for module in modules:
        if hooks := overheard_by(module):
            yield id(module), *hooks


def _words(path: list[Any]) -> str:
    name, *steps = path
    return str(name) + "".join(
        f".{key}" if kind == "attribute" else f"[{key!r}]" for kind, key in steps
    )


def _path(node: ast.AST) -> list[Any]:
    """`a.b["c"]` as a, .b, ["c"]; nothing for what is no such chain."""
    match node:
        case ast.Name():
            return [node.id]
        case ast.Attribute() if before := _path(node.value):
            return [*before, ("attribute", node.attr)]
        case ast.Subscript(slice=ast.Constant(value=key)) if before := _path(node.value):
            return [*before, ("item", key)]
    return []


def lying_at(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """What such a chain leads to; nothing where it is none."""
    path = _path(node)
    return _followed(path, names) if path else ABSENT


def _followed(path: list[Any], names: Mapping[str, Any]) -> Any:
    name, *steps = path
    value = names.get(name, ABSENT)
    for kind, key in steps:
        value = lying(value, key) if kind == "attribute" else _item(value, key)
    return value


def _lying(path: list[Any], names: Mapping[str, Any]) -> Any:
    value = _followed(path, names)
    if len(path) == 1 or isinstance(value, (*PLAIN, *HELD)):
        return now(value)
    return None


def _item(owner: Any, key: Any) -> Any:
    if type(owner) in (list, tuple) and isinstance(key, int):
        return owner[key] if -len(owner) <= key < len(owner) else None
    return owner.get(key) if type(owner) is dict else None


def taken_apart(model: torch.nn.Module, whole: Collection[str]) -> Iterator[torch.nn.Module]:
    """The modules whose own code was recorded."""
    kept: list[str] = []
    for name, module in model.named_modules():
        path = f"model.{name}" if name else "model"
        if path in whole:
            kept.append(f"{path}.")
        elif not path.startswith(tuple(kept)):
            yield module


def forward_of(module: torch.nn.Module) -> Any:
    """What is called: one that was set on it, or its class's."""
    return vars(module).get("forward", type(module).forward)


def methods(module: torch.nn.Module) -> Iterator[tuple[str, "Call"]]:
    """Its forward, and methods of its own with names that are used there."""
    waiting, seen = ["forward"], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        found = [Call(vars(kind).get(name), (module,)) for kind in type(module).__mro__]
        if name == "forward" and name in vars(module):
            found = [_call_of(forward_of(module))]
        for call in found:
            code = getattr(call.function, "__code__", None)
            if code is not None and not is_library(code.co_filename):
                yield name, call
                waiting += code.co_names


class Call:
    """A function, and what is known of what it is given."""

    def __init__(
        self, function: Any, given: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> None:
        self.function = function
        self._given = dict[str, Any]()
        self._paths: Sequence[list[Any]] = ()
        if isinstance(function, FunctionType):
            code = function.__code__
            self._given = dict.fromkeys(_parameters(code))
            places = code.co_varnames[: code.co_argcount]
            self._given |= zip(
                reversed(places), reversed(function.__defaults__ or ()), strict=False
            )
            self._given |= function.__kwdefaults__ or {}
            self._given |= zip(places, given, strict=False)
            self._given |= {k: v for k, v in (named or {}).items() if k in self._given}

    @property
    def mark(self) -> tuple[int, ...]:
        return id(self.function), *map(id, self._given.values())

    def look(self) -> Iterator[tuple[list[Any], Any]]:
        """What it reads by name outside of itself, and in what it is given."""
        names = self._names()
        return ((path, _lying(path, names)) for path in self._paths)

    def leave_out(self, apart: Collection[int], met: set[FunctionType]) -> None:
        """What is looked at anyway: in modules that were taken apart, and by whoever else calls this function."""

        def wanted(path: list[Any]) -> bool:
            if path[0] not in self._given:
                return self.function not in met
            given = self._given[path[0]]
            known = id(given) in apart and path[1:] and path[1][1] in vars(given)
            return len(path) > 2 or (len(path) == 2 and not known)

        self._paths = [path for path in _paths(self.function.__code__) if wanted(path)]
        met.add(self.function)

    def calls(self) -> Iterator["Call"]:
        names = self._names()
        return (call for path in _paths(self.function.__code__) for call in _calls_at(path, names))

    def _names(self) -> Mapping[str, Any]:
        return ChainMap(self._given, held_by(self.function), self.function.__globals__)


def _parameters(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _call(node: ast.Call, names: Mapping[str, Any]) -> Call:
    """One that stands in the body."""
    path = _path(node.func)
    given = [lying_at(each, names) for each in node.args]
    named = {each.arg: lying_at(each.value, names) for each in node.keywords if each.arg}
    return _called(path, names, given, named) if path else Call(None)


def _called(
    path: list[Any],
    names: Mapping[str, Any],
    given: Sequence[Any] = (),
    named: Mapping[str, Any] | None = None,
) -> Call:
    """Of what lies there. A method is given its object first."""
    found = _followed(path, names)
    if path[1:] and path[-1][0] == "attribute":
        owner, name = _followed(path[:-1], names), path[-1][1]
        if isinstance(found, classmethod):
            given = (owner if isinstance(owner, type) else type(owner), *given)
        elif isinstance(found, FunctionType | property) and name not in getattr(
            owner, "__dict__", {}
        ):
            given = (owner, *given)
    return _call_of(found, given, named)


def _call_of(
    function: Any, given: Sequence[Any] = (), named: Mapping[str, Any] | None = None
) -> Call:
    while True:
        match function:
            case functools.partial():
                given, named = (*function.args, *given), {**function.keywords, **(named or {})}
                function = function.func
            case MethodType():
                given, function = (function.__self__, *given), function.__func__
            case staticmethod() | classmethod():
                function = function.__func__
            case property():
                function = function.fget
            case _ if is_own_class(type(function)) and not isinstance(function, torch.nn.Module):
                given, function = (function, *given), of_kind(type(function), "__call__")
            case _:
                return Call(function, given, named)


def _calls_at(path: list[Any], names: Mapping[str, Any]) -> Iterator[Call]:
    """Of what lies there, or in the container there."""
    yield _called(path, names)
    found = _followed(path, names)
    if isinstance(found, list | tuple | dict) and len(found) <= ITEMS_MAX:
        inside = dict.values(found) if isinstance(found, dict) else found
        yield from (_call_of(each) for each in inside if isinstance(each, FUNCTIONS))


def _reached(called: Sequence[Call]) -> Iterator[Call]:
    """Functions among these and what they call by name, as far as it is no library's."""
    waiting, seen = list(called), set[tuple[int, ...]]()
    while waiting:
        call = waiting.pop()
        if not isinstance(call.function, FunctionType) or call.mark in seen:
            continue
        seen.add(call.mark)
        if not is_library(call.function.__code__.co_filename):
            yield call
            waiting += call.calls()


@functools.cache
def _paths(code: CodeType) -> tuple[list[Any], ...]:
    """`losses.weight` where it reads that: what it names outside of itself or is given, and what lies there."""
    found: list[list[Any]] = []
    goes_on, given, key = False, _parameters(code), list[Any]()
    other = dict[str, list[Any]]()  # names of its own that it gives to what lies there
    for step in dis.get_instructions(code):
        name = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
        local = step.opname.startswith("LOAD_FAST") and name in given
        if local or step.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
            found.append([name])
            goes_on = True
        elif step.opname.startswith("LOAD_FAST") and name in other:
            found.append(other[name])
            goes_on = True
        elif goes_on and step.opname == "STORE_FAST":
            other[name] = found[-1]
            goes_on = False
        elif goes_on and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found.append([*found[-1], ("attribute", name)])
        elif goes_on and step.opname == "LOAD_CONST":
            key = [step.argval]
            continue
        elif goes_on and key and "SUBSCR" in step.opname:
            found.append([*found[-1], ("item", *key)])
        else:
            goes_on = False
        key = []
    inner = (path for each in code.co_consts if isinstance(each, CodeType) for path in _paths(each))
    return (*found, *inner)
