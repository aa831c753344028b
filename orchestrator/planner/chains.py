"""Formations: which workers stand in which chain, and how long a step takes with them.

If workers are few, all formations are listed. Else chains are formed inside a group of equal
instances as far as possible, and the workers left over in several groups form mixed chains, whose
stages run on unlike workers. All replicas cut the model at the same sections, so the replicas of a
stage hold the same weights; the cuts are those that suit the slowest chain best. Each replica gets
as many microbatches as it can compute in the same time:

    T_r(N) = a_r + c_r N        N_r so that the largest T_r(N_r) is least and they add up to M
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from heapq import heapify, heapreplace
from itertools import islice, pairwise, product
from typing import NamedTuple

import numpy as np

from orchestrator.planner import cost_model, partition, search
from orchestrator.planner.compiled import Reals
from orchestrator.planner.cost_model import Firsts, Tables
from orchestrator.planner.plans import Cost, Holding, LayoutPlan, Way
from orchestrator.planner.search import Task
from orchestrator.planner.simulation import kernel, schedules

FULL = 4  # depths until a pipeline is full
FORMATIONS_MAX, KINDS_MAX, CHAINS_MAX = 256, 128, 6
ROUNDING = 1e-9
LATELY = 256  # programs and peaks that the caches keep


class Chain(NamedTuple):
    """A replica, as the group of each stage's worker."""

    groups: tuple[int, ...]


class WorkerGroup(NamedTuple):
    holding: Holding
    tables: Tables
    pace: float  # seconds of the whole model, a sample

    @property
    def room_bytes(self) -> float:
        """Return the memory that one worker has for state and microbatches."""
        return self.tables.profile.memory_bytes - self.tables.profile.reserved_bytes


def formed(
    groups: Sequence[WorkerGroup], depth: int, most: int, groups_min: int
) -> list[tuple[Chain, ...]]:
    """Return all formations if they are few; else those with as few mixed chains as possible."""
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
    groups: Sequence[WorkerGroup], depth: int, most: int, groups_min: int
) -> list[tuple[Chain, ...]] | None:
    """Return every formation that the workers suffice for, or `None` if there are too many.

    The first `groups_min` groups are used as far as whole chains of them go.
    """
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
    """Yield formations chain by chain, so that none is built that needs too many workers."""
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
    groups: Sequence[WorkerGroup], way: Way, chains: tuple[Chain, ...], share: int
) -> Firsts | None:
    """Return cuts that balance the slowest chain.

    If possible they fit the smallest worker of every stage.
    """
    slowest = max(set(chains), key=lambda chain: max(groups[g].pace for g in chain.groups))
    base = groups[slowest.groups[0]].tables
    m = way.microbatch_size
    row = base.size(m)
    seconds = base.forward[row] + base.backward[row]
    pace = np.array([groups[g].pace for g in slowest.groups]) / groups[slowest.groups[0]].pace
    stash, entry = _peaks(way, share)[0].copy(), np.zeros(way.depth)
    if way.recompute:
        where = np.array(way.recompute)
        pace[where] *= 1 + base.untraced[row, -1] / max(seconds[-1], 1e-300)
        entry[where], stash[where] = stash[where], 1
    room = _room(groups, way, chains)
    held = 2 * base.weights + _kept(way, len(chains)) * base.optimizer
    held = held + cost_model.sums_held(base.profile, way) * base.parameters
    load = partition.Load(
        seconds, held, base.stash * m, base.entry * m, pace, stash, entry, np.array(room)
    )
    return partition.split(load) or partition.split(load._replace(limit=np.full(way.depth, np.inf)))


def has_room(groups: Sequence[WorkerGroup], way: Way, chains: tuple[Chain, ...]) -> bool:
    """Return whether a chain could hold state and one microbatch if it could be cut anywhere."""
    room, used = _room(groups, way, chains), {g for chain in chains for g in chain.groups}
    tables = [groups[g].tables for g in used]
    one = min(float(its.stash[-1]) for its in tables) * way.microbatch_size
    share = _kept(way, len(chains))
    state = min(
        float(
            2 * its.weights[-1]
            + cost_model.sums_held(its.profile, way) * its.parameters[-1]
            + share * its.optimizer[-1]
            + its.copied[-1] / len(chains)
        )
        for its in tables
    )
    return min(room) >= 0 and sum(room) >= (state + one) * (1 - ROUNDING)


