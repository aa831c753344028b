"""Module names in a graph's code. Torch writes invalid Python for `heads["class"]`.

Torch has no setting for this, so its function is replaced only while code is written, by one thread
at a time.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from keyword import iskeyword

import torch
from torch import fx

_writing = threading.RLock()


def written(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return a module that computes the graph."""
    with _spelled_out():
        return fx.GraphModule(root, graph)


def rewrite(module: fx.GraphModule) -> None:
    """Write the module's code again, because its graph has been changed."""
    with _spelled_out():
        module.recompile()


@contextmanager
def _spelled_out() -> Iterator[None]:
    with _writing:
        before = fx.graph._format_target
        fx.graph._format_target = _spelled
        try:
            yield
        finally:
            fx.graph._format_target = before


def _spelled(base: str, target: str) -> str:
    for name in target.split("."):
        plain = name.isidentifier() and not iskeyword(name)
        base = f"{base}.{name}" if plain else f'getattr({base}, "{name}")'
    return base
