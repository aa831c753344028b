"""What a script gives to its session, looked at before anything is done with it."""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from agent.errors import Misuse
from agent.pipeline.births import Unborn
from agent.source.found import Caller, found_loop, names_of
from agent.source.loops import is_backward
from agent.source.reads import lying_at
from agent.tensors.away import is_away

CLIPS = {"clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"}


def check_modules(modules: Sequence[torch.nn.Module], *, built: bool) -> None:
    """That their names and their states say what is what."""
    _check_names(modules)
    for module in modules:
        _check_scripted(module)
        if built:
            _check_saved(module)


def _check_names(modules: Sequence[torch.nn.Module]) -> None:
    """Sums, snapshots and the optimizer's state go by the name of a parameter or buffer."""
    seen: set[str] = set()
    for module in modules:
        names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        if both := sorted(names & seen):
            raise Misuse(
                f"Session: two of the models both have a tensor called {both[0]!r}. Put them into one "
                "nn.ModuleDict and give that to Session, so that every name is there once"
            )
        seen |= names


def _check_scripted(module: torch.nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise Misuse(
                f"Session: {name or 'the model'!r} is a scripted module, whose tensors cannot be told apart: give it as "
                "it was before torch.jit, which computes the same"
            )


def _check_saved(module: torch.nn.Module) -> None:
    """The state goes by `state_dict()`, which may be the person's own."""
    saved = module.state_dict(keep_vars=True)
    for name, param in module.named_parameters():
        if saved.get(name) is not param:
            raise Misuse(
                f"Session: the state_dict() of {type(module).__name__} has not got its parameter {name!r} under that "
                "name, so whoever joins later would not get it. Leave state_dict() as torch has it, and leave out or "
                "rename in a method of another name"
            )


def check_unborn(
    unborn: Iterable[Unborn[Any]],
    modules: Sequence[torch.nn.Module],
    others: Sequence[object],
) -> None:
    """That they are as they were handed over, and nothing was made of them that is theirs to make."""
    names = {id(param): name for module in modules for name, param in module.named_parameters()}
    for param in [param for each in unborn for param in each.params]:
        if id(param) not in names:
            raise Misuse(
                "a model was handed over unbuilt, and a parameter of it is in no model that Session(...) was "
                "given: give all of it to Session"
            )
        if not is_away(param):
            raise Misuse(
                f"{names[id(param)]} was changed after unbuilt(...): whatever changes the model before training, "
                ".to(...) or loading weights for one, belongs into the function that builds it"
            )
        for thing in others:
            if isinstance(thing, torch.optim.Optimizer) and thing.state.get(param):
                raise Misuse(
                    f"{type(thing).__name__} makes its state before there are any parameters: with unbuilt(...) "
                    "use an optimizer that makes it in its first step, as Adam and SGD do"
                )


def scaler_of(others: Sequence[object]) -> torch.amp.GradScaler | None:
    """The one that scales the loss, if it does."""
    scalers = [thing for thing in others if isinstance(thing, torch.amp.GradScaler)]
    if len(scalers) > 1:
        raise Misuse(
            "Session: two GradScalers were given; one scales the loss of all that is trained"
        )
    return scalers[0] if scalers and scalers[0].is_enabled() else None


def check_trained(modules: Iterable[torch.nn.Module], others: Iterable[object]) -> None:
    """What a loss learns besides its models, the weights of several losses for one, is summed and saved as part of a module."""
    known = {id(param) for module in modules for param in module.parameters()}
    for thing in others:
        groups = thing.param_groups if isinstance(thing, torch.optim.Optimizer) else []
        for param in (param for group in groups for param in group["params"]):
            if id(param) not in known:
                raise Misuse(
                    f"{type(thing).__name__} trains a parameter of shape {list(param.shape)} that is in no model that "
                    "Session(...) was given, so it would be in no sum and in no state: put it into one, `extra = "
                    "torch.nn.ParameterList([...])`, and give that as well: Session(model, extra, optimizer, ...)"
                )


def say_divided(caller: Caller, microbatches: int) -> None:
    """A loss that is divided by their number, as loops do that add gradients up themselves. Whoever means it may."""
    loop = found_loop(caller)
    if loop is None or microbatches == 1:
        return
    if microbatches in _divisors([*ast.walk(loop.whole)], names_of(caller.frame)):
        sys.stderr.write(
            f"the loss that session.backward(...) is given was divided by {microbatches}, the number of microbatches. "
            "What is trained on is the mean over the microbatches of a step anyway: leave the division out, unless it "
            "is meant as something else\n"
        )


def say_clipped(caller: Caller, microbatches: int) -> None:
    """By hand it would be the sum so far, which nobody has here. Whoever means each microbatch may."""
    loop = found_loop(caller)
    if loop is None or microbatches == 1:
        return
    for node in ast.walk(loop.whole):
        match node:
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in CLIPS:
                sys.stderr.write(
                    f"{Path(loop.file).name}:{node.lineno}: {name} in the loop over session.share(...) clips the gradient of "
                    "each microbatch by itself, not the sum so far: move it behind the loop, where the gradient is that of "
                    "the step, unless it is meant so\n"
                )
                return


def _divisors(nodes: Sequence[ast.AST], names: Mapping[str, object]) -> Iterator[object]:
    """What the loss is divided by in the loop's source, where it is given to `session.backward` and where it gets its name."""
    for call in nodes:
        if is_backward(call) and call.args:
            given = call.args[0]
            for way in (given, *(_set_to(given.id, nodes) if isinstance(given, ast.Name) else ())):
                match way:
                    case ast.BinOp(op=ast.Div(), right=by) | ast.AugAssign(op=ast.Div(), value=by):
                        yield by.value if isinstance(by, ast.Constant) else lying_at(by, names)


def _set_to(name: str, nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
    for node in nodes:
        match node:
            case ast.Assign(targets=targets, value=value):
                if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                    yield value
            case ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as value) if (
                found == name
            ):
                yield value
            case ast.AugAssign(target=ast.Name(id=found)) if found == name:
                yield node
