"""Who decides: every strategy answers the same question, which machines stay and which are bought.

    orders(world, job, plan, leases, t, work_left) -> Orders

`ours` is the manager's own arithmetic (`bidding.core`); `bidbrain` is Proteus as printed (equations
4.1 to 4.4, bids over the market price, an hour at a time); the others are what people run today.
"""

import numpy as np

from bidding.compiled import Floats, Ints, compiled
from bidding.core import (
    BY_SECOND,
    HOURLY,
    Bounds,
    Units,
    best_prefix,
    differ,
    horizon,
    in_parts,
    margin_of,
    order_of,
    outlook,
    stalls_of,
    walk,
)
from bidding.deadline import IDLE, ON_DEMAND, SPOT, guarded
from bidding.engine import (
    ANY_PRICE,
    LEASES_MAX,
    Job,
    Leases,
    Orders,
    Plan,
    World,
    is_reliable,
)

ONLY_ON_DEMAND, STANDARD, GREEDY, STUDY, BIDBRAIN, OURS, SPOT_FIRST, UNIFORM = range(8)
NOTHING = -1
LOST_PER_H_MAX = 13.8  # one in a million is left after an hour


@compiled
def keep_all(world: World, leases: Leases) -> Orders:
    pools = world.price.shape[0]
    return Orders(
        leases.machines.copy(), np.zeros(pools, np.int64), np.full(pools, ANY_PRICE), False
    )


@compiled
def slots_held(world: World, leases: Leases) -> int:
    total = 0
    for row in range(LEASES_MAX):
        total += leases.machines[row] * world.slots[leases.pool[row]]
    return total


@compiled
def slots_by_pool(world: World, leases: Leases) -> Floats:
    held = np.zeros(world.price.shape[0])
    for row in range(LEASES_MAX):
        held[leases.pool[row]] += leases.machines[row] * world.slots[leases.pool[row]]
    return held


@compiled
def cheapest(world: World, plan: Plan, t: int, per_work: bool) -> int:
    """The allowed spot pool with capacity that costs least, per machine-slot or per work."""
    best, lowest = NOTHING, np.inf
    for k in range(world.price.shape[0] - 1):
        if plan.allowed[k] and world.capacity[k, t] > 0:
            p = world.price[k, t] / world.slots[k]
            if per_work:
                p /= world.speed[k]
            if p < lowest:
                best, lowest = k, p
    return best


@compiled
def only_on_demand(world: World, job: Job, leases: Leases) -> Orders:
    orders = keep_all(world, leases)
    k = world.price.shape[0] - 1
    missing = job.slots - slots_held(world, leases)
    orders.buy[k] = max(0, missing) // world.slots[k]
    return orders


@compiled
def standard(world: World, job: Job, plan: Plan, leases: Leases, t: int) -> Orders:
    """Spot Fleet's default: the lowest price now, bidding the on-demand price, held until it is lost."""
    orders = keep_all(world, leases)
    k = cheapest(world, plan, t, False)
    missing = job.slots - slots_held(world, leases)
    if k != NOTHING and missing > 0:
        orders.buy[k] = missing // world.slots[k]
        orders.bid[k] = on_demand_bid(world, plan, k)
    return orders


@compiled
def on_demand_bid(world: World, plan: Plan, k: int) -> float:
    """The on-demand price of this pool's machines, where bids exist."""
    last = world.price.shape[0] - 1
    per_work = world.price[last, 0] / (world.slots[last] * world.speed[last])
    return per_work * world.slots[k] * world.speed[k] if plan.bid_on_demand else ANY_PRICE


@compiled
def greedy(world: World, job: Job, plan: Plan, leases: Leases, t: int) -> Orders:
    """Always all machines where work is cheapest at this moment, whatever a move costs."""
    k = cheapest(world, plan, t, True)
    orders = keep_all(world, leases)
    if k == NOTHING:
        return orders
    here = 0
    for row in range(LEASES_MAX):
        if leases.machines[row] > 0 and leases.pool[row] != k:
            orders.keep[row] = 0
        here += orders.keep[row] * world.slots[k]
    orders.buy[k] = max(0, job.slots - here) // world.slots[k]
    orders.bid[k] = on_demand_bid(world, plan, k)
    return orders


