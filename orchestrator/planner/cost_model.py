"""From a profile to the engine's costs: seconds, wires, tails and bytes of every stage.

seconds      sums over the sections of a stage, plus the time to receive every message
wire         bytes / bandwidth, latency plus mean jitter; inside or between instances, by placement
reduce_s     2 (D-1) hop + 2 (D-1)/D * bytes * max(1, k / lanes) / bandwidth, where each replica
             exchanges with all others: k is how many workers with no other replica on their
             machine would send as much over its link; of bytes in the format of exchanges
memory       weights + gradients + optimizer + the copy of a worker's share + stashed microbatches +
             one live set if recomputed, and the sums of gradients; of the stage's state, or of the
             whole state if every worker keeps it
"""

from functools import lru_cache
from math import gcd
from typing import NamedTuple

import msgspec
import numpy as np

from agent.profile import Link, Profile
from orchestrator.planner.compiled import Codes, Reals
from orchestrator.planner.plans import Way
from orchestrator.planner.simulation import kernel

Firsts = tuple[int, ...]
FAR = 1 << 30  # replicas: too many for one machine


class Tables(NamedTuple):
    """Prefix sums over sections: [size, section] for times, [section] for bytes."""

    profile: Profile
    forward: Reals
    backward: Reals
    input_gradient: Reals
    weight_gradient: Reals
    untraced: Reals
    fresh: Reals
    parameters: Reals
    weights: Reals  # the parameters, or 0 if every worker keeps all stages
    optimizer: Reals  # likewise 0 if every worker keeps all stages
    copied: Reals  # of which each replica has an equal share besides
    stash: Reals  # per sample
    entry: Reals  # per sample, the input of section i; not a sum

    def size(self, microbatch_size: int) -> int:
        return self.profile.microbatch_sizes.index(microbatch_size)


def tables(profile: Profile, *, whole: bool = False) -> Tables:
    """Return the prefix sums of a profile.

    With `whole` every worker keeps the state of all stages, so that memory is reserved.
    """
    found = _tables(profile)
    if not whole:
        return found
    state = float(2 * found.weights[-1] + found.optimizer[-1])
    reserved = msgspec.structs.replace(profile, reserved_bytes=profile.reserved_bytes + state)
    none = np.zeros(len(found.weights))
    return found._replace(profile=reserved, weights=none, optimizer=none)


def _tables(profile: Profile) -> Tables:
    sections, nothing = profile.sections, (0.0,) * len(profile.microbatch_sizes)
    first = [s.input_gradient_s or tuple(t / 2 for t in s.backward_s) for s in sections]
    second = [
        s.weight_gradient_s
        or tuple(max(whole - half, 0.0) for whole, half in zip(s.backward_s, halves, strict=True))
        for s, halves in zip(sections, first, strict=True)
    ]
    parameters = _sums(np.array([section.parameter_bytes for section in sections]))
    optimizer = _sums(np.array([section.optimizer_bytes for section in sections]))
    return Tables(
        profile,
        _sums(np.array([section.forward_s for section in sections]).T),
        _sums(np.array([section.backward_s for section in sections]).T),
        _sums(np.array(first).T),
        _sums(np.array(second).T),
        _sums(np.array([section.untraced_s or section.forward_s for section in sections]).T),
        _sums(np.array([section.fresh_s or nothing for section in sections]).T),
        parameters,
        parameters,
        optimizer,
        profile.copies * (parameters + optimizer),
        _sums(np.array([section.stash_bytes for section in sections])),
        np.array([0.0, *(section.activation_bytes for section in sections)]),
    )


def _sums(values: Reals) -> Reals:
    zero = np.zeros((*values.shape[:-1], 1))
    return np.concatenate([zero, np.cumsum(values, axis=-1)], axis=-1)


def _between(sums: Reals, edges: Codes) -> Reals:
    """Return the sum between each edge and the next."""
    until = sums[edges]
    found: Reals = until[1:] - until[:-1]
    return found


