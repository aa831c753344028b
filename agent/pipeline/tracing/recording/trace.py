"""Record the model and its loss as one graph, without changing the model.

`torch.fx` runs the person's code once with placeholders. It gets some things wrong silently, so
those are looked for here: what is drawn at random or computed without gradients while recording
would be frozen into the graph or lost from it. A module in which that happens, or whose code asks
for values that do not exist yet, is kept whole and called unchanged, and only the code around it is
taken apart. Nodes around what is computed under an autocast switch it: see `modes`.

If the outermost code cannot be recorded so, or most of the model would be one node, the code is run
on a real microbatch: see `witness`. If that does not help either, the error names the line.
"""

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.autograd.function import _SingleLevelFunction
from torch.distributions import Distribution
from torch.fx.node import map_aggregate

from agent.errors import CannotRecord, Misuse
from agent.pipeline.autocast_nodes import Switches
from agent.pipeline.flatten import cloned
from agent.pipeline.loss_scale import Scaler, Scaling
from agent.pipeline.tracing.recording import frozen_modules
from agent.pipeline.tracing.recording.compiled import compiled_refused
from agent.pipeline.tracing.recording.eager_trace import (
    Derived,
    Unswitched,
    Witness,
    backward_hooks,
    refuse_hooks,
    refuse_kept_weights,
    refuse_lent,
    refuse_replaced,
    refuse_settings,
    settings,
    weights_kept,
)
from agent.pipeline.tracing.recording.loss_value import called
from agent.pipeline.tracing.recording.module_names import written
from agent.pipeline.tracing.recording.places import where
from agent.source.tracebacks import overheard_by
from agent.tensors.device import PythonStreams, device_of, stream_kept, stream_state

LossOf = Callable[..., Any]  # takes the model and the parts of a microbatch
FIXED = "shapes are fixed"  # in the `meta` of a graph: sizes are constants in it
LOOKS = "looks"  # in the `meta`: what the graph assumes about the microbatch's values
TRAINED = "trained"  # in the `meta`: which parameters required gradients
METRICS = "metrics"  # the names of the numbers that it returns after the loss
LUMP = 0.2  # the largest share of a model's parameters that one node may have
TORCHS = fx.Tracer()  # knows which modules are torch's own


def trained(model: torch.nn.Module) -> tuple[bool, ...]:
    """Return which parameters require gradients; for others stages compute other gradients."""
    return tuple(param.requires_grad for param in model.parameters())


class Recorded(torch.nn.Module):
    """The computation of a step: from a microbatch to its loss, and the numbers beside it."""

    def __init__(self, model: torch.nn.Module, loss_of: LossOf, scaler: Scaler | None) -> None:
        super().__init__()
        self.model = model
        self.scaling = None if scaler is None else Scaling(scaler)
        self._loss_of = (loss_of,)  # in a tuple, so that a loss that is a module is no submodule
        self.metrics: list[str] = []  # the names of the numbers

    def forward(self, *batch: Any) -> tuple[Any, ...]:
        scaler = None if self.scaling is None else self.scaling.scaler
        found = called(lambda given: self._loss_of[0](self.model, *given), batch, scaler)
        self.metrics[:] = found.metrics
        return found.loss, *found.metrics.values()


def record(
    model: torch.nn.Module,
    loss_of: LossOf,
    example: Sequence[torch.Tensor],
    scaler: Scaler | None = None,
    *,
    fixed: bool = False,
    before_example: Callable[[], None] = lambda: None,
) -> fx.GraphModule:
    """Return the graph of `loss_of(model, *batch)`; parameters keep their names after `model.`

    A graph from placeholders holds for microbatches of any shape, so they are tried first, unless
    `fixed` says that they are of no use. If most of the model would be one node then, the code is
    run on the example itself, after `before_example`.

    The graph returns the loss, scaled if there is a `scaler`, and then the metrics, whose names are
    in its `meta`.
    """
    first = None
    if not fixed:
        try:
            graph = _attempts(_on_placeholders, Recorded(model, loss_of, scaler), example)
        except CannotRecord:
            raise
        except Exception as error:  # the person's code may raise any exception
            first = error
        else:
            if _lump(graph) <= LUMP:
                return graph
    before_example()
    try:
        other = _attempts(_on_example, Recorded(model, loss_of, scaler), example)
    except (Misuse, CannotRecord):
        raise
    except Exception as error:
        if first is None and not fixed:
            return graph
        raise _cannot(error) from error
    return other if first or fixed or _lump(other) < _lump(graph) else graph


