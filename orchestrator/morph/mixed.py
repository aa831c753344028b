"""Footprints of unlike instances: other types, other zones, replicas that do not run equally fast.

Chains are formed inside a group of equal instances as far as they go; what is left over in several groups
forms mixed chains, whose stages run on unlike workers. All replicas cut the model at the same sections, so
that the replicas of a stage hold the same weights; the cuts are those that suit the slowest chain best. Each
replica gets as many microbatches as it can do in the same time:

    T_r(N) = a_r + c_r N        N_r so that the largest T_r(N_r) is least and they add up to M
"""

from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

import msgspec
import numpy as np

from agent.profile import Profile
from orchestrator.morph import costing, engine, partition, schedules, search
from orchestrator.morph.book import best
from orchestrator.morph.compiled import Reals
from orchestrator.morph.costing import Firsts, Tables
from orchestrator.morph.errors import DoesNotFit, ProfileError
from orchestrator.morph.plans import Cost, Holding, Plan, RunnerUp, Way
from orchestrator.morph.search import RUNNERS_UP, Task
from orchestrator.wording import plural

MIXED_DEPTH_MAX = 64
MIXES_MAX = 256
BISECTIONS = 50
ROUNDING = 1e-9


class Chain(NamedTuple):
    """A replica: which group each stage's worker comes from."""

    groups: tuple[int, ...]


class _Group(NamedTuple):
    holding: Holding
    tables: Tables
    pace: float  # seconds of the whole model, a sample


def best_mix(
    profiles: Mapping[str, Profile], task: Task, holdings: Sequence[Holding], groups_min: int = 1
) -> tuple[Plan, tuple[Chain, ...]]:
    """The best layout for what is held, and the group of every worker of every replica.

    Groups are numbered from the fastest on. Slow ones may be left out, but for the first `groups_min`.
    """
    groups = _groups(profiles, task, holdings)
    workers = sum(group.holding.workers for group in groups)
    if workers == 0:
        raise DoesNotFit("there are no workers; the job waits for 1 of them")
    if len(groups) == 1:
        only = msgspec.structs.replace(task, per_instance=groups[0].holding.per_instance)
        plan = best(groups[0].tables.profile, only, workers)
        return plan, (Chain((0,) * plan.way.depth),) * plan.width
    found: list[tuple[Plan, tuple[Chain, ...]]] = []
    for used in range(min(groups_min, len(groups)), len(groups) + 1):
        some = groups[:used]
        deepest = min(MIXED_DEPTH_MAX, sum(group.holding.workers for group in some))
        for way in search.ways(task, some[0].tables.profile, deepest):
            if way.placement == "chain" and way.schedule not in schedules.MODULO:
                found += _tried(task, some, way)
    if not found:
        held = max(group.tables.profile.memory_bytes for group in groups)
        raise DoesNotFit(
            f"no layout of {plural(workers, 'worker')} fits; the roomiest accelerator has {held / 2**30:.2f} GiB"
        )
    found.sort(key=lambda pair: pair[0].step_s)
    plan, chains = found[0]
    others = tuple(
        RunnerUp(way=other.way, width=other.width, cost=other.cost)
        for other, _ in found[1 : 1 + RUNNERS_UP]
    )
    return msgspec.structs.replace(plan, workers=workers, runners_up=others), chains


def mix_book(
    profiles: Mapping[str, Profile], task: Task, mixes: Sequence[Sequence[Holding]]
) -> dict[tuple[Holding, ...], tuple[Plan, tuple[Chain, ...]]]:
    """The best layout of every likely mix, by `footprint`; a mix that nothing fits is not in it."""
    made = {}
    for mix in mixes[:MIXES_MAX]:
        try:
            made[footprint(mix)] = best_mix(profiles, task, mix)
        except DoesNotFit:
            continue
    return made


def footprint(holdings: Sequence[Holding]) -> tuple[Holding, ...]:
    """The same for the same instances, in whatever order they are listed; empty holdings are dropped."""
    held = [holding for holding in holdings if holding.workers]
    return tuple(sorted(held, key=lambda h: (h.instance_type, h.zone, h.per_instance, h.instances)))