def _room(groups: Sequence[WorkerGroup], way: Way, chains: tuple[Chain, ...]) -> list[float]:
    """Return the memory of the smallest worker of every stage."""
    free, kinds = [group.room_bytes for group in groups], set(chains)
    return [min(free[chain.groups[s]] for chain in kinds) for s in range(way.depth)]


def _kept(way: Way, width: int) -> float:
    """Return the share of the optimizer's state that a replica keeps."""
    return {"none": 1.0, "optimizer": 1 / width, "offload": 0.0}[way.sharding]


class _Line(NamedTuple):
    """The line of a chain with a full pipeline: ready_s(N) = at + N * slope."""

    at: list[float]
    slope: list[float]


class Lanes:
    """Times and memory of chains of one way with the same cuts, by number of microbatches.

    Formations of one way share most of their chains, and chains share groups, so each result is
    cached.
    """

    def __init__(self, groups: Sequence[WorkerGroup], way: Way, firsts: Firsts) -> None:
        self.groups, self.way, self.firsts = groups, way, firsts
        self._seconds: dict[int, Reals] = {}
        self._wires: dict[tuple[int, bool], Reals] = {}
        self._costs: dict[Chain, kernel.Costs] = {}
        self._lines: dict[Chain, _Line] = {}
        self._ready: dict[tuple[Chain, int], list[float]] = {}
        self._tails: dict[tuple[int, int, bool], list[float]] = {}
        self._held: dict[tuple[int, int, int], tuple[list[float], list[bool]]] = {}

    def costs(self, chain: Chain) -> kernel.Costs:
        """Return the costs of a chain, with every stage at the times of its worker."""
        if chain not in self._costs:
            seconds = np.empty((5, self.way.stages))
            for stage, group in enumerate(chain.groups):
                seconds[:, stage] = self._seconds_of(group)[:, stage]
            self._costs[chain] = kernel.Costs(
                seconds, np.ones(self.way.depth), self._wires_of(chain), 0
            )
        return self._costs[chain]

    def _seconds_of(self, group: int) -> Reals:
        if group not in self._seconds:
            tables = self.groups[group].tables
            self._seconds[group] = cost_model.seconds(tables, self.firsts, self.way)
        return self._seconds[group]

    def _wires_of(self, chain: Chain) -> Reals:
        """Return the wires; between unlike groups a message takes the slower of their links."""
        wire = np.empty((2, self.way.stages, 3))
        for stage, group in enumerate(chain.groups):
            wire[:, stage] = self._wire(group, False)[:, stage]
        for stage, (here, there) in enumerate(pairwise(chain.groups)):
            if here != there:
                for way_of, sender in ((0, stage), (1, stage + 1)):
                    both = [self._wire(group, True)[way_of, sender] for group in (here, there)]
                    wire[way_of, sender] = np.maximum(*both)
        return wire

    def _wire(self, group: int, apart: bool) -> Reals:
        if (group, apart) not in self._wires:
            one = self.groups[group]
            per_instance = 1 if apart else one.holding.per_instance
            self._wires[group, apart] = cost_model.wires(
                one.tables, self.firsts, self.way, per_instance, cost_model.FAR
            )
        return self._wires[group, apart]

    def ready_s(self, chain: Chain, share: int) -> list[float]:
        """Return when the gradients of each stage are complete.

        The times are simulated until the pipeline is full, and linear from there on.
        """
        key = chain, share
        if key not in self._ready:
            if share > FULL * self.way.depth:
                line = self.line(chain)
                pairs = zip(line.at, line.slope, strict=True)
                self._ready[key] = [at + share * slope for at, slope in pairs]
            else:
                self._ready[key] = self._simulated(chain, share).tolist()
        return self._ready[key]

    def line(self, chain: Chain) -> _Line:
        if chain not in self._lines:
            first = FULL * self.way.depth
            ready = self._simulated(chain, first)
            slope = (self._simulated(chain, first + self.way.depth) - ready) / self.way.depth
            self._lines[chain] = _Line((ready - first * slope).tolist(), slope.tolist())
        return self._lines[chain]

    def _simulated(self, chain: Chain, count: int) -> Reals:
        return search.gradients_done(_programs(self.way, count), self.costs(chain))

    def tail_s(self, chain: Chain, width: int, apart: bool) -> list[float]:
        """Return how long each stage takes after its last gradient, on its worker."""
        hosts = enumerate(chain.groups)
        return [self._tails_of(group, width, apart)[stage] for stage, group in hosts]

    def _tails_of(self, group: int, width: int, apart: bool) -> list[float]:
        key = group, width, apart
        if key not in self._tails:
            one = self.groups[group]
            found = cost_model.tails(
                one.tables,
                self.firsts,
                self.way,
                np.array([float(width)]),
                one.holding.per_instance,
                apart=apart,
            )
            self._tails[key] = found[:, 0].tolist()
        return self._tails[key]

    def fits(self, chain: Chain, width: int, share: int) -> bool:
        """Return whether every worker can hold its state and the stash of a share.

        A share of 0 counts as one microbatch.
        """
        hosts = enumerate(chain.groups)
        return all(self._held_of(group, width, share)[1][stage] for stage, group in hosts)

    def held_bytes(self, chain: Chain, width: int, share: int) -> list[float]:
        hosts = enumerate(chain.groups)
        return [self._held_of(group, width, share)[0][stage] for stage, group in hosts]

    def _held_of(self, group: int, width: int, share: int) -> tuple[list[float], list[bool]]:
        """Return what the stages hold on workers of this group, and whether that fits."""
        # Only GPipe's stash grows with the share; the others reach a maximum.
        most = share if self.way.schedule == "gpipe" else min(share, FULL * self.way.depth)
        tables, wide = self.groups[group].tables, np.array([float(width)])
        key = group, width if cost_model.narrows(tables, self.way) else 1, most
        if key not in self._held:
            peaks = _peaks(self.way, most)[:, :, None]
            held = cost_model.memory_bytes(tables, self.firsts, self.way, wide, peaks)[:, 0]
            self._held[key] = held.tolist(), (held <= tables.profile.memory_bytes).tolist()
        return self._held[key]


