"""Backtest: many starts of a job in a market, per strategy, with the clairvoyant bound."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import numpy as np

from bidding.backtests import clairvoyant
from bidding.backtests.baselines import OURS, orders_of, slots_by_pool, slots_held
from bidding.backtests.engine import (
    BacktestJob,
    BacktestWorld,
    Decision,
    Leases,
    Outcome,
    carry_out,
    charge,
    evict,
    granted,
    no_leases,
    owed_when_given_back,
    traffic_usd_per_work,
    work_rate,
)
from bidding.backtests.strategies import STRATEGIES, WITH_DEADLINE, Strategy, plan_of
from bidding.compiled import Flags, Floats, Ints, compiled
from bidding.core import BY_SECOND, code_of
from bidding.deadline import book
from bidding.errors import ConstraintError
from bidding.markets.grid import PLENTY, Market
from bidding.markets.history import Series
from bidding.risk import CapacityRisk, climate_at, phases
from cloud.clock import HOUR_S

COLUMNS = Outcome._fields
DOLLARS, DONE, HELD = range(3)  # columns of a trace; from `HELD` on the slots of each pool
RESAMPLES = 400
SLOTS_MAX = 100_000
RATIO_MAX = 99.0  # the most that a cost over a bound near zero counts
MTTF_PRIOR_H = 8.0  # before any loss was seen
ORDERS_MAX = 4  # within a tick


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The job of a backtest, and the cost of changes.

    `hours` is its duration at full size and speed one. `recovery_s` is the time that an eviction
    costs all machines, lost steps included. `checkpoint_s` is the time to write a checkpoint, for
    strategies that do.
    """

    hours: float = 20.0
    slots: int = 1
    start_s: float = 120.0
    morph_s: float = 2.0
    recovery_s: float = 5.0
    checkpoint_s: float = 120.0
    manager_usd_per_h: float = 0.0
    scaling: float = 1.0
    haste: float = 0.5
    patience: float = 6.0  # given up after this many times its hours
    exchange_gb_per_work: float = 0.0  # per slot-hour at speed one: see `bidding.traffic`
    zone_usd_per_gb: float = 0.0
    region_usd_per_gb: float = 0.0

    def __post_init__(self) -> None:
        fine = 0 < self.hours < math.inf and 1 <= self.slots <= SLOTS_MAX
        if not fine or not 0 < self.scaling <= 1:
            raise ConstraintError(
                f"a job needs hours > 0, 1 <= slots <= {SLOTS_MAX} and 0 < scaling <= 1, not hours={self.hours}, "
                f"slots={self.slots}, scaling={self.scaling}"
            )


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy over all starts, a value per start.

    `bound_usd` is the least bill of a buyer who also knows which machines will be refunded;
    `plain_usd` is the least bill of one who knows prices and capacity, if nothing were refunded.
    """

    strategy: str
    starts: Ints
    outcome: Mapping[str, Floats]
    bound_usd: Floats
    plain_usd: Floats

    def __getitem__(self, column: str) -> Floats:
        return self.outcome[column]

    @property
    def ratio(self) -> Floats:
        """Return the cost over the bound, per start."""
        cost = self.outcome["cost_usd"]
        return cost / np.maximum(self.bound_usd, cost / RATIO_MAX)

    @property
    def plain_ratio(self) -> Floats:
        """Return the cost over the least bill without refunds; refunds can make it below one."""
        return self.outcome["cost_usd"] / self.plain_usd


@compiled
def run_one(
    world: BacktestWorld,
    job: BacktestJob,
    plan: Decision,
    leases: Leases,
    span: tuple[int, int],
    rows: Floats,
) -> Outcome:
    """Run one job from a tick until it is done; after its patience the rest is on demand."""
    begin, limit = span
    leases.machines[:] = 0
    leases.shut_until[:], leases.refusals[:] = 0.0, 0
    cost = lost_h = free_h = spot_h = reliable_h = stall_h = unsaved_h = 0.0
    evictions = changes = losses = 0
    left, unfinished = job.work_h, False
    for t in range(begin, limit):
        gone, back_usd, back_h = evict(world, leases, t)
        cost, free_h = cost - back_usd, free_h + back_h
        tau_h = interval_h(plan, losses, (t - begin) * world.tick_h)
        if gone > 0:
            evictions, losses = evictions + gone, losses + 1
            stall_h += job.recovery_h if plan.checkpoint_h == 0.0 else job.start_h
            redo = min(unsaved_h, 0.5 * tau_h) * job.slots
            left, lost_h, unsaved_h = left + redo, lost_h + redo, 0.0
        if unfinished or due(world, job, plan, leases, (t, begin, gone)):
            changed, tries, refused = 0, 0, True
            while refused and tries < ORDERS_MAX:  # refused machines are ordered elsewhere at once
                orders = orders_of(world, job, plan, leases, t, left)
                unfinished = orders.unfinished
                tries += 1
                holds_on = plan.policy >= OURS and tries < ORDERS_MAX
                sold, refused = granted(world, leases, orders, t, holds_on)
                cost += owed_when_given_back(world, leases, orders, t)
                changed += carry_out(leases, orders, sold, t)
            changes += changed
            stall_h += job.morph_h if changed > 0 and t > begin else 0.0
        rate, spot, reliable = work_rate(world, job, leases, t)
        useful = 1.0 - (min(stall_h, world.tick_h) / world.tick_h if rate > 0 else 0.0)
        stall_h = max(0.0, stall_h - world.tick_h)
        if plan.checkpoint_h > 0.0:
            useful *= tau_h / (tau_h + plan.checkpoint_h)
            unsaved_h += world.tick_h
        done = rate * useful * world.tick_h
        share = 1.0 if done < left else left / done
        hours = world.tick_h * share
        cost += charge(world, leases, t, share) + job.manager_usd_per_h * hours
        if job.exchange_gb_per_work > 0.0:
            cost += traffic_usd_per_work(world, job, leases) * done * share
        left -= done * share
        spot_h, reliable_h = spot_h + spot * hours, reliable_h + reliable * hours
        lost_h += (spot + reliable - rate * useful) * hours
        if len(rows) > 0:
            rows[t - begin, DOLLARS], rows[t - begin, DONE] = cost, job.work_h - left
            rows[t - begin, HELD:] = slots_by_pool(world, leases)
        if left <= 1e-9:
            runtime = (t - begin) * world.tick_h + hours
            return Outcome(
                cost, runtime, lost_h, evictions, free_h, spot_h, reliable_h, 1.0, changes
            )
    rest_h, rest_usd, rest_slot_h = rest_on_demand(world, job, left)
    runtime = (limit - begin) * world.tick_h + rest_h
    reliable_h += rest_slot_h
    return Outcome(
        cost + rest_usd, runtime, lost_h, evictions, free_h, spot_h, reliable_h, 0.0, changes
    )


@compiled
def rest_on_demand(
    world: BacktestWorld, job: BacktestJob, left: float
) -> tuple[float, float, float]:
    """Return (hours, dollars, slot-hours) of finishing on demand at full size."""
    last = len(world.slots) - 1
    machines = max(1, job.slots // world.slots[last])
    slots = machines * world.slots[last]
    hours = left / (slots * world.speed[last]) ** job.scaling
    return hours, hours * (machines * world.price[last, 0] + job.manager_usd_per_h), hours * slots


@compiled
def interval_h(plan: Decision, losses: int, hours: float) -> float:
    """Return Flint's checkpoint interval: sqrt(2 delta MTTF), with the MTTF seen so far."""
    mttf_h = (MTTF_PRIOR_H + hours) / (1.0 + losses)
    return float(np.sqrt(2.0 * plan.checkpoint_h * mttf_h))


