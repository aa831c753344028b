"""The decision: what is kept and what is bought, compiled, for the manager and for the backtest.

`bidding.acquire` fills the columns from offers and leases, `bidding.backtests.baselines` from a market on a
grid. Both then ask, in this order:
    weighed(machines, need)           every row with its outlook over the horizon
    planned(machines, weighed, ...)   whether anything is held at all, and the walks over the rows
    chosen(walks, rates, ...)         the best footprint, and the part of it that is next
The rates between the last two are the caller's: the planner's in the manager, a power law in the
backtest. Nothing else may differ, so a figure of the backtest is a figure of the manager's rule.
"""

from typing import NamedTuple

import numpy as np

from bidding.compiled import Flags, Floats, Ints, compiled
from bidding.core import (
    BY_SECOND,
    FIRST_HOUR,
    HOURLY,
    Best,
    Bounds,
    Units,
    best_prefix,
    differ,
    exchanged,
    home_order,
    homes_of,
    horizon,
    in_parts,
    margin_of,
    order_of,
    outlook,
    stalls_of,
    traffic_of,
    walk,
)
from bidding.deadline import IDLE, ON_DEMAND

ANY_MODE = -1  # else a mode of `bidding.deadline`
FITS, ABOVE_LIMIT, WAITS = 0, 1, 2
RENEW_H = 1 / 12  # this shortly before a paid hour ends, the next one is weighed
LOST_PER_H_MAX = 60.0
LOST_MAX = 0.999999  # a bid that loses for sure loses within seconds, not at once
# The start of a machine is paid and another's is not: that is won back within four or five starts.
SUNK_MARGIN = 0.22
ROUNDING = 1e-9


class Machines(NamedTuple):
    """What is held and what is on offer, one row per lease or offer, leases first.

    The order of the rows decides between equals, so both callers sort them alike: leases that
    work, leases that start, offers; on-demand before spot; then by the name of the pool.
    """

    rule: Ints  # of billing
    losses_seen: Flags  # a refund is hoped for only where machines were seen to go
    price_usd_per_h: Floats
    disk_usd_per_h: Floats
    egress_usd: Floats  # paid once per machine
    paid_ahead_h: Floats  # hours that are owed as soon as the machine is bought
    age_h: Floats
    slots: Ints
    speed: Floats
    machines: Ints
    pool: Ints
    region: Ints
    zone: Ints
    zone_usd_per_gb: Floats  # of traffic to another zone of the region
    region_usd_per_gb: Floats
    held: Flags
    starts: Flags  # held, and has not worked yet
    fixed: Flags  # held, and stays whatever it costs
    blocked: Flags  # an offer that is left alone for now
    on_demand: Flags
    first: Ints  # [row + 1]: where the choices of a row begin, one per bid
    hazard_per_h: Floats  # [choice]


class Need(NamedTuple):
    """What the job asks of a machine. `left_h` is how long machines are needed."""

    start_h: float
    morph_h: float
    recovery_h: float
    left_h: float
    slots_max: int
    some_held: bool


class Weighed(NamedTuple):
    """Every row with its outlook, and which of its choices (bids) is meant."""

    units: Units
    choice: Ints


class Walks(NamedTuple):
    """Machines one by one, cheapest work first; each prefix is a footprint.

    Where traffic between zones costs, there is a walk for each zone, which takes the machines of
    that zone first: `homes[k, :lengths[k]]`.
    """

    refusal: int
    units: Units
    order: Ints
    steps: Ints
    homes: Ints
    lengths: Ints


class Choice(NamedTuple):
    """The rows that are held next, once per machine, and the footprint that they lead to.

    `unfinished`: a part is exchanged now and the rest waits. `apart_usd_per_work` is what the
    whole walk that looks at no zone would pay for traffic; zero where there is no home to keep to.
    """

    rows: Ints
    steps: Ints
    rates_per_h: Floats
    best: Best
    unfinished: bool
    apart_usd_per_work: float


@compiled
def _rule(machines: Machines, i: int) -> int:
    hopeless = machines.rule[i] == FIRST_HOUR and not machines.losses_seen[i]
    return BY_SECOND if hopeless else int(machines.rule[i])


@compiled
def weighed(machines: Machines, need: Need) -> Weighed:
    """Every row with what it costs and does over the hours that the job needs it."""
    n = len(machines.rule)
    newcomer_h = need.start_h + stalls_of(need.slots_max, need.some_held) * need.morph_h
    ahead_h = horizon(need.left_h, newcomer_h)
    units = Units(
        machines.price_usd_per_h + machines.disk_usd_per_h,
        np.zeros(n),
        np.zeros(n),
        np.zeros(n),
        machines.slots,
        machines.speed,
        machines.machines.copy(),
        machines.pool,
        machines.region,
        np.zeros(n),
        machines.held.copy(),
        np.zeros(n, np.bool_),
        np.zeros(n),
        machines.zone,
        machines.zone_usd_per_gb,
        machines.region_usd_per_gb,
    )
    choice = np.zeros(n, np.int64)
    sunk = _sunk_margin(machines)
    for i in range(n):
        if machines.held[i]:
            _weigh_lease(machines, need, i, ahead_h, units)
            units.margin[i] += sunk
            choice[i] = machines.first[i]
        else:
            choice[i] = _weigh_offer(machines, need, i, (newcomer_h, ahead_h), units)
    return Weighed(units, choice)


