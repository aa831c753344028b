"""The arithmetic of one decision, compiled: what the manager runs and what the backtest runs.

`bidding.decision` puts these functions together.
"""

from typing import NamedTuple

import numpy as np

from bidding.compiled import Flags, Floats, Ints, compiled
from bidding.markets.billing import BillingRule
from bidding.traffic import NO_EXCHANGE, Exchange, Spread, nowhere, place, usd_per_work
from cloud.clock import HOUR_S

BY_SECOND, FIRST_HOUR, HOURLY, HOURLY_REFUND = 0, 1, 2, 3
REFUNDS = {"none": BY_SECOND, "first_hour": FIRST_HOUR, "current_quantum": HOURLY_REFUND}
KEEP_MARGIN = 0.005  # a held machine goes only for one this much cheaper: no flapping,
YOUNG_MARGIN = 0.03  # least of all within its first hour
# Of a footprint at once: what is exchanged one part at a time never fails as a whole.
EXCHANGED = 0.25
HORIZON_H = 24.0  # how far ahead a machine is weighed, if the job needs it that long
ROUNDING = 1e-9
TOTAL, SHARED_TOTAL = range(2)
SHARED = 0.3  # of a pool's losses, how many hit the other pools of its region at the same moment


class Units(NamedTuple):
    """What could be held next, one row per lease or offer, leases first, each kind sorted by name."""

    usd_per_h: Floats  # price now
    expected_usd_per_h: Floats  # with refunds, egress and the hours that will not be had
    share: Floats  # of an hour in which it works
    hazard_per_h: Floats
    slots: Ints
    speed: Floats
    machines: Ints
    pool: Ints
    region: Ints
    margin: Floats  # how much cheaper than this lease another machine must be
    held: Flags
    pinned: Flags  # its time is paid: giving it back now saves nothing
    upfront_usd: Floats  # owed at once per machine when bought
    zone: Ints
    zone_usd_per_gb: Floats  # of what it sends to another zone of its region
    region_usd_per_gb: Floats


class Bounds(NamedTuple):
    """Limits of one decision; infinite where there is none."""

    slots_min: int
    slots_max: int
    usd_per_h_max: float
    budget_left_usd: float
    runway_h: float  # what is left must pay a footprint this long
    work_left: float
    haste: float
    recovery_h: float
    bound_usd_per_h: float  # price of what stays whatever it costs
    bound_expected_usd_per_h: float
    exchange: Exchange = NO_EXCHANGE


class Losses(NamedTuple):
    """What is known of the pools that are held: the worst hazard of each pool and each region, or below zero."""

    worst: Floats  # [pool]
    highest: Floats  # [region]
    sums: Floats  # TOTAL, SHARED_TOTAL


class Best(NamedTuple):
    """The first `taken` machines of the walk, with E; and the runner-up.

    Its cost per hour includes traffic; `kept_usd_per_h` is how much dearer than others its leases
    may be before they are exchanged.
    """

    taken: int
    usd_per_work: float
    other_taken: int
    other_usd_per_work: float
    work_per_h: float
    usd_per_h: float
    kept_usd_per_h: float
    traffic_usd_per_work: float


def code_of(rule: BillingRule) -> int:
    """The billing rule as compiled functions know it."""
    code = REFUNDS[rule.refund]
    return HOURLY if rule.quantum_s >= HOUR_S and code == BY_SECOND else code


@compiled
def alive_h(hazard_per_h: float, hours: float) -> float:
    """A(H) = integral of exp(-h t) from 0 to H: the time a machine is expected to be had."""
    x = hazard_per_h * hours
    return hours if x < 1e-9 else -np.expm1(-x) / hazard_per_h


@compiled
def horizon(work_left_h: float, start_h: float) -> float:
    """As far ahead as the job still needs machines, but no less than what a start is worth while for."""
    return min(HORIZON_H, max(work_left_h, 2.0 * start_h + 0.01))


@compiled
def stalls_of(slots_max: int, held: bool) -> float:
    """How often a change stalls one machine's worth of work per newcomer: a part of the footprint comes,
    and all of it stands still.
    """
    return min(1.0 / EXCHANGED, float(slots_max)) if held else 1.0


@compiled
def margin_of(age_h: float) -> float:
    return YOUNG_MARGIN if age_h < 1.0 else KEEP_MARGIN