Attempt = Callable[[Recorded, Sequence[torch.Tensor], frozenset[str]], fx.GraphModule]


def _attempts(attempt: Attempt, whole: Recorded, example: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Attempt repeatedly; after each failure keep the module that failed whole."""
    kept: set[str] = set()
    for _ in range(1 + sum(1 for _ in whole.modules())):
        scaling = whole.scaling.recorded(CannotRecord) if whole.scaling else nullcontext()
        try:
            with streams_kept(device_of(whole)), attributes_kept(whole), scaling, unvalidated():
                return attempt(whole, example, frozenset(kept))
        except _Failed as failed:
            if failed.module is None or failed.module in kept:
                raise failed.error from None
            kept.add(failed.module)
    raise AssertionError("every module is kept whole, and still one fails")


class _Failed(Exception):  # noqa: N818 - a reason to try it otherwise
    """Taking this module apart failed; None stands for the code around all modules."""

    def __init__(self, error: Exception, module: str | None) -> None:
        self.error, self.module = error, module


def _on_placeholders(
    whole: Recorded, example: Sequence[torch.Tensor], kept: frozenset[str]
) -> fx.GraphModule:
    tracer = _Tracer(kept, device_of(whole), Derived([*whole.parameters(), *whole.buffers()]))
    try:
        with tracer.switches.watching(), tracer.derived, compiled_refused():
            graph = written(whole, tracer.trace(whole, {"batch": len(example)}))
    except CannotRecord:
        raise
    except Exception as error:
        raise _Failed(error, tracer.failed) from error
    graph.meta[METRICS] = tuple(whole.metrics)
    return graph


def _on_example(
    whole: Recorded, example: Sequence[torch.Tensor], kept: frozenset[str]
) -> fx.GraphModule:
    """Record on the example, and once more if the code reads a number.

    The first attempt finds out whether code reads numbers from tensors; the second answers it.
    """
    witness = Witness(whole, kept, is_leaf, patient=True)
    try:
        with streams_kept(device_of(whole)), attributes_kept(whole):
            return _witnessed(whole, witness, example)
    except _Failed:
        if not witness.waited:
            raise
    return _witnessed(whole, Witness(whole, kept, is_leaf, patient=False), example)


def _witnessed(
    whole: Recorded, witness: Witness, example: Sequence[torch.Tensor]
) -> fx.GraphModule:
    before = PythonStreams()
    try:
        with buffers_kept(whole), witness.switches.watching(), compiled_refused():
            graph, looks = witness.trace(cloned(example))
        _refuse_frozen(before)
    except (Misuse, CannotRecord):
        raise
    except Exception as error:
        raise _Failed(error, witness.failed) from error
    found = written(whole, graph)
    found.meta |= {FIXED: True, LOOKS: looks, METRICS: tuple(whole.metrics)}
    return found


def _refuse_frozen(before: PythonStreams) -> None:
    if before.moved:
        raise fx.proxy.TraceError("it draws from Python's or numpy's random stream")


def _lump(graph: fx.GraphModule) -> float:
    """Return the share of the parameters in the largest node that could be taken apart."""
    modules = {str(node.target) for node in graph.graph.nodes if node.op == "call_module"}
    sizes = [
        sum(param.numel() for param in module.parameters())
        for module in map(graph.get_submodule, modules)
        if next(module.children(), None) is not None
    ]
    total = sum(param.numel() for param in graph.parameters())
    return max(sizes, default=0) / max(total, 1)


def is_leaf(m: torch.nn.Module, name: str) -> bool:
    """Return whether a module is called unchanged, as one node.

    Torch's own modules are, and modules with backward hooks, because these belong to the call. A
    module with a script's forward hook is taken apart, because the hook may keep the output for the
    loss. So is one whose weights `parametrize.cached()` keeps between calls, because its own call
    would compute them again.
    """
    return (
        isinstance(m, Scaling)
        or bool(backward_hooks(m))
        or (TORCHS.is_leaf_module(m, name) and not overheard_by(m) and not weights_kept(m))
    )


@contextmanager
def buffers_kept(whole: torch.nn.Module) -> Iterator[None]:
    """Put buffers back after a forward, leaving alone those that it did not change.

    A buffer that is not written to here does not count as written.
    """
    before = [(buffer, buffer.detach().clone()) for buffer in whole.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # a buffer's value is not a constant

    def __init__(self, kept: frozenset[str], device: torch.device, derived: Derived) -> None:
        super().__init__()
        self._kept, self._device, self.derived = kept, device, derived
        self._grad = torch.is_grad_enabled()
        self._inside = 0  # how many modules of the model are running
        self._own: Collection[int] = ()  # the ids of its weights
        # Of its modules, at the start.
        self._hooks: Mapping[int, list[Callable[..., Any]]] = {}
        self._settings: Mapping[int, dict[str, Any]] = {}
        self.switches = Switches()
        self.failed: str | None = None

    def trace(
        self,
        root: torch.nn.Module | Callable[..., Any],
        concrete_args: dict[str, Any] | None = None,
    ) -> fx.Graph:
        """Trace with as many placeholders as `concrete_args` says; fx cannot know how many."""
        assert isinstance(root, Recorded) and concrete_args is not None
        count = concrete_args["batch"]
        names = ", ".join(f"batch_{index}" for index in range(count))
        space: dict[str, Any] = {"forward": Recorded.forward}
        exec(f"def fixed(self, {names}): return forward(self, {names})", space)  # noqa: S102
        self._own = {id(param) for param in root.parameters()}
        self._hooks = {id(each): backward_hooks(each) for each in root.modules()}
        self._settings = settings(root)
        root.__class__ = type("Recorded", (Recorded,), {"forward": space["fixed"]})
        before = _Streams(self._device)
        with Unswitched(self._own):
            graph = super().trace(root)
        self._refuse_draws(before)
        return graph

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._kept or is_leaf(m, module_qualified_name)

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
            return self._beside(m, forward, args, kwargs)
        refuse_lent(m, self._own)
        if path in self._kept:
            refuse_kept_weights(m)
        if self.is_leaf_module(m, path):
            refuse_settings(m, path, self._settings)
        self._inside += 1
        try:
            if self.is_leaf_module(m, path):  # it is not run, so there is nothing to look for
                refuse_hooks(m, path, self._hooks)
                return super().call_module(m, forward, args, kwargs)
            before, buffers = _Streams(self._device), [*m._buffers.values()]
            out = super().call_module(m, forward, args, kwargs)
            self._refuse_draws(before)
            refuse_replaced(m, buffers)
        except Exception:
            self.failed = self.failed or path
            raise
        finally:
            self._inside -= 1
        return out

    def _beside(
        self, m: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        found = list[fx.Node]()
        map_aggregate(
            (args, kwargs),
            lambda each: found.append(each.node) if isinstance(each, fx.Proxy) else None,
        )
        if not torch.is_grad_enabled() or frozen_modules.of_batch(self.root, found):
            path = frozen_modules.received(self.root, m)
            if path is not None:
                with torch.set_grad_enabled(self._grad):
                    return self.create_proxy("call_module", path, args, kwargs)
        if next(m.parameters(), None) is not None or next(m.buffers(), None) is not None:
            raise fx.proxy.TraceError("it calls a module that the session does not know of")
        return forward(*args, **kwargs)  # a loss without state, made beside the model

    def create_arg(self, a: Any) -> Any:
        """Refuse numbers that were computed from weights alone, and script-defined generators.

        `sum(p.square().sum() for p in model.parameters())` meets no placeholder, so the graph would
        keep this step's number as a constant.
        """
        if isinstance(a, torch.Generator) and a is not torch.default_generator:
            # Made again for each microbatch, it begins again; a recording has one for all
            # microbatches.
            raise fx.proxy.TraceError("it draws from its own random stream")
        if isinstance(a, torch.Tensor) and not self.derived.knows(a) and self.derived.has(a):
            raise fx.proxy.TraceError("it computes with weights before it meets its inputs")
        if isinstance(a, np.float64):
            # Code would be made of its text, `np.float64(0.5)`.
            return float(a)
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if self._inside and torch.is_grad_enabled() != self._grad:
            raise fx.proxy.TraceError("part of it runs under no_grad")
        self.switches.write(self.graph)
        return super().create_node(*args, **kwargs)

    def _refuse_draws(self, before: "_Streams") -> None:
        if before.moved:
            raise fx.proxy.TraceError("it draws random numbers that do not depend on its inputs")


class _Streams:
    """Where all random streams stand now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._torch, self._others = stream_state(device).numpy().tobytes(), PythonStreams()

    @property
    def moved(self) -> bool:
        return stream_state(self._device).numpy().tobytes() != self._torch or self._others.moved


@contextmanager
def streams_kept(device: torch.device) -> Iterator[None]:
    """Put all random streams back, so that recording leaves no trace in them."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with stream_kept(device):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def attributes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Put attributes of modules back: a mask made once, the last attention weights.

    Otherwise they would keep placeholders, and the first real microbatch would trip over them.
    """
    before = _as_they_are(model)
    try:
        with learning_kept(model):
            yield
    finally:
        for now, earlier in before:
            _put_back(now, earlier)


@contextmanager
def learning_kept(model: torch.nn.Module) -> Iterator[None]:
    """Put back which parameters require gradients, as code that fails may have frozen some."""
    before = [(param, param.requires_grad) for param in model.parameters()]
    try:
        yield
    finally:
        for param, learns in before:
            if param.requires_grad != learns:
                param.requires_grad_(learns)


class Kept:
    """What modules keep between calls: whether there is any, and what a call gives without it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model  # with all that it is made of
        self._begun = _as_they_are(model)

    @property
    def anything(self) -> bool:
        return any(
            now.keys() != begun.keys() or any(now[key] is not value for key, value in begun.items())
            for now, begun in self._begun
        )

    def without(self, module: torch.nn.Module, call: Callable[[], Any]) -> Any:
        """Return what a call of this module gives without what is kept, or None if it fails.

        Random streams, the module's buffers and what is kept are put back.
        """
        device = device_of(self._model)
        with attributes_kept(self._model), buffers_kept(module), streams_kept(device):
            for now, begun in self._begun:
                _put_back(now, begun)
            try:
                return call()
            except Exception:  # it needs what was kept
                return None


@contextmanager
def unvalidated() -> Iterator[None]:
    """Turn off validation by distributions, which reads values; the training loop has it on."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


class Filled:
    """What forwards put into the attributes of modules: a loss, a mask that is made once.

    A loop is recorded as if there had been no forward, so that a worker that has run some records
    the same graph as one that has run none.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._places = [  # each with whether it may be filled at any time, such as a growing table
            (place, bool(module._non_persistent_buffers_set))
            for model in models
            for module in model.modules()
            for place in _attributes(module)
        ]
        self._roles = set[object]()
        self._before: list[tuple[int, dict[Any, Any]]] = []
        self._first: dict[tuple[int, Any], tuple[bool, Any]] = {}  # what was there, if anything was

    def begin(self, role: object) -> None:
        """Note what is there; a role that ran before uses the same modules, so most are skipped."""
        known = role in self._roles
        self._roles.add(role)
        self._before = [
            (index, dict(place))
            for index, (place, grows) in enumerate(self._places)
            if grows or not known
        ]

    def look(self) -> None:
        """Note what has changed since `begin`; nothing but forwards may have run since."""
        for index, before in self._before:
            for key, value in self._places[index][0].items():
                if before.get(key) is not value:
                    self._first.setdefault((index, key), (key in before, before.get(key)))
        self._before = []

    def empty(self) -> None:
        self._roles.clear()  # forwards will fill them again
        for (index, key), (was_there, value) in self._first.items():
            place, _ = self._places[index]
            if was_there:
                place[key] = value
            else:
                place.pop(key, None)


def _attributes(module: torch.nn.Module) -> list[dict[Any, Any]]:
    """Return the dicts of a module's attributes, buffers and hooks.

    Libraries register some hooks in the first forward, and note in an attribute that they did.
    """
    own = vars(module)
    hooks = (v for key, v in own.items() if key.endswith("_hooks") and isinstance(v, dict))
    return [own, module._buffers, *hooks]


def _as_they_are(model: torch.nn.Module) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    return [(now, dict(now)) for module in model.modules() for now in _attributes(module)]


def _put_back(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key in now.keys() - before.keys():
        del now[key]
    for key, value in before.items():
        if key not in now or now[key] is not value:
            now[key] = value


def _cannot(error: Exception) -> CannotRecord:
    return CannotRecord(
        f"{where(error)}: this line cannot be recorded ({_short(error)}), which cutting the model "
        "into stages needs. Move it into a module of its own, or train with depth 1"
    )


@contextmanager
def functions_refused(kind: type = torch.autograd.Function) -> Iterator[None]:
    """Refuse calls of an autograd.Function of this kind.

    The check is placed below `Function.apply`, because scripts may hold references to `apply`.
    """

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if issubclass(cls, kind):
            raise fx.proxy.TraceError(f"{cls.__name__} has its own backward")
        return super(_SingleLevelFunction, cls).apply(*args, **kwargs)  # type: ignore[misc]

    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:160]
