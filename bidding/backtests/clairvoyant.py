"""The least that a buyer who knows the future pays: a lower bound for every strategy.

Relaxed for one slot of the job, in work-hours w of one slot of speed one:
    g(mu) = n V(mu) + mu W,   V(mu) = min over paths through time of  cost - mu work
Weak duality: g(mu) is at most the least cost of W work with n slots, for every mu >= 0 (machines
meet only in ways that cost more: stalls, capacity, poor scaling). V is a shortest path over ticks:
    idle(t)  = min( idle(t+1), start in any pool that has capacity )
    start    = mu start_h + either a stretch that is refunded or hold(t)
    hold(t)  = (p - mu) dt + min( idle(t+1), hold(t+1) if the pool still has capacity )
If a pool keeps less capacity than n slots could fill, some machines are taken and the others stay
(the newest go, so a buyer loses nothing if enough for n slots is left). No more than those are
refunded: each of the r refunds that are possible in pool k at tick t costs a fee f >= 0, and a fee
r f is given back,
    g(mu, f) = n V(mu, f) + mu W - sum r f    also a bound, for all fees; they are searched too
Under rules by the hour, hold goes hour by hour at the price of the hour's first tick, and an hour
may end free wherever the price rises (some bid is outbid exactly there). g is concave; the best mu
is searched, and the bound holds for any mu that the search finds.
"""

from typing import NamedTuple

import numpy as np

from bidding.compiled import Flags, Floats, Ints, compiled
from bidding.markets.grid import Market
from cloud.clock import HOUR_S

GOLDEN = 0.6180339887498949
PRECISION = 1e-4  # the search for mu ends at this share of the on-demand price
NOTHING = -1
STEPS_UP, PATIENCE, HOPE, HOPE_LEAST = 600, 10, 0.5, 1e-3


class Terms(NamedTuple):
    """A market as one slot of the job sees it. Times are in hours, counts in ticks."""

    usd_per_slot_h: Floats  # [pool, tick]
    capacity: Ints  # [pool, tick]
    machine_slots: Ints  # [pool]
    speed: Floats  # [pool]
    on_demand_usd_per_work_h: float
    on_demand_speed: float
    tick_h: float
    start_h: float
    free_ticks: int  # a stretch shorter than this is free when the cloud ends it
    hour_ticks: int  # 0: by the second
    refund: bool  # the current hour is free when the cloud ends it