@compiled
def study(world: World, job: Job, plan: Plan, leases: Leases, t: int) -> Orders:
    """The pricing study's: the most work per dollar at the start, and again when it may re-choose."""
    due = plan.rechoose_ticks > 0 and t % plan.rechoose_ticks == 0
    if due:
        return greedy(world, job, plan, leases, t)
    orders = keep_all(world, leases)
    missing = job.slots - slots_held(world, leases)
    if missing > 0:
        k = cheapest(world, plan, t, True)
        if k != NOTHING:
            orders.buy[k] = missing // world.slots[k]
            orders.bid[k] = on_demand_bid(world, plan, k)
    return orders


@compiled
def outbids(world: World, delta: float) -> bool:
    """Whether the price can take away a machine whose bid is so far above it."""
    return bool(world.bids and delta < ANY_PRICE / 2)


@compiled
def known_delta(world: World, delta: float) -> int:
    """Between the deltas that are known the nearest smaller one counts: the safe side. -1 below all."""
    return int(np.searchsorted(world.deltas, delta + 1e-12, side="right") - 1)


@compiled
def beta_of(world: World, k: int, delta: float, hours: float, t: int) -> float:
    """BidBrain's chance of losing a machine of pool k within these hours, from prices and from capacity."""
    stays = np.exp(-world.hazard_per_h[k, t] * hours)
    if outbids(world, delta):
        i = known_delta(world, delta)
        stays *= (1.0 - world.evicted_in_1h[k, i]) ** hours if i >= 0 else 0.0
    return float(1.0 - stays)


@compiled
def hazard_of(world: World, k: int, bid: float, t: int) -> float:
    """As a rate per hour, where the mood of the price counts as well."""
    if is_reliable(world, k):
        return 0.0
    hazard, delta = world.hazard_per_h[k, t], bid - world.price[k, t]
    if outbids(world, delta):
        i = known_delta(world, delta)
        beta = world.evicted_in_mood[k, world.mood[k, t], i] if i >= 0 else 1.0
        hazard += -np.log1p(-beta) if beta < 1.0 else LOST_PER_H_MAX
    return float(min(hazard, LOST_PER_H_MAX))


@compiled
def bidbrain(world: World, job: Job, leases: Leases, t: int) -> Orders:
    """At every decision the best (pool, bid) is added if it lowers E; near its hour's end an
    allocation is renewed only if E is lower with it."""
    orders = keep_all(world, leases)
    hour = max(1, round(1.0 / world.tick_h))
    for row in range(LEASES_MAX):
        if (
            leases.machines[row] > 0
            and (t - leases.begun[row]) % hour == 0
            and t > leases.begun[row]
        ):
            with_it = footprint_e(world, job, leases, t, int(NOTHING), 0.0)
            n = leases.machines[row]
            leases.machines[row] = 0
            without = footprint_e(world, job, leases, t, int(NOTHING), 0.0)
            leases.machines[row] = n
            if without < with_it:
                orders.keep[row] = 0
    missing = job.slots
    for row in range(LEASES_MAX):
        missing -= orders.keep[row] * world.slots[leases.pool[row]]
    if missing <= 0:
        return orders
    best, best_bid, lowest = NOTHING, 0.0, footprint_e(world, job, leases, t, int(NOTHING), 0.0)
    for k in range(world.price.shape[0] - 1):
        if world.capacity[k, t] <= 0:
            continue
        for d in range(len(world.deltas) if world.bids else 1):
            bid = world.price[k, t] + world.deltas[d] if world.bids else ANY_PRICE
            e = footprint_e(world, job, leases, t, k, bid)
            if e < lowest:
                best, best_bid, lowest = k, bid, e
    if best != NOTHING:
        orders.buy[best] = missing // world.slots[best]
        orders.bid[best] = best_bid
    return orders


@compiled
def footprint_e(world: World, job: Job, leases: Leases, t: int, extra: int, bid: float) -> float:
    """E_A of what is held, with the missing machines bought in pool `extra` when one is named (4.4)."""
    hour = max(1, round(1.0 / world.tick_h))
    stays, cost, work, slots = 1.0, job.manager_usd_per_h, 0.0, 0
    rows = np.empty((LEASES_MAX + 1, 4))  # work per hour, omega, beta, dollars per hour
    n = 0
    for row in range(LEASES_MAX + 1):
        new = row == LEASES_MAX
        k = extra if new else leases.pool[row]
        if new and extra == NOTHING:
            break
        count = (job.slots - slots) // world.slots[k] if new else leases.machines[row]
        if count <= 0:
            continue
        left = 1.0 if new else 1.0 - ((t - leases.begun[row]) % hour) * world.tick_h
        margin = (bid if new else leases.bid[row]) - world.price[k, t]
        beta = 0.0 if is_reliable(world, k) else beta_of(world, k, margin, left, t)
        slots += count * world.slots[k]
        stays *= 1.0 - beta
        rows[n, 0] = count * world.slots[k] * world.speed[k]
        rows[n, 1] = left * (1.0 - 0.5 * beta) - (job.start_h if new else 0.0)
        rows[n, 2], rows[n, 3] = beta, count * world.price[k, t] * left
        n += 1
    for i in range(n):
        useful = max(0.0, rows[i, 1] - (1.0 - stays) * job.recovery_h - job.morph_h)
        cost += (1.0 - rows[i, 2] * (1.0 if world.rule >= HOURLY else 0.0)) * rows[i, 3]
        work += rows[i, 0] * useful
    return cost / work if work > 0 else np.inf