@compiled
def due(
    world: BacktestWorld, job: BacktestJob, plan: Decision, leases: Leases, at: tuple[int, int, int]
) -> bool:
    """Return whether there is a reason to decide in this tick.

    Reasons are a start, a loss, a changed price or capacity, missing machines, an hour that ends, a
    time to re-choose, or a deadline.
    """
    t, begin, gone = at
    if (
        job.finish_tick > 0
        or t == begin
        or gone > 0
        or world.moved[t]
        or slots_held(world, leases) < job.slots
    ):
        return True
    if plan.rechoose_ticks > 0 and t % plan.rechoose_ticks == 0:
        return True
    if world.rule == BY_SECOND:
        return False
    hour = round(1.0 / world.tick_h)
    for row in range(len(leases.machines)):
        if leases.machines[row] > 0 and (t - leases.begun[row]) % hour == 0:
            return True
    return False


def _run_all(
    world: BacktestWorld, job: BacktestJob, plan: Decision, starts: Ints, ticks: int
) -> Floats:
    """Run the job from every start; return the outcomes by [column, start]."""
    leases, no_trace = no_leases(len(world.slots)), np.empty((0, HELD))
    spans = [(b, min(b + ticks, world.price.shape[1])) for b in starts.tolist()]
    runs = [run_one(world, job, plan, leases, span, no_trace) for span in spans]
    return np.array(runs, dtype=np.float64).reshape(-1, len(COLUMNS)).T.copy()


