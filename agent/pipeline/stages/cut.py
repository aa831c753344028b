"""From a graph to stages: where to cut, and what each stage is.

    sections   runs of nodes between neighbouring cut-points worth having
    balance    stages = runs of sections, so that the slowest is as fast as can be
    build      each stage a separate module, with its own parameters only

Balance, over cuts c_1 < ... < c_{P-1} among sections 0 .. K-1 with forward plus backward times t
and bytes b that cross after a section:

    minimise  max over stages of  sum of t + (b_in + b_out) / bandwidth

Where workers have several stages each, the busiest worker counts instead, for M microbatches on P
workers, because stages of the same slowest time can make one worker do a third more than another:

    minimise  M * (max over workers of its stages) + (P - 1) * (max over stages)
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx

from agent.errors import Misuse
from agent.pipeline import autocast_nodes
from agent.pipeline.stages.stage import Stage
from agent.pipeline.stages.stage_parts import NOTHING, Boundary, Piece
from agent.pipeline.tracing.analysis import CutPoint, Facts, cut_points, used
from agent.pipeline.tracing.recording.eager_trace import backward_hooks
from agent.pipeline.tracing.recording.module_names import written
from agent.pipeline.tracing.recording.trace import METRICS, attributes_kept
from agent.schedule import Schedule
from agent.source.tracebacks import is_torchs
from agent.tensors.absent import stood_in
from agent.tensors.device import clock_of, device_of, stream_kept
from agent.tensors.unchanged import memory_of

SECTIONS_MAX = 64
SELDOM_BYTES_MAX = 1 << 18  # the largest buffer that is copied in case it is written to
BANDWIDTH_BYTES_PER_S = 1e9  # until a link has been measured


class TooShort(Misuse):
    """The model has fewer places to cut than the layout needs."""


def worth_cutting(facts: Facts, most: int = SECTIONS_MAX) -> tuple[CutPoint, ...]:
    """Return cut-points that are no wider than their neighbours, thinned evenly if many."""
    points = cut_points(facts)
    if not points:
        return ()
    widths = [point.nbytes for point in points]
    narrow = [
        point
        for index, point in enumerate(points)
        if widths[index] <= min(widths[max(index - 1, 0) : index + 2])
    ]
    step = -(-len(narrow) // (most - 1))
    return tuple(narrow[::step])


def build(graph: fx.GraphModule, facts: Facts, after: Sequence[int]) -> tuple[Piece, ...]:
    """Build the stages between cuts after these nodes."""
    points = {point.after: point for point in cut_points(facts)}
    if not set(after) <= set(points):
        raise Misuse(f"the model cannot be cut after {sorted(set(after) - set(points))}")
    cuts = [points[position] for position in after]
    nodes = list(graph.graph.nodes)
    edges = [-1, *(cut.after for cut in cuts), len(nodes) - 1]
    spans = [range(a + 1, b + 1) for a, b in itertools.pairwise(edges)]
    owners = _owners(graph, nodes, spans)
    boundaries = [NOTHING]
    for index, cut in enumerate(cuts):
        drawn = any(draw <= cut.after for draw in facts.draws)
        boundaries.append(
            Boundary(
                values=cut.values,
                stream=drawn and any(draw > cut.after for draw in facts.draws),
                tied=tuple(
                    name for name, stages in owners.items() if stages[0] <= index < stages[-1]
                ),
            )
        )
    boundaries.append(NOTHING)
    tied = {name: tuple(stages) for name, stages in owners.items() if len(stages) > 1}
    return tuple(
        _piece(graph, facts, span, boundaries[index : index + 2], (index, tied))
        for index, span in enumerate(spans)
    )


def _piece(
    graph: fx.GraphModule,
    facts: Facts,
    span: range,
    edges: list[Boundary],
    place: tuple[int, dict[str, tuple[int, ...]]],
) -> Piece:
    index, tied = place
    nodes = list(graph.graph.nodes)
    before, after = edges
    module, batch = _module(graph, nodes, span, before, after)
    whole = dict(graph.named_parameters())
    mine = {id(param): name for name, param in module.named_parameters()}
    seldom = _seldom_written(graph, nodes, span)
    buffers = dict(graph.named_buffers())
    written_to = {memory_of(buffers[name]) for name in facts.written}
    return Piece(
        index=index,
        last=after is NOTHING,
        module=module,
        batch=batch,
        before=before,
        after=after,
        draws=any(draw in span for draw in facts.draws),
        foreign=not all(is_torchs(type(each)) for each in module.modules()),
        written=tuple(
            name
            for name, buffer in module.named_buffers()
            if memory_of(buffer) in written_to or id(buffer) in seldom
        ),
        tied=tied,
        names={name: mine[id(whole[name])] for name in tied if id(whole[name]) in mine},
        metrics=graph.meta[METRICS] if after is NOTHING else (),
        device=device_of(graph),
    )


def _seldom_written(graph: fx.GraphModule, nodes: list[fx.Node], span: range) -> set[int]:
    """Return buffers that may be written to, though no write has been seen.

    They belong to a module that is kept whole, and what it does may depend on values. Buffers used
    on both sides of a cut are left out, and so are those of a module with backward hooks: what such
    a hook writes is in no copy, and shows in the buffer itself.
    """
    elsewhere = {
        id(tensor) for i, node in enumerate(nodes) if i not in span for tensor in used(graph, node)
    }
    return {
        id(buffer)
        for node in (nodes[i] for i in span)
        if node.op == "call_module"
        if not any(map(backward_hooks, graph.get_submodule(str(node.target)).modules()))
        for each in graph.get_submodule(str(node.target)).modules()
        if not type(each).__module__.startswith("torch.nn.")
        for buffer in each._buffers.values()
        if buffer is not None and buffer.nbytes <= SELDOM_BYTES_MAX
    } - elsewhere


def _module(
    graph: fx.GraphModule, nodes: list[fx.Node], span: range, before: Boundary, after: Boundary
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """Return the nodes of a span as a module. Parameters are fetched where they are used."""
    made = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    by_name = {node.name: node for node in nodes}
    placeholders = [node for node in nodes if node.op == "placeholder"]
    mine = [node for node in (nodes[i] for i in span) if node.op not in ("placeholder", "get_attr")]
    for name in (*before.tensors, *before.plains):
        known[by_name[name]] = made.placeholder(name)
    needed = {source for node in mine for source in node.all_input_nodes}
    batch = tuple(i for i, node in enumerate(placeholders) if node in needed)
    for index in batch:
        known[placeholders[index]] = made.placeholder(placeholders[index].name)
    autocast = autocast_nodes.in_force(nodes, span.start)
    if autocast is not None:
        made.call_function(autocast_nodes.enter, autocast)
    for node in mine:
        for source in node.all_input_nodes:
            if source not in known and source.op == "get_attr":
                known[source] = made.node_copy(source)
        if node.op == "output":
            made.output(fx.node.map_arg(node.args[0], known.__getitem__))
        else:
            known[node] = made.node_copy(node, known.__getitem__)
    if autocast_nodes.in_force(nodes, span.stop) is not None:
        made.call_function(autocast_nodes.leave, autocast_nodes.outside(nodes))
    if after is not NOTHING:
        made.output(tuple(known[by_name[name]] for name in (*after.tensors, *after.plains)))
    return written(graph, made), batch


def _owners(
    graph: fx.GraphModule, nodes: list[fx.Node], spans: list[range]
) -> dict[str, list[int]]:
    """Return the stages that use each trainable parameter, under the first of its names."""
    names = {id(param): name for name, param in graph.named_parameters() if param.requires_grad}
    found: dict[str, set[int]] = {}
    position = {node: index for index, node in enumerate(nodes)}
    stage_of = {index: stage for stage, span in enumerate(spans) for index in span}
    for node in nodes:
        places = [node] if node.op == "call_module" else list(node.users)
        for tensor in used(graph, node):
            if id(tensor) in names and places:  # it may be fetched but not used
                stages = found.setdefault(names[id(tensor)], set())
                stages |= {stage_of[position[place]] for place in places}
    return {name: sorted(stages) for name, stages in found.items()}


def balance(
    seconds: Sequence[float],
    nbytes: Sequence[int],
    stages: int,
    bandwidth_bytes_per_s: float = BANDWIDTH_BYTES_PER_S,
    schedule: Schedule | None = None,
) -> tuple[int, ...]:
    """Choose the sections to cut after. `nbytes[k]` crosses a cut after section k.

    `schedule` says which worker has which stages; without it each worker has one.
    """
    count = len(seconds)
    if stages > count:
        raise TooShort(
            f"the model has {count - 1} places to cut, and {stages} stages need {stages - 1}: "
            f"use a depth of at most {count}"
        )
    total = [0.0]
    for value in seconds:
        total.append(total[-1] + value)
    wire = [0.0, *(size / bandwidth_bytes_per_s for size in nbytes[: count - 1]), 0.0]

    def cost(first: int, end: int) -> float:
        return total[end] - total[first] + wire[first] + wire[end]

    best = [cost(0, end) for end in range(count + 1)]
    choices: list[list[int]] = []
    for stage in range(1, stages):
        found, chosen = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(stage + 1, count + 1):
            for first in range(stage, end):
                slowest = max(best[first], cost(first, end))
                if slowest < found[end]:
                    found[end], chosen[end] = slowest, first
        best = found
        choices.append(chosen)
    cuts, end = [], count
    for chosen in reversed(choices):
        end = chosen[end]
        cuts.append(end - 1)
    found_cuts = tuple(reversed(cuts))
    if schedule is None or schedule.workers == stages:
        return found_cuts
    return _evened(found_cuts, count, cost, schedule)


def _evened(
    cuts: tuple[int, ...],
    count: int,
    cost: Callable[[int, int], float],
    schedule: Schedule,
) -> tuple[int, ...]:
    """Move cuts, two at a time, while that makes a step shorter."""

    def step_s(cuts: tuple[int, ...]) -> float:
        edges = (0, *(cut + 1 for cut in cuts), count)
        stages = [cost(first, end) for first, end in itertools.pairwise(edges)]
        busy = [0.0] * schedule.workers
        for seconds, hosts in zip(stages, schedule.hosts, strict=True):
            for host in hosts:
                busy[host] += seconds / len(hosts)
        return schedule.microbatches * max(busy) + (schedule.workers - 1) * max(stages)

    best = step_s(cuts)
    while True:
        found = min(_neighbours(cuts, count), key=step_s, default=cuts)
        if step_s(found) >= best:
            return cuts
        cuts, best = found, step_s(found)


def _neighbours(cuts: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
    """Yield the choices that differ in two cuts."""
    edges = (-1, *cuts, count - 1)
    for one, other in itertools.combinations(range(1, len(edges) - 1), 2):
        others = set(cuts) - {edges[one], edges[other]}
        near = range(edges[one - 1] + 1, edges[one + 1 + (other == one + 1)])
        far = range(edges[other - 1 - (other == one + 1)] + 1, edges[other + 1])
        yield from (
            tuple(sorted({a, b} | others)) for a, b in itertools.product(near, far) if a < b
        )


def measured(
    pieces: Sequence[Piece], example: Sequence[torch.Tensor], rounds: int = 5
) -> list[float]:
    """Return the seconds of forward plus backward of every piece, the least of a few rounds.

    The least is taken because a disturbance only adds. Every round goes through all pieces, so that
    a disturbance does not hit all rounds of one piece.
    """
    device = pieces[0].device
    clock, found = clock_of(device, time.perf_counter), [math.inf] * len(pieces)
    modules = torch.nn.ModuleList([piece.module for piece in pieces])
    with stream_kept(device), attributes_kept(modules):
        for _ in range(rounds):
            arrived = None
            for index, piece in enumerate(pieces):
                with stood_in(piece.module):
                    stage = Stage(piece, microbatches=1)
                    start_s = clock()
                    sent = stage.forward(0, arrived, example)
                    stage.backward(0, stage.ones_for(sent))
                    found[index] = min(found[index], clock() - start_s)
                    stage.module.zero_grad()
                arrived = sent
    return found


class Sections:
    """The places where a graph may be cut, and the times of the sections between.

    It is measured once for each graph. One worker measures and sends its choice to the others,
    because times differ between workers.
    """

    def __init__(self) -> None:
        self._graph: fx.GraphModule | None = None
        self._points: tuple[CutPoint, ...] = ()
        self._seconds: list[float] = []

    def choose(
        self,
        graph: fx.GraphModule,
        facts: Facts,
        example: Sequence[torch.Tensor],
        stages: int,
        schedule: Schedule | None = None,
    ) -> tuple[int, ...]:
        """Choose where to cut for so many stages, as even as measured times allow."""
        if stages == 1:
            return ()
        if self._graph is not graph or stages > len(self._points) + 1:
            points = worth_cutting(facts)
            self._points = points if stages <= len(points) + 1 else cut_points(facts)
            pieces = build(graph, facts, [point.after for point in self._points])
            self._graph, self._seconds = graph, measured(pieces, example)
        nbytes = [point.nbytes for point in self._points]
        chosen = balance(self._seconds, nbytes, stages, schedule=schedule)
        return tuple(self._points[index].after for index in chosen)