@compiled
def ours(world: World, job: Job, plan: Plan, leases: Leases, t: int, work_left: float) -> Orders:
    """The manager's decision: `bidding.core` over every lease and offer."""
    units, bids, rows = units_of(
        world, job, plan, leases, (t, ahead_h(world, job, leases, work_left))
    )
    bounds = Bounds(
        1, job.slots, np.inf, np.inf, 0.0, work_left, plan.haste, job.recovery_h, job.recovery_h,
        job.manager_usd_per_h, job.manager_usd_per_h,
    )  # fmt: skip
    order = order_of(units, job.recovery_h)
    orders = keep_all(world, leases)
    orders.keep[:] = 0
    if waits(world, plan, units, order, t):
        return orders
    pools = world.price.shape[0]
    steps = walk(units, order, bounds, pools, job.slots)
    best = best_prefix(units, steps, rates_of(units, steps, job), bounds, pools)
    target = steps[: best.taken]
    parts = in_parts(units, order, target, bounds)
    for i in parts:
        if units.held[i]:
            orders.keep[rows[i]] += 1
        else:
            orders.buy[units.pool[i]] += 1
            orders.bid[units.pool[i]] = bids[i]
    return Orders(orders.keep, orders.buy, orders.bid, differ(parts, target))


@compiled
def ahead_h(world: World, job: Job, leases: Leases, work_left: float) -> float:
    """How far ahead to look: as long as the fastest machines need for the rest."""
    rate = (job.slots * np.max(world.speed)) ** job.scaling
    return float(horizon(work_left / rate, newcomer_h(job, slots_held(world, leases) > 0)))


@compiled
def newcomer_h(job: Job, held: bool) -> float:
    """What a newcomer does not work at first, and what its coming stalls."""
    return job.start_h + stalls_of(job.slots, held) * job.morph_h


@compiled
def rates_of(units: Units, steps: Ints, job: Job) -> Floats:
    """Throughput per hour after each machine of the walk."""
    rates, power = np.empty(len(steps)), 0.0
    for j in range(len(steps)):
        power += units.slots[steps[j]] * units.speed[steps[j]]
        rates[j] = power**job.scaling
    return rates


@compiled
def waits(world: World, plan: Plan, units: Units, order: Ints, t: int) -> bool:
    """Waiting is better when a pool that sells nothing now sells far cheaper work."""
    away = np.inf
    for k in range(world.price.shape[0] - 1):
        if plan.allowed[k] and world.capacity[k, t] <= 0:
            away = min(away, world.price[k, t] / (world.slots[k] * world.speed[k]))
    if len(order) == 0:
        return False
    i = order[0]
    here = units.expected_usd_per_h[i] / (units.share[i] * units.slots[i] * units.speed[i])
    return bool(here > (1.0 + plan.haste) * away)


@compiled
def units_of(
    world: World, job: Job, plan: Plan, leases: Leases, now: tuple[int, float]
) -> tuple[Units, Floats, Ints]:
    """Columns for the core: leases first, then the offers; with the bid and the row of each.

    `now` is the tick, and how many hours to look ahead.
    """
    t, ahead = now
    pools = world.price.shape[0]
    most = LEASES_MAX + pools
    units = Units(
        np.empty(most), np.empty(most), np.empty(most), np.empty(most), np.empty(most, np.int64),
        np.empty(most), np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64),
        np.zeros(most), np.zeros(most, np.bool_), np.zeros(most, np.bool_), np.zeros(most),
    )  # fmt: skip
    bids, rows = np.full(most, ANY_PRICE), np.full(most, NOTHING)
    held = slots_held(world, leases) > 0
    n = 0  # handed on through int(): for a number that it knows, numba would compile once more
    for row in range(LEASES_MAX):
        if leases.machines[row] > 0:
            fill_lease(world, job, leases, row, (t, int(n), ahead), units)
            rows[n] = row
            n += 1
    for k in range(pools):
        if plan.allowed[k] and world.capacity[k, t] > 0:
            bids[n] = fill_offer(world, job, k, (t, int(n), ahead), units, held)
            n += 1
    cut = Units(
        units.usd_per_h[:n], units.expected_usd_per_h[:n], units.share[:n], units.hazard_per_h[:n],
        units.slots[:n], units.speed[:n], units.machines[:n], units.pool[:n], units.region[:n],
        units.margin[:n], units.held[:n], units.pinned[:n], units.upfront_usd[:n],
    )  # fmt: skip
    return cut, bids, rows


