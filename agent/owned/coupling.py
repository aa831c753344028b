"""What looks at all gradients at once is wrong where a worker has those of its own layers only, and says nothing.

Norms of one layer's tensors, as LAMB has, are of what is there. A norm of all of them is not, unless it is
`clip_grad_norm_`'s. So an optimizer is tried on three tensors: what it makes of one may not depend on whether the
others have gradients. And what the person's own code reads of gradients is looked for in its source.
"""

import ast
from collections.abc import Iterable, Iterator

import torch
from torch.optim.swa_utils import AveragedModel

from agent.errors import Misuse
from agent.owned import guarded
from agent.pipeline.record import streams_kept
from agent.script.optimizers import twin_of
from agent.source import own
from agent.source.found import Caller
from agent.tensors.device import CPU

STEPS = 4
APART = "and in this layout each worker keeps the layers of its own stages only"
PLACE = (
    f"{APART}. The norm of all gradients is clip_grad_norm_(...)'s there; for anything else the workers need room for "
    "the whole state"
)
ROOM = (
    f"{APART}. An object of your own with a state_dict may average model.state_dict() instead; for this one the workers "
    "need room for the whole state"
)


def refuse(things: Iterable[object], caller: Caller) -> None:
    """Before anything is trained in such a layout."""
    for thing in things:
        if isinstance(thing, torch.optim.Optimizer) and (why := _why_not(thing)):
            raise Misuse(f"{type(thing).__name__} {why}, {PLACE}")
        if isinstance(thing, AveragedModel):
            raise Misuse(f"{type(thing).__name__} takes in all weights one by one, {ROOM}")
    for file, there in own.sources(caller.frame).items():
        optimizers = {
            name
            for name, kind in there.items()
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        }
        tree = own.parsed(own.source(file, there))
        for node in _read(tree, optimizers):
            raise Misuse(
                f"{own.shown(file)}:{node.lineno}: `{ast.unparse(node)}` is read here, which may be the gradient of a "
                f"layer that others have, {PLACE}"
            )
        for each in guarded.going_on(_nodes(tree, optimizers)):
            raise Misuse(
                f"{own.shown(file)}:{each.lineno}: `{ast.unparse(each)}` is done here for parameters that have a gradient, "
                f"one after the other, {APART}: for each of them before it is asked whether there is one, or the workers "
                "need room for the whole state"
            )


def _why_not(optimizer: torch.optim.Optimizer) -> str:
    """Tried on a twin. One that cannot be made, or does not step by itself, is not known to be right."""
    try:
        with streams_kept(CPU):
            together, apart = _tried(optimizer, others=True), _tried(optimizer, others=False)
    except Exception as error:
        return f"could not be tried on tensors of its own ({type(error).__name__}: {error})"
    if all(torch.equal(a, b) for a, b in zip(together, apart, strict=True)):
        return ""
    return "makes something else of a parameter when others have no gradients"


def _tried(optimizer: torch.optim.Optimizer, *, others: bool) -> list[torch.Tensor]:
    """What a few steps make of one tensor of three, and of the settings that belong to all."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    twin = twin_of(optimizer, params, capturable=False)  # which is for devices
    grads = torch.randn(STEPS, 3, 4, 4)
    torch.manual_seed(1)  # what it draws for the others is not drawn where they are not
    found = []
    for step in range(STEPS):
        for index, param in enumerate(params):
            param.grad = grads[step, index].clone() if others or index == 1 else None
        twin.step()
        found.append(params[1].detach().clone())
        found += [
            torch.as_tensor(value, dtype=torch.float64)
            for group in twin.param_groups
            for value in group.values()
            if isinstance(value, int | float)
        ]
    return found


def _read(tree: ast.AST, optimizers: set[str]) -> Iterator[ast.Attribute]:
    """Where gradients are read, but for whether they are there and for what is done to each in its place."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and node.name in optimizers:
            continue
        if guarded.is_gradient(node) and not (isinstance(tree, ast.Call) and tree.func is node):
            yield node
        elif not _harmless(node):
            yield from _read(node, optimizers)


def _nodes(tree: ast.AST, optimizers: set[str]) -> Iterator[ast.AST]:
    yield tree
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.ClassDef) and node.name in optimizers):
            yield from _nodes(node, optimizers)


def _harmless(node: ast.AST) -> bool:
    match node:
        case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name, value=owner))):
            bare = (
                owner.value if isinstance(owner, ast.Attribute) and owner.attr == "data" else owner
            )
            return guarded.is_gradient(bare) and name.endswith("_")
    return False