@compiled
def _sunk_margin(machines: Machines) -> float:
    """The same for all that is held, so that a start never decides between two held machines.

    It grows with the share of machines that start: in a large footprint one nearly always starts.
    """
    total, starting = 0, 0
    for i in range(len(machines.rule)):
        if machines.held[i] and not machines.fixed[i]:
            total += machines.machines[i]
            starting += machines.machines[i] if machines.starts[i] else 0
    return SUNK_MARGIN * starting / total if total > 0 else 0.0


@compiled
def _weigh_lease(machines: Machines, need: Need, i: int, ahead_h: float, units: Units) -> None:
    age_h, rule = machines.age_h[i], _rule(machines, i)
    hazard = machines.hazard_per_h[machines.first[i]]
    pinned, weighed_at_h = False, age_h
    if rule >= HOURLY:
        left_h = -age_h % 1.0
        left_h = 0.0 if left_h > 1.0 - ROUNDING else left_h
        pinned = left_h > RENEW_H + ROUNDING
        weighed_at_h = age_h if pinned else np.round(age_h + left_h)
    cost, share = outlook(
        rule,
        (machines.price_usd_per_h[i], 0.0),
        hazard,
        weighed_at_h,
        max(0.0, need.start_h - age_h),
        ahead_h,
    )
    units.expected_usd_per_h[i] = cost + machines.disk_usd_per_h[i]
    units.share[i] = max(share, 1e-6) if pinned else share
    units.hazard_per_h[i], units.margin[i], units.pinned[i] = hazard, margin_of(age_h), pinned


@compiled
def _weigh_offer(
    machines: Machines, need: Need, i: int, hours: tuple[float, float], units: Units
) -> int:
    """With the bid that makes its work cheapest; an offer that never works gets no share."""
    newcomer_h, ahead_h = hours
    price = machines.price_usd_per_h[i]
    units.upfront_usd[i] = price * machines.paid_ahead_h[i] + machines.egress_usd[i]
    lowest, best = np.inf, machines.first[i]
    for j in range(machines.first[i], machines.first[i + 1]):
        hazard = machines.hazard_per_h[j]
        cost, share = outlook(
            _rule(machines, i), (price, machines.egress_usd[i]), hazard, 0.0, newcomer_h, ahead_h
        )
        cost += machines.disk_usd_per_h[i]
        net = share - min(hazard, LOST_PER_H_MAX) * need.recovery_h
        if net <= 0:
            continue
        per_work = cost / net
        safer = per_work == lowest and hazard < units.hazard_per_h[i]
        if per_work < lowest or safer:
            lowest, best = per_work, j
            units.expected_usd_per_h[i], units.share[i] = cost, share
            units.hazard_per_h[i] = hazard
    return int(best)


@compiled
def price_of_work(units: Units, i: int) -> float:
    """Dollars per hour of one slot at speed one; infinite where nothing is worked."""
    power = units.share[i] * units.slots[i] * units.speed[i]
    return units.expected_usd_per_h[i] / power if power > 0 else np.inf


@compiled
def planned(
    machines: Machines, weighed: Weighed, bounds: Bounds, mode: int, tight: bool, pools: int
) -> Walks:
    """Walk over what may be held; with a deadline there is a mode, and time may be tight."""
    units = _candidates(machines, weighed.units, bounds, mode, tight)
    order = order_of(units, bounds.recovery_h)
    refusal = FITS
    if mode == ANY_MODE:
        refusal = _refusal(machines, weighed.units, units, order, bounds)
        order = order if refusal == FITS else order[:0]
    steps = walk(units, order, bounds, pools, bounds.slots_max)
    zones = homes_of(units, order, bounds)
    homes = np.zeros((len(zones), bounds.slots_max), np.int64)
    lengths = np.zeros(len(zones), np.int64)
    for k in range(len(zones)):
        home = home_order(units, order, zones[k])
        near = walk(units, home, bounds, pools, bounds.slots_max)
        lengths[k] = len(near)
        homes[k, : len(near)] = near
    return Walks(refusal, units, order, steps, homes, lengths)


@compiled
def _candidates(machines: Machines, all_: Units, bounds: Bounds, mode: int, tight: bool) -> Units:
    """The rows that may be held: those that the mode allows, and of which one machine is not too large.

    With little time to spare nothing moves to a cheaper pool.
    """
    n = len(machines.rule)
    fine = np.zeros(n, np.bool_)
    held_slots = 0
    for i in range(n):
        wanted = mode == ANY_MODE or (mode != IDLE and (mode == ON_DEMAND) == machines.on_demand[i])
        fine[i] = wanted and not machines.fixed[i] and not machines.blocked[i]
        fine[i] = fine[i] and machines.machines[i] > 0
        if fine[i] and machines.held[i]:
            held_slots += machines.machines[i] * machines.slots[i]
    if mode != ANY_MODE and tight and held_slots >= bounds.slots_max:
        fine &= machines.held
    return Units(
        all_.usd_per_h,
        all_.expected_usd_per_h,
        np.where(fine, all_.share, 0.0),
        all_.hazard_per_h,
        all_.slots,
        all_.speed,
        np.where(fine, all_.machines, 0),
        all_.pool,
        all_.region,
        all_.margin,
        all_.held & fine,
        all_.pinned & fine,
        all_.upfront_usd,
        all_.zone,
        all_.zone_usd_per_gb,
        all_.region_usd_per_gb,
    )