def world_of(market: Market, work: Work = Work()) -> BacktestWorld:  # noqa: B008 - a value
    """Return the market plus an on-demand pool of the type whose work is cheapest on demand."""
    per_work = market.on_demand_usd_per_h / (market.slots * market.speed)
    best = int(np.argmin(per_work))
    ticks = market.ticks
    places = [(p.cloud, p.region) for p in [*market.pools, market.pools[best]]]
    regions = {place: i for i, place in enumerate(dict.fromkeys(places))}
    within = [(p.cloud, p.region, p.zone) for p in [*market.pools, market.pools[best]]]
    zones = {zone: i for i, zone in enumerate(dict.fromkeys(within))}
    reliable = np.full((1, ticks), market.on_demand_usd_per_h[best])
    has = market.capacity > 0
    changes = np.any(np.diff(market.price, axis=1) != 0, axis=0)
    changes |= np.any(np.diff(has, axis=1), axis=0)
    return BacktestWorld(
        price=np.ascontiguousarray(np.concatenate([market.price, reliable])),
        capacity=np.concatenate([market.capacity, np.full((1, ticks), PLENTY)]),
        hazard_per_h=np.concatenate([market.hazard_per_h, np.zeros((1, ticks))]),
        losses_seen=np.concatenate([losses_seen(has), np.zeros((1, ticks), np.bool_)]),
        moved=np.concatenate([[True], changes]),
        slots=np.append(market.slots, market.slots[best]),
        speed=np.append(market.speed, market.speed[best]),
        region=np.array([regions[place] for place in places], np.int64),
        deltas=market.deltas_usd_per_h,
        evicted_in_1h=market.evicted_in_1h,
        evicted_in_mood=market.evicted_in_mood,
        mood=market.mood,
        tick_h=market.tick_s / HOUR_S,
        rule=code_of(market.rule),
        bids=market.rule.bid == "required",
        zone=np.array([zones[zone] for zone in within], np.int64),
        zone_usd_per_gb=work.zone_usd_per_gb,
        region_usd_per_gb=work.region_usd_per_gb,
    )


def losses_seen(has: Flags) -> Flags:
    """Return by [pool, tick] whether the pool had taken all of its machines before."""
    lost = np.zeros_like(has)
    lost[:, 1:] = has[:, :-1] & ~has[:, 1:]
    return np.asarray(np.logical_or.accumulate(lost, axis=1))


def job_of(work: Work) -> BacktestJob:
    return BacktestJob(
        slots=work.slots,
        work_h=work.hours * work.slots**work.scaling,
        start_h=work.start_s / HOUR_S,
        morph_h=work.morph_s / HOUR_S,
        recovery_h=work.recovery_s / HOUR_S,
        manager_usd_per_h=work.manager_usd_per_h,
        scaling=work.scaling,
        begin_tick=0,
        finish_tick=0,
        exchange_gb_per_work=work.exchange_gb_per_work,
    )


