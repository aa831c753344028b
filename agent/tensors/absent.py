"""Parameters that have no values on this worker.

A parameter that is away has its name, its shape and no memory: it is one number that is not a
number, expanded to the parameter's shape. So code that computes with it by mistake shows at once,
and code that looks for writes can skip it. Where time is measured, something stands in for it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

SMALL = 0.01


def nothing(param: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return what a parameter like this holds while it is away, on its device or on `device`."""
    floating = param.dtype.is_floating_point or param.dtype.is_complex
    device = param.device if device is None else device
    one = torch.full((), float("nan") if floating else 0, dtype=param.dtype, device=device)
    return one.expand(param.shape)


def is_away(param: torch.Tensor) -> bool:
    strided = param.layout is torch.strided  # others have no strides, or none that say anything
    return strided and param.numel() > 1 and not any(param.stride())


def is_none(param: torch.Tensor) -> bool:
    """Return whether it is away, also for one number, which has as much memory while away."""
    return is_away(param) or (param.numel() == 1 and bool(param.isnan()))


def any_away(module: torch.nn.Module) -> bool:
    return any(is_away(param) for param in module.parameters())


def watch(module: torch.nn.Module, seen: Callable[[], None]) -> None:
    """Call `seen` before any code runs the module, asks for its state, copies or pickles it.

    Copies do not contain these hooks.
    """
    ours = {
        "_forward_pre_hooks": module.register_forward_pre_hook(lambda *_: seen()).id,
        "_state_dict_pre_hooks": module.register_state_dict_pre_hook(lambda *_: seen()).id,  # type: ignore[no-untyped-call]
    }

    def reduced(protocol: int) -> Any:
        seen()
        made = type(module).__reduce_ex__(module, protocol)
        if len(made) < 3 or not isinstance(made[2], dict):
            return made  # the class has its own way
        state = {name: value for name, value in made[2].items() if name != reduced.__name__}
        for name, key in ours.items():
            state[name] = OrderedDict((k, hook) for k, hook in state[name].items() if k != key)
        return *made[:2], state, *made[3:]

    reduced.__name__ = "__reduce_ex__"  # which copying and pickling look up
    module.__dict__[reduced.__name__] = reduced


@contextmanager
def computable(module: torch.nn.Module) -> Iterator[None]:
    """Let a number without memory stand in for each parameter that is away.

    With not-a-number, code that looks at what it computes may refuse to go on, or never end.
    """
    away = list[tuple[torch.nn.Parameter, torch.Tensor]]()
    if any_away(module):
        away = [(param, param.data) for param in module.parameters() if is_none(param)]
    for param, none in away:
        number = SMALL if none.dtype.is_floating_point or none.dtype.is_complex else 0
        # What is viewed as complex numbers has the two parts of each side by side.
        pair = (2,) if none.shape[-1:] == (2,) else ()
        param.data = none.new_full(pair, number).expand(none.shape)
    try:
        with _Lent() if away else nullcontext():
            yield
    finally:
        for param, none in away:
            param.data = none


class _Lent(TorchFunctionMode):
    """Gives stand-ins memory for a call that fails without.

    Some kernels refuse tensors without memory, torch's grouped products for one.
    """

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            if not any(map(_stands_in, tree_leaves((args, kwargs)))):
                raise
        args, kwargs = tree_map_only(torch.Tensor, _with_memory, (args, kwargs))
        return func(*args, **kwargs)


def _stands_in(value: object) -> bool:
    return isinstance(value, torch.Tensor) and is_away(value)


def _with_memory(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous() if is_away(value) else value


@contextmanager
def stood_in(module: torch.nn.Module) -> Iterator[None]:
    """Let zeros with memory stand in, so that kernels take their usual time."""
    away = [param for param in module.parameters() if is_away(param)]
    for param in away:
        # They are written, or the kernel would map all to one page that is always in the cache.
        param.data = torch.empty(param.shape, dtype=param.dtype, device=param.device).zero_()
    try:
        yield
    finally:
        for param in away:
            param.data = nothing(param)
