"""Which workers stand in which chain, and what a formation takes.

Where workers are few, all formations are listed; else chains are formed
inside a group of equal instances as far as they go, and what is left over in several groups forms mixed chains,
whose stages run on unlike workers. All replicas cut the model at the same sections, so
that the replicas of a stage hold the same weights; the cuts are those that suit the slowest chain best. Each
replica gets as many microbatches as it can do in the same time:

    T_r(N) = a_r + c_r N        N_r so that the largest T_r(N_r) is least and they add up to M
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import islice, product
from typing import NamedTuple

import numpy as np

from orchestrator.morph import costing, engine, partition, schedules, search
from orchestrator.morph.compiled import Flags, Reals
from orchestrator.morph.costing import Firsts, Tables
from orchestrator.morph.plans import Cost, Holding, Plan, Way
from orchestrator.morph.search import Task

FULL = 4  # depths until a pipeline is full
FORMATIONS_MAX, KINDS_MAX, CHAINS_MAX = 256, 128, 6
ROUNDING = 1e-9


class Chain(NamedTuple):
    """A replica: which group each stage's worker comes from."""

    groups: tuple[int, ...]


class Group(NamedTuple):
    holding: Holding
    tables: Tables
    pace: float  # seconds of the whole model, a sample


def formed(
    groups: Sequence[Group], depth: int, most: int, groups_min: int
) -> list[tuple[Chain, ...]]:
    """All of them if they are few; else those that keep to one group as far as that goes."""
    few = _every_formation(groups, depth, most, groups_min)
    if few is not None:
        return few
    found = []
    for used in range(min(groups_min, len(groups)), len(groups) + 1):
        whole, rest = [], []
        for index, group in enumerate(groups[:used]):
            count, left = divmod(group.holding.workers, depth)
            whole += [Chain((index,) * depth)] * count
            rest += [index] * left
        across = [Chain(tuple(rest[i : i + depth])) for i in range(0, len(rest) - depth + 1, depth)]
        found += [tuple(whole[:most]), tuple((whole + across)[:most])]
    return [chains for chains in dict.fromkeys(found) if chains]


