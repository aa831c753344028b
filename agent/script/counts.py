"""What a model counts in its own methods, `self.calls += 1`, and goes by: on each worker it is another.

Looked for in the source of its class. A count that is only printed changes nothing, and one that a method begins anew,
`self.depth = 0`, is of one forward.
"""

import ast
import functools
from collections.abc import Iterator
from types import FunctionType

from agent.source import own

SAYING = {"print", "debug", "info", "warning", "error", "log", "write", "add_scalar", "add_scalars"}
SAYING |= {"set_postfix", "set_postfix_str", "set_description", "set_description_str"}


@functools.lru_cache(own.SOURCES_MAX)
def gone_by(kind: type) -> frozenset[str]:
    methods = [each for one in kind.__mro__ if own.is_own_class(one) for each in _methods(one)]
    counted = {name for method in methods for name in _counted(method)}
    if not counted:
        return frozenset()
    begun = {name for method in methods if method.name != "__init__" for name in _begun(method)}
    read = {name for method in methods for name in _read(method)}
    return frozenset((counted & read) - begun)


def _methods(kind: type) -> Iterator[ast.FunctionDef]:
    for function in vars(kind).values():
        found = own.definition(function) if isinstance(function, FunctionType) else None
        if found is not None:
            yield found


def _counted(method: ast.AST) -> Iterator[str]:
    for node in ast.walk(method):
        match node:
            case ast.AugAssign(
                target=ast.Attribute(value=ast.Name(id="self"), attr=name), value=ast.Constant()
            ):
                yield name


def _begun(method: ast.AST) -> Iterator[str]:
    for node in ast.walk(method):
        if isinstance(node, ast.Assign):
            read = set(_read(node.value))
            for target in node.targets:
                yield from (
                    each.attr
                    for each in ast.walk(target)
                    if isinstance(each, ast.Attribute)
                    and isinstance(each.ctx, ast.Store)
                    and each.attr not in read
                )


def _read(node: ast.AST) -> Iterator[str]:
    """For something else than to count on, or to say."""
    match node:
        case ast.Attribute(attr=name, ctx=ast.Load()):
            yield name
        case ast.Assign(targets=[ast.Attribute(attr=name)], value=value):
            yield from {*_read(value)} - {name}
            return
        case _ if only_says(node):
            return
    for child in ast.iter_child_nodes(node):
        yield from _read(child)


def only_says(node: ast.AST) -> bool:
    """Whether what is read in it is only told to somebody."""
    match node:
        case ast.If(body=body, orelse=[]):
            return all(map(says, body))
    return says(node)


def says(node: ast.AST) -> bool:
    match node:
        case ast.Expr(
            value=ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name))
        ):
            return name in SAYING
    return False
