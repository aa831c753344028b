"""The backward of a stage in two halves: first the inputs' gradients, later the weights'.

The previous stage waits for the first half. Which nodes belong to which half is torch's analysis
(`torch.distributed.pipelining`). It depends only on the form of the graph, and the graphs of
microbatches have the same form, so it is made once. Then one call of the engine finds the gradients
of the inputs and those that enter the weights' side, and one call for each group of weights goes on
from there.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.distributed.pipelining._backward import construct_reverse_graph, get_param_groups

FORMS_MAX = 64
# Group norm's backward (torch 2.13, on a CPU, with channels last) writes the gradient of its input
# even where it is not asked for, which ends the process. So its weights get theirs together with
# the input's.
WHOLE = {"NativeGroupNormBackward0"}
Form = tuple[Any, ...]
Found = tuple[torch.Tensor | None, ...]


class WeightGroup(NamedTuple):
    """Weights, and the entries of the gradients that lead to them and to nothing else."""

    weights: tuple[int, ...]
    entries: tuple[int, ...]
    nodes: int  # the number of nodes with entries


class SplitPlan(NamedTuple):
    """The entries as (node, output), nodes in `_walk` order, and the groups that they lead to."""

    entries: tuple[tuple[int, int], ...]
    groups: tuple[WeightGroup, ...]
    at_once: tuple[int, ...]  # weights that are not owed


class Owed(NamedTuple):
    """The second half of one microbatch."""

    groups: tuple[WeightGroup, ...]
    edges: list[GradientEdge]
    grads: Found
    known: Sequence[tuple[int, torch.Tensor | None]]  # weights that have their gradients already


class Halves:
    """The two halves, for graphs that end in these weights."""

    def __init__(self, weights: Sequence[torch.nn.Parameter]) -> None:
        self._weights = tuple(weights)
        self._known = {id(weight): -1 - index for index, weight in enumerate(self._weights)}
        self._plans: dict[Form, SplitPlan | None] = {}

    def first(
        self,
        roots: tuple[list[GradientEdge], list[torch.Tensor]],
        leaves: Sequence[torch.Tensor],
    ) -> tuple[Found, Owed | None]:
        """Return the leaves' gradients, and what is owed for the second half.

        If the graph cannot be taken apart, nothing is owed, and the graph is kept for another
        backward.
        """
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
        """Put the weights' gradients into their `.grad`s, or add them to what is there."""
        for index, gradient in owed.known:
            _give(self._weights[index], gradient)
        # What lies between several uses of a weight is needed by other groups as well.
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
        self, group: WeightGroup, entering: list[tuple[GradientEdge, torch.Tensor]], again: bool
    ) -> Found:
        """Do `torch.autograd.grad` without its checks, which cost more than a small layer."""
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
        """Return every node once, from the roots on, and the form of the graph.

        The form says which nodes follow which, and which leaf is which.
        """
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
    ) -> SplitPlan | None:
        """Plan the halves; return None if a weight, or a use of one, is in no group of torch's analysis."""
        rows = form[len(roots) :]
        leaf = {at: row[0] for at, row in enumerate(rows) if len(row) == 1 and row[0] is not None}
        if any(_is_apart(at, rows, leaf) for at, _ in form[: len(roots)]):
            return None
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
            groups.append(WeightGroup(reached, tuple(span), len(ways)))
        return SplitPlan(tuple(entries), tuple(groups), tuple(at_once))


def _is_apart(root: int, rows: Sequence[tuple[Any, ...]], leaf: Mapping[int, int]) -> bool:
    """Return whether a root leads to weights and to no input, as that of a second call on the batch.

    Torch follows a weight only to where it meets the inputs' side, and passes over such a use of it.
    """
    seen, coming, ends = {root}, [root], set[int]()
    while coming:
        at = coming.pop()
        if at in leaf:
            ends.add(leaf[at])
            continue
        following = {each for each in rows[at][::2] if each is not None} - seen
        seen |= following
        coming += following
    return bool(ends) and max(ends) < 0


def _give(weight: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Add to the gradient that the weight has already, if any."""
    if weight.grad is None:
        weight.grad = gradient
    elif gradient is not None:
        weight.grad.add_(gradient)


def _outputs(
    roots: Sequence[tuple[int, int]], rows: Sequence[tuple[Any, ...]]
) -> dict[int, set[int]]:
    """Return the outputs of each node that are used."""
    outputs: dict[int, set[int]] = {}
    for at, number in roots:
        outputs.setdefault(at, set()).add(number)
    for row in rows:
        for at, number in zip(row[::2], row[1::2], strict=False):
            if at is not None:
                outputs.setdefault(at, set()).add(number)
    return outputs


def _joined(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join groups that share a node.

    Torch may leave them apart, and then a weight that is in two would count twice.
    """
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
    """Return whether some gradient has come in at every node."""
    come = {
        edge.node
        for edge, gradient in zip(owed.edges, owed.grads, strict=True)
        if gradient is not None
    }
    return all(edge.node in come for edge in owed.edges)


def _clamped(entering: list[tuple[GradientEdge, torch.Tensor]]) -> list[Any]:
    """Restrict each node to what entered at it, not what others of its group pass on."""
    kept: dict[Node, dict[int, torch.Tensor]] = {}
    for edge, gradient in entering:
        kept.setdefault(edge.node, {})[edge.output_nr] = gradient

    def clamp(own: Mapping[int, torch.Tensor]) -> Any:
        return lambda arriving: tuple(own.get(number) for number in range(len(arriving)))

    return [node.register_prehook(clamp(own)) for node, own in kept.items()]
