"""The best layout for a number of equal workers: every way of computing, at every width.

A *way* fixes all but the width D. Its cost as a function of the microbatches N that a replica gets
is a max-plus linear system, hence exactly linear in N once the pipeline is full. Two simulations
give

    ready_s(N) = ready_s(N1) + (N - N1) * slope_s        for N >= N1, simulated if N is smaller

so comparing all widths of a way takes about as long as one. N is the largest share, ceil(M / D).
"""

from collections.abc import Iterator
from itertools import combinations
from math import comb
from typing import NamedTuple

import msgspec
import numpy as np

from agent.profile import Profile
from orchestrator.planner import cost_model, partition
from orchestrator.planner.compiled import Codes, Reals
from orchestrator.planner.cost_model import Firsts, Tables
from orchestrator.planner.errors import BatchError
from orchestrator.planner.plans import Cost, Placement, Sharding, Way, all_but_last
from orchestrator.planner.simulation import kernel, schedules, simulator

RUNNERS_UP = 3
WORKERS_MAX = 20_000
OFFERED = 3
TRIED_MAX = 8
GROUPINGS_MAX = 200
SHARDS_APART = 8  # replicas; with more, one replica hardly changes each one's optimizer share
# Varuna's order is searched on request only: without jitter it gains nothing on 1F1B, and it takes
# long to become regular.
SEARCHED = ("1f1b", "gpipe", "interleaved", "zero-bubble", "eager", "modulo")
DEEPEST = {"eager": 4}  # longer chains need halves in every microbatch, or lose more in the drain
FULL = {
    "1f1b": 4,
    "interleaved": 4,
    "modulo": 4,
    "eager": 6,
    "varuna": 12,
}  # depths until a pipeline is full; 2 for others


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of a step, and which plans may be considered."""

    global_batch: int
    per_instance: int = 1
    schedules: tuple[str, ...] = SEARCHED
    recompute: tuple[bool, ...] = (False, True)
    shardings: tuple[Sharding, ...] = ("none",)
    microbatch_sizes: tuple[int, ...] = ()  # if empty, all measured ones
    depth_min: int = 1
    depth_max: int = 0  # if 0, limited only by sections and workers
    width_max: int = 0
    whole: bool = False  # every worker keeps the state of all stages

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.per_instance < 1:
            raise BatchError(
                f"global batch {self.global_batch}, {self.per_instance} accelerators per instance: "
                "both must be at least 1"
            )


class Curve(NamedTuple):
    """The time of one replica for N microbatches: simulated below `first`, linear from there."""

    way: Way
    firsts: Firsts
    first: int
    ready: Reals  # [stage], at `first`
    slope: Reals
    peaks: Reals  # [stashed | owed, stage], at `first`
    peak_slope: Reals
    busy: Reals  # of each stage's worker, a microbatch
    lead: Reals  # of each worker: until its first input, plus its lag
    lag: Reals  # of each worker: from its last gradient to the first stage
    costs: kernel.Costs

    @property
    def busy_s(self) -> float:
        return float(self.busy.max())


def sizes(task: Task, profile: Profile) -> tuple[int, ...]:
    """Return the measured microbatch sizes that divide the global batch.

    If none does, the error names batches that would do.
    """
    asked = task.microbatch_sizes or profile.microbatch_sizes
    known = [size for size in asked if size in profile.microbatch_sizes]
    if not known:
        raise BatchError(
            f"microbatches of {', '.join(map(str, asked))} were not measured; the profile has "
            f"{', '.join(map(str, profile.microbatch_sizes))}"
        )
    fitting = tuple(size for size in known if task.global_batch % size == 0)
    if not fitting:
        below = {task.global_batch // size * size for size in known}
        near = sorted(
            below | {batch + size for size in known for batch in [task.global_batch // size * size]}
        )
        near = sorted(
            (batch for batch in near if batch > 0), key=lambda b: abs(b - task.global_batch)
        )
        offers = ", ".join(map(str, sorted(near[:OFFERED])))
        raise BatchError(
            f"a global batch of {task.global_batch} is no multiple of any measured microbatch size "
            f"({', '.join(map(str, known))}); the nearest that are: {offers}"
        )
    return fitting


def ways(task: Task, profile: Profile, workers: int) -> Iterator[Way]:
    """Yield every way that the task allows on a number of workers."""
    deepest = min(workers, len(profile.sections), task.depth_max or workers)
    placements: tuple[Placement, ...] = ("chain",) if task.per_instance == 1 else ("chain", "ring")
    for size in sizes(task, profile):
        for depth in range(task.depth_min, deepest + 1):
            for name in task.schedules if depth > 1 else task.schedules[:1]:
                if depth <= DEEPEST.get(name, depth):
                    yield from _ways(task, profile, placements, (size, depth, name))


def _ways(
    task: Task, profile: Profile, placements: tuple[Placement, ...], fixed: tuple[int, int, str]
) -> Iterator[Way]:
    size, depth, name = fixed
    chunks = schedules.CHUNKS if name in schedules.MODULO and depth > 1 else 1
    if depth * chunks > len(profile.sections):
        return
    again = task.recompute
    if depth == 1:
        name, again = "1f1b", (False,)
    elif name in (*schedules.MODULO, *schedules.SPLIT):
        again = (False,)
    for placement in placements[: 1 if depth == 1 else None]:
        for recompute in again:
            for sharding in task.shardings:
                if sharding != "offload" or profile.host_bytes_per_s > 0:
                    yield Way(
                        schedule=name,
                        depth=depth,
                        microbatch_size=size,
                        recompute=all_but_last(depth) if recompute else (),
                        chunks=chunks,
                        sharding=sharding,
                        placement=placement,
                    )


class Splitter:
    """Stages for a way, balanced and within memory; what is independent of memory is cached."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._balanced: dict[tuple[int, int, int, tuple[bool, ...]], Firsts | None] = {}

    def firsts(
        self, way: Way, peaks: Reals, width: int = 1, memory_bytes: float | None = None
    ) -> Firsts | None:
        """Return the best grouping that fits into memory with this width; `None` if none does.

        `memory_bytes` replaces the memory of the profile.
        """
        memory = self.tables.profile.memory_bytes if memory_bytes is None else memory_bytes
        key = (way.stages, way.chunks, way.microbatch_size, way.recompute)
        if key not in self._balanced:
            load = self._load(way, peaks, np.inf, width)
            self._balanced[key] = self._even(way, partition.split(load))
        firsts = self._balanced[key]
        if firsts is None or self._held(way, firsts, peaks, width) <= memory:
            return firsts
        if way.chunks > 1:
            return self._chunks_that_fit(way, peaks, width, memory)
        room = memory - self.tables.profile.reserved_bytes
        return partition.split(self._load(way, peaks, room, width))

    def _even(self, way: Way, firsts: Firsts | None) -> Firsts | None:
        """Even out the workers' sums if workers host several stages."""
        if firsts is None or way.chunks == 1:
            return firsts
        row = self.tables.size(way.microbatch_size)
        seconds = self.tables.forward[row] + self.tables.backward[row]
        return tuple(partition.evened(seconds, np.array(firsts, np.int64), way.depth).tolist())

    def is_balanced(self, way: Way, firsts: Firsts) -> bool:
        """Return whether the way would have these stages with unlimited memory, too."""
        key = (way.stages, way.chunks, way.microbatch_size, way.recompute)
        return self._balanced.get(key) == firsts

    def _chunks_that_fit(self, way: Way, peaks: Reals, width: int, memory: float) -> Firsts | None:
        """Return the fastest grouping that fits, as chunks of one worker share its memory.

        All groupings are tried if they are few; else each chunk gets an equal part of the memory.
        """
        sections = len(self.tables.profile.sections)
        if comb(sections - 1, way.stages - 1) > GROUPINGS_MAX:
            room = memory - self.tables.profile.reserved_bytes
            return partition.split(self._load(way, peaks, room / way.chunks, width))
        every = ((0, *cuts) for cuts in combinations(range(1, sections), way.stages - 1))
        fitting = [firsts for firsts in every if self._held(way, firsts, peaks, width) <= memory]
        return min(fitting, key=lambda firsts: self._slowest_s(way, firsts), default=None)

    def _slowest_s(self, way: Way, firsts: Firsts) -> float:
        each = cost_model.seconds(self.tables, firsts, way)[:2].sum(axis=0)
        return float(each.reshape(way.chunks, way.depth).sum(axis=0).max())

    def _held(self, way: Way, firsts: Firsts, peaks: Reals, width: int) -> float:
        wide = np.array([float(width)])
        held = cost_model.memory_bytes(self.tables, firsts, way, wide, peaks[:, :, None])
        return float(held.max())

    def _load(self, way: Way, peaks: Reals, limit: float, width: int) -> partition.Load:
        tables, m = self.tables, way.microbatch_size
        row, stages = tables.size(m), way.stages
        seconds = tables.forward[row] + tables.backward[row]
        pace, stash, entry = np.ones(stages), peaks[0].copy(), np.zeros(stages)
        if way.recompute:
            again = tables.untraced[row, -1] / max(seconds[-1], 1e-300)
            where = np.array(way.recompute)
            pace[where] += again
            stash[where], entry[where] = 1, peaks[0, where]
        optimizer = (
            tables.optimizer / {"none": 1, "optimizer": width, "offload": np.inf}[way.sharding]
        )
        return partition.Load(
            seconds,
            2 * tables.weights
            + cost_model.sums_held(tables.profile, way) * tables.parameters
            + optimizer
            + tables.copied / width,
            tables.stash * m,
            tables.entry * m,
            pace,
            stash,
            entry,
            np.full(stages, limit),
        )