def draw_starts(market: Market, work: Work, count: int, seed: int) -> Ints:
    """Draw random ticks with a day of history before them and room for the job after them."""
    hour = HOUR_S / market.tick_s
    if work.hours * hour < 1:
        raise ConstraintError(
            f"a job of {work.hours:g} h is over within one tick of {market.tick_s:g} s, and nothing is decided "
            f"in between: give it {1 / hour:.2g} h or more"
        )
    first, last = int(24 * hour), market.ticks - int(work.patience * work.hours * hour) - 1
    if last <= first:
        raise ConstraintError(
            f"{market.ticks} ticks of {market.tick_s:.0f} s hold no start for a job of {work.hours} h "
            f"with patience {work.patience}: give longer series, a shorter job or less patience"
        )
    return np.random.default_rng(seed).integers(first, last, count)


def run(
    market: Market,
    work: Work,
    strategies: Sequence[Strategy] = STRATEGIES,
    *,
    starts: Ints,
    bounded: Collection[str] | None = None,
) -> list[Result]:
    """Run every strategy from the same starts; each bound ends when its strategy ended.

    Bounds take longer than runs, so `bounded` names the strategies that need one; the others get
    none.
    """
    world, job = world_of(market, work), job_of(work)
    ticks = int(work.patience * work.hours * HOUR_S / market.tick_s)
    results = []
    for strategy in strategies:
        plan = plan_of(strategy, market, work.checkpoint_s, work.haste)
        out = _run_all(world, job, plan, starts, ticks)
        outcome = dict(zip(COLUMNS, out, strict=True))
        ends = starts + np.ceil(outcome["runtime_h"] * HOUR_S / market.tick_s).astype(np.int64)
        wanted = bounded is None or strategy.name in bounded
        bound, plain = (
            np.full(len(starts), np.nan)
            if not wanted
            else _bounds(clairvoyant.terms_of(market, work.start_s, refunds), job, starts, ends)
            for refunds in (True, False)
        )
        results.append(
            Result(
                strategy=strategy.name,
                starts=starts,
                outcome=outcome,
                bound_usd=bound,
                plain_usd=plain,
            )
        )
    return results


def _bounds(terms: clairvoyant.Terms, job: BacktestJob, starts: Ints, ends: Ints) -> Floats:
    """Return the clairvoyant's least cost from each start to its end.

    It includes the manager's machine.
    """
    manager_usd = job.manager_usd_per_h * job.work_h / job.slots
    return np.array(
        [
            manager_usd
            + clairvoyant.lower_bound_usd(
                terms, int(b), int(e), work_slot_h=job.work_h, slots=job.slots
            )
            for b, e in zip(starts, ends, strict=True)
        ]
    )


def trace(market: Market, work: Work, strategy: Strategy, start: int) -> Floats:
    """Return one run in detail, a row per tick.

    A row holds dollars and work so far, then the slots held of each pool, on demand last.
    """
    ticks = min(int(work.patience * work.hours * HOUR_S / market.tick_s), market.ticks - start)
    rows = np.full((ticks, HELD + len(market.pools) + 1), np.nan)
    plan = plan_of(strategy, market, work.checkpoint_s, work.haste)
    leases = no_leases(len(market.pools) + 1)
    run_one(world_of(market, work), job_of(work), plan, leases, (start, start + ticks), rows)
    return np.asarray(rows[~np.isnan(rows[:, DOLLARS])], dtype=np.float64)


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A figure over all starts, with its 95 % interval."""

    value: float
    low: float
    high: float


def interval(values: Floats, figure: Callable[[Floats], float], seed: int = 0) -> Interval:
    """Return the interval of a figure by resampling the starts.

    Starts that overlap in time make it a little too narrow.
    """
    rng = np.random.default_rng(seed)
    drawn = [
        figure(values[..., rng.integers(0, values.shape[-1], values.shape[-1])])
        for _ in range(RESAMPLES)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Interval(value=figure(values), low=float(low), high=float(high))


def mean_ratio(pair: Floats) -> float:
    """Return the sum of the first row of costs over the sum of the second."""
    return float(pair[0].sum() / pair[1].sum())


class Rush(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy with a deadline over all starts; `missed` counts the jobs that were late."""

    strategy: str
    cost_usd: Floats
    bound_usd: Floats
    plain_usd: Floats
    on_demand_usd: float
    missed: int

    @property
    def share_of_saving(self) -> float:
        """Return (on demand - ours) / (on demand - clairvoyant), over the sums of all starts."""
        best = self.on_demand_usd * len(self.cost_usd) - float(self.bound_usd.sum())
        return (self.on_demand_usd * len(self.cost_usd) - float(self.cost_usd.sum())) / best