@lru_cache(maxsize=LATELY)
def _programs(way: Way, count: int) -> kernel.Programs:
    """Return the programs, which are short, since pipelines are simulated only until full."""
    return schedules.pack(way.schedule, way.depth, count, recompute=way.recompute)


@lru_cache(maxsize=LATELY)
def _peaks(way: Way, share: int) -> Reals:
    """Return the peaks of a share; 0 stands for one microbatch and no owed weight-gradient."""
    if not share:
        return np.array([np.ones(way.stages), np.zeros(way.stages)])
    return search.peaks(
        way, schedules.pack(way.schedule, way.depth, share, recompute=way.recompute)
    )


class Play:
    """A formation: its chains run side by side, with shares of the microbatches."""

    def __init__(self, task: Task, lanes: Lanes, chains: tuple[Chain, ...]) -> None:
        self._task, self.lanes, self._chains = task, lanes, chains
        self._width = len(chains)
        self._kinds = dict.fromkeys(chains)
        self._used = {group for chain in self._kinds for group in chain.groups}
        self._ends: dict[tuple[Chain, int], float] = {}

    @cached_property
    def tail_s(self) -> list[float]:
        """Return how long each stage takes after its last gradient, over all chains.

        A ring runs at its slowest link, and ends with its slowest worker. Unlike groups are not on
        one machine.
        """
        apart = len(self._used) > 1
        each = [self.lanes.tail_s(chain, self._width, apart) for chain in self._kinds]
        return [max(stage) for stage in zip(*each, strict=True)]

    def about(self) -> tuple[int, ...]:
        """Return shares estimated by the chains' lines."""
        microbatches = self._task.global_batch // self.lanes.way.microbatch_size
        if self._width == 1:
            return (microbatches,)
        lines = [self.lanes.line(chain) for chain in self._chains]
        at_s, each_s = [max(line.at) for line in lines], [max(line.slope) for line in lines]
        return shared_by_pace(microbatches, at_s, each_s)

    def about_s(self) -> float:
        """Return the step time with the estimated shares, whether or not they fit."""
        shares = dict(
            zip(self._chains, self.about(), strict=True)
        )  # equal chains get about as many
        return max(self.through_s(chain, share) for chain, share in shares.items())

    def through_s(self, chain: Chain, share: int) -> float:
        """Return when a chain is done with a share, tails included."""
        ready_s = self.lanes.ready_s(chain, share)
        return max(ready + tail for ready, tail in zip(ready_s, self.tail_s, strict=True))

    def ends_s(self, chain: Chain, share: int) -> float:
        """Return when a chain is done with a share; infinite if the share does not fit."""
        key = chain, share
        if key not in self._ends:
            fits = self.lanes.fits(chain, self._width, share)
            self._ends[key] = self.through_s(chain, share) if fits else np.inf
        return self._ends[key]

    @cached_property
    def shares(self) -> tuple[int, ...] | None:
        """Return the shares with which the last chain ends as early as possible, or `None`.

        From the estimated shares, one microbatch at a time moves from the last chain to the one
        that would then end first, until that gains nothing; then no other move gains either.
        """
        # Any share takes at least as much memory as share 0.
        if not all(self.lanes.fits(chain, self._width, 0) for chain in self._kinds):
            return None
        chains, shares = self._chains, list(self.about())
        ends = [self.ends_s(*pair) for pair in zip(chains, shares, strict=True)]
        for _ in range(sum(shares)):
            last = ends.index(max(ends))
            if shares[last] == 1:
                break
            more = [
                self.ends_s(chain, shares[r] + 1) if r != last else np.inf
                for r, chain in enumerate(chains)
            ]
            to = more.index(min(more))
            if more[to] >= ends[last]:
                break
            shares[last] -= 1
            shares[to] += 1
            ends[last], ends[to] = self.ends_s(chains[last], shares[last]), more[to]
        return tuple(shares) if max(ends) < np.inf else None

    @cached_property
    def step_s(self) -> float:
        """Return the step time with the best shares; infinite if none fit."""
        if self.shares is None:
            return np.inf
        ends = [self.ends_s(*pair) for pair in zip(self._chains, self.shares, strict=True)]
        return max(ends) + self._overhead_s

    @property
    def _overhead_s(self) -> float:
        return max(self.lanes.groups[group].tables.profile.overhead_s for group in self._used)

    def plan(self) -> LayoutPlan | None:
        """Return the plan with the best shares, in which a stage's replicas wait for the slowest."""
        shares, lanes = self.shares, self.lanes
        if shares is None:
            return None
        pairs = dict.fromkeys(zip(self._chains, shares, strict=True))
        compute_s = max(max(lanes.ready_s(*pair)) for pair in pairs)
        held = [lanes.held_bytes(chain, self._width, n) for chain, n in pairs]
        busy_s = max(n * float(search.busy(lanes.way, lanes.costs(c)).max()) for c, n in pairs)
        return LayoutPlan(
            way=lanes.way,
            firsts=lanes.firsts,
            sections=len(lanes.groups[0].tables.profile.sections),
            shares=shares,
            workers=sum(group.holding.workers for group in lanes.groups),
            samples=self._task.global_batch,
            cost=Cost(
                step_s=self.step_s,
                busy_s=busy_s,
                bubble_s=compute_s - busy_s,
                reduce_s=self.step_s - compute_s - self._overhead_s,
            ),
            memory_bytes=tuple(max(stage) for stage in zip(*held, strict=True)),
            owned=lanes.way.depth > 1 and not self._task.whole,
        )


def shared_by_pace(
    microbatches: int, at_s: Sequence[float], each_s: Sequence[float]
) -> tuple[int, ...]:
    """Return the shares, at least one each, with which the last replica ends earliest."""
    at, each = np.array(at_s), np.maximum(np.array(each_s), 1e-12)
    shares, able = np.ones(len(at), np.int64), np.ones(len(at), bool)
    while able.any():
        # Find the moment by which all replicas together compute all microbatches. A replica that
        # cannot compute one by then gets just one.
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
