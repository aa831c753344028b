"""What to buy and what to give back in one control period.

The footprint's expected cost per work decides. A unit is one machine, held or on offer:

    price of work   w_i = p_i · H / (H - o_i) / (speed_i · slots_i)      o_i = start + morph if new, else 0
    expected cost   C   = Σ p_i · H / 3600                                over the horizon H
    expected work   W   = rate(counts) · (H - o - Σ_pools h · H · recovery)
    cost per work   E   = C / W                                           (4.4 of BidBrain, per period)

Units are taken in the order of w_i and the best prefix of that order is the footprint.
"""

from collections.abc import Sequence
from itertools import groupby

import msgspec

from bidding.model import Acquire, Demand, Holding, Limits, Offer, Purchase, Release, Throughput
from cloud.model import InstanceType, Market, Pool

HORIZON_S = 3600.0  # how far ahead a purchase is weighed; the unit in which spot markets move
HAZARD_PER_H = {"spot": 0.05, "on_demand": 0.0}  # prior of a bulk loss in one pool
KEEP_MARGIN = 0.05  # a held unit is given up only for one this much cheaper: no flapping
EQUAL = 0.02  # footprints this close in cost per work count as equal: the faster one wins
RESERVE_S = 120.0  # a footprint must be payable this long, else it is not held
HOUR_S = 3600.0


class _Unit(msgspec.Struct, frozen=True, kw_only=True):
    """One machine that could be part of the footprint."""

    pool: Pool
    market: Market
    type: InstanceType
    price_usd_per_h: float
    usd_per_work: float
    lease: str = ""
    bound: bool = False  # reliable: stays whatever it costs


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    units: tuple[_Unit, ...]
    cost_usd_per_work: float | None
    work_per_s: float
    usd_per_h: float


def decide(
    offers: Sequence[Offer],
    holdings: Sequence[Holding],
    demand: Demand,
    limits: Limits,
    throughput: Throughput,
    at_s: float,
) -> Purchase:
    """The footprint with the lowest expected cost per work within the limits, as a difference."""
    horizon_s = _horizon_s(demand, limits, at_s)
    waiting = min((o.price_usd_per_h for o in offers if o.blocked), default=None)
    units = _units(offers, holdings, demand, limits, horizon_s)
    best, runner_up = _choose(units, demand, limits, throughput, horizon_s)
    return _difference(best, runner_up, holdings, waiting)


def _horizon_s(demand: Demand, limits: Limits, at_s: float) -> float:
    """An hour, less when the deadline is nearer, never shorter than what a start costs twice."""
    floor_s = 2 * (demand.start_s + demand.morph_s) + 1.0
    if limits.finish_by_s is None:
        return max(HORIZON_S, floor_s)
    return max(min(HORIZON_S, limits.finish_by_s - at_s), floor_s)