def run_with_deadline(
    market: Market,
    work: Work,
    deadline_h: float,
    strategies: Sequence[Strategy] = WITH_DEADLINE,
    *,
    starts: Ints,
) -> list[Rush]:
    """Run every strategy from the same starts with the same deadline, as has the bound."""
    if deadline_h < work.hours:
        raise ConstraintError(
            f"the deadline of {deadline_h} h is before the {work.hours} h that the work takes on demand: "
            "give more time or less work"
        )
    world = world_of(market, work)
    ticks = int(deadline_h * HOUR_S / market.tick_s)
    job = job_of(work)
    bound, plain = (
        _bounds(clairvoyant.terms_of(market, work.start_s, refunds), job, starts, starts + ticks)
        for refunds in (True, False)
    )
    on_demand = _on_demand_usd(world, job)
    results = []
    for strategy in strategies:
        plans = _deadline_plans(market, work, strategy, deadline_h, starts)
        runs = [_rush_one(world, job, p, int(b), ticks) for b, p in zip(starts, plans, strict=True)]
        results.append(
            Rush(
                strategy=strategy.name,
                cost_usd=np.array([r.cost_usd for r in runs]),
                bound_usd=bound,
                plain_usd=plain,
                on_demand_usd=on_demand,
                missed=sum(r.finished == 0.0 for r in runs),
            )
        )
    return results


def _rush_one(
    world: BacktestWorld, job: BacktestJob, plan: Decision, begin: int, ticks: int
) -> Outcome:
    timed = job._replace(begin_tick=begin, finish_tick=begin + ticks)
    leases = no_leases(len(world.slots))
    return run_one(world, timed, plan, leases, (begin, begin + ticks), np.empty((0, HELD)))


def _on_demand_usd(world: BacktestWorld, job: BacktestJob) -> float:
    """Return the cost of the whole job on demand, its start included."""
    last = len(world.slots) - 1
    machines = job.slots // int(world.slots[last])
    rate = (machines * world.slots[last] * world.speed[last]) ** job.scaling
    return float(machines * world.price[last, 0] * (job.work_h / rate + job.start_h))


def _deadline_plans(
    market: Market, work: Work, strategy: Strategy, deadline_h: float, starts: Ints
) -> list[Decision]:
    """Return a plan per start, with the market's climate as known when the job began."""
    at_s = np.arange(market.ticks, dtype=np.float64) * market.tick_s
    spells = CapacityRisk(
        Series(at_s=at_s, value=np.any(market.capacity > 0, axis=0).astype(np.float64))
    )
    common = plan_of(strategy, market, work.checkpoint_s, work.haste)._replace(
        phase=phases(spells, at_s)
    )
    if strategy.policy != "ours":
        return [common] * len(starts)
    per_work = market.price / (market.slots * market.speed)[:, None]
    cheapest = np.min(market.on_demand_usd_per_h / (market.slots * market.speed))
    overhead_h = (work.start_s + work.morph_s) / HOUR_S
    return [
        common._replace(
            book=book(
                climate_at(spells, float(at_s[b])),
                deadline_h,
                float(per_work[:, b].min() / cheapest),
                overhead_h,
            )
        )
        for b in starts
    ]