def seconds(tables: Tables, firsts: Firsts, way: Way) -> Reals:
    """Return how long each kind of action takes at each stage, [kind, stage]."""
    edges = np.array([*firsts, len(tables.entry) - 1])
    row = tables.size(way.microbatch_size)
    forward = _between(tables.forward[row], edges)
    backward = _between(tables.backward[row], edges)
    first = _between(tables.input_gradient[row], edges)
    second = _between(tables.weight_gradient[row], edges)
    found = np.stack([forward, backward, first, second, forward])
    if way.schedule == "gpipe":
        # GPipe holds every microbatch of the step; other schedules reuse memory that was released.
        found[0] += _between(tables.fresh[row], edges)
    if way.recompute:
        found[0] = np.where(way.recompute, _between(tables.untraced[row], edges), found[0])
    send_s = tables.profile.send_s
    if send_s and way.depth > 1:
        # A separate thread sends; the worker that waits for a message decodes it.
        found[0, 1:] += send_s
        found[1:3, :-1] += send_s
    return found


@lru_cache(maxsize=4096)
def crossings(way: Way, per_instance: int, width: int) -> Reals:
    """Return by [stage] 1 if the link from stage s to s + 1 leaves the instance in a replica."""
    crosses = np.ones(way.stages)
    if way.depth * width <= per_instance:
        crosses[:] = 0
    elif way.placement == "chain":
        worker = np.arange(way.stages) % way.depth
        following = (worker + 1) % way.depth
        crosses[:] = 0
        # Chains lie end to end, so replica d begins at slot d * P, and the pattern repeats.
        for d in range(min(width, per_instance // gcd(way.depth, per_instance))):
            here, there = d * way.depth + worker, d * way.depth + following
            crosses = np.maximum(crosses, here // per_instance != there // per_instance)
    return crosses


def variant(way: Way, per_instance: int, width: int) -> int:
    """Return a width whose replicas have the same wires as this width's, or slightly worse."""
    if per_instance == 1 or way.depth == 1:
        return 1
    if width == 1 or way.depth * width <= per_instance:
        return width if way.depth * width > per_instance else 1
    if way.placement == "ring" and width < per_instance:
        return width
    return FAR


def wires(tables: Tables, firsts: Firsts, way: Way, per_instance: int, width: int) -> Reals:
    """Return occupancy, latency and jitter of the messages of stage s: [up 0 | down 1, s, 3].

    Replicas of a stage that are on one machine send over its link at the same time.
    """
    stages = len(firsts)
    wire = np.zeros((2, stages, 3))
    if way.depth == 1:
        return wire
    crosses = crossings(way, per_instance, width)[: stages - 1]
    network = tables.profile.network
    sent = tables.entry[np.array(firsts[1:], np.int64)] * way.microbatch_size
    inter, intra, stays = network.inter, network.intra, 1 - crosses
    at_once = min(width, per_instance) if way.placement == "ring" else 1
    occupied = crosses * sent * max(1.0, at_once / inter.lanes) / inter.bandwidth_bytes_per_s
    wire[0, :-1, 0] = occupied + stays * sent / intra.bandwidth_bytes_per_s
    late = crosses * (inter.latency_s + inter.jitter_s)
    wire[0, :-1, 1] = late + stays * (intra.latency_s + intra.jitter_s)
    wire[1, 1:] = wire[0, :-1]
    return wire


def costs(tables: Tables, firsts: Firsts, way: Way, per_instance: int, width: int) -> kernel.Costs:
    """Return the engine's costs for these stages on equal workers without jitter."""
    wire = wires(tables, firsts, way, per_instance, width)
    return kernel.Costs(seconds(tables, firsts, way), np.ones(way.depth), wire, 0)


def reduce_link(
    tables: Tables, way: Way, width: int, per_instance: int, *, apart: bool = False
) -> tuple[Link, float]:
    """Return the slowest link of a stage's exchange, and how many exchanges it carries at once.

    A replica sends to each of the D - 1 others, of which r - 1 are on its machine. So the n workers
    of a machine send as much over its link as n (D-r)/(D-1) workers of as many machines do.
    """
    network, depth = tables.profile.network, way.depth
    if not apart and depth * width <= per_instance:
        return network.reduce_intra, float(depth)
    if way.placement == "ring" and width <= per_instance and per_instance % width == 0:
        return network.reduce_intra, float(per_instance // width)
    if way.placement == "chain":
        sending = min(per_instance, depth * (width - 1))
        near = max(1, sending // depth)
    elif width % per_instance == 0:
        sending = near = per_instance
    else:  # a stage may begin in the middle of a machine, where another one ends
        near = (min(width, per_instance) + 1) // 2
        sending = 2 * near
    return network.reduce_inter, sending * (width - near) / max(1, width - 1)


def reduce_s(size_bytes: Reals, widths: Reals, links: list[tuple[Link, float]]) -> Reals:
    """Return the ring's time for a number of bytes, [stage, width]."""
    hop = np.array([link.latency_s + link.jitter_s for link, _ in links])
    pace = np.array(
        [max(1.0, rings / link.lanes) / link.bandwidth_bytes_per_s for link, rings in links]
    )
    sent = 2 * (widths - 1)
    found: Reals = sent * hop + size_bytes[:, None] * (sent / widths * pace)
    return found


def tails(
    tables: Tables,
    firsts: Firsts,
    way: Way,
    widths: Reals,
    per_instance: int,
    *,
    apart: bool = False,
) -> Reals:
    """Return the time from a stage's last backward until its weights are new, [stage, width].

    Replicas that are `apart` are never all on one machine, even if they are few.
    """
    edges = np.array([*firsts, len(tables.entry) - 1])
    size_bytes = _between(tables.parameters, edges)
    links = [
        reduce_link(tables, way, int(width), per_instance, apart=apart and width > 1)
        for width in widths
    ]
    profile = tables.profile
    if profile.reduce_overlaps:
        found = _overlapped(tables, edges, way, widths, links)
    else:
        found = reduce_s(size_bytes * profile.exchanged, widths, links)
    share = 1 / widths if way.sharding == "optimizer" else np.ones(len(widths))
    if way.sharding == "offload":
        found = found + 2 * size_bytes[:, None] / profile.host_bytes_per_s
    applied: Reals = found + size_bytes[:, None] * (profile.apply_s_per_byte * share)
    return applied


def _overlapped(
    tables: Tables, edges: Codes, way: Way, widths: Reals, links: list[tuple[Link, float]]
) -> Reals:
    """Return the time of reductions that overlap the last backward, [stage, width].

    The backward goes from the last section to the first; each section reduces as soon as it is
    done.
    """
    row = tables.size(way.microbatch_size)
    each = reduce_s(np.diff(tables.parameters) * tables.profile.exchanged, widths, links)
    done = np.zeros((len(edges) - 1, len(widths)))
    for stage in range(len(edges) - 1):
        free = np.full(len(widths), -np.inf)
        for section in range(int(edges[stage + 1]) - 1, int(edges[stage]) - 1, -1):
            left_s = tables.backward[row, section] - tables.backward[row, int(edges[stage])]
            free = np.maximum(free, -left_s) + each[section]
        done[stage] = free
    return done


def sums_held(profile: Profile, way: Way) -> float:
    """Return the memory for sums of gradients, in multiples of the gradients.

    At depth 1 the script computes, so the gradients of one microbatch are held besides.
    """
    return profile.sums + (way.depth == 1) if profile.sums else 0.0


def narrows(tables: Tables, way: Way) -> bool:
    """Return whether a worker holds less if there are more replicas."""
    return way.sharding == "optimizer" or bool(tables.copied[-1])


def memory_bytes(tables: Tables, firsts: Firsts, way: Way, widths: Reals, peaks: Reals) -> Reals:
    """Return the memory of a worker by [stage, width].

    `peaks` are the microbatches stashed [0] and the weight-gradients owed [1].
    """
    edges = np.array([*firsts, len(tables.entry) - 1])
    live = _between(tables.stash, edges)[:, None] * way.microbatch_size
    entry = tables.entry[edges, None] * way.microbatch_size
    stash = peaks[0] * live
    if way.recompute:
        stash = np.where(np.array(way.recompute)[:, None], peaks[0] * entry[:-1] + live, stash)
    state = 2 * _between(tables.weights, edges)[:, None]
    if way.sharding != "offload":
        optimizer = _between(tables.optimizer, edges)[:, None]
        state = state + optimizer / (widths if way.sharding == "optimizer" else 1)
    sums = sums_held(tables.profile, way) * _between(tables.parameters, edges)[:, None]
    copied = _between(tables.copied, edges)[:, None] / widths
    each = state + sums + copied + stash + peaks[1] * entry[1:]
    if way.chunks > 1:
        shape = (way.chunks, way.depth, each.shape[1])
        each = np.tile(each.reshape(shape).sum(axis=0), (way.chunks, 1))
    found: Reals = each + tables.profile.reserved_bytes
    return found