def _every_formation(
    groups: Sequence[Group], depth: int, most: int, groups_min: int
) -> list[tuple[Chain, ...]] | None:
    """Every choice of chains that the workers suffice for; the first `groups_min` groups are used as they can be."""
    held = [group.holding.workers for group in groups]
    widest = min(sum(held) // depth, most)
    if len(groups) ** depth > KINDS_MAX or widest > CHAINS_MAX:
        return None
    kinds = [Chain(each) for each in product(range(len(groups)), repeat=depth)]
    every = _sufficing(kinds, held, widest, [count // depth * depth for count in held[:groups_min]])
    found = list(islice(every, FORMATIONS_MAX + 1))
    return found if len(found) <= FORMATIONS_MAX else None


def _sufficing(
    kinds: Sequence[Chain], held: Sequence[int], widest: int, least: Sequence[int]
) -> Iterator[tuple[Chain, ...]]:
    """Chain by chain, so that nothing is gone through that the workers do not suffice for."""
    needs = [[chain.groups.count(g) for g in range(len(held))] for chain in kinds]

    def from_here(
        chains: tuple[Chain, ...], first: int, left: list[int], more: int
    ) -> Iterator[tuple[Chain, ...]]:
        if not more:
            used = [n - m for n, m in zip(held, left, strict=True)]
            if all(n >= few for n, few in zip(used[1:], least[1:], strict=False)):
                yield chains
            return
        for index in range(first, len(kinds)):
            rest = [n - need for n, need in zip(left, needs[index], strict=True)]
            if min(rest) >= 0:
                yield from from_here((*chains, kinds[index]), index, rest, more - 1)

    for width in range(1, widest + 1):
        yield from from_here((), 0, list(held), width)


def even_firsts(
    groups: Sequence[Group], way: Way, chains: tuple[Chain, ...], share: int
) -> Firsts | None:
    """Balanced for the slowest chain, within the memory of the smallest worker of every stage if that can be."""
    slowest = max(set(chains), key=lambda chain: max(groups[g].pace for g in chain.groups))
    base = groups[slowest.groups[0]].tables
    m = way.microbatch_size
    row = base.size(m)
    seconds = base.forward[row] + base.backward[row]
    pace = np.array([groups[g].pace for g in slowest.groups]) / groups[slowest.groups[0]].pace
    programs = schedules.pack(way.schedule, way.depth, share, recompute=way.recompute)
    stash, entry = search.peaks(way, programs)[0].copy(), np.zeros(way.depth)
    if way.recompute:
        where = np.array(way.recompute)
        pace[where] *= 1 + base.untraced[row, -1] / max(seconds[-1], 1e-300)
        entry[where], stash[where] = stash[where], 1
    room, held = _room(groups, way, chains), _state(base, way, len(chains))
    load = partition.Load(
        seconds, held, base.stash * m, base.entry * m, pace, stash, entry, np.array(room)
    )
    return partition.split(load) or partition.split(load._replace(limit=np.full(way.depth, np.inf)))


def has_room(groups: Sequence[Group], way: Way, chains: tuple[Chain, ...]) -> bool:
    """Whether a chain could hold the state and one microbatch, if it could be cut anywhere."""
    room, used = _room(groups, way, chains), {g for chain in chains for g in chain.groups}
    tables = [groups[g].tables for g in used]
    one = min(float(its.stash[-1]) for its in tables) * way.microbatch_size
    state = min(float(_state(its, way, len(chains))[-1]) for its in tables)
    return min(room) >= 0 and sum(room) >= (state + one) * (1 - ROUNDING)


def _room(groups: Sequence[Group], way: Way, chains: tuple[Chain, ...]) -> list[float]:
    """Of the smallest worker of every stage."""
    profiles = [group.tables.profile for group in groups]
    free = [profile.memory_bytes - profile.reserved_bytes for profile in profiles]
    return [min(free[chain.groups[s]] for chain in set(chains)) for s in range(way.depth)]


def _state(tables: Tables, way: Way, width: int) -> Reals:
    share = {"none": 1.0, "optimizer": 1 / width, "offload": 0.0}[way.sharding]
    found: Reals = 2 * tables.weights + share * tables.optimizer
    return found


class _Line(NamedTuple):
    """A chain's straight line from where it is full: ready_s(N) = at + N * slope."""

    at: Reals
    slope: Reals


class Lanes:
    """What single chains of one way with the same cuts take for how many microbatches, and what they hold."""

    def __init__(self, groups: Sequence[Group], way: Way, firsts: Firsts) -> None:
        self.groups, self.way, self.firsts = groups, way, firsts
        self._costs: dict[Chain, engine.Costs] = {}
        self._lines: dict[Chain, _Line] = {}
        self._ready: dict[tuple[Chain, int], Reals] = {}
        self._peaks: dict[int, Reals] = {}

    def costs(self, chain: Chain) -> engine.Costs:
        """Every stage at its own worker's times."""
        if chain not in self._costs:
            seconds = np.zeros((5, self.way.stages))
            for group, mine in _hosts(chain):
                tables = self.groups[group].tables
                seconds[:, mine] = costing.seconds(tables, self.firsts, self.way)[:, mine]
            wires = _wires(self.groups, self.way, self.firsts, chain)
            self._costs[chain] = engine.Costs(seconds, np.ones(self.way.depth), wires, 0)
        return self._costs[chain]

    def ready_s(self, chain: Chain, share: int) -> Reals:
        """When the gradients of its stages are there: simulated until the pipeline is full, linear from there on."""
        key = chain, share
        if key not in self._ready:
            if share > FULL * self.way.depth:
                line = self.line(chain)
                self._ready[key] = line.at + share * line.slope
            else:
                self._ready[key] = search.gradients_done(self._programs(share), self.costs(chain))
        return self._ready[key]

    def line(self, chain: Chain) -> _Line:
        if chain not in self._lines:
            first, costs = FULL * self.way.depth, self.costs(chain)
            ready, later = (
                search.gradients_done(self._programs(count), costs)
                for count in (first, first + self.way.depth)
            )
            slope = (later - ready) / self.way.depth
            self._lines[chain] = _Line(ready - first * slope, slope)
        return self._lines[chain]

    def _programs(self, count: int) -> engine.Programs:
        way = self.way
        return schedules.pack(way.schedule, way.depth, count, recompute=way.recompute)

    def peaks(self, share: int) -> Reals:
        """Only GPipe holds more and more; the others are full at some time."""
        most = share if self.way.schedule == "gpipe" else min(share, FULL * self.way.depth)
        if most not in self._peaks:
            self._peaks[most] = search.peaks(self.way, self._programs(most))
        return self._peaks[most]


class Play:
    """A formation: its chains side by side."""

    def __init__(self, task: Task, lanes: Lanes, chains: tuple[Chain, ...]) -> None:
        self._task, self.lanes, self._chains = task, lanes, chains
        self._width = np.array([float(len(chains))])
        self._kinds = dict.fromkeys(chains)
        self._used = {group for chain in self._kinds for group in chain.groups}
        self._tails: Reals | None = None

    @property
    def tail_s(self) -> Reals:
        """A ring runs at its slowest link, and ends with its slowest worker. Unlike groups are not on one machine."""
        if self._tails is None:
            lanes, self._tails = self.lanes, np.zeros(self.lanes.way.stages)
            for group in self._used:
                one, mine = lanes.groups[group], np.zeros(lanes.way.stages, bool)
                for chain in self._kinds:
                    mine |= np.array(chain.groups) == group
                found = costing.tails(
                    one.tables, lanes.firsts, lanes.way, self._width, one.holding.per_instance,
                    apart=len(self._used) > 1,
                )  # fmt: skip
                self._tails = np.maximum(self._tails, found[:, 0] * mine)
        return self._tails

    def about(self) -> tuple[int, ...]:
        """Shares by straight lines."""
        lines = [self.lanes.line(chain) for chain in self._chains]
        return shared_by_pace(
            self._task.global_batch // self.lanes.way.microbatch_size,
            [float(line.at.max()) for line in lines],
            [float(line.slope.max()) for line in lines],
        )

    def through_s(self, chain: Chain, share: int) -> float:
        """When a chain is through with so many, the tails counted."""
        return float((self.lanes.ready_s(chain, share) + self.tail_s).max())

    def ends_s(self, chain: Chain, share: int) -> float:
        """The same; never if they do not fit."""
        fits = self._fits(chain, self.lanes.peaks(share))
        return self.through_s(chain, share) if fits else np.inf

    def _has_room(self) -> bool:
        """Whether every worker can hold its state and one microbatch. Any share takes as much."""
        one = np.zeros((2, self.lanes.way.stages))
        one[0] = 1
        return all(self._fits(chain, one) for chain in self._kinds)

    def _fits(self, chain: Chain, peaks: Reals) -> bool:
        room = [self.lanes.groups[g].tables.profile.memory_bytes for g in chain.groups]
        return bool((self._held_bytes(chain, peaks) <= np.array(room)).all())

    def _held_bytes(self, chain: Chain, peaks: Reals) -> Reals:
        lanes, held = self.lanes, np.zeros(self.lanes.way.stages)
        for group, mine in _hosts(chain):
            tables = lanes.groups[group].tables
            each = costing.memory_bytes(
                tables, lanes.firsts, lanes.way, self._width, peaks[:, :, None]
            )
            held[mine] = each[mine, 0]
        return held

    def shares(self) -> tuple[int, ...] | None:
        """With which the last chain is through as early as can be; none if they do not fit.

        From what straight lines say, one microbatch at a time goes from whoever is last to whoever is then through
        first: when that gains nothing, nothing does.
        """
        if not self._has_room():
            return None
        chains, shares = self._chains, list(self.about())
        ends = [self.ends_s(*pair) for pair in zip(chains, shares, strict=True)]
        for _ in range(sum(shares)):
            last = int(np.argmax(ends))
            if shares[last] == 1:
                break
            more = [self.ends_s(c, n + 1) for c, n in zip(chains, shares, strict=True)]
            more[last] = np.inf
            to = int(np.argmin(more))
            if more[to] >= ends[last]:
                break
            shares[last] -= 1
            shares[to] += 1
            ends[last], ends[to] = self.ends_s(chains[last], shares[last]), more[to]
        return tuple(shares) if max(ends) < np.inf else None

    def plan(self) -> Plan | None:
        """With the best shares: the replicas of a stage wait for their slowest."""
        shares, lanes = self.shares(), self.lanes
        if shares is None:
            return None
        pairs = dict.fromkeys(zip(self._chains, shares, strict=True))
        ready = np.max([lanes.ready_s(*pair) for pair in pairs], axis=0)
        held = np.max([self._held_bytes(c, lanes.peaks(n)) for c, n in pairs], axis=0)
        overhead_s = max(lanes.groups[g].tables.profile.overhead_s for g in self._used)
        compute_s, step_s = float(ready.max()), float((ready + self.tail_s).max()) + overhead_s
        busy_s = max(n * float(search.busy(lanes.way, lanes.costs(c)).max()) for c, n in pairs)
        return Plan(
            way=lanes.way,
            firsts=lanes.firsts,
            sections=len(lanes.groups[0].tables.profile.sections),
            shares=shares,
            workers=sum(group.holding.workers for group in lanes.groups),
            samples=self._task.global_batch,
            cost=Cost(
                step_s=step_s,
                busy_s=busy_s,
                bubble_s=compute_s - busy_s,
                reduce_s=step_s - compute_s - overhead_s,
            ),
            memory_bytes=tuple(held.tolist()),
            owned=lanes.way.depth > 1 and not self._task.whole,
        )


def _hosts(chain: Chain) -> Iterator[tuple[int, Flags]]:
    """Every group of a chain, and which stages are on its workers."""
    for group in set(chain.groups):
        yield group, np.array(chain.groups) == group


def _wires(groups: Sequence[Group], way: Way, firsts: Firsts, chain: Chain) -> Reals:
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


def shared_by_pace(
    microbatches: int, at_s: Sequence[float], each_s: Sequence[float]
) -> tuple[int, ...]:
    """The shares with which the last replica is done as early as can be; each gets at least one."""
    at, each = np.array(at_s), np.maximum(np.array(each_s), 1e-12)
    shares, able = np.ones(len(at), np.int64), np.ones(len(at), bool)
    while able.any():
        # All that can be done by one moment add up to what is there; whoever cannot do one by then gets just one.
        left = microbatches - int((~able).sum())
        end_s = (left + (at[able] / each[able]).sum()) / (1 / each[able]).sum()
        done = np.floor((end_s - at) / each + ROUNDING).astype(np.int64)
        if (done[able] >= 1).all():
            shares[able] = done[able]
            break
        able &= done >= 1
    found = shares.tolist()
    heap = [(at_s[r] + (share + 1) * each_s[r], r) for r, share in enumerate(found)]
    heapify(heap)
    for _ in range(microbatches - sum(found)):
        end_s, r = heap[0]
        found[r] += 1
        heapreplace(heap, (end_s + each_s[r], r))
    return tuple(found)