@compiled
def _taken(terms: Terms, k: int, t: int, slots: int) -> int:
    """Return how many of `slots` slots pool k takes at most as tick t begins."""
    machines = min(terms.capacity[k, t - 1], -(-slots // terms.machine_slots[k]))
    return int(max(0, machines - terms.capacity[k, t]) * terms.machine_slots[k])


class _Path(NamedTuple):
    """The work of a shortest path, and how many refunds it gets at [pool, tick]."""

    work_h: float
    refunds: Floats


class _Sheet(NamedTuple):
    """The inputs that all paths through a span share, and room for one path."""

    fee: Floats  # [pool, tick]: the fee of a refund
    takes: Ints  # [pool, tick]: the tick at which that pool takes machines next
    what: Ints  # [tick]: the pool to start from idle
    until: Ints  # [tick]: the end of that stretch if it is refunded
    stays: Flags  # [pool, tick], on demand last: the machine is held on


@compiled
def _sheet(terms: Terms, span: tuple[int, int], slots: int) -> _Sheet:
    begin, end = span
    pools, n = terms.speed.shape[0], end - begin
    takes = np.full((pools, n + 1), n + 1 + terms.free_ticks)
    for k in range(pools):
        for i in range(n - 2, -1, -1):
            taken = _taken(terms, k, begin + i + 1, slots) > 0
            takes[k, i] = i + 1 if taken else takes[k, i + 1]
    stays = np.zeros((pools + 1, n), np.bool_)
    return _Sheet(
        np.zeros((pools, n + 1)), takes, np.zeros(n, np.int64), np.zeros(n, np.int64), stays
    )


@compiled
def _seconds(terms: Terms, mu: float, span: tuple[int, int], sheet: _Sheet) -> float:
    """Return V(mu) under a rule by the second, and write its path on the sheet."""
    begin, end = span
    pools, n, never = terms.speed.shape[0], end - begin, end - begin + 1 + terms.free_ticks
    dt, pace = terms.tick_h, terms.on_demand_speed
    fee, takes, what, until, stays = sheet
    idle, hold, reliable = np.zeros(n + 1), np.zeros(pools), 0.0
    for i in range(n - 1, -1, -1):
        t = begin + i
        stays[pools, i] = i + 1 < n and reliable < idle[i + 1]
        spent = (terms.on_demand_usd_per_work_h - mu) * pace * dt
        reliable = spent + min(idle[i + 1], reliable)
        best, place, given_back = idle[i + 1], NOTHING, 0
        if mu * pace * terms.start_h + reliable < best:
            best, place = mu * pace * terms.start_h + reliable, pools
        for k in range(pools):
            if terms.capacity[k, t] <= 0:
                continue
            gain, after = mu * terms.speed[k], idle[i + 1]
            stays[k, i] = i + 1 < n and terms.capacity[k, t + 1] > 0 and hold[k] < after
            if stays[k, i]:
                after = hold[k]
            hold[k] = (terms.usd_per_slot_h[k, t] - gain) * dt + after
            value, j, back = hold[k], takes[k, i], 0
            while j - i < terms.free_ticks:
                refunded = -gain * (j - i) * dt + fee[k, j] + idle[j]
                if refunded < value:
                    value, back = refunded, j
                j = never if terms.capacity[k, begin + j] <= 0 else takes[k, j]
            if gain * terms.start_h + value < best:
                best, place, given_back = gain * terms.start_h + value, k, back
        idle[i], what[i], until[i] = best, place, given_back
    return float(idle[0])


@compiled
def _along(terms: Terms, sheet: _Sheet) -> _Path:
    """Follow the path on the sheet forwards; return its work and refunds."""
    pools, n = terms.speed.shape[0], len(sheet.what)
    refunds, work_h, i = np.zeros(sheet.fee.shape), 0.0, 0
    while i < n:
        k, first = sheet.what[i], i
        if k == NOTHING:
            i += 1
            continue
        if sheet.until[i] > 0:
            i = sheet.until[i]
            refunds[k, i] += 1.0
        else:
            while sheet.stays[k, i]:
                i += 1
            i += 1
        speed = terms.on_demand_speed if k == pools else terms.speed[k]
        work_h += speed * ((i - first) * terms.tick_h - terms.start_h)
    return _Path(work_h, refunds)


@compiled
def _hour(
    terms: Terms, k: int, at: tuple[int, int, int, int], idle: Floats, hours: Floats, mu: float
) -> float:
    """Return the least cost of an hour that begins now in pool k, and of all that follows."""
    t, i, n, slots = at
    p, gain = terms.usd_per_slot_h[k, t], mu * terms.speed[k]
    best = np.inf
    for j in range(1, terms.hour_ticks + 1):
        b = i + j
        if b > n:
            break
        gone = b < n and terms.capacity[k, t + j] <= 0
        outbid = b < n and terms.usd_per_slot_h[k, t + j] > terms.usd_per_slot_h[k, t + j - 1]
        taken = b < n and _taken(terms, k, t + j, slots) > 0
        ended = j < terms.hour_ticks and (taken or outbid)
        paid = 0.0 if terms.refund and ended else p
        best = min(best, (paid - gain) * j * terms.tick_h + idle[b])
        if gone:
            break
        if j == terms.hour_ticks and b < n:
            best = min(best, (p - gain) * j * terms.tick_h + hours[k, b])
    return float(best)


@compiled
def _hourly(terms: Terms, mu: float, span: tuple[int, int], slots: int) -> float:
    """Return V(mu) under a rule by the hour."""
    begin, end = span
    pools = terms.speed.shape[0]
    n, pace = end - begin, terms.on_demand_speed
    idle = np.zeros(n + 1)
    hours = np.full((pools, n + 1), np.inf)
    reliable = 0.0
    for i in range(n - 1, -1, -1):
        t = begin + i
        spent = (terms.on_demand_usd_per_work_h - mu) * pace * terms.tick_h
        reliable = spent + min(idle[i + 1], reliable)
        best = min(idle[i + 1], mu * pace * terms.start_h + reliable)
        for k in range(pools):
            if terms.capacity[k, t] > 0:
                hours[k, i] = _hour(terms, k, (t, i, n, slots), idle, hours, mu)
                best = min(best, mu * terms.speed[k] * terms.start_h + hours[k, i])
        idle[i] = best
    return float(idle[0])


@compiled
def _dual(
    terms: Terms, mu: float, span: tuple[int, int], work: tuple[float, int], sheet: _Sheet
) -> float:
    """Return g(mu)."""
    work_h, slots = work
    if terms.hour_ticks > 0:
        return slots * _hourly(terms, mu, span, slots) + mu * work_h
    return slots * _seconds(terms, mu, span, sheet) + mu * work_h


@compiled
def _bound(terms: Terms, span: tuple[int, int], work_h: float, slots: int) -> float:
    """Return max over mu of g(mu), by golden section between 0 and well above on demand."""
    sheet, work = _sheet(terms, span, slots), (work_h, slots)
    lo, hi = 0.0, 3.0 * terms.on_demand_usd_per_work_h
    a, b = hi - GOLDEN * (hi - lo), lo + GOLDEN * (hi - lo)
    ga, gb = _dual(terms, a, span, work, sheet), _dual(terms, b, span, work, sheet)
    best = max(0.0, ga, gb)
    while hi - lo > PRECISION * terms.on_demand_usd_per_work_h:
        if ga < gb:
            lo, a, ga = a, b, gb
            b = lo + GOLDEN * (hi - lo)
            gb = _dual(terms, b, span, work, sheet)
        else:
            hi, b, gb = b, a, ga
            a = hi - GOLDEN * (hi - lo)
            ga = _dual(terms, a, span, work, sheet)
        best = max(best, ga, gb)
    if terms.free_ticks > 0 and slots > 1:
        best = max(best, _with_fees(terms, span, work, sheet, lo))
    return best


@compiled
def _with_fees(
    terms: Terms, span: tuple[int, int], work: tuple[float, int], sheet: _Sheet, mu: float
) -> float:
    """Return the largest g(mu, fees) found by a bounded number of steps uphill.

    The steps follow subgradients, with their length by Polyak's rule.
    """
    (begin, end), (work_h, slots) = span, work
    room = np.full(sheet.fee.shape, float(slots))
    for k in range(len(terms.speed)):
        for i in range(1, end - begin):
            room[k, i] = min(slots, _taken(terms, k, begin + i, slots))
    scarce = (room > 0) & (room < slots)
    best, best_mu, best_fee = 0.0, mu, sheet.fee.copy()
    hope, failed = HOPE, 0
    least = HOPE_LEAST * terms.on_demand_usd_per_work_h * work_h
    for _ in range(STEPS_UP if scarce.any() else 0):
        fees = float((sheet.fee * room * scarce).sum())
        now = slots * _seconds(terms, mu, span, sheet) + mu * work_h - fees
        failed = 0 if now > best * (1 + HOPE_LEAST) else failed + 1
        if now > best:
            best, best_mu, best_fee = now, mu, sheet.fee.copy()
        if failed > PATIENCE:
            hope, failed, mu = hope / 2, 0, best_mu
            sheet.fee[:] = best_fee
            continue
        path = _along(terms, sheet)
        up_mu = work_h - slots * path.work_h
        up_fee = (slots * path.refunds - room) * scarce
        norm = up_mu * up_mu + float((up_fee * up_fee).sum())
        if norm == 0.0 or hope < HOPE_LEAST:
            break
        step = (max(best, least) * (1 + hope) - now) / norm
        mu = max(0.0, mu + step * up_mu)
        sheet.fee[:] = np.maximum(0.0, sheet.fee + step * up_fee)
    return best


def terms_of(market: Market, start_s: float, refunds: bool = True) -> Terms:
    """Return the market as terms for the bound.

    Without `refunds` nothing is refunded, so the bound shows the worth of knowing prices and
    capacity alone.
    """
    rule = market.rule
    hour_ticks = round(HOUR_S / market.tick_s)
    per_work = market.on_demand_usd_per_h / (market.slots * market.speed)
    return Terms(
        usd_per_slot_h=market.price / market.slots[:, None],
        capacity=market.capacity,
        machine_slots=market.slots,
        speed=market.speed,
        on_demand_usd_per_work_h=float(per_work.min()),
        on_demand_speed=float(market.speed[int(np.argmin(per_work))]),
        tick_h=market.tick_s / HOUR_S,
        start_h=start_s / HOUR_S,
        free_ticks=hour_ticks if refunds and rule.refund == "first_hour" else 0,
        hour_ticks=hour_ticks if rule.quantum_s >= HOUR_S else 0,
        refund=refunds and rule.refund == "current_quantum",
    )


def lower_bound_usd(terms: Terms, begin: int, end: int, *, work_slot_h: float, slots: int) -> float:
    """Return a cost below which no strategy does this work between ticks `begin` and `end`."""
    return _bound(terms, (begin, min(end, terms.capacity.shape[1])), work_slot_h, slots)
