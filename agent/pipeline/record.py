"""The model and its loss as one graph, recorded without a change to the model.

`torch.fx` runs the person's code once with placeholders. It is silent about some things that it gets
wrong, so those are looked for here: what is drawn at random or computed without gradients
while recording would be frozen into the graph or lost from it. A module in which that happens, or whose
code asks for values that do not exist yet, is kept whole and called as it is: the graph then goes
module by module around it. What is computed under an autocast has nodes around it that switch it: see `modes`. When the outermost code itself cannot be recorded so, `torch.export` is asked;
when that cannot either, the error names the line.
"""

import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.autograd.function import _SingleLevelFunction

from agent import own
from agent.device import device_of, set_stream_state, stream_state
from agent.errors import Misuse
from agent.pipeline.modes import Switches
from agent.pipeline.scaling import Scaler, Scaling

LossOf = Callable[..., torch.Tensor]
LIBRARY = str(Path(torch.__file__).parent)
FIXED = "shapes are fixed"  # in the `meta` of a graph: sizes are constants in it
HERE = str(Path(__file__).parents[1])


class CannotRecord(Misuse):
    """The model's code cannot be turned into a graph; the message names the line."""


class Recorded(torch.nn.Module):
    """What the step computes: from a microbatch to one number."""

    def __init__(self, model: torch.nn.Module, loss_of: LossOf, scaler: Scaler | None) -> None:
        super().__init__()
        self.model = model
        self.scaling = None if scaler is None else Scaling(scaler)
        self._loss_of = (
            loss_of,
        )  # in a tuple, so that a loss that is a module is not a part of us

    def forward(self, *batch: Any) -> torch.Tensor:
        return self._loss_of[0](self.model, *batch)