def curve(splitter: Splitter, way: Way, per_instance: int, among: Codes) -> Curve | None:
    """Simulate a way with a full pipeline; return `None` if it does not fit into memory.

    The rows of `among` are a width with the same wires, the possible widths, and their shares.
    """
    width, narrowest, shares = int(among[0, 0]), int(among[1].min()), among[2]
    first = FULL.get(way.schedule, 2) * way.depth
    second = first + way.depth
    one, two = _programs(way, first), _programs(way, second)
    held = peaks(way, one)
    firsts = _first_that_fits(splitter, way, (narrowest, shares), (first, held))
    if firsts is None:
        return None
    tables = splitter.tables
    costs = cost_model.costs(tables, firsts, way, per_instance, width)
    ready, later = gradients_done(one, costs), gradients_done(two, costs)
    return Curve(
        way,
        firsts,
        first,
        ready,
        (later - ready) / (second - first),
        held,
        (peaks(way, two) - held) / (second - first),
        busy(way, costs),
        *_lead_and_lag(way, costs),
        costs,
    )


def _first_that_fits(
    splitter: Splitter, way: Way, among: tuple[int, Codes], full: tuple[int, Reals]
) -> Firsts | None:
    """Return stages that fit with a full pipeline, else with the largest share that fits."""
    width, shares = among
    if shares.max() >= full[0]:
        firsts = splitter.firsts(way, full[1], width)
        if firsts is not None:
            return firsts
    tried = np.unique(shares[shares < full[0]])[::-1]
    for share in tried[:: max(1, len(tried) // TRIED_MAX)].tolist():
        firsts = splitter.firsts(way, peaks(way, _programs(way, share)), width)
        if firsts is not None:
            return firsts
    return None


def busy(way: Way, costs: kernel.Costs) -> Reals:
    """Return how long each worker computes per microbatch, over its chunks."""
    again = costs.seconds[kernel.RECOMPUTE] * np.array(way.recompute or 0.0)
    backward = costs.seconds[kernel.BACKWARD]
    if way.schedule in schedules.HALVED:
        backward = costs.seconds[kernel.INPUT_GRADIENT] + costs.seconds[kernel.WEIGHT_GRADIENT]
    each = costs.seconds[kernel.FORWARD] + backward + again
    found: Reals = each.reshape(way.chunks, way.depth).sum(axis=0)
    return found


def _lead_and_lag(way: Way, costs: kernel.Costs) -> tuple[Reals, Reals]:
    """Return `lead` and `lag` of a curve, the constants of a lower bound on ready times.

        ready_j(N) >= (until k has its first input) + N * busy_k + (from k's last gradient to j), k >= j

    By convexity the line through two small N can only be too low. It is if the worker that limits
    the pipeline in the long run does not limit it yet, so `along` adds that worker's line.
    """
    hop = costs.wire[:, : way.depth, :2].sum(axis=2)
    forward, backward = costs.seconds[[kernel.FORWARD, kernel.BACKWARD], : way.depth]
    fill = np.concatenate([[0.0], np.cumsum(forward + hop[0])[:-1]])
    if way.schedule == "gpipe" and way.recompute:
        # The last microbatch needs no recompute.
        fill[:-1] -= costs.seconds[kernel.RECOMPUTE, : way.depth - 1]
    lag = np.concatenate([[0.0], np.cumsum(backward)[:-1]]) + np.cumsum(hop[1])
    return fill + lag, lag


def _held_back(curve: Curve, shares: Codes) -> Reals:
    """Return the bound of `_lead_and_lag` for all workers' first stages, [worker, share]."""
    own = curve.lead[:, None] + curve.busy[:, None] * shares
    # The last weight-gradients of a split backward delay no other worker.
    if curve.way.schedule not in schedules.SPLIT:
        own = np.maximum.accumulate(own[::-1], axis=0)[::-1]
    bound: Reals = own - curve.lag[:, None]
    return bound


def _programs(way: Way, microbatches: int) -> kernel.Programs:
    return schedules.pack(
        way.schedule, way.depth, microbatches, recompute=way.recompute, chunks=way.chunks
    )


def peaks(way: Way, programs: kernel.Programs) -> Reals:
    """Return peaks by [stashed | owed, stage]: by formula for two schedules, else counted."""
    if way.schedule not in ("gpipe", "1f1b"):
        return kernel.peaks(programs, way.stages).astype(float)
    found, most = np.zeros((2, way.stages)), programs.microbatches
    room = np.arange(way.depth, 0, -1) if way.schedule == "1f1b" else most
    found[0] = np.minimum(room, most)
    return found


def gradients_done(programs: kernel.Programs, costs: kernel.Costs) -> Reals:
    return kernel.run_in_order(programs, costs, simulator.NO_TRACE).stage_done


def along(curve: Curve, shares: Codes) -> tuple[Reals, Reals]:
    """Return ready times [stage, share] and peaks [2, stage, share] for these shares."""
    steps = shares - curve.first
    ready = curve.ready[:, None] + curve.slope[:, None] * steps
    depth = curve.way.depth
    ready[:depth] = np.maximum(ready[:depth], _held_back(curve, shares))
    held = curve.peaks[:, :, None] + curve.peak_slope[:, :, None] * steps
    for at in np.flatnonzero(steps < 0):
        programs = _programs(curve.way, int(shares[at]))
        ready[:, at] = gradients_done(programs, curve.costs)
        held[:, :, at] = peaks(curve.way, programs)
    return ready, held


class Priced(NamedTuple):
    """A way at many widths: the step time (infinite if it does not fit) and its parts."""

    curve: Curve
    widths: Codes
    step_s: Reals
    compute_s: Reals
    shares: Codes  # of the fullest replica


def price(tables: Tables, task: Task, curve: Curve, widths: Codes) -> Priced:
    """Return the price of a way at all widths at once."""
    way = curve.way
    shares = shares_of(task, way, widths)
    if not len(widths):
        empty = np.empty(0)
        return Priced(curve, widths, empty, empty, shares)
    distinct, back = np.unique(shares, return_inverse=True)
    ready, most = along(curve, distinct)
    ready, most = ready[:, back], most[:, :, back]
    wide = widths.astype(float)
    ends = ready + cost_model.tails(tables, curve.firsts, way, wide, task.per_instance)
    step_s = ends.max(axis=0) + tables.profile.overhead_s
    held = cost_model.memory_bytes(tables, curve.firsts, way, wide, most)
    step_s[held.max(axis=0) > tables.profile.memory_bytes] = np.inf
    return Priced(curve, widths, step_s, ready.max(axis=0), shares)


def priced_ways(tables: Tables, task: Task, workers: int, fastest: int = 0) -> Iterator[Priced]:
    """Yield every way that fits, at every width that can be best.

    With `fastest`, yield only widths that may be among that many fastest on all these workers.
    """
    splitter, limit_s = Splitter(tables), [np.inf] * max(fastest, 1)
    roomy: set[Way] = set()
    for way in ways(task, tables.profile, workers):
        plain = msgspec.structs.replace(way, recompute=())
        if way.recompute and plain in roomy:
            continue  # it would do more work to save memory that is not needed
        fits = True
        for alike, found in _curves(splitter, task, way, widths_of(task, way, workers, tables)):
            if found is None:
                fits = False
                continue
            slowest_s = shares_of(task, way, alike) * found.busy_s
            some = alike[slowest_s < limit_s[-1]] if fastest else alike
            priced = price(tables, task, found, some)
            fits &= bool(np.isfinite(priced.step_s).all())
            fits &= splitter.is_balanced(way, found.firsts)  # memory has not moved its stages
            if fastest and len(priced.step_s):
                limit_s = sorted([*limit_s, float(priced.step_s.min())])[:fastest]
            yield priced
        if fits:
            roomy.add(plain)


def _curves(
    splitter: Splitter, task: Task, way: Way, widths: Codes
) -> Iterator[tuple[Codes, Curve | None]]:
    """Yield curves for groups of widths that have the same wires.

    If memory is scarce, and depends on the width, they are also grouped by a replica's share.
    """
    like = np.array([cost_model.variant(way, task.per_instance, int(width)) for width in widths])
    for same in np.unique(like):
        alike = widths[like == same]
        among = np.stack([np.full(len(alike), same), alike, shares_of(task, way, alike)])
        found = curve(splitter, way, task.per_instance, among)
        balanced = found is not None and splitter.is_balanced(way, found.firsts)
        if balanced or not cost_model.narrows(splitter.tables, way):
            yield alike, found
            continue
        parts = np.where(alike <= SHARDS_APART, alike, 1 << np.log2(alike).astype(np.int64))
        for part in np.unique(parts):
            here = parts == part
            yield alike[here], curve(splitter, way, task.per_instance, among[:, here])


def shares_of(task: Task, way: Way, widths: Codes) -> Codes:
    """Return the share of the fullest replica at every width."""
    found: Codes = -(-(task.global_batch // way.microbatch_size) // widths)
    return found


def widths_of(task: Task, way: Way, workers: int, tables: Tables) -> Codes:
    """Return the widths at which a way can be best: the narrowest of each largest share.

    More replicas with the same largest share only lengthen the all-reduce, unless each of them
    holds less then, or they form rings.
    """
    microbatches = task.global_batch // way.microbatch_size
    most = min(workers // way.depth, microbatches, task.width_max or workers)
    widths = np.arange(1, most + 1)
    shares = shares_of(task, way, widths)
    apart = np.ones(len(widths), bool)
    if way.placement == "ring":  # a single replica, or all in one instance, is the same as a chain
        apart = (widths > 1) & (way.depth * widths > task.per_instance)
    if way.schedule in schedules.MODULO:  # whole rounds only
        whole: Codes = widths[apart & (microbatches % widths == 0) & (shares % way.depth == 0)]
        return whole
    if cost_model.narrows(tables, way) or way.placement == "ring":
        every: Codes = widths[apart]
        return every
    narrowest: Codes = widths[np.concatenate([[True], shares[1:] < shares[:-1]])]
    return narrowest


def cost(priced: Priced, at: int, overhead_s: float) -> Cost:
    """Split the step time: the busiest worker's work first, then waiting, then the tail."""
    busy_s = float(priced.shares[at]) * priced.curve.busy_s
    return Cost(
        step_s=float(priced.step_s[at]),
        busy_s=busy_s,
        bubble_s=float(priced.compute_s[at]) - busy_s,
        reduce_s=float(priced.step_s[at] - priced.compute_s[at]) - overhead_s,
    )
