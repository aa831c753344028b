"""The result of a script's loss function: a loss, and named numbers beside it.

The same function is called where a worker trains the whole model, while its graph is recorded, and
to compare a recording with it. A loss is scaled once, by the function itself or by the session.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any, NoReturn

import msgspec
import torch
from torch import fx
from torch.utils import _pytree as pytree

from agent.errors import Misuse
from agent.pipeline.loss_scale import Scaler
from agent.pipeline.tracing.recording.eager_trace import Later
from agent.tensors.device import number_of
from agent.tensors.metrics import METRICS_MAX, Numbers

LossOf = Callable[[Any], Any]  # takes a microbatch
WHERE = "session.backward(loss_of, ...)"
PENDING = (fx.Proxy, Later)  # their values are not known while a graph is recorded


class Returned(msgspec.Struct, frozen=True, kw_only=True):
    """A loss, scaled if there is a scaler, and the numbers beside it, sorted by name."""

    loss: torch.Tensor
    metrics: dict[str, Any] = {}

    def numbers(self, scale: float = 1.0) -> Numbers:
        """Return all numbers for adding up, the loss without its scale, and wait for no device."""
        values = map(_number, self.metrics.values())
        return Numbers(tuple(self.metrics), (number_of(self.loss) / scale, *values))


def called(loss_of: LossOf, microbatch: Any, scaler: Scaler | None = None) -> Returned:
    """Call `loss_of`, check what it returns, and scale its loss if it has not done so itself."""
    with _heard(scaler) as scaled:
        loss, metrics = _apart(loss_of(microbatch))
        returned = checked(loss, metrics)
        if scaler is None or _comes_of(loss, scaled):
            return returned
        return Returned(loss=scaler.scale(loss), metrics=returned.metrics)


def checked(loss: Any, metrics: Mapping[str, Any]) -> Returned:
    """Return the loss and the metrics of one microbatch, or refuse them if they are invalid."""
    if len(metrics) > METRICS_MAX:
        _refuse(f"{len(metrics)} metrics; return at most {METRICS_MAX}")
    with torch._C.DisableTorchFunction():  # a recording would record questions about sizes
        if not isinstance(loss, PENDING):
            _check_loss(loss)
        known = {name: _metric(name, value) for name, value in metrics.items()}
    return Returned(loss=loss, metrics={name: known[name] for name in sorted(known)})


def _apart(found: Any) -> tuple[Any, Mapping[str, Any]]:
    if isinstance(found, Mapping) and "loss" in found:
        return found["loss"], {name: value for name, value in found.items() if name != "loss"}
    if not isinstance(found, tuple):
        return found, {}
    if len(found) != 2 or not isinstance(found[1], Mapping):
        kinds = ", ".join(type(each).__name__ for each in found)
        _refuse(f'({kinds}); return the loss, or `loss, {{"name": number}}`')
    return found


def _check_loss(loss: Any) -> None:
    if loss is None:
        _refuse("nothing; let it end with `return loss`")
    if not isinstance(loss, torch.Tensor):
        _refuse(f"a {type(loss).__name__} as loss; return the tensor, without .item() or float()")
    if loss.numel() != 1:
        shape = tuple(loss.shape)
        _refuse(f"a loss of shape {shape}; reduce it to one number, with .mean() for example")
    if not loss.requires_grad:
        _refuse(
            "a loss without a gradient, because it was detached, was computed under torch.no_grad(), or depends on "
            "no parameter that is trained; return the loss as it was computed"
        )


def _metric(name: Any, value: Any) -> Any:
    if not isinstance(name, str) or "\n" in name:
        _refuse(f"a metric called {name!r}; let its name be a string of one line")
    if name == "loss":
        _refuse("a metric called 'loss', as the loss itself is; call it otherwise")
    if isinstance(value, PENDING):
        return value
    if isinstance(value, Real):
        return float(value)
    if not isinstance(value, torch.Tensor):
        _refuse(
            f"{name!r} as a {type(value).__name__}; let a metric be a number or a tensor of one"
        )
    if value.numel() != 1 or value.is_complex():
        shape = tuple(value.shape)
        _refuse(f"{name!r} of shape {shape} and {value.dtype}; let a metric be one real number")
    return value


def _refuse(what: str) -> NoReturn:
    raise Misuse(f"{WHERE}: loss_of returned {what}")


def _number(value: Any) -> float | torch.Tensor:
    return number_of(value) if isinstance(value, torch.Tensor) else float(value)


# --- the scale of a loss --------------------------------------------------------------------------------


@contextmanager
def _heard(scaler: Scaler | None) -> Iterator[list[Any]]:
    """Collect the tensors that `scaler.scale` returns meanwhile."""
    made = list[Any]()
    if scaler is None:
        yield made
        return
    original, own = scaler.scale, vars(scaler).get("scale")

    def scale(outputs: Any) -> Any:
        found = original(outputs)
        made.extend(pytree.tree_leaves(found))
        return found

    vars(scaler)["scale"] = scale
    try:
        yield made
    finally:
        if own is None:
            del vars(scaler)["scale"]
        else:
            vars(scaler)["scale"] = own


def _comes_of(loss: Any, scaled: list[Any]) -> bool:
    """Return whether the loss was computed from something scaled.

    A call of `scale` alone does not show it, because a gradient penalty may scale what it
    differentiates and drop it.
    """
    if any(loss is each for each in scaled):
        return True
    if not scaled:
        return False
    if isinstance(loss, fx.Proxy):
        nodes = {each.node for each in scaled if isinstance(each, fx.Proxy)}
        return _reaches(loss.node, nodes, lambda node: node.all_input_nodes)
    with torch._C.DisableTorchFunction():
        made = {each.grad_fn for each in scaled if isinstance(each, torch.Tensor)} - {None}
        return _reaches(loss.grad_fn, made, lambda node: [each for each, _ in node.next_functions])


def _reaches(start: Any, ends: set[Any], before: Callable[[Any], list[Any]]) -> bool:
    waiting, seen = [start], set[Any]()
    while waiting:
        node = waiting.pop()
        if node in ends:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += before(node)
    return False
