"""Tensors that a loss makes without its microbatch, and then writes into.

`weight = torch.ones(10); weight[labels] = 2.0` makes a tensor that is the same for each microbatch as
far as is known, so a graph has it as a constant. What is written into a constant would be in it for
the next microbatch too. So each call of the graph writes into a copy.
"""

from collections import defaultdict
from collections.abc import Iterator

from torch import fx

from agent.pipeline.tracing.recording.frozen_modules import writes

CONSTANT = "_tensor_constant"  # how the names of a graph's own tensors begin


def copied(graph: fx.GraphModule) -> None:
    """Let each call of the graph copy the constants that it writes into."""
    uses = defaultdict[str, list[fx.Node]](list)
    for node in graph.graph.nodes:
        if node.op == "get_attr" and str(node.target).startswith(CONSTANT):
            uses[str(node.target)].append(node)
    if not uses:
        return
    found = {str(node.target) for node in _written(graph)} & uses.keys()
    for name in sorted(found):
        first, *others = uses[name]
        with graph.graph.inserting_after(first):
            copy = graph.graph.call_method("clone", (first,))
        first.replace_all_uses_with(copy)
        copy.args = (first,)
        for other in others:
            other.replace_all_uses_with(copy)
            graph.graph.erase_node(other)
    if found:
        graph.recompile()


def _written(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield what is written into, or what that is a view of."""
    for node in graph.graph.nodes:
        calls = node.op == "call_module"
        if writes(node) or (
            calls and getattr(graph.get_submodule(str(node.target)), "inplace", False)
        ):
            for each in (*node.args[:1], node.kwargs.get("out")):
                yield from _behind(each)


def _behind(node: object) -> Iterator[fx.Node]:
    """Yield a node, and what it may be a view of: the first argument of each call."""
    while isinstance(node, fx.Node):
        yield node
        node = node.args[0] if node.args else None