def record(
    model: torch.nn.Module,
    loss_of: LossOf,
    example: Sequence[torch.Tensor],
    scaler: Scaler | None = None,
) -> fx.GraphModule:
    """The graph of `loss_of(model, *batch)`; parameters keep their names behind `model.`"""
    whole = Recorded(model, loss_of, scaler)
    kept: set[str] = set()
    for _ in range(1 + sum(1 for _ in model.modules())):
        tracer = _Tracer(frozenset(kept), device_of(model))
        try:
            scaling = whole.scaling.recorded(CannotRecord) if whole.scaling else nullcontext()
            with (
                streams_kept(device_of(model)),
                attributes_kept(whole.model),
                tracer.switches.watching(),
                scaling,
            ):
                graph = tracer.trace(whole, {"batch": len(example)})
            return fx.GraphModule(whole, graph)
        except CannotRecord:
            raise
        except Exception as error:  # whatever the person's code raises
            if tracer.failed is None or tracer.failed in kept:
                return _export(whole, example, error)
            kept.add(tracer.failed)
    raise AssertionError("every module is kept whole, and still one fails")


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # a buffer's value is not a constant

    def __init__(self, kept: frozenset[str], device: torch.device) -> None:
        super().__init__()
        self._kept, self._device = kept, device
        self._grad = torch.is_grad_enabled()
        self.switches = Switches()
        self.failed: str | None = None

    def trace(
        self,
        root: torch.nn.Module | Callable[..., Any],
        concrete_args: dict[str, Any] | None = None,
    ) -> fx.Graph:
        """`concrete_args` says how many tensors a microbatch has: fx cannot know."""
        assert isinstance(root, Recorded) and concrete_args is not None
        count = concrete_args["batch"]
        names = ", ".join(f"batch_{index}" for index in range(count))
        space: dict[str, Any] = {"forward": Recorded.forward}
        exec(f"def fixed(self, {names}): return forward(self, {names})", space)  # noqa: S102
        root.__class__ = type("Recorded", (Recorded,), {"forward": space["fixed"]})
        before = _drawn(self._device)
        graph = super().trace(root)
        self._refuse_draws(before)
        return graph

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        # Hooks of a backward belong to the call of the module, which is not there if it is taken apart.
        return (
            module_qualified_name in self._kept
            or isinstance(m, Scaling)
            or bool(m._backward_hooks or m._backward_pre_hooks)
            or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(
        self,
        m: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        try:
            path = self.path_of_module(m)
        except NameError:
            if next(m.parameters(), None) is not None or next(m.buffers(), None) is not None:
                raise
            return forward(*args, **kwargs)  # a loss without state, made beside the model
        before, buffers = _drawn(self._device), [*m._buffers.values()]
        try:
            out = super().call_module(m, forward, args, kwargs)
            self._refuse_draws(before)
            self._refuse_replaced(m, buffers)
        except Exception:
            self.failed = self.failed or path
            raise
        return out

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if torch.is_grad_enabled() != self._grad:
            raise fx.proxy.TraceError("part of it runs under no_grad")
        self.switches.write(self.graph)
        return super().create_node(*args, **kwargs)

    def _refuse_replaced(self, m: torch.nn.Module, before: list[torch.Tensor | None]) -> None:
        if any(a is not b for a, b in zip(before, m._buffers.values(), strict=False)):
            raise fx.proxy.TraceError("it puts another buffer in the place of one")

    def _refuse_draws(self, before: tuple[object, ...]) -> None:
        if _drawn(self._device) != before:
            raise fx.proxy.TraceError("it draws random numbers that do not depend on its inputs")


def _drawn(device: torch.device) -> tuple[object, ...]:
    """Where the random streams stand."""
    return stream_state(device).numpy().tobytes(), python_drawn()


def python_drawn() -> tuple[object, ...]:
    """Where the streams stand that do not travel with a microbatch."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, np.asarray(keys).tobytes(), tuple(rest)


@contextmanager
def streams_kept(device: torch.device) -> Iterator[None]:
    """Recording leaves no trace in the random streams."""
    torch_state, python_state, numpy_state = (
        stream_state(device),
        random.getstate(),
        np.random.get_state(),
    )
    try:
        yield
    finally:
        set_stream_state(torch_state, device)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def attributes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Nor in what modules keep for themselves: a mask that is made once, what was attended to last. They would keep
    placeholders otherwise, and the first microbatch would come upon them."""
    before = [(each, dict(vars(each)), dict(each._buffers)) for each in model.modules()]
    try:
        yield
    finally:
        for module, own, buffers in before:
            _put_back(vars(module), own)
            _put_back(module._buffers, buffers)


def _put_back(now: dict[str, Any], before: dict[str, Any]) -> None:
    for key in now.keys() - before.keys():
        del now[key]
    for key, value in before.items():
        if key not in now or now[key] is not value:
            now[key] = value


def _export(whole: Recorded, example: Sequence[torch.Tensor], first: Exception) -> fx.GraphModule:
    """The graph of single operators, for code that placeholders cannot run through."""
    whole.__class__ = Recorded
    if whole.scaling is not None:
        raise _cannot(first, first) from first  # it would write down the scale
    try:
        with streams_kept(device_of(whole.model)), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # about its own future; nothing that a person can act on
            before = python_drawn()
            # Of a function with a backward of its own only the forward would be in the graph.
            with functions_refused(), attributes_kept(whole.model):
                program = torch.export.export(whole, tuple(example), strict=False)
            _refuse_frozen(before)
            exported = program.module(check_guards=False)
    except Exception as error:
        why = error if isinstance(error, fx.proxy.TraceError) else first
        raise _cannot(first, why) from error
    for node in exported.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            _adopt(whole, exported, str(node.target))
    graph = fx.GraphModule(whole, exported.graph)
    graph.meta[FIXED] = True
    return graph


def _cannot(error: Exception, why: Exception) -> CannotRecord:
    return CannotRecord(
        f"{where(error)}: this line cannot be recorded ({_short(why)}), which cutting the model "
        "into stages needs. Move it into a module of its own, or train with depth 1"
    )


@contextmanager
def functions_refused(kind: type = torch.autograd.Function) -> Iterator[None]:
    """An autograd.Function of this kind may not be called. Looked for below `Function.apply`, of which scripts
    keep names of their own."""

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if issubclass(cls, kind):
            raise fx.proxy.TraceError(f"{cls.__name__} has a backward of its own")
        return super(_SingleLevelFunction, cls).apply(*args, **kwargs)  # type: ignore[misc]

    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]


def _refuse_frozen(before: tuple[object, ...]) -> None:
    if python_drawn() != before:
        raise fx.proxy.TraceError("it draws from Python's or numpy's random stream")


def _adopt(whole: Recorded, exported: torch.nn.Module, name: str) -> None:
    """What `torch.export` made of the code itself, constants and inner graphs, becomes ours."""
    path, _, last = name.rpartition(".")
    owner = whole.get_submodule(path)
    if hasattr(owner, last):
        return
    thing = getattr(exported.get_submodule(path), last)
    if isinstance(thing, torch.Tensor):
        owner.register_buffer(last, thing, persistent=False)
    else:
        owner.add_module(last, thing)


def where(error: BaseException) -> str:
    """The last line of the person's own code that an error came through."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((LIBRARY, HERE, "<"))
    ]
    if not frames:
        return "the model"
    return f"{own.shown(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}"


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:160]