@compiled
def fill_lease(
    world: World, job: Job, leases: Leases, row: int, at: tuple[int, int, float], units: Units
) -> None:
    t, n, ahead = at
    k = leases.pool[row]
    age_h = (t - leases.begun[row]) * world.tick_h
    rule = BY_SECOND if is_reliable(world, k) else world.rule
    hazard = hazard_of(world, k, leases.bid[row], t)
    left_h = max(0.0, job.start_h - age_h)
    cost, share = outlook(rule, (world.price[k, t], 0.0), hazard, age_h, left_h, ahead)
    into_h = age_h - np.floor(age_h + 1e-9)
    pinned = rule >= HOURLY and into_h > 1e-9
    share = max(share, 1e-6) if pinned else share
    put(units, n, (world.price[k, t], cost, share, hazard), k, leases.machines[row])
    units.slots[n], units.speed[n] = world.slots[k], world.speed[k]
    units.region[n], units.margin[n] = world.region[k], margin_of(age_h)
    units.held[n], units.pinned[n] = True, pinned


@compiled
def fill_offer(
    world: World, job: Job, k: int, at: tuple[int, int, float], units: Units, held: bool
) -> float:
    """One row per offer; where bids evict, with the bid that makes its work cheapest."""
    t, n, ahead = at
    p = world.price[k, t]
    rule = BY_SECOND if is_reliable(world, k) else world.rule
    start_h = newcomer_h(job, held)
    choices = len(world.deltas) if world.bids and not is_reliable(world, k) else 1
    lowest, best_bid = np.inf, ANY_PRICE
    for d in range(choices):
        bid = p + world.deltas[d] if choices > 1 else ANY_PRICE
        hazard = hazard_of(world, k, bid, t)
        cost, share = outlook(rule, (p, 0.0), hazard, 0.0, start_h, ahead)
        net = share - min(hazard, 60.0) * job.recovery_h
        if d == 0 or (net > 0 and cost / net < lowest):
            put(units, n, (p, cost, share, hazard), k, job.slots // world.slots[k])
            lowest = cost / net if net > 0 else np.inf
            best_bid = bid
    units.slots[n], units.speed[n] = world.slots[k], world.speed[k]
    units.region[n] = world.region[k]
    return best_bid


@compiled
def put(
    units: Units, n: int, seen: tuple[float, float, float, float], pool: int, machines: int
) -> None:
    units.usd_per_h[n], units.expected_usd_per_h[n] = seen[0], seen[1]
    units.share[n], units.hazard_per_h[n] = seen[2], seen[3]
    units.pool[n], units.machines[n] = pool, machines


@compiled
def mode_now(world: World, leases: Leases) -> int:
    mode = IDLE
    for row in range(LEASES_MAX):
        if leases.machines[row] > 0:
            mode = ON_DEMAND if is_reliable(world, leases.pool[row]) else max(mode, SPOT)
            if mode == ON_DEMAND:
                return ON_DEMAND
    return mode


@compiled
def time_and_work(world: World, job: Job, t: int, work_left: float) -> tuple[float, float]:
    """Hours to the deadline, and hours that the rest takes on demand at full size."""
    last = world.price.shape[0] - 1
    machines = job.slots // world.slots[last]
    rate = (machines * world.slots[last] * world.speed[last]) ** job.scaling
    return (job.finish_tick - t) * world.tick_h, work_left / rate


@compiled
def in_mode(
    world: World, job: Job, plan: Plan, leases: Leases, at: tuple[int, float], mode: int
) -> Orders:
    """Everything in one mode: nothing, all on demand, or the spot machines that `ours` chooses."""
    t, work_left = at
    last = world.price.shape[0] - 1
    if mode == SPOT:
        spot = Plan(
            plan.policy,
            plan.allowed.copy(),
            0,
            0.0,
            np.inf,
            plan.bid_on_demand,
            plan.book,
            plan.phase,
        )
        spot.allowed[last] = False
        orders = ours(world, job, spot, leases, t, work_left)
    else:
        orders = keep_all(world, leases)
    held = 0
    for row in range(LEASES_MAX):
        reliable = is_reliable(world, leases.pool[row])
        if leases.machines[row] > 0 and reliable != (mode == ON_DEMAND):
            orders.keep[row] = 0
        if reliable:
            held += orders.keep[row] * world.slots[last]
    if mode == ON_DEMAND:
        orders.buy[last] = max(0, job.slots - held) // world.slots[last]
    return orders


@compiled
def with_deadline(
    world: World, job: Job, plan: Plan, leases: Leases, t: int, work_left: float
) -> Orders:
    """The manager's decision with a deadline: the mode from the table, behind its guard."""
    now = mode_now(world, leases)
    left_h = time_and_work(world, job, t, work_left)
    margin_h = job.start_h + job.morph_h + job.recovery_h + world.tick_h
    start_h = job.start_h + job.morph_h
    mode = guarded(plan.book, left_h, (margin_h, start_h), plan.phase[t], now)
    orders = in_mode(world, job, plan, leases, (t, work_left), mode)
    tight = left_h[0] - left_h[1] <= margin_h + start_h
    if mode == SPOT and tight and slots_held(world, leases) >= job.slots:
        return keep_all(world, leases)  # a move to a cheaper pool would use up the spare time
    return orders


@compiled
def spot_first(
    world: World, job: Job, plan: Plan, leases: Leases, t: int, work_left: float
) -> Orders:
    """Spot whenever there is some, else nothing, until only on demand can still make it."""
    time_h, need_h = time_and_work(world, job, t, work_left)
    d = job.start_h + job.morph_h + job.recovery_h + world.tick_h
    mode = SPOT if plan.phase[t] < 2 else IDLE
    if time_h - need_h <= d or mode_now(world, leases) == ON_DEMAND:
        mode = ON_DEMAND
    return in_mode(world, job, plan, leases, (t, work_left), mode)


@compiled
def uniform(world: World, job: Job, plan: Plan, leases: Leases, t: int, work_left: float) -> Orders:
    """Our reading of Uniform Progress: spot is kept while it lasts; behind an even pace on demand
    fills in, and is left again when the pace is ahead by two changeovers; a net at the end."""
    time_h, need_h = time_and_work(world, job, t, work_left)
    _, whole_h = time_and_work(world, job, t, job.work_h)
    d = job.start_h + job.morph_h + job.recovery_h + world.tick_h
    total_h = (job.finish_tick - job.begin_tick) * world.tick_h
    even = whole_h * (1.0 - time_h / total_h)
    ahead_by = (whole_h - need_h) - even
    now, spot = mode_now(world, leases), plan.phase[t] < 2
    mode = SPOT if spot else IDLE
    if (now == ON_DEMAND and ahead_by < 2.0 * d * whole_h / total_h) or (
        not spot and ahead_by < 0.0
    ):
        mode = ON_DEMAND
    if time_h - need_h <= 2.0 * d and now != SPOT:
        mode = ON_DEMAND
    if time_h - need_h <= d:
        mode = ON_DEMAND
    return in_mode(world, job, plan, leases, (t, work_left), mode)


@compiled
def orders_of(
    world: World, job: Job, plan: Plan, leases: Leases, t: int, work_left: float
) -> Orders:
    """The one interface: whichever strategy, the same question."""
    if plan.policy == ONLY_ON_DEMAND:
        orders = only_on_demand(world, job, leases)
    elif plan.policy == STANDARD:
        orders = standard(world, job, plan, leases, t)
    elif plan.policy == GREEDY:
        orders = greedy(world, job, plan, leases, t)
    elif plan.policy == STUDY:
        orders = study(world, job, plan, leases, t)
    elif plan.policy == BIDBRAIN:
        orders = bidbrain(world, job, leases, t)
    elif plan.policy == SPOT_FIRST:
        orders = spot_first(world, job, plan, leases, t, work_left)
    elif plan.policy == UNIFORM:
        orders = uniform(world, job, plan, leases, t, work_left)
    elif job.finish_tick > 0:
        orders = with_deadline(world, job, plan, leases, t, work_left)
    else:
        orders = ours(world, job, plan, leases, t, work_left)
    return orders
