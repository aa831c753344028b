"""What a script does for parameters that have a gradient, and for no others.

Where each worker keeps its own layers only, those of others have none. To change each one in its place is right there; what
is drawn or counted up on the way goes on from one to the next, and is another number where some are left out.
"""

import ast
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from itertools import dropwhile
from typing import TypeGuard

from agent.source.loops import names_in

LEAVES = ast.Continue | ast.Return
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
DRAWS = {
    "bernoulli", "bernoulli_", "beta", "binomial", "cauchy_", "choice", "choices", "dropout", "exponential",
    "exponential_", "gauss", "geometric_", "laplace", "log_normal_", "multinomial", "normal", "normal_",
    "permutation", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random",
    "random_", "randperm", "rsample", "sample", "shuffle", "standard_normal", "trunc_normal_", "uniform",
    "uniform_", "kaiming_normal_", "kaiming_uniform_", "orthogonal_", "sparse_", "xavier_normal_",
    "xavier_uniform_",
}  # fmt: skip


def going_on(nodes: Iterable[ast.AST]) -> Iterator[ast.Call | ast.AugAssign]:
    """The draws and the counts."""
    known = list(nodes)
    chosen = {
        name
        for node in known
        if isinstance(node, ast.Assign) and asks(node.value)
        for name in names_in(*node.targets)
    }
    for stretch in _stretches(known, chosen):
        inside = [node for each in stretch for node in ast.walk(each)]
        counts = [
            n for n in inside if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)
        ]
        others = set(inside) - {each.target for each in counts}
        own = {n.id for n in others if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        yield from (each for each in counts if names_in(each.target) - own)
        yield from (n for n in inside if isinstance(n, ast.Call) and _draws(n, own))


def misses(error: BaseException) -> bool:
    """What Python says of who does something to a gradient that is not there: `p.grad.mul_(2)`, `p.grad += noise`."""
    if not isinstance(error, AttributeError | TypeError) or "'NoneType'" not in str(error):
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    return re.search(r"\.grad\b", last.line or "") is not None


def asks(node: ast.AST) -> bool:
    """Whether it asks if there is a gradient."""
    return any(
        isinstance(each, ast.Compare)
        and isinstance(each.ops[0], ast.Is | ast.IsNot)
        and is_gradient(each.left)
        for each in ast.walk(node)
    )


def is_gradient(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return (
        isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Load)
    )


def _stretches(nodes: Iterable[ast.AST], chosen: set[str]) -> Iterator[Sequence[ast.AST]]:
    """What is done where there is one. `chosen` are the names of lists of those that have one."""
    for node in nodes:
        match node:
            case ast.If(test=test) if asks(test):
                yield (*node.body, *node.orelse)
            case ast.IfExp(test=test) if asks(test):
                yield node.body, node.orelse
            case ast.For(iter=source) if asks(source) or names_in(source) & chosen:
                yield node.body
            case _ if isinstance(node, Comprehension) and _chooses(node, chosen):
                yield (node,)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            yield list(dropwhile(lambda each: not _leaves(each), body))[1:]


def _chooses(node: Comprehension, chosen: set[str]) -> bool:
    return any(
        names_in(each.iter) & chosen or any(map(asks, (each.iter, *each.ifs)))
        for each in node.generators
    )


def _leaves(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and asks(node.test) and isinstance(node.body[-1], LEAVES)


def _draws(node: ast.Call, own: set[str]) -> bool:
    """Unless it is from a stream that is begun for this parameter."""
    name = getattr(node.func, "attr", getattr(node.func, "id", None))
    streams = [each.value for each in node.keywords if each.arg == "generator"]
    if any(names_in(each) <= own for each in streams):
        return False
    return name in DRAWS