def _groups(
    profiles: Mapping[str, Profile], task: Task, holdings: Sequence[Holding]
) -> list[_Group]:
    """Equal instances of one zone together, the fastest first."""
    merged: dict[tuple[str, str], Holding] = {}
    for holding in holdings:
        key = (holding.instance_type, holding.zone)
        more = merged[key].instances if key in merged else 0
        merged[key] = msgspec.structs.replace(holding, instances=holding.instances + more)
    groups = []
    for holding in merged.values():
        profile = profiles.get(holding.instance_type)
        if profile is None:
            raise ProfileError(
                f"{holding.instance_type}: there is no profile for this type; calibrate on it first"
            )
        tables = costing.tables(profile, whole=task.whole)
        row = tables.size(search.sizes(task, profile)[-1])
        seconds = float(tables.forward[row, -1] + tables.backward[row, -1])
        if holding.workers:
            groups.append(_Group(holding, tables, seconds / profile.microbatch_sizes[row]))
    counts = {len(group.tables.profile.sections) for group in groups}
    if len(counts) > 1:
        raise ProfileError(
            f"the profiles have {sorted(counts)} sections; they must be of one model, calibrate again"
        )
    return sorted(groups, key=lambda group: (group.pace, group.holding.zone))


def _tried(task: Task, groups: Sequence[_Group], way: Way) -> list[tuple[Plan, tuple[Chain, ...]]]:
    """With mixed chains and without."""
    whole, rest = [], []
    for index, group in enumerate(groups):
        count, left = divmod(group.holding.workers, way.depth)
        whole += [Chain((index,) * way.depth)] * count
        rest += [index] * left
    across = [
        Chain(tuple(rest[i : i + way.depth]))
        for i in range(0, len(rest) - way.depth + 1, way.depth)
    ]
    options = [tuple(whole), tuple(whole + across)] if across else [tuple(whole)]
    most = task.global_batch // way.microbatch_size
    found = []
    for chains in options:
        plan = _plan(task, groups, way, chains[:most])
        if plan is not None:
            found.append((plan, chains[: plan.width]))
    return found


class _Line(NamedTuple):
    """A chain's straight line: ready_s(N) = at + N * slope, and what a microbatch keeps it busy."""

    at: Reals
    slope: Reals
    busy_s: float
    first: int
    costs: engine.Costs


def _plan(task: Task, groups: Sequence[_Group], way: Way, chains: tuple[Chain, ...]) -> Plan | None:
    if not chains:
        return None
    programs = schedules.pack(way.schedule, way.depth, 2 * way.depth, recompute=way.recompute)
    peaks = search.peaks(way, programs)
    firsts = _firsts(groups, way, chains, peaks)
    if firsts is None:
        return None
    kinds = dict.fromkeys(chains)
    lines = {chain: _line(groups, way, firsts, chain) for chain in kinds}
    microbatches = task.global_batch // way.microbatch_size
    shares = shared_by_pace(
        microbatches,
        [float(lines[chain].at.max()) for chain in chains],
        [float(lines[chain].slope.max()) for chain in chains],
    )
    return _priced(task, groups, way, (firsts, chains, shares, lines))


def _firsts(
    groups: Sequence[_Group], way: Way, chains: tuple[Chain, ...], peaks: Reals
) -> Firsts | None:
    """Balanced for the slowest chain, within the memory of the smallest worker of every stage."""
    slowest = max(set(chains), key=lambda chain: max(groups[g].pace for g in chain.groups))
    base = groups[slowest.groups[0]].tables
    m = way.microbatch_size
    row = base.size(m)
    seconds = base.forward[row] + base.backward[row]
    pace = np.array([groups[g].pace for g in slowest.groups]) / groups[slowest.groups[0]].pace
    stash, entry = peaks[0].copy(), np.zeros(way.depth)
    if way.recompute:
        pace[:-1] *= 1 + base.untraced[row, -1] / max(seconds[-1], 1e-300)
        stash[:-1], entry[:-1] = 1, peaks[0, :-1]
    room = [
        min(
            groups[chain.groups[stage]].tables.profile.memory_bytes
            - groups[chain.groups[stage]].tables.profile.reserved_bytes
            for chain in set(chains)
        )
        for stage in range(way.depth)
    ]
    held = 2 * base.weights + (0 if way.sharding == "offload" else 1) * base.optimizer
    load = partition.Load(
        seconds, held, base.stash * m, base.entry * m, pace, stash, entry, np.array(room)
    )
    return partition.split(load)


def _line(groups: Sequence[_Group], way: Way, firsts: Firsts, chain: Chain) -> _Line:
    """Simulate one chain at two numbers of microbatches; every stage at its own worker's times."""
    seconds = np.zeros((5, way.stages))
    for group in set(chain.groups):
        mine = np.array(chain.groups) == group
        seconds[:, mine] = costing.seconds(groups[group].tables, firsts, way)[:, mine]
    costs = engine.Costs(seconds, np.ones(way.depth), _wires(groups, way, firsts, chain), 0)
    first = 4 * way.depth
    ready = [
        search.gradients_done(
            schedules.pack(way.schedule, way.depth, count, recompute=way.recompute), costs
        )
        for count in (first, first + way.depth)
    ]
    slope = (ready[1] - ready[0]) / way.depth
    busy_s = float((seconds[0] + seconds[1]).max())
    return _Line(ready[0] - first * slope, slope, busy_s, first, costs)


