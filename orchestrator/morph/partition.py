"""Where to cut a model into stages.

`split`: Varuna's way, K sections into P runs so that the slowest is as fast as can be, each within its
memory, each at the speed of its own worker.

`pipedream`: the hierarchical dynamic programme of PipeDream. Level k joins m_k components of level k-1 over
links of bandwidth B_k; A^k(i->j, m) is the slowest stage of the best pipeline for what lies between the
states i and j on m components, T^k(i->j, m) that of one stage replicated m times:

    T^k(i->j, m) = 1/m * max( A^{k-1}(i->j, m_{k-1}),  2 (m-1) * sum w / B_k )
    A^k(i->j, m) = min( T^k(i->j, m),  min over s, m' of max( A^k(i->s, m-m'), 2 a_s / B_k, T^k(s->j, m') ) )
    A^0(i->j)    = sum of compute,    A^k(i->j, 1) = A^{k-1}(i->j, m_{k-1})

The first candidate of A^k, one stage on all m, is missing in print and is needed for plain data parallelism.
With one level (flat) the recurrence can give any replication, such as 15-1; with two it nests in servers.

A *state* is what has been computed so far: a set of layers that holds all predecessors of its members. For a
chain these are the prefixes. For a graph all of them are used while they are few, which is never worse than
any one topological order; else the narrowest cuts of every size, with the prefixes of two orders among them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from orchestrator.morph.compiled import Codes, Reals, compiled, vectorised
from orchestrator.morph.errors import DoesNotFit
from orchestrator.morph.profiles import Graph

NEVER = 1e300
STATES_MAX = 1000
WORD = 60
SAME = 1 + 1e-9  # sums of the same numbers in another order


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """How many components of the level below are joined, and by how fast a link."""

    components: int
    bandwidth_bytes_per_s: float


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A stage: its layers, its replicas, and how each replica is partitioned in turn."""

    layers: tuple[int, ...]
    replicas: int
    inner: tuple["Part", ...] = ()


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    parts: tuple[Part, ...]
    input_s: float  # per input, in the steady state: the slowest stage
    alone_s: float  # per input if all were replicas of one stage
    states: int
    exact: bool  # over all states, or over some of them

    def describe(self) -> str:
        """Replicas of each stage: 15-1; straight is 1-1-1-1, one stage is plain data parallelism."""
        return "-".join(str(part.replicas) for part in self.parts)


# --- states ---------------------------------------------------------------------------------------


class States(msgspec.Struct, frozen=True):
    """States by size, the empty one first; `within[i, j]` says that i is a part of j."""

    sets: tuple[int, ...]
    compute_s: Reals
    parameter_bytes: Reals
    cut_bytes: Reals
    within: NDArray[np.int8]
    exact: bool


def states_of(graph: Graph, most: int = STATES_MAX) -> States:
    sets, exact = _downsets(graph, most)
    nodes = graph.nodes
    compute = np.array([node.forward_s + node.backward_s for node in nodes])
    parameters = np.array([node.parameter_bytes for node in nodes])
    words = _words(sets, len(nodes))
    bits = np.array([[held >> i & 1 for i in range(len(nodes))] for held in sets], np.float64)
    return States(
        sets=tuple(sets),
        compute_s=bits @ compute,
        parameter_bytes=bits @ parameters,
        cut_bytes=_cut_bytes(graph, bits),
        within=_nested(words),
        exact=exact,
    )


def _cut_bytes(graph: Graph, bits: Reals) -> Reals:
    """Per state, the activations of its layers that somebody outside of it still needs."""
    finished = bits.copy()
    for before, behind in graph.edges:
        finished[:, before] = np.minimum(finished[:, before], bits[:, behind])
    waiting: Reals = (bits - finished) @ np.array([node.activation_bytes for node in graph.nodes])
    return waiting


class _Order(msgspec.Struct, frozen=True):
    """Predecessors and successors of every layer as bits, and what can be computed at once."""

    before: tuple[int, ...]
    after: tuple[tuple[int, ...], ...]
    first: frozenset[int]