def _units(
    offers: Sequence[Offer],
    holdings: Sequence[Holding],
    demand: Demand,
    limits: Limits,
    horizon_s: float,
) -> list[_Unit]:
    """Held and offered machines in the order in which they make work cheap; ties by name."""
    start = horizon_s / (horizon_s - demand.start_s - demand.morph_s)
    units = [
        _Unit(
            pool=h.pool, market=h.market, type=h.type, price_usd_per_h=h.price_usd_per_h,
            usd_per_work=h.price_usd_per_h * (1 - KEEP_MARGIN) / (h.type.slots * h.type.speed),
            lease=h.lease, bound=h.reliable,
        )
        for h in holdings
        if not h.noticed or h.reliable
    ]  # fmt: skip
    for o in offers:
        allowed = o.market == "spot" or limits.on_demand_allowed
        if o.blocked or not allowed or not 0 < o.price_usd_per_h < 1e6:
            continue
        per_work = o.price_usd_per_h * start / (o.type.slots * o.type.speed)
        unit = _Unit(pool=o.pool, market=o.market, type=o.type,
                     price_usd_per_h=o.price_usd_per_h, usd_per_work=per_work)  # fmt: skip
        units.extend([unit] * -(-limits.slots_max // o.type.slots))
    units.sort(key=lambda u: (not u.bound, u.usd_per_work, not u.lease, u.market, u.pool, u.lease))
    return units


def _choose(
    units: Sequence[_Unit],
    demand: Demand,
    limits: Limits,
    throughput: Throughput,
    horizon_s: float,
) -> tuple[_Choice, _Choice | None]:
    """Walk the order; every prefix is a footprint; the cheapest per work wins, the faster on a tie."""
    tried: list[_Choice] = []
    taken: list[_Unit] = [u for u in units if u.bound]
    counts: dict[str, int] = {}
    pools: set[Pool] = set()
    usd_per_h = sum(u.price_usd_per_h for u in taken)
    slots = 0
    for unit in (u for u in units if not u.bound):
        more_usd_per_h = usd_per_h + unit.price_usd_per_h
        if slots + unit.type.slots > limits.slots_max or not _payable(more_usd_per_h, limits):
            continue
        taken, slots, usd_per_h = [*taken, unit], slots + unit.type.slots, more_usd_per_h
        counts[unit.type.name] = counts.get(unit.type.name, 0) + 1
        if unit.market == "spot":
            pools.add(unit.pool)
        if slots >= limits.slots_min:
            tried.append(_weigh(tuple(taken), counts, len(pools), demand, throughput, horizon_s))
    worth = [c for c in tried if c.cost_usd_per_work is not None]
    if not worth:
        bound = tuple(u for u in units if u.bound)
        nothing = _Choice(units=bound, cost_usd_per_work=None, work_per_s=0.0,
                          usd_per_h=sum(u.price_usd_per_h for u in bound))  # fmt: skip
        return nothing, None
    lowest = min(c.cost_usd_per_work or 0.0 for c in worth)
    equal = [c for c in worth if (c.cost_usd_per_work or 0.0) <= lowest * (1 + EQUAL)]
    best = max(equal, key=lambda c: c.work_per_s)
    others = [c for c in worth if c is not best]
    return best, min(others, key=lambda c: c.cost_usd_per_work or 0.0, default=None)


def _payable(usd_per_h: float, limits: Limits) -> bool:
    if limits.usd_per_h_max is not None and usd_per_h > limits.usd_per_h_max:
        return False
    left = limits.budget_left_usd
    return left is None or usd_per_h * RESERVE_S / HOUR_S <= left


def _weigh(
    units: tuple[_Unit, ...],
    counts: dict[str, int],
    spot_pools: int,
    demand: Demand,
    throughput: Throughput,
    horizon_s: float,
) -> _Choice:
    rate = throughput.work_per_s(counts)
    usd_per_h = sum(u.price_usd_per_h for u in units)
    change_s = demand.morph_s if any(not u.lease for u in units) else 0.0
    losses = HAZARD_PER_H["spot"] * spot_pools * horizon_s / HOUR_S
    work = rate * (horizon_s - change_s - losses * demand.recovery_s)
    per_work = usd_per_h * horizon_s / HOUR_S / work if work > 0 else None
    return _Choice(units=units, cost_usd_per_work=per_work, work_per_s=rate, usd_per_h=usd_per_h)


def _difference(
    best: _Choice,
    runner_up: _Choice | None,
    holdings: Sequence[Holding],
    waiting_usd_per_h: float | None,
) -> Purchase:
    kept = {u.lease for u in best.units if u.lease}
    new = sorted(
        (u for u in best.units if not u.lease), key=lambda u: (u.pool, u.market, u.price_usd_per_h)
    )
    because = _sentence(best, waiting_usd_per_h)
    acquire = []
    for (pool, market), group in groupby(new, key=lambda u: (u.pool, u.market)):
        same = list(group)
        why = f"{len(same)} x {pool.key} at ${same[0].price_usd_per_h:.4f}/h ({market}): {because}"
        acquire.append(Acquire(pool=pool, market=market, bid_usd_per_h=None,
                               count=len(same), because=why))  # fmt: skip
    release = tuple(
        Release(
            lease=h.lease,
            because=f"{h.pool.key} at ${h.price_usd_per_h:.4f}/h is no longer worth it: {because}",
        )
        for h in sorted(holdings, key=lambda h: h.lease)
        if not h.reliable and not h.noticed and h.lease not in kept
    )
    other = "nothing else was possible" if runner_up is None else _sentence(runner_up, None)
    return Purchase(acquire=tuple(acquire), release=release, because=because, runner_up=other,
                    cost_usd_per_work=best.cost_usd_per_work)  # fmt: skip


def _sentence(choice: _Choice, waiting_usd_per_h: float | None) -> str:
    if choice.cost_usd_per_work is None:
        if waiting_usd_per_h is not None:
            return f"waiting: every pool refused a moment ago (cheapest ${waiting_usd_per_h:.4f}/h)"
        return "waiting: no offer fits the limits"
    n = sum(1 for u in choice.units if not u.bound)
    return (
        f"{n} machine{'s' * (n != 1)} for ${choice.usd_per_h:.4f}/h do {choice.work_per_s:.4g} work/s, "
        f"${choice.cost_usd_per_work:.4g} per work"
    )
