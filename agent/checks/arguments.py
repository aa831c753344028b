"""Check the objects that a script gives to its session, before anything is done with them."""

import operator
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, get_args

import torch
from torch.nn.parameter import is_lazy

from agent.errors import Misuse
from agent.pipeline.deferred.initial_values import Unborn
from agent.profile import Stragglers, SumFormat
from agent.store.layers import why_unsaved
from agent.tensors.absent import is_away
from agent.tensors.layer_names import Models, named_parameters


def counted(number: Any, where: str) -> int:
    """Return a number of steps or microbatches as the plain one that other workers are told."""
    try:
        found = int(operator.index(number))
    except TypeError:
        found = -1
    if found < 0:
        raise Misuse(
            f"{where}: {number!r} is no number of them; give a whole one, as int(...) does"
        )
    return found


def numbers_of(given: Any, where: str) -> range:
    """Return the numbers that a loop counts by: a range, or those up to a whole number."""
    return given if isinstance(given, range) else range(counted(given, where))


def items_of(given: Any, where: str, *, by_number: bool = False) -> Any:
    """Return what an epoch goes through; a number stands for as many of them."""
    if isinstance(given, Integral):
        return range(counted(given, where))
    needs = {"__len__": "length"} | ({"__getitem__": "items by number"} if by_number else {})
    for name, what in needs.items():
        if not hasattr(given, name):
            raise Misuse(
                f"{where}: a {type(given).__name__} has no {what}: give a list, [*...], or the number of steps of an epoch"
            )
    return given


def check_modules(models: Models, *, built: bool) -> None:
    """Check that the tensors of the models and their saved states can be told apart by name."""
    for module in models.values():
        _check_scripted(module)
        _check_lazy(module)
        if built:
            _check_saved(module)


def _check_scripted(module: torch.nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise Misuse(
                f"Session: {name or 'the model'!r} is a scripted module, whose tensors cannot be distinguished: give it as "
                "it was before torch.jit, which computes the same"
            )


def _check_lazy(module: torch.nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise Misuse(
                f"Session: {name!r} of {type(module).__name__} has no shape yet: run the model on one batch before"
            )


def _check_saved(module: torch.nn.Module) -> None:
    """Check that all tensors can be saved, and parameters under the names of `state_dict()`.

    A class may define that method in a different way.
    """
    saved = module.state_dict(keep_vars=True)
    for name, item in saved.items():
        if isinstance(item, torch.Tensor) and (why := why_unsaved(item) or _why_unloaded(item)):
            raise Misuse(f"Session: {name!r} of {type(module).__name__}: {why}")
    for name, param in module.named_parameters():
        if saved.get(name) is not param:
            raise Misuse(
                f"Session: the state_dict() of {type(module).__name__} does not have its parameter {name!r} under that "
                "name, so a joining worker would not get it. Leave state_dict() as torch has it, and leave out or "
                "rename in a method of another name"
            )


def _why_unloaded(tensor: torch.Tensor) -> str:
    """Return why a saved tensor could not be written to; "" if it could.

    A parameter may be one number for all here, as those are that are held elsewhere.
    """
    away = isinstance(tensor, torch.nn.Parameter) and is_away(tensor)
    if away or torch._debug_has_internal_overlap(tensor) != 1:
        return ""
    return "a tensor of which several numbers lie in one place, as after expand(...), cannot be loaded: keep .clone() of it"


def check_unborn(unborn: Iterable[Unborn[Any]], models: Models, others: Sequence[object]) -> None:
    """Check that models handed over unbuilt are registered, and still unchanged."""
    names = {id(param): name for name, param in named_parameters(models).items()}
    for param in [param for each in unborn for param in each.params]:
        if id(param) not in names:
            raise Misuse(
                "a model was handed over unbuilt, and a parameter of it is in no model that Session(...) was "
                "given: give all of it to Session"
            )
        if not is_away(param):
            raise Misuse(
                f"{names[id(param)]} was changed after unbuilt(...): everything that changes the model before training, "
                ".to(...) or loading weights for example, belongs into the function that builds it"
            )
        for thing in others:
            if isinstance(thing, torch.optim.Optimizer) and thing.state.get(param):
                raise Misuse(
                    f"{type(thing).__name__} makes its state before there are any parameters: with unbuilt(...) "
                    "use an optimizer that makes it in its first step, as Adam and SGD do"
                )


def scaler_of(objects: Iterable[object]) -> torch.amp.GradScaler | None:
    """Return the registered scaler of the loss, if there is one that is enabled.

    It may be an attribute of a registered object, as of timm's NativeScaler.
    """
    scalers = {
        id(one): one
        for thing in objects
        if not isinstance(thing, torch.nn.Module | torch.optim.Optimizer)
        for one in (thing, *getattr(thing, "__dict__", {}).values())
        if isinstance(one, torch.amp.GradScaler)
    }
    if len(scalers) > 1:
        raise Misuse(
            "Session: two GradScalers were given; one scales the loss of everything that is trained"
        )
    return next((one for one in scalers.values() if one.is_enabled()), None)


def check_exchange(exchange: object, models: Models, *, deterministic: bool) -> None:
    """Check that sums in this format are one number for all layouts, and differ from others."""
    known, where = get_args(SumFormat), f"Session(..., exchange={exchange!r})"
    if exchange not in known:
        raise Misuse(f"{where}: gradients are exchanged as one of {known}: give one of these")
    if exchange == "float32":
        return
    if not deterministic:
        raise Misuse(
            f"{where} with deterministic=False: where the order of additions is free, a rounded sum is a different "
            "number on every number of workers, and loses more with each microbatch. Leave out one of the two"
        )
    if not any(p.dtype == torch.float32 for p in named_parameters(models).values()):
        raise Misuse(
            f"{where}: no parameter is of torch.float32, and gradients of other types are exchanged as they are: "
            "leave it out"
        )


def check_stragglers(stragglers: object, *, deterministic: bool) -> None:
    """Check that the microbatches of a late worker can be added in their own places."""
    known, where = get_args(Stragglers), f"Session(..., stragglers={stragglers!r})"
    if stragglers not in known:
        raise Misuse(f"{where}: it is one of {known}: give one of these")
    if stragglers != "wait" and not deterministic:
        raise Misuse(
            f"{where} with deterministic=False: where the order of additions is free, a microbatch that another worker "
            "computes has no fixed place in the sum. Leave out one of the two"
        )


def check_trained(models: Models, objects: Iterable[object]) -> None:
    """Check that each parameter of a registered optimizer is in a registered module.

    Only then it is summed and saved.
    """
    known = {id(param) for param in named_parameters(models).values()}
    for thing in objects:
        groups = thing.param_groups if isinstance(thing, torch.optim.Optimizer) else []
        for param in (param for group in groups for param in group["params"]):
            if id(param) not in known:
                raise Misuse(
                    f"{type(thing).__name__} trains a parameter of shape {list(param.shape)} that is in no model that "
                    "Session(...) was given, so it would be in no sum and in no state: put it into one, `extra = "
                    "torch.nn.ParameterList([...])`, and give that as well: Session(model, extra, optimizer, ...)"
                )