@compiled
def outlook(
    rule: int, price: tuple[float, float], h: float, age_h: float, start_h: float, horizon_h: float
) -> tuple[float, float]:
    """Weigh one machine: (dollars, working time) per hour of the stretch whose work is cheapest.

    `price` is (dollars per hour, dollars once). With A(H) = integral of S(t) = exp(-h t) from 0 to
    H, for a machine a hours old:
    without refund      C(H) = p A(H),                                   W(H) = A(H) - start
    first hour free, R = 1 - a of it left
        H <= R          C(H) = p S(H) H - p (1 - S(H)) a
        H >  R          C(H) = p (S(R) R + A(H) - A(R)) - p (1 - S(R)) a
    hour by hour, refunded when evicted, R of the hour left (Proteus, 4.1)
                        C(R) = S(R) p R,                                 W(R) = A(R) - start
    What is paid once, such as egress, is added to C. The machine can always be given up at the end
    of the refundable time, so the better stretch counts.
    """
    p, once_usd = price
    if rule >= HOURLY:
        left = 1.0 - age_h % 1.0
        stays = np.exp(-h * left) if rule == HOURLY_REFUND else 1.0
        return p * stays + once_usd / left, (alive_h(h, left) - start_h) / left
    had = alive_h(h, horizon_h)
    cost, share = (p * had + once_usd) / horizon_h, (had - start_h) / horizon_h
    if rule != FIRST_HOUR or age_h >= 1.0:
        return cost, share
    best_cost, best_share = cost, -1.0
    for end in (min(1.0 - age_h, horizon_h), horizon_h):
        had = alive_h(h, end)
        left = min(1.0 - age_h, end)
        survives = np.exp(-h * left)
        cost = p * (survives * left + had - alive_h(h, left)) - p * (1.0 - survives) * age_h
        cost, share = (cost + once_usd) / end, (had - start_h) / end
        if share > 0 and (best_share <= 0 or cost * best_share < best_cost * share):
            best_cost, best_share = cost, share
    return best_cost, best_share


@compiled
def works_price(units: Units, recovery_h: float) -> Floats:
    """Dollars per hour of one slot at speed one, evictions included; infinite where nothing is worked.

    The work of a machine is what its pool would leave of a job that runs on this pool alone.
    """
    power = units.slots * units.speed
    price = np.full(len(units.share), np.inf)
    for i in range(len(price)):
        if units.share[i] > 0:
            stays = max(1e-3, 1.0 - units.hazard_per_h[i] * recovery_h)
            price[i] = units.expected_usd_per_h[i] / (units.share[i] * stays * power[i])
    return price


@compiled
def order_of(units: Units, recovery_h: float) -> Ints:
    """Cheapest work first; a lease counts as a little cheaper than it is; ties stay in place."""
    price = works_price(units, recovery_h) * (1.0 - units.margin)
    for i in range(len(price)):
        if units.pinned[i]:
            price[i] = -1.0
    return np.argsort(price, kind="mergesort")


@compiled
def walk(units: Units, order: Ints, bounds: Bounds, pools: int, slots_per_pool: int) -> Ints:
    """Machines one by one in that order, as rows of the units, as long as the limits allow."""
    steps = np.empty(bounds.slots_max, dtype=np.int64)
    here = np.zeros(pools, dtype=np.int64)
    n, slots = 0, 0
    usd_per_h, upfront = bounds.bound_usd_per_h, 0.0
    for i in order:
        if not units.share[i] > 0:
            continue
        for _ in range(units.machines[i]):
            more = usd_per_h + units.usd_per_h[i]
            owed = upfront + (0.0 if units.held[i] else units.upfront_usd[i])
            payable = (
                more <= bounds.usd_per_h_max
                and owed + more * bounds.runway_h <= bounds.budget_left_usd
            )
            in_pool = here[units.pool[i]] + units.slots[i]
            full = slots + units.slots[i] > bounds.slots_max or in_pool > slots_per_pool
            if full or not payable:
                break
            here[units.pool[i]] = in_pool
            slots, usd_per_h, upfront = slots + units.slots[i], more, owed
            steps[n] = i
            n += 1
        if slots == bounds.slots_max:
            break
    return steps[:n]