def _wires(groups: Sequence[_Group], way: Way, firsts: Firsts, chain: Chain) -> Reals:
    """Between unlike groups a message takes the slower of the two groups' links."""
    each = [
        costing.wires(groups[g].tables, firsts, way, groups[g].holding.per_instance, 1 << 30)
        for g in range(len(groups))
    ]
    apart = [costing.wires(group.tables, firsts, way, 1, 1 << 30) for group in groups]
    wire = each[chain.groups[0]].copy()
    for stage in range(way.depth):
        for way_of, other in ((0, stage + 1), (1, stage - 1)):
            if 0 <= other < way.depth:
                here, there = chain.groups[stage], chain.groups[other]
                both = each[here][way_of, stage]
                if here != there:
                    both = np.maximum(apart[here][way_of, stage], apart[there][way_of, stage])
                wire[way_of, stage] = both
    return wire


def _priced(
    task: Task,
    groups: Sequence[_Group],
    way: Way,
    laid: tuple[Firsts, tuple[Chain, ...], tuple[int, ...], dict[Chain, _Line]],
) -> Plan | None:
    """The step of unequal replicas: stages wait for their slowest, rings run at their slowest link."""
    firsts, chains, shares, lines = laid
    pairs = set(zip(chains, shares, strict=True))
    ready = np.max([_ready(way, lines[chain], share) for chain, share in pairs], axis=0)
    width = np.array([float(len(chains))])
    used = sorted({g for chain in chains for g in chain.groups})
    tail_s = np.max(
        [
            costing.tails(groups[g].tables, firsts, way, width, groups[g].holding.per_instance)
            for g in used
        ],
        axis=0,
    )[:, 0]
    overhead_s = max(groups[g].tables.profile.overhead_s for g in used)
    held = np.zeros(way.stages)
    peaks = search.peaks(
        way, schedules.pack(way.schedule, way.depth, max(shares), recompute=way.recompute)
    )
    for chain in set(chains):
        for stage, g in enumerate(chain.groups):
            tables = groups[g].tables
            mine = costing.memory_bytes(tables, firsts, way, width, peaks[:, :, None])[stage, 0]
            if mine > tables.profile.memory_bytes:
                return None
            held[stage] = max(held[stage], mine)
    compute_s, step_s = float(ready.max()), float((ready + tail_s).max()) + overhead_s
    busy_s = max(share * lines[chain].busy_s for chain, share in pairs)
    return Plan(
        way=way,
        firsts=firsts,
        sections=len(groups[0].tables.profile.sections),
        shares=shares,
        workers=sum(group.holding.workers for group in groups),
        samples=task.global_batch,
        cost=Cost(
            step_s=step_s,
            busy_s=busy_s,
            bubble_s=compute_s - busy_s,
            reduce_s=step_s - compute_s - overhead_s,
        ),
        memory_bytes=tuple(held.tolist()),
        owned=way.depth > 1 and not task.whole,
    )


def _ready(way: Way, line: _Line, share: int) -> Reals:
    if share >= line.first:
        return line.at + share * line.slope
    programs = schedules.pack(way.schedule, way.depth, share, recompute=way.recompute)
    return search.gradients_done(programs, line.costs)


def shared_by_pace(
    microbatches: int, at_s: Sequence[float], each_s: Sequence[float]
) -> tuple[int, ...]:
    """The shares with which the last replica is done as early as can be; each gets at least one."""
    at, each = np.array(at_s), np.maximum(np.array(each_s), 1e-12)

    def done_by(end_s: float) -> Reals:
        shares: Reals = np.maximum(np.floor((end_s - at) / each + ROUNDING), 1)
        return shares

    low, high = 0.0, float((at + microbatches * each).max())
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if done_by(middle).sum() >= microbatches else (middle, high)
    shares = done_by(low).astype(int).tolist()
    heap = [(at_s[r] + (share + 1) * each_s[r], r) for r, share in enumerate(shares)]
    heapify(heap)
    for _ in range(microbatches - sum(shares)):
        end_s, r = heap[0]
        shares[r] += 1
        heapreplace(heap, (end_s + each_s[r], r))
    return tuple(shares)
