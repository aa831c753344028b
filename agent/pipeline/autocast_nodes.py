"""Nodes that switch autocast in a graph, so that each stage has the script's settings.

    enter     an outermost `torch.autocast(...)` begins; what it casts of weights is kept to its end
    change    an autocast inside it begins or ends
    leave     the outermost ends

    grad      gradients are wanted from here on, or no longer

A stage that begins between them enters again, and leaves at its end. So casts are not kept across a
cut, and a weight that was cast once for two uses has its gradients added in half precision: no cut
goes between those uses (`Casts`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.node import has_side_effect
from torch.utils._python_dispatch import TorchDispatchMode

_accelerator = torch.accelerator.current_accelerator()
KINDS = ("cpu", "cuda" if _accelerator is None else _accelerator.type)
Modes = tuple[Any, ...]


def current() -> Modes:
    """Return the autocast settings of this thread."""
    kinds = ((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in KINDS)
    return (torch.is_autocast_cache_enabled(), *(each for kind in kinds for each in kind))


def libraries() -> Modes:
    """Return which libraries and kernels compute.

    They are set by `torch.backends.mkldnn.flags(...)`, `torch.nn.attention.sdpa_kernel(...)` and
    others, and different ones round differently.
    """
    c = torch._C
    flags = (c._get_cudnn_benchmark(), c._get_cudnn_deterministic(), c._get_cudnn_allow_tf32())
    attention = (
        *(c._get_flash_sdp_enabled(), c._get_mem_efficient_sdp_enabled()),
        *(c._get_math_sdp_enabled(), c._get_cudnn_sdp_enabled(), c._get_sdp_priority_order()),
    )
    return c._get_mkldnn_enabled(), c._get_cudnn_enabled(), *flags, *attention


def nesting() -> int:
    """Return how many autocasts this thread is in."""
    count = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return count - 1


@has_side_effect
def change(cache: bool, *kinds: Any) -> None:
    torch.set_autocast_cache_enabled(cache)
    for kind, enabled, dtype in zip(KINDS, kinds[::2], kinds[1::2], strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


@has_side_effect
def enter(*modes: Any) -> None:
    torch.autocast_increment_nesting()
    change(*modes)


@has_side_effect
def leave(*modes: Any) -> None:
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    change(*modes)


@has_side_effect
def grad(enabled: bool) -> None:
    torch.set_grad_enabled(enabled)


@contextmanager
def kept() -> Iterator[None]:
    """Put autocast and gradient modes back, also after an error."""
    modes, before, enabled = current(), nesting(), torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(enabled)
        while nesting() > before:
            leave(*modes)
        change(*modes)


def _refuse_packing() -> None:
    """Refuse script-defined saved-tensor hooks, because stages save tensors unchanged.

    Torch's own hooks, a checkpoint's or `save_on_cpu`'s, are allowed because they return what they
    took.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks and not str(getattr(hooks[0], "__module__", "")).startswith("torch."):
        raise fx.proxy.TraceError("part of it runs under saved_tensors_hooks")


class Switches:
    """Records mode switches as nodes of a graph."""

    def __init__(self) -> None:
        self._outside, self._nesting = current(), nesting()
        self._region = self._begun = 0  # the current outermost autocast, and how many have begun
        self._modes, self._grad = self._outside, torch.is_grad_enabled()
        self._libraries = libraries()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the outermost autocasts, because one right after another looks unchanged inside."""
        original = torch.autocast.__enter__

        def counted(autocast: torch.autocast) -> Any:
            self._begun += nesting() == self._nesting
            return original(autocast)  # type: ignore[no-untyped-call]

        torch.autocast.__enter__ = counted  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.autocast.__enter__ = original  # type: ignore[method-assign]

    def write(self, graph: fx.Graph) -> None:
        """Record what has to be switched before the next node."""
        _refuse_packing()
        if libraries() != self._libraries:
            raise fx.proxy.TraceError(
                "part of it runs under other flags of torch.backends or of attention's kernels, which can be "
                "set around the loop"
            )
        modes = current()
        region = self._begun if nesting() > self._nesting else 0
        if region == 0 and modes != self._outside:
            raise fx.proxy.TraceError("part of it runs under an autocast that was set by hand")
        if region != self._region:
            if self._region:
                graph.call_function(leave, self._outside)
            if region:
                graph.call_function(enter, modes)
        elif modes != self._modes:
            graph.call_function(change, modes)
        self._region, self._modes = region, modes
        if torch.is_grad_enabled() != self._grad:
            self._grad = not self._grad
            graph.call_function(grad, (self._grad,))


def is_switch(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (enter, change, leave)


def switches(node: fx.Node) -> bool:
    """Return whether the node switches autocast or gradients."""
    return is_switch(node) or (node.op == "call_function" and node.target is grad)


def without_grad(nodes: Iterable[fx.Node]) -> Iterator[tuple[int, int]]:
    """Yield spans from where gradients are not wanted to where they are again."""
    first = None
    for index, node in enumerate(nodes):
        if node.op == "call_function" and node.target is grad:
            if first is not None:
                yield first, index
            first = None if node.args[0] else index


def in_force(nodes: list[fx.Node], at: int) -> tuple[Any, ...] | None:
    """Return the settings of the autocast that a node is in, or None if it is in none."""
    for node in reversed(nodes[:at]):
        if is_switch(node):
            return None if node.target is leave else node.args
    return None


def outside(nodes: list[fx.Node]) -> tuple[Any, ...]:
    """Return the settings outside all autocasts."""
    return next(node.args for node in nodes if node.target is leave)


class Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which nodes cast which weights, by the autocast that they are in."""

    def __init__(self, params: Iterator[torch.nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._params = {id(param) for param in params if param.requires_grad}
        self._found: dict[tuple[int, int], list[int]] = {}
        self._region = self._node = 0

    @contextmanager
    def watching(self, index: int, node: fx.Node) -> Iterator[None]:
        """Watch for casts while this node is run."""
        self._region += node.target is enter
        self._node = index
        if nesting() == 0:
            yield
            return
        torch.clear_autocast_cache()  # so that a second use of a weight casts it again and is seen
        with self:
            yield

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._to_copy.default and id(args[0]) in self._params:
            self._found.setdefault((self._region, id(args[0])), []).append(self._node)
        return func(*args, **(kwargs or {}))

    def spans(self) -> list[tuple[int, int]]:
        """Return spans from the first to the last of the nodes that use one cast."""
        return [(nodes[0], nodes[-1]) for nodes in self._found.values() if nodes[0] < nodes[-1]]