@compiled
def best_prefix(units: Units, steps: Ints, rates: Floats, bounds: Bounds, pools: int) -> Best:
    """The prefix with the lowest E = C / W, grown while the next machine's own work stays cheap.

    `rates` is the throughput per hour after each machine. W loses what evictions cost all; see `stalled`.
    C includes what the work sends between zones, and so does the limit per hour.
    """
    n = len(steps)
    costs, works = np.zeros(n), np.zeros(n)
    kept, traffic = np.zeros(n), np.zeros(n)
    spread = nowhere(pools)
    usd_per_h, kept_usd = bounds.bound_usd_per_h, 0.0
    cost = bounds.bound_expected_usd_per_h
    power = useful = 0.0
    slots = 0
    losses = Losses(np.full(pools, -1.0), np.full(pools, -1.0), np.zeros(2))
    for j in range(n):
        i = steps[j]
        cost += units.expected_usd_per_h[i]
        slots += units.slots[i]
        power += units.slots[i] * units.speed[i]
        useful += units.slots[i] * units.speed[i] * units.share[i]
        add_hazard(losses, units.pool[i], units.region[i], units.hazard_per_h[i])
        runs = max(0.0, 1.0 - stalled(losses, bounds))
        costs[j] = cost
        works[j] = rates[j] * useful / power * runs if slots >= bounds.slots_min else 0.0
        usd_per_h += units.usd_per_h[i]
        kept_usd += units.margin[i] * abs(units.expected_usd_per_h[i])
        kept[j] = kept_usd
        put(units, i, spread)
        traffic[j] = usd_per_work(spread, bounds.exchange)
        if traffic[j] > 0.0:
            costs[j] += traffic[j] * works[j]
            if usd_per_h + traffic[j] * rates[j] > bounds.usd_per_h_max:
                works[j] = 0.0
    best = _grown(costs, works, bounds)
    k = best.taken - 1
    if k < 0:
        return best
    return Best(
        best.taken,
        best.usd_per_work,
        best.other_taken,
        best.other_usd_per_work,
        works[k],
        costs[k],
        kept[k],
        traffic[k],
    )


@compiled
def put(units: Units, i: int, spread: Spread) -> None:
    """Add one machine of a row to the spread of a footprint."""
    place(
        spread,
        units.slots[i],
        (units.zone[i], units.region[i]),
        (units.zone_usd_per_gb[i], units.region_usd_per_gb[i]),
    )


@compiled
def traffic_of(units: Units, rows: Ints, bounds: Bounds, pools: int) -> float:
    """Return what a footprint pays for traffic per work."""
    spread = nowhere(pools)
    for i in rows:
        put(units, i, spread)
    return usd_per_work(spread, bounds.exchange)


@compiled
def homes_of(units: Units, order: Ints, bounds: Bounds) -> Ints:
    """Return the zones that a footprint may keep to; none where traffic between zones is free."""
    found = np.empty(len(order), np.int64)
    n, dear = 0, False
    for i in order:
        if units.share[i] > 0:
            dear = dear or units.zone_usd_per_gb[i] > 0.0 or units.region_usd_per_gb[i] > 0.0
            known = False
            for k in range(n):
                known = known or found[k] == units.zone[i]
            if not known:
                found[n] = units.zone[i]
                n += 1
    return found[:n] if dear and n > 1 and bounds.exchange.gb_per_work > 0.0 else found[:0]


@compiled
def home_order(units: Units, order: Ints, zone: int) -> Ints:
    """Return the order in which the machines of a zone come first, then those of its region."""
    region = -1
    for i in order:
        if units.zone[i] == zone:
            region = units.region[i]
    found = np.empty(len(order), np.int64)
    n = 0
    for away in range(3):
        for i in order:
            apart = 0 if units.zone[i] == zone else 1 if units.region[i] == region else 2
            if apart == away:
                found[n] = i
                n += 1
    return found


@compiled
def add_hazard(losses: Losses, k: int, region: int, hazard_per_h: float) -> None:
    """One more machine of pool k. A pool loses its machines together: it counts once, at its worst."""
    before = losses.worst[k]
    if hazard_per_h <= before:
        return
    losses.worst[k] = hazard_per_h
    losses.sums[TOTAL] += hazard_per_h - max(0.0, before)
    if hazard_per_h > losses.highest[region]:
        losses.sums[SHARED_TOTAL] += hazard_per_h - max(0.0, losses.highest[region])
        losses.highest[region] = hazard_per_h


@compiled
def stalled(losses: Losses, bounds: Bounds) -> float:
    """Share of the time that evictions cost all; pools of one region have a share c of their losses in common.

    L     = sum over regions of  (1 - c) sum_k h_k + c max_k h_k      for pools k that are held
    share = L recovery
    """
    events = (1.0 - SHARED) * losses.sums[TOTAL] + SHARED * losses.sums[SHARED_TOTAL]
    return float(events * bounds.recovery_h)