def _downsets(graph: Graph, most: int) -> tuple[list[int], bool]:
    """All states if there are at most so many, else the narrowest of every size; smallest first."""
    count = len(graph.nodes)
    before, after = [0] * count, [list[int]() for _ in range(count)]
    for a, b in graph.edges:
        before[b] |= 1 << a
        after[a].append(b)
    first = frozenset(i for i in range(count) if before[i] == 0)
    order = _Order(tuple(before), tuple(tuple(ends) for ends in after), first)
    everything = _rings(order, count, lambda ring: ring, most)
    if everything is not None:
        return everything, True
    always = {(1 << size) - 1 for size in range(count + 1)} | set(_deepest_first(order, count))
    width = max(1, most // count)

    def narrowest(ring: list[int]) -> list[int]:
        kept = sorted(ring, key=lambda held: (held not in always, _width(graph, held), held))
        return sorted(kept[:width])

    found = _rings(order, count, narrowest, count * (width + 1))
    assert found is not None
    return found, False


def _rings(
    order: _Order, count: int, keep: Callable[[list[int]], list[int]], most: int
) -> list[int] | None:
    """Sets of one layer more from sets of one less, `keep` deciding which; None if they are too many."""
    ring: dict[int, frozenset[int]] = {0: order.first}
    found = [0]
    for _ in range(count):
        grown: dict[int, frozenset[int]] = {}
        for held, ready in ring.items():
            for i in ready:
                larger = held | 1 << i
                if larger not in grown:
                    fed = {j for j in order.after[i] if order.before[j] & ~larger == 0}
                    grown[larger] = ready - {i} | fed
            if len(found) + len(grown) > 8 * most:
                return None
        kept = keep(sorted(grown))
        ring = {held: grown[held] for held in kept}
        found.extend(kept)
        if len(found) > most:
            return None
    return found


def _deepest_first(order: _Order, count: int) -> list[int]:
    """The prefixes of the order that follows one branch to its end before it takes the next."""
    ready, held = sorted(order.first, reverse=True), 0
    found: list[int] = []
    while len(found) < count:
        i = ready.pop()
        held |= 1 << i
        found.append(held)
        ready += [j for j in order.after[i] if order.before[j] & ~held == 0]
    return found


def _width(graph: Graph, held: int) -> float:
    open_ends = {a for a, b in graph.edges if held >> a & 1 and not held >> b & 1}
    return sum(graph.nodes[a].activation_bytes for a in open_ends)


def _words(sets: Sequence[int], count: int) -> Codes:
    """The sets in machine words, so that one can be tested against another quickly."""
    pieces = range(0, max(count, 1), WORD)
    mask = (1 << WORD) - 1
    return np.array([[held >> piece & mask for piece in pieces] for held in sets], np.int64)


@compiled
def _nested(words: Codes) -> NDArray[np.int8]:
    count, pieces = words.shape
    within = np.zeros((count, count), np.int8)
    for j in range(count):
        for i in range(j):
            inside = 1
            for piece in range(pieces):
                if words[i, piece] & ~words[j, piece]:
                    inside = 0
                    break
            within[i, j] = inside
    return within


# --- PipeDream's programme -------------------------------------------------------------------------


class _Tables(NamedTuple):
    """One level: best[m, i, j] = A(i->j, m); single[m, j, i] = T(i->j, m), turned for the inner loop."""

    best: Reals
    single: Reals


@vectorised
def _solve(
    below: Reals, weights: Reals, cut_s: Reals, shape: tuple[int, int], slow: float
) -> _Tables:
    """A and T of one level; `slow` is 2 / B_k; only the first `shape[1]` start states are wanted."""
    components, rows = shape
    states = len(weights)
    single = np.full((components + 1, states, states), NEVER)
    best = np.full((components + 1, rows, states), NEVER)
    for m in range(1, components + 1):
        for i in range(states):
            for j in range(i + 1, states):
                if below[i, j] < NEVER:
                    reduce_s = (m - 1) * (weights[j] - weights[i]) * slow
                    single[m, j, i] = max(below[i, j], reduce_s) / m
    for i in range(rows):
        best[1, i] = below[i]
        for m in range(2, components + 1):
            for j in range(i + 1, states):
                if below[i, j] >= NEVER:
                    continue
                least = single[m, j, i]
                for replicas in range(1, m):
                    for s in range(i + 1, j):
                        slowest = max(best[m - replicas, i, s], cut_s[s], single[replicas, j, s])
                        least = min(least, slowest)
                best[m, i, j] = least
    return _Tables(best, single)


def pipedream(states: States, levels: Sequence[Level]) -> Partition:
    """The best pipeline over these levels, lowest first; one level is the flat mode."""
    if not levels or any(level.components < 1 for level in levels):
        raise DoesNotFit("no workers: a partition needs at least one component on every level")
    last = len(states.sets) - 1
    spent = states.compute_s[None, :] - states.compute_s[:, None]
    below = np.where(states.within == 1, spent, NEVER)
    tables = []
    for depth, level in enumerate(levels):
        rows = 1 if depth == len(levels) - 1 else last + 1
        slow = 2 / level.bandwidth_bytes_per_s
        cut_s = states.cut_bytes * slow
        weights = states.parameter_bytes
        tables.append(_solve(below, weights, cut_s, (level.components, rows), slow))
        below = tables[-1].best[level.components]
    m = levels[-1].components
    straight = (
        _straight(states, levels[0], float(tables[0].best[m, 0, last]))
        if len(levels) == 1
        else None
    )
    return Partition(
        parts=straight or _parts(states, levels, tables, (len(levels) - 1, 0, last, m)),
        input_s=float(tables[-1].best[m, 0, last]),
        alone_s=float(tables[-1].single[m, last, 0]),
        states=len(states.sets),
        exact=states.exact,
    )


def _straight(states: States, level: Level, value: float) -> tuple[Part, ...] | None:
    """One worker a stage, if that is as fast as the best: then no weights go over the network."""
    cut_s = states.cut_bytes * (2 / level.bandwidth_bytes_per_s)
    spent = states.compute_s[None, :] - states.compute_s[:, None]
    spent[states.within == 0] = NEVER
    front, came = spent[0], []
    for _ in range(level.components - 1):
        slowest = np.maximum(np.maximum(front, cut_s)[:, None], spent)
        came.append(slowest.argmin(axis=0))
        front = slowest.min(axis=0)
    if front[-1] > value * SAME:
        return None
    parts, j = [], len(states.sets) - 1
    for choice in reversed(came):
        i = int(choice[j])
        parts.append(Part(layers=_layers(states, i, j), replicas=1))
        j = i
    parts.append(Part(layers=_layers(states, 0, j), replicas=1))
    return tuple(reversed(parts))


def _parts(
    states: States, levels: Sequence[Level], tables: list[_Tables], where: tuple[int, int, int, int]
) -> tuple[Part, ...]:
    """Walk back: which candidate gave the value? `where` is level, first and last state, components.

    Many do when one layer sets the pace; of these, the one with a front of a single stage comes first.
    """
    depth, i, j, m = where
    best, single = tables[depth]
    if m == 1:
        return (_part(states, levels, tables, where),)
    value = best[m, i, j] * SAME
    if single[m, j, i] <= value:
        return (_part(states, levels, tables, (depth, i, j, m)),)
    cut_s = states.cut_bytes * (2 / levels[depth].bandwidth_bytes_per_s)
    between = slice(i + 1, j)
    for front in (single[:, :, i], best[:, i, :]):
        for replicas in range(1, m):
            tail = np.maximum(cut_s[between], single[replicas, j, between])
            slowest = np.maximum(front[m - replicas, between], tail)
            s = int(slowest.argmin()) + i + 1
            if slowest[s - i - 1] <= value:
                head = _parts(states, levels, tables, (depth, i, s, m - replicas))
                return (*head, _part(states, levels, tables, (depth, s, j, replicas)))
    raise AssertionError((depth, i, j, m))


def _part(
    states: States, levels: Sequence[Level], tables: list[_Tables], where: tuple[int, int, int, int]
) -> Part:
    depth, i, j, replicas = where
    inner: tuple[Part, ...] = ()
    if depth > 0:
        below = (depth - 1, i, j, levels[depth - 1].components)
        inner = _parts(states, levels, tables, below)
    return Part(layers=_layers(states, i, j), replicas=replicas, inner=inner)


def _layers(states: States, i: int, j: int) -> tuple[int, ...]:
    added = states.sets[j] & ~states.sets[i]
    return tuple(k for k in range(added.bit_length()) if added >> k & 1)


# --- Varuna's grouping -----------------------------------------------------------------------------


class Load(NamedTuple):
    """Prefix sums over sections, and what a stage may hold.

    Stage s over sections i..j-1 takes pace[s] * (seconds[j] - seconds[i]) and holds
    held[j] - held[i] + stash[s] * (live[j] - live[i]) + entry[s] * input[i] bytes.
    """

    seconds: Reals
    held: Reals
    live: Reals
    input: Reals
    pace: Reals
    stash: Reals
    entry: Reals
    limit: Reals


@compiled
def _split(load: Load) -> tuple[Reals, Codes]:
    sections, stages = len(load.seconds) - 1, len(load.pace)
    worst = np.full((stages + 1, sections + 1), NEVER)
    square = np.full((stages + 1, sections + 1), NEVER)
    came = np.full((stages + 1, sections + 1), -1, np.int64)
    worst[0, 0] = square[0, 0] = 0.0
    for s in range(stages):
        for j in range(s + 1, sections - (stages - s - 1) + 1):
            for i in range(j - 1, s - 1, -1):
                spent = load.pace[s] * (load.seconds[j] - load.seconds[i])
                if spent > worst[s + 1, j] * (1 + 1e-12):
                    break
                bytes_held = (
                    load.held[j] - load.held[i] + load.stash[s] * (load.live[j] - load.live[i])
                )
                if bytes_held + load.entry[s] * load.input[i] > load.limit[s]:
                    continue
                slowest, even = max(worst[s, i], spent), square[s, i] + spent * spent
                least = worst[s + 1, j]
                if slowest < least * (1 - 1e-12) or (
                    slowest <= least * (1 + 1e-12) and even < square[s + 1, j]
                ):
                    worst[s + 1, j], square[s + 1, j], came[s + 1, j] = slowest, even, i
    return worst[stages], came


def split(load: Load) -> tuple[int, ...] | None:
    """The first section of every stage; the slowest stage as fast as can be, then as even as can be.

    None if no grouping fits into memory.
    """
    sections, stages = len(load.seconds) - 1, len(load.pace)
    if stages > sections:
        return None
    worst, came = _split(load)
    if worst[sections] >= NEVER:
        return None
    firsts, j = [], sections
    for s in range(stages, 0, -1):
        j = int(came[s, j])
        firsts.append(j)
    return tuple(reversed(firsts))


@compiled
def evened(seconds: Reals, firsts: Codes, depth: int) -> Codes:
    """Boundaries moved by one section at a time, as long as the workers' loads become more alike.

    Worker w computes the stages w, w + depth, ...; less is a shorter slowest worker, then a smaller sum of squares.
    """
    stages, loads, found = len(firsts), np.zeros(depth), firsts.copy()
    ends = np.append(found[1:], len(seconds) - 1)
    for s in range(stages):
        loads[s % depth] += seconds[ends[s]] - seconds[found[s]]
    moved = True
    while moved:
        moved = False
        for s in range(1, stages):
            last = found[s + 1] if s + 1 < stages else len(seconds) - 1
            for to in (found[s] - 1, found[s] + 1):
                if not found[s - 1] < to < last:
                    continue
                more = seconds[to] - seconds[found[s]]  # of the stage before
                least, squares = loads.max(), (loads * loads).sum()
                loads[(s - 1) % depth] += more
                loads[s % depth] -= more
                slowest = loads.max()
                better = slowest < least / SAME
                if better or (slowest <= least and (loads * loads).sum() < squares / SAME):
                    found[s], moved = to, True
                    break
                loads[(s - 1) % depth] -= more
                loads[s % depth] += more
    return found
