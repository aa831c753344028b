"""The backward of a stage in two halves: what the stage before waits for first, what the weights get later.

Which nodes belong to which half is torch's analysis (`torch.distributed.pipelining`). It goes by the form of the graph, and the
graphs of microbatches have the same form: it is made once. Then one call of the engine finds the gradients of the inputs
and those that enter the weights' side, and one for each group of weights goes on from there.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.distributed.pipelining._backward import construct_reverse_graph, get_param_groups

FORMS_MAX = 64
# Group norm's backward (torch 2.13, on a CPU, with channels last) writes the gradient of its input wherever it is not
# asked for, which ends the process. Its weights have theirs with the input's.
WHOLE = {"NativeGroupNormBackward0"}
Form = tuple[Any, ...]
Found = tuple[torch.Tensor | None, ...]


class Group(NamedTuple):
    """Weights, and where the gradients come in that lead to them and to nothing else."""

    weights: tuple[int, ...]
    entries: tuple[int, ...]
    nodes: int  # that the entries are of


class Plan(NamedTuple):
    """The entries as nodes of a graph, in the order of `_walk`, and which of their outputs; and who goes on from them."""

    entries: tuple[tuple[int, int], ...]
    groups: tuple[Group, ...]
    at_once: tuple[int, ...]  # weights that are not owed


class Owed(NamedTuple):
    """The second half of one microbatch."""

    groups: tuple[Group, ...]
    edges: list[GradientEdge]
    grads: Found
    known: Sequence[tuple[int, torch.Tensor | None]]  # weights whose gradients there are already


class Halves:
    """The two halves, for graphs that end in these weights."""

    def __init__(self, weights: Sequence[torch.nn.Parameter]) -> None:
        self._weights = tuple(weights)
        self._known = {id(weight): -1 - index for index, weight in enumerate(self._weights)}
        self._plans: dict[Form, Plan | None] = {}

    def first(
        self,
        roots: tuple[list[GradientEdge], list[torch.Tensor]],
        leaves: Sequence[torch.Tensor],
    ) -> tuple[Found, Owed | None]:
        """The gradients of the leaves. Nothing is owed if the graph cannot be taken apart: it is kept, and goes again."""
        edges, grads = roots
        nodes, form = self._walk(edges, leaves)
        if form not in self._plans:
            if len(self._plans) >= FORMS_MAX:
                self._plans.clear()
            self._plans[form] = self._plan(edges, nodes, form)
        plan = self._plans[form]
        ends: list[Any] = [*leaves]
        entries = [GradientEdge(nodes[at], number) for at, number in plan.entries] if plan else []
        at_once = plan.at_once if plan else ()
        ends += [*(self._weights[index] for index in at_once), *entries]
        found = torch.autograd.grad(edges, ends, grads, retain_graph=True, allow_unused=True)
        split = len(leaves) + len(at_once)
        known = [*zip(at_once, found[len(leaves) : split], strict=True)]
        owed = Owed(plan.groups, entries, found[split:], known) if plan else None
        return found[: len(leaves)], owed if owed and _complete(owed) else None

    def second(self, owed: Owed) -> None:
        """What the weights get, into their `.grad`s, or added to what is there."""
        for index, gradient in owed.known:
            _give(self._weights[index], gradient)
        # A weight of several uses is found out along the way from one to the next, which others need as well.
        again = any(group.nodes > 1 for group in owed.groups)
        for group in owed.groups:
            entering = [
                (owed.edges[entry], gradient)
                for entry in group.entries
                if (gradient := owed.grads[entry]) is not None
            ]
            found = self._go_on(group, entering, again)
            for index, gradient in zip(group.weights, found, strict=True):
                _give(self._weights[index], gradient)

    def _go_on(
        self, group: Group, entering: list[tuple[GradientEdge, torch.Tensor]], again: bool
    ) -> Found:
        """`torch.autograd.grad` without its checks, which take longer than a small layer does."""
        edges, grads = zip(*entering, strict=True)
        weights = tuple(self._weights[index] for index in group.weights)
        hooks = _clamped(entering) if group.nodes > 1 else []
        try:
            found: Found = _engine_run_backward(
                edges, grads, again, False, weights, True, accumulate_grad=False
            )
        finally:
            for hook in hooks:
                hook.remove()
        return found

    # --- which is which -----------------------------------------------------------------------------

    def _walk(
        self, roots: Sequence[GradientEdge], leaves: Sequence[torch.Tensor]
    ) -> tuple[list[Node], Form]:
        """Every node once, from the roots on, and the form of it all: who follows whom, and which leaf is which."""
        known = self._known | {id(leaf): index for index, leaf in enumerate(leaves)}
        index: dict[Node, int] = {}
        for edge in roots:
            index.setdefault(edge.node, len(index))
        nodes, form = list(index), [(index[edge.node], edge.output_nr) for edge in roots]
        for node in nodes:
            row: list[Any] = []
            for following, number in node.next_functions:
                if following is not None and following not in index:
                    index[following] = len(nodes)
                    nodes.append(following)
                row += (None if following is None else index[following], number)
            form.append(tuple(row) or (known.get(id(getattr(node, "variable", None))),))
        return nodes, tuple(form)

    def _plan(
        self, roots: Sequence[GradientEdge], nodes: Sequence[Node], form: Form
    ) -> Plan | None:
        """None if some weight is reached in no such way."""
        rows = form[len(roots) :]
        leaf = {at: row[0] for at, row in enumerate(rows) if len(row) == 1 and row[0] is not None}
        inputs = [nodes[at] for at, which in leaf.items() if which >= 0]
        weights = {nodes[at]: -1 - which for at, which in leaf.items() if which < 0}
        reverse = construct_reverse_graph([edge.node for edge in roots])
        found = _joined(get_param_groups(inputs, list(weights), reverse))
        if not weights.keys() <= {node for group in found for node in group["params"]}:
            return None
        outputs = _outputs(form[: len(roots)], rows)
        where = {node: at for at, node in enumerate(nodes)}
        entries: list[tuple[int, int]] = []
        groups, at_once = [], list[int]()
        for group in found:
            reached = tuple(weights[node] for node in group["params"])
            if any(node.name() in WHOLE for node in group["intermediates"]):
                at_once += reached
                continue
            ways = [where[node] for node in group["intermediates"]]
            mine = [(at, number) for at in ways for number in sorted(outputs[at])]
            span = range(len(entries), len(entries) + len(mine))
            entries += mine
            groups.append(Group(reached, tuple(span), len(ways)))
        return Plan(tuple(entries), tuple(groups), tuple(at_once))


def _give(weight: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
    """To what it has already, if anything."""
    if weight.grad is None:
        weight.grad = gradient
    elif gradient is not None:
        weight.grad.add_(gradient)


def _outputs(
    roots: Sequence[tuple[int, int]], rows: Sequence[tuple[Any, ...]]
) -> dict[int, set[int]]:
    """Of each node, the outputs that anything is done with."""
    outputs: dict[int, set[int]] = {}
    for at, number in roots:
        outputs.setdefault(at, set()).add(number)
    for row in rows:
        for at, number in zip(row[::2], row[1::2], strict=False):
            if at is not None:
                outputs.setdefault(at, set()).add(number)
    return outputs


def _joined(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups with a node in common as one: torch may leave them apart, and a weight that is in two counts twice."""
    joined: list[dict[str, Any]] = []
    for group in groups:
        one, apart = group, []
        for other in joined:
            if one["intermediates"].isdisjoint(other["intermediates"]):
                apart.append(other)
            else:
                one = {key: one[key] | other[key] for key in ("params", "intermediates")}
        joined = [*apart, one]
    return joined


def _complete(owed: Owed) -> bool:
    """Whether something has come in at every node."""
    come = {
        edge.node
        for edge, gradient in zip(owed.edges, owed.grads, strict=True)
        if gradient is not None
    }
    return all(edge.node in come for edge in owed.edges)


def _clamped(entering: list[tuple[GradientEdge, torch.Tensor]]) -> list[Any]:
    """Each node gets what came in at it, and not what others of its group pass on to it as well."""
    kept: dict[Node, dict[int, torch.Tensor]] = {}
    for edge, gradient in entering:
        kept.setdefault(edge.node, {})[edge.output_nr] = gradient

    def clamp(own: Mapping[int, torch.Tensor]) -> Any:
        return lambda arriving: tuple(own.get(number) for number in range(len(arriving)))

    return [node.register_prehook(clamp(own)) for node, own in kept.items()]