@compiled
def _grown(costs: Floats, works: Floats, bounds: Bounds) -> Best:
    """Work grows in stairs where microbatches do not divide, so that whole stairs are looked at."""
    e = np.full(len(works), np.inf)
    for j in range(len(works)):
        if works[j] > 0:
            e[j] = costs[j] / works[j]
    lowest = -1
    for j in range(len(e)):
        if e[j] < np.inf and (lowest < 0 or e[j] < e[lowest]):
            lowest = j
    if lowest < 0:
        return Best(0, np.inf, 0, np.inf, 0.0, 0.0, 0.0, 0.0)
    best = lowest
    allowed = (1.0 + bounds.haste) * abs(e[lowest])
    for j in range(lowest + 1, len(e)):
        more = works[j] - works[best]
        if more <= 0 or costs[j] - costs[best] > more * allowed * (1.0 + 1e-9):
            continue
        if bounds.work_left < np.inf and e[j] * bounds.work_left > bounds.budget_left_usd:
            break
        best = j
    other = -1
    for j in range(len(e)):
        if j != best and e[j] < np.inf and (other < 0 or e[j] < e[other]):
            other = j
    runner_up = e[other] if other >= 0 else np.inf
    return Best(best + 1, e[best], other + 1, runner_up, 0.0, 0.0, 0.0, 0.0)


@compiled
def in_parts(units: Units, order: Ints, chosen: Ints, bounds: Bounds) -> Ints:
    """What is held and bought next on the way to the chosen machines: a part is exchanged, the rest waits.

    Of T slots that are chosen, `new` are not held, and `leaving` held ones are not chosen:
        shrink = max(0, leaving - new),                growth = max(0, new - leaving)
        new'   <= growth + part - shrink,              leaving' >= shrink + new' - growth
    where the part is EXCHANGED T, but one whole machine at least. What is held beyond T is an exchange
    that is under way, so that shrink takes from the part.
    Until who leaves has left, both are paid: newcomers are bought as far as the price per hour of all that is
    held allows. If it allows none, a part leaves first, if as many as are needed at least remain.
    """
    taken = np.zeros(len(units.slots), dtype=np.int64)
    for i in chosen:
        taken[i] += 1
    new, leaving, part, held_usd, new_usd = exchanged(units, taken, bounds)
    shrink, growth = max(0, leaving - new), max(0, new - leaving)
    allowed = max(0, part - shrink)
    most_usd = bounds.usd_per_h_max * (1.0 + ROUNDING)
    if new == 0 or (min(new, leaving) <= allowed and held_usd + new_usd <= most_usd):
        return chosen
    parts = np.empty(len(chosen) + leaving, dtype=np.int64)
    n, come, usd_per_h, slots = 0, 0, bounds.bound_usd_per_h, 0
    for i in chosen:
        coming = come + units.slots[i] <= growth + allowed
        if not units.held[i] and not (coming and held_usd + units.usd_per_h[i] <= most_usd):
            continue
        if not units.held[i]:
            come, held_usd = come + units.slots[i], held_usd + units.usd_per_h[i]
        parts[n], n, usd_per_h = i, n + 1, usd_per_h + units.usd_per_h[i]
        slots += units.slots[i]
    least = shrink + max(0, come - growth)
    if come == 0:
        if held_usd <= most_usd and slots + leaving - max(least, allowed) < bounds.slots_min:
            least = 0
        else:
            least = max(least, min(leaving, allowed))
    for i in order:
        rest = units.machines[i] - taken[i] if units.held[i] and units.share[i] > 0 else 0
        for _ in range(rest):
            payable = usd_per_h + units.usd_per_h[i] <= most_usd
            if payable and leaving - units.slots[i] >= least:
                leaving -= units.slots[i]
                parts[n], n, usd_per_h = i, n + 1, usd_per_h + units.usd_per_h[i]
    return parts[:n] if usd_per_h * bounds.runway_h <= bounds.budget_left_usd else chosen


@compiled
def differ(parts: Ints, chosen: Ints) -> bool:
    """Whether a part is exchanged now and the rest waits."""
    return len(parts) != len(chosen) or bool((parts != chosen).any())


@compiled
def exchanged(units: Units, taken: Ints, bounds: Bounds) -> tuple[int, int, int, float, float]:
    """Slots that come, slots that go, how many at once; and the price per hour of what is held, and of what comes."""
    total, new, leaving, largest = 0, 0, 0, 0
    held_usd, new_usd = bounds.bound_usd_per_h, 0.0
    for i in range(len(taken)):
        total += taken[i] * units.slots[i]
        goes = units.machines[i] - taken[i] if units.held[i] and units.share[i] > 0 else 0
        comes = 0 if units.held[i] else taken[i]
        leaving, new = leaving + goes * units.slots[i], new + comes * units.slots[i]
        held_usd += units.machines[i] * units.usd_per_h[i] if units.held[i] else 0.0
        new_usd += comes * units.usd_per_h[i]
        if goes > 0 or comes > 0:
            largest = max(largest, units.slots[i])
    part = max(int(np.ceil(EXCHANGED * total)), largest)
    return new, leaving, part, held_usd, new_usd
