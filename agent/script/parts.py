"""What a module's forward leaves in the module for whoever wants to see it: the parts of a loss, the target that it made.

It is set anew each time, so it is of the last microbatch, and no next one goes by it.
"""

import ast
import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from types import FunctionType

from agent.source import own

Methods = dict[str, ast.FunctionDef]


@functools.lru_cache(own.SOURCES_MAX)
def left_by(kind: type) -> frozenset[str]:
    """The attributes that its forward sets before it reads them, or that no method reads."""
    methods = _methods(kind)
    forward = methods.get("forward")
    if forward is None:
        return frozenset()
    read = {name for method in methods.values() for name in _read([method], {})}
    counted = {
        each.target.attr
        for each in ast.walk(forward)
        if isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Attribute)
    }
    left = _set_first(forward.body, methods) | (_stored([forward]) - read)
    return frozenset(left - counted)


def read_elsewhere(name: str, kind: type, sources: Mapping[str, Mapping[str, object]]) -> bool:
    """Whether the person's own code reads an attribute of this name anywhere but in this class."""
    inside = sum(_counted(method)[name] for method in _methods(kind).values())
    return sum(_counted(own.parsed(own.source(*one)))[name] for one in sources.items()) > inside


def _counted(node: ast.AST) -> Counter[str]:
    asked = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    return Counter(each.attr for each in asked if isinstance(each.ctx, ast.Load))


def _methods(kind: type) -> Methods:
    """As they are called, from its bases on."""
    found = dict[str, ast.FunctionDef]()
    for each in reversed(kind.__mro__):
        for name, function in vars(each).items() if own.is_own_class(each) else ():
            method = own.definition(function) if isinstance(function, FunctionType) else None
            if method is not None:
                found[name] = method
    return found


def _set_first(body: Iterable[ast.stmt], methods: Methods) -> set[str]:
    """What is set whatever else happens, and not read before."""
    known, read = set[str](), set[str]()
    for part in body:
        match part:
            case ast.Assign(value=value, targets=targets):
                read |= _read([value, *targets], methods) - known
                known |= _stored(targets) - read
            case _:
                read |= _read([part], methods) - known
    return known


def _read(nodes: Iterable[ast.AST], methods: Methods) -> set[str]:
    """Also by the methods that are called there."""
    found, waiting = set[str](), list(nodes)
    met = set[str]()
    while waiting:
        names = set(_counted(waiting.pop()))
        waiting += [methods[name] for name in names & methods.keys() - met]
        met |= names
        found |= names
    return found


def _stored(nodes: Iterable[ast.AST]) -> set[str]:
    every = (each for node in nodes for each in ast.walk(node))
    return {
        each.attr
        for each in every
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
    }