@compiled
def _refusal(machines: Machines, all_: Units, units: Units, order: Ints, bounds: Bounds) -> int:
    """Whether nothing is held: what is fixed costs too much already, or waiting is cheaper.

    Waiting is cheaper where nothing is held and an offer that is left alone for now sells far
    cheaper work. Its machines would have to start as well, so prices of work are compared.
    """
    if bounds.bound_usd_per_h > bounds.usd_per_h_max:
        return ABOVE_LIMIT
    if units.held.any() or len(order) == 0:
        return FITS  # what works already works until something better is there
    away = np.inf
    for i in range(len(machines.rule)):
        if machines.blocked[i] and not machines.on_demand[i] and machines.machines[i] > 0:
            away = min(away, price_of_work(all_, i))
    here = price_of_work(units, order[0])
    return WAITS if here > (1.0 + bounds.haste) * away else FITS


@compiled
def chosen(
    walks: Walks, rates_per_h: Floats, homes_per_h: Floats, bounds: Bounds, pools: int
) -> Choice:
    """The best footprint of any walk, and what of it is held next."""
    best = best_prefix(walks.units, walks.steps, rates_per_h, bounds, pools)
    steps, rates = walks.steps, rates_per_h
    apart = 0.0
    if len(walks.homes) > 0:
        apart = traffic_of(walks.units, walks.steps, bounds, pools)
    home, best = _home(walks, homes_per_h, best, bounds, pools)
    if home >= 0:
        n = walks.lengths[home]
        steps, rates = walks.homes[home, :n].copy(), homes_per_h[home, :n].copy()
    target = steps[: best.taken]
    rows = in_parts(walks.units, walks.order, target, bounds)
    if len(walks.homes) > 0 and _splits(walks.units, rows, target, bounds, pools):
        rows = target
    return Choice(rows, steps, rates, best, differ(rows, target), apart)


@compiled
def _worth_at_most(lowest: float, bounds: Bounds) -> float:
    """The most that work may cost, if the cheapest costs so much."""
    most = lowest
    if 0 < abs(lowest) < np.inf:
        most += bounds.haste * abs(lowest)
    return most


@compiled
def _home(
    walks: Walks, homes_per_h: Floats, best: Best, bounds: Bounds, pools: int
) -> tuple[int, Best]:
    """The zone whose walk leads to the best footprint of all, or -1, and that footprint.

    The best has the most left of what its work is worth at most. What is held counts as a little
    cheaper than it is, as in `order_of`, so that nothing moves to another zone for nothing.
    """
    lowest = best.usd_per_work
    for k in range(len(walks.homes)):
        n = walks.lengths[k]
        other = best_prefix(
            walks.units, walks.homes[k, :n].copy(), homes_per_h[k, :n].copy(), bounds, pools
        )
        lowest = min(lowest, other.usd_per_work)
    most, home = _worth_at_most(lowest, bounds), -1
    for k in range(len(walks.homes)):
        n = walks.lengths[k]
        other = best_prefix(
            walks.units, walks.homes[k, :n].copy(), homes_per_h[k, :n].copy(), bounds, pools
        )
        if other.taken > 0 and (best.taken == 0 or _leaves_more(other, best, most)):
            home, best = k, other
    return home, best


@compiled
def _leaves_more(one: Best, other: Best, most: float) -> bool:
    """Whether `one` leaves more of what its work is worth; at any price, whether it does more."""
    more = one.work_per_h - other.work_per_h
    alike = abs(more) <= ROUNDING * other.work_per_h
    dearer = one.usd_per_h - one.kept_usd_per_h - (other.usd_per_h - other.kept_usd_per_h)
    slack = ROUNDING * abs(other.usd_per_h)
    if alike or most == np.inf:
        return dearer < -slack if alike else more > 0
    return dearer < more * abs(most) - slack


@compiled
def _splits(units: Units, rows: Ints, target: Ints, bounds: Bounds, pools: int) -> bool:
    """Whether a part of the exchange would cost traffic that the whole does not.

    Then all of it is bought at once, if the price per hour of both together is allowed.
    """
    if traffic_of(units, rows, bounds, pools) <= traffic_of(units, target, bounds, pools):
        return False
    taken = np.zeros(len(units.slots), dtype=np.int64)
    for i in target:
        taken[i] += 1
    _, _, _, held_usd, new_usd = exchanged(units, taken, bounds)
    return bool(held_usd + new_usd <= bounds.usd_per_h_max)
