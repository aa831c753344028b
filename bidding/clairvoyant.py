"""What a buyer who knows the future must at least pay: a lower bound for every strategy.

Relaxed for one slot of the job, in work-hours w of one slot of speed one:
    g(mu) = n V(mu) + mu W,   V(mu) = min over paths through time of  cost - mu work
Weak duality: g(mu) is at most the least cost of W work with n slots, for every mu >= 0 (machines
meet only in ways that cost more: stalls, capacity, poor scaling). V is a shortest path over ticks:
    idle(t)  = min( idle(t+1), start in any pool that has capacity )
    start    = mu start_h + either a stretch that is refunded or hold(t)
    hold(t)  = (p - mu) dt + min( idle(t+1), hold(t+1) if the pool still has capacity )
Under rules by the hour, hold goes hour by hour at the price of the hour's first tick, and an hour
may end free wherever the price rises (some bid is outbid exactly there). g is concave: the best mu
is searched, and whichever is found, the bound holds.
"""

from typing import NamedTuple

import numpy as np

from bidding.billing import HOUR_S
from bidding.compiled import Floats, Ints, compiled
from bidding.market import Market

GOLDEN = 0.6180339887498949
PRECISION = 1e-4  # of the on-demand price: where the search for mu ends


class Terms(NamedTuple):
    """A market as one slot of the job meets it. Times in hours, counts in ticks."""

    usd_per_slot_h: Floats  # [pool, tick]
    capacity: Ints  # [pool, tick]
    speed: Floats  # [pool]
    on_demand_usd_per_work_h: float
    tick_h: float
    start_h: float
    free_ticks: int  # a stretch shorter than this is free when the cloud ends it
    hour_ticks: int  # 0: by the second
    refund: bool  # the current hour is free when the cloud ends it


@compiled
def _seconds(terms: Terms, mu: float, begin: int, end: int) -> float:
    """V(mu) under a rule by the second."""
    pools = terms.speed.shape[0]
    n = end - begin
    dt = terms.tick_h
    idle = np.zeros(n + 1)
    hold = np.zeros(pools)
    reliable = 0.0
    lost_at = np.full(pools, n + 1 + terms.free_ticks)  # where capacity is lost next
    for i in range(n - 1, -1, -1):
        t = begin + i
        reliable = (terms.on_demand_usd_per_work_h - mu) * dt + min(idle[i + 1], reliable)
        best = min(idle[i + 1], mu * terms.start_h + reliable)
        for k in range(pools):
            if terms.capacity[k, t] <= 0:
                lost_at[k] = i
                continue
            gain = mu * terms.speed[k]
            after = idle[i + 1]
            if i + 1 < n and terms.capacity[k, t + 1] > 0:
                after = min(after, hold[k])
            hold[k] = (terms.usd_per_slot_h[k, t] - gain) * dt + after
            stretch = lost_at[k] - i
            value = hold[k]
            if stretch < terms.free_ticks:
                value = min(value, -gain * stretch * dt + idle[lost_at[k]])
            best = min(best, gain * terms.start_h + value)
        idle[i] = best
    return float(idle[0])


@compiled
def _hour(
    terms: Terms, k: int, at: tuple[int, int, int], idle: Floats, hours: Floats, mu: float
) -> float:
    """Least cost of an hour that begins now in pool k, and of all that follows it."""
    t, i, n = at
    p, gain = terms.usd_per_slot_h[k, t], mu * terms.speed[k]
    best = np.inf
    for j in range(1, terms.hour_ticks + 1):
        b = i + j
        if b > n:
            break
        gone = b < n and terms.capacity[k, t + j] <= 0
        outbid = b < n and terms.usd_per_slot_h[k, t + j] > terms.usd_per_slot_h[k, t + j - 1]
        ended = j < terms.hour_ticks and (gone or outbid)
        paid = 0.0 if terms.refund and ended else p
        best = min(best, (paid - gain) * j * terms.tick_h + idle[b])
        if gone:
            break
        if j == terms.hour_ticks and b < n:
            best = min(best, (p - gain) * j * terms.tick_h + hours[k, b])
    return float(best)


@compiled
def _hourly(terms: Terms, mu: float, begin: int, end: int) -> float:
    """V(mu) under a rule by the hour."""
    pools = terms.speed.shape[0]
    n = end - begin
    idle = np.zeros(n + 1)
    hours = np.full((pools, n + 1), np.inf)
    reliable = 0.0
    for i in range(n - 1, -1, -1):
        t = begin + i
        reliable = (terms.on_demand_usd_per_work_h - mu) * terms.tick_h + min(idle[i + 1], reliable)
        best = min(idle[i + 1], mu * terms.start_h + reliable)
        for k in range(pools):
            if terms.capacity[k, t] > 0:
                hours[k, i] = _hour(terms, k, (t, i, n), idle, hours, mu)
                best = min(best, mu * terms.speed[k] * terms.start_h + hours[k, i])
        idle[i] = best
    return float(idle[0])


@compiled
def _dual(terms: Terms, mu: float, span: tuple[int, int], work_h: float, slots: int) -> float:
    """g(mu)"""
    begin, end = span
    if terms.hour_ticks > 0:
        return slots * _hourly(terms, mu, begin, end) + mu * work_h
    return slots * _seconds(terms, mu, begin, end) + mu * work_h


@compiled
def _bound(terms: Terms, span: tuple[int, int], work_h: float, slots: int) -> float:
    """max over mu of g(mu), by golden section between free and well above on demand."""
    lo, hi = 0.0, 3.0 * terms.on_demand_usd_per_work_h
    a, b = hi - GOLDEN * (hi - lo), lo + GOLDEN * (hi - lo)
    ga, gb = _dual(terms, a, span, work_h, slots), _dual(terms, b, span, work_h, slots)
    best = max(0.0, ga, gb)
    while hi - lo > PRECISION * terms.on_demand_usd_per_work_h:
        if ga < gb:
            lo, a, ga = a, b, gb
            b = lo + GOLDEN * (hi - lo)
            gb = _dual(terms, b, span, work_h, slots)
        else:
            hi, b, gb = b, a, ga
            a = hi - GOLDEN * (hi - lo)
            ga = _dual(terms, a, span, work_h, slots)
        best = max(best, ga, gb)
    return best


def terms_of(market: Market, start_s: float, refunds: bool = True) -> Terms:
    """Without `refunds` nothing is ever given back: what knowing prices and capacity alone is worth."""
    rule = market.rule
    hour_ticks = round(HOUR_S / market.tick_s)
    return Terms(
        usd_per_slot_h=market.price / market.slots[:, None],
        capacity=market.capacity,
        speed=market.speed,
        on_demand_usd_per_work_h=float(
            np.min(market.on_demand_usd_per_h / (market.slots * market.speed))
        ),
        tick_h=market.tick_s / HOUR_S,
        start_h=start_s / HOUR_S,
        free_ticks=hour_ticks if refunds and rule.refund == "first_hour" else 0,
        hour_ticks=hour_ticks if rule.quantum_s >= HOUR_S else 0,
        refund=refunds and rule.refund == "current_quantum",
    )


def lower_bound_usd(terms: Terms, begin: int, end: int, *, work_slot_h: float, slots: int) -> float:
    """No strategy that starts at tick `begin` and ends by tick `end` pays less for this work."""
    return _bound(terms, (begin, min(end, terms.capacity.shape[1])), work_slot_h, slots)
