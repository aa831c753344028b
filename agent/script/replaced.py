"""What goes on from step to step as another object each time: `self.mean = 0.9 * self.mean + 0.1 * x`, `self.shadow[i] = ...`.

A tensor, an array, a list or a dict that was replaced does not tell where it comes from. So attributes are looked for in the source,
into whose next value their own goes, and which nothing begins anew.
"""

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from agent.script.behind import is_of_steps
from agent.script.carried import asked_for, is_time, place_in, scopes, times_in
from agent.source import own
from agent.source.loops import last_name, names_in, sets_in, within

SEEDS = {"manual_seed", "seed", "set_state", "setstate"}
BEGINS = {"", "__init__", "__post_init__", "load_state_dict", "register"}  # "": outside of all


def replaced(sources: Mapping[str, Mapping[str, object]]) -> set[str]:
    each = [_of_file(own.source(*one)) for one in sources.items()]
    begun = {name for _, anew in each for name in anew}
    return {name for grown, _ in each for name in grown} - begun


class _Seeds(msgspec.Struct, frozen=True):
    """What a function seeds, by last names, and what of it in a loop; and what it calls once at most, or may again and again."""

    function: str
    is_once: bool
    seeds: frozenset[str]
    looped: frozenset[str]
    calls: frozenset[str]
    again: frozenset[str]


def seeded(sources: Mapping[str, Mapping[str, object]]) -> set[str]:
    """The random streams, by their last names, that a loop or a function may seed for each step."""
    every = [each for one in sources.items() for each in _seeds(own.source(*one))]
    once = {each.function for each in every if each.is_once}
    again = {name for each in every for name in each.again}
    while True:
        also = {name for each in every if each.function not in once for name in each.calls}
        more = {name for each in every for name in each.calls} - again - also - once
        if not more:
            break
        once |= more
    return {n for each in every for n in (each.looped if each.function in once else each.seeds)}


@functools.lru_cache(own.SOURCES_MAX)
def _seeds(source: str) -> tuple[_Seeds, ...]:
    return tuple(_seeds_of(name, nodes) for name, nodes in scopes(own.parsed(source)))


def _seeds_of(function: str, nodes: list[ast.AST]) -> _Seeds:
    looped = list(_looped(nodes))
    inside, calls = {id(each) for each in looped}, [e for e in nodes if isinstance(e, ast.Call)]
    once = [each.func for each in calls if id(each) not in inside]
    named = {id(each) for each in once}
    others = (each for each in nodes if id(each) not in named)
    return _Seeds(
        function=function,
        is_once=not function or any(map(is_of_steps, nodes)),
        seeds=frozenset(_streams(nodes, is_new=function == "__init__")),
        looped=frozenset(_streams(looped) - _streams(_at_one_step(looped))),
        calls=frozenset(map(last_name, once)),
        again=frozenset(last_name(e) for e in others if isinstance(e, ast.Name | ast.Attribute)),
    )


def _streams(nodes: Iterable[ast.AST], *, is_new: bool = False) -> set[str]:
    """Those of an object that `is_new` begin with it."""
    found = set[str]()
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr=name, value=stream)) if name in SEEDS:
                if not (is_new and isinstance(stream, ast.Attribute)):
                    found.add(last_name(stream))
    return found


def _at_one_step(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """`if step == 0: ...`"""
    for node in nodes:
        match node:
            case ast.If(test=ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant()]), body=body):
                yield from within(body)


@functools.lru_cache(own.SOURCES_MAX)
def _of_file(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """Which are made of themselves, and which are begun anew."""
    grown, begun = set[str](), set[str]()
    for function, nodes in scopes(own.parsed(source)):
        told, of = times_in(nodes), _Origins(nodes)
        again = {id(each) for each in (_looped(nodes) if function in BEGINS else nodes)}
        for target, value in _stores(nodes):
            attribute = _attribute(target)
            if attribute is None or is_time(value) or told & names_in(value):
                continue
            if place_in(attribute) in of.asked_for(value):
                grown.add(attribute.attr)
            elif id(target) in again:
                begun.add(attribute.attr)
    return frozenset(grown), frozenset(begun)


def _stores(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Not `sum += x`, of which meters are made: in place it shows otherwise."""
    plain = (each for each in nodes if not isinstance(each, ast.AugAssign))
    return ((target, value) for target, value in sets_in(plain) if value is not None)


def _looped(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    return within(each for each in nodes if isinstance(each, ast.For | ast.While))


def _attribute(target: ast.AST) -> ast.Attribute | None:
    """Of which the target is an item, or which it is."""
    while isinstance(target, ast.Subscript):
        target = target.value
    return target if isinstance(target, ast.Attribute) else None


class _Origins:
    """Of which attributes the names of a function are made."""

    def __init__(self, nodes: list[ast.AST]) -> None:
        self._of = dict[str, set[str]]()
        sets = [
            (target.id, value) for target, value in _stores(nodes) if isinstance(target, ast.Name)
        ]
        more = True
        while more:
            more = False
            for name, value in sets:
                found = self.asked_for(value)
                if not found <= self._of.setdefault(name, set()):
                    self._of[name] |= found
                    more = True

    def asked_for(self, value: ast.AST) -> set[str]:
        return asked_for(value).union(*(self._of.get(name, ()) for name in names_in(value)))
