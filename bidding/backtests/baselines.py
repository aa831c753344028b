"""Strategies as functions: which machines stay and which are bought at a tick.

    orders(world, job, plan, leases, t, work_left) -> Orders

`decided` is the manager's decision (`bidding.decision`), in the mode that a deadline calls for:
`with_deadline` is the manager's own, `spot_first` and `uniform` are those of others. `bidbrain` is
Proteus as printed (equations 4.1 to 4.4, bids over the market price, an hour at a time); the rest
is what people run today.
"""

import numpy as np

from bidding.backtests.engine import (
    ANY_PRICE,
    LEASES_MAX,
    BacktestJob,
    BacktestWorld,
    Decision,
    Leases,
    Orders,
    is_reliable,
    is_shut,
)
from bidding.compiled import Floats, Ints, compiled
from bidding.core import BY_SECOND, HOURLY, Bounds
from bidding.deadline import IDLE, ON_DEMAND, SPOT, guarded
from bidding.decision import ANY_MODE, LOST_MAX, Machines, Need, chosen, planned, weighed
from bidding.traffic import Exchange

ONLY_ON_DEMAND, STANDARD, GREEDY, STUDY, BIDBRAIN, OURS, SPOT_FIRST, UNIFORM = range(8)
NOTHING = -1


@compiled
def keep_all(world: BacktestWorld, leases: Leases) -> Orders:
    pools = world.price.shape[0]
    return Orders(
        leases.machines.copy(), np.zeros(pools, np.int64), np.full(pools, ANY_PRICE), False
    )


@compiled
def slots_held(world: BacktestWorld, leases: Leases) -> int:
    total = 0
    for row in range(LEASES_MAX):
        total += leases.machines[row] * world.slots[leases.pool[row]]
    return total


@compiled
def slots_by_pool(world: BacktestWorld, leases: Leases) -> Floats:
    held = np.zeros(world.price.shape[0])
    for row in range(LEASES_MAX):
        held[leases.pool[row]] += leases.machines[row] * world.slots[leases.pool[row]]
    return held


@compiled
def cheapest(world: BacktestWorld, plan: Decision, t: int, per_work: bool) -> int:
    """Return the cheapest allowed spot pool with capacity, per machine-slot or per work."""
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
def only_on_demand(world: BacktestWorld, job: BacktestJob, leases: Leases) -> Orders:
    orders = keep_all(world, leases)
    k = world.price.shape[0] - 1
    missing = job.slots - slots_held(world, leases)
    orders.buy[k] = max(0, missing) // world.slots[k]
    return orders


@compiled
def standard(
    world: BacktestWorld, job: BacktestJob, plan: Decision, leases: Leases, t: int
) -> Orders:
    """Follow Spot Fleet's default: the lowest price now, held until it is lost.

    It bids the on-demand price.
    """
    orders = keep_all(world, leases)
    k = cheapest(world, plan, t, False)
    missing = job.slots - slots_held(world, leases)
    if k != NOTHING and missing > 0:
        orders.buy[k] = missing // world.slots[k]
        orders.bid[k] = on_demand_bid(world, plan, k)
    return orders


@compiled
def on_demand_bid(world: BacktestWorld, plan: Decision, k: int) -> float:
    """Return the on-demand price of this pool's machines, if bids exist, else `ANY_PRICE`."""
    last = world.price.shape[0] - 1
    per_work = world.price[last, 0] / (world.slots[last] * world.speed[last])
    return per_work * world.slots[k] * world.speed[k] if plan.bid_on_demand else ANY_PRICE


@compiled
def greedy(
    world: BacktestWorld, job: BacktestJob, plan: Decision, leases: Leases, t: int
) -> Orders:
    """Keep all machines in the pool with the cheapest work now, at any cost of moving."""
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
def study(world: BacktestWorld, job: BacktestJob, plan: Decision, leases: Leases, t: int) -> Orders:
    """Follow the pricing study: buy the cheapest work at the start, and when re-choosing."""
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
def outbids(world: BacktestWorld, delta: float) -> bool:
    """Return whether the price can take away a machine whose bid is `delta` above it."""
    return bool(world.bids and delta < ANY_PRICE / 2)


@compiled
def known_delta(world: BacktestWorld, delta: float) -> int:
    """Return the index of the nearest smaller known delta, the safe side; -1 if there is none."""
    return int(np.searchsorted(world.deltas, delta + 1e-12, side="right") - 1)


@compiled
def beta_of(world: BacktestWorld, k: int, delta: float, hours: float, t: int) -> float:
    """Return BidBrain's chance of losing a machine of pool k within these hours.

    It follows from prices and from capacity.
    """
    stays = np.exp(-world.hazard_per_h[k, t] * hours)
    if outbids(world, delta):
        i = known_delta(world, delta)
        stays *= (1.0 - world.evicted_in_1h[k, i]) ** hours if i >= 0 else 0.0
    return float(1.0 - stays)


@compiled
def hazard_of(world: BacktestWorld, k: int, bid: float, t: int) -> float:
    """Return the risk of a bid as a rate per hour, with the mood of the price included."""
    if is_reliable(world, k):
        return 0.0
    hazard, delta = world.hazard_per_h[k, t], bid - world.price[k, t]
    if outbids(world, delta):
        i = known_delta(world, delta)
        beta = world.evicted_in_mood[k, world.mood[k, t], i] if i >= 0 else 1.0
        hazard = min(hazard - np.log1p(-min(beta, LOST_MAX)), -np.log1p(-LOST_MAX))
    return float(hazard)


@compiled
def bidbrain(world: BacktestWorld, job: BacktestJob, leases: Leases, t: int) -> Orders:
    """Add the best (pool, bid) if it lowers E.

    At the end of its hour an allocation is renewed unless E is lower without it.
    """
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
def footprint_e(
    world: BacktestWorld, job: BacktestJob, leases: Leases, t: int, extra: int, bid: float
) -> float:
    """Return E_A of the held machines (4.4), with the missing ones bought in pool `extra`.

    If `extra` is `NOTHING`, no machine is added.
    """
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
def decided(
    world: BacktestWorld,
    job: BacktestJob,
    plan: Decision,
    leases: Leases,
    now: tuple[int, float, int],
    tight: bool,
) -> Orders:
    """Ask the manager's decision (`bidding.decision`) with the columns of a market.

    `now` is the tick, the work left and the mode that a deadline calls for.
    """
    t, work_left, mode = now
    machines, rows = machines_of(world, job, plan, leases, t)
    pools = world.price.shape[0]
    haste = plan.haste if mode == ANY_MODE else np.inf
    bounds = Bounds(
        1,
        job.slots,
        np.inf,
        np.inf,
        0.0,
        work_left,
        haste,
        job.recovery_h,
        job.manager_usd_per_h,
        job.manager_usd_per_h,
        Exchange(job.exchange_gb_per_work, 1, 0.0),
    )
    need = Need(
        job.start_h,
        job.morph_h,
        job.recovery_h,
        needed_h(world, job, machines, t, work_left),
        job.slots,
        slots_held(world, leases) > 0,
    )
    known = weighed(machines, need)
    walks = planned(machines, known, bounds, mode, tight, pools)
    rates = rates_of(machines, walks.steps, job)
    home_rates = np.zeros(walks.homes.shape)
    for h in range(len(walks.homes)):
        n = walks.lengths[h]
        home_rates[h, :n] = rates_of(machines, walks.homes[h, :n].copy(), job)
    choice = chosen(walks, rates, home_rates, bounds, pools)
    orders = keep_all(world, leases)
    orders.keep[:] = 0
    for i in choice.rows:
        if machines.held[i]:
            orders.keep[rows[i]] += 1
        else:
            k = machines.pool[i]
            orders.buy[k] += 1
            if world.bids and not is_reliable(world, k):
                delta = world.deltas[known.choice[i] - machines.first[i]]
                orders.bid[k] = world.price[k, t] + delta
    return Orders(orders.keep, orders.buy, orders.bid, choice.unfinished)


@compiled
def needed_h(
    world: BacktestWorld, job: BacktestJob, machines: Machines, t: int, work_left: float
) -> float:
    """Return how long machines are needed: until the fastest are done, or until the deadline."""
    fastest = 0.0
    for i in range(len(machines.slots)):
        slots = job.slots // machines.slots[i] * machines.slots[i]
        fastest = max(fastest, slots * machines.speed[i])
    hours = work_left / fastest**job.scaling if fastest > 0 else np.inf
    return min(hours, (job.finish_tick - t) * world.tick_h) if job.finish_tick > 0 else hours


@compiled
def rates_of(machines: Machines, steps: Ints, job: BacktestJob) -> Floats:
    """Return the throughput per hour after each machine of the walk."""
    rates, power = np.empty(len(steps)), 0.0
    for j in range(len(steps)):
        power += machines.slots[steps[j]] * machines.speed[steps[j]]
        rates[j] = power**job.scaling
    return rates


@compiled
def machines_of(
    world: BacktestWorld, job: BacktestJob, plan: Decision, leases: Leases, t: int
) -> tuple[Machines, Ints]:
    """Return a market at one tick in the decision's form, and the lease of each row."""
    pools = world.price.shape[0]
    held, offered = rows_held(world, job, leases, t), pools_offered(plan)
    n, begins = len(held) + len(offered), len(held)
    deltas = len(world.deltas) if world.bids else 1
    pool, lease = np.empty(n, np.int64), np.full(n, NOTHING)
    lease[:begins] = held
    pool[:begins] = leases.pool[held]
    pool[begins:] = offered
    first, hazards = np.zeros(n + 1, np.int64), np.empty(n * deltas)
    age_h, count, blocked = np.zeros(n), np.empty(n, np.int64), np.zeros(n, np.bool_)
    reliable = pool == pools - 1
    for i in range(n):
        k, row = pool[i], lease[i]
        many = row == NOTHING and world.bids and not reliable[i]
        first[i + 1] = first[i] + (deltas if many else 1)
        for j in range(first[i], first[i + 1]):
            above = world.price[k, t] + world.deltas[j - first[i]] if many else ANY_PRICE
            bid = above if row == NOTHING else leases.bid[row]
            hazards[j] = hazard_of(world, k, bid, t)
        count[i] = job.slots // world.slots[k] if row == NOTHING else leases.machines[row]
        if row == NOTHING:
            blocked[i] = world.capacity[k, t] <= 0 or is_shut(leases, k, t)
        else:
            age_h[i] = (t - leases.begun[row]) * world.tick_h
    is_held = lease != NOTHING
    on_demand_rule = HOURLY if world.rule >= HOURLY else BY_SECOND  # nothing is refunded there
    rule = np.where(reliable, on_demand_rule, world.rule)
    machines = Machines(
        rule,
        world.losses_seen[:, t][pool],
        world.price[:, t][pool],
        np.zeros(n),
        np.zeros(n),
        np.where(rule >= HOURLY, 1.0, 0.0),
        age_h,
        world.slots[pool],
        world.speed[pool],
        count,
        pool,
        world.region[pool],
        world.zone[pool],
        np.full(n, world.zone_usd_per_gb),
        np.full(n, world.region_usd_per_gb),
        is_held,
        is_held & (age_h < job.start_h - 1e-9),
        np.zeros(n, np.bool_),
        blocked,
        reliable,
        first,
        hazards[: first[n]],
    )
    return machines, lease


@compiled
def starts(world: BacktestWorld, job: BacktestJob, leases: Leases, row: int, t: int) -> bool:
    """Return whether the machines of a row do not work yet."""
    return bool((t - leases.begun[row]) * world.tick_h < job.start_h - 1e-9)


@compiled
def rows_held(world: BacktestWorld, job: BacktestJob, leases: Leases, t: int) -> Ints:
    """Return the rows of leases in the decision's order: working ones first, then by pool."""
    pools = world.price.shape[0]
    rows, keys = np.empty(LEASES_MAX, np.int64), np.empty(LEASES_MAX, np.int64)
    n = 0
    for row in range(LEASES_MAX):
        if leases.machines[row] > 0:
            k, starting = leases.pool[row], starts(world, job, leases, row, t)
            rows[n], keys[n] = row, (pools if starting else 0) + (k + 1) % pools
            n += 1
    return rows[:n][np.argsort(keys[:n], kind="mergesort")]


@compiled
def pools_offered(plan: Decision) -> Ints:
    """Return the pools that may be bought from, on demand first."""
    pools = len(plan.allowed)
    order = (np.arange(pools) + pools - 1) % pools
    return order[plan.allowed[order]]


@compiled
def mode_now(world: BacktestWorld, leases: Leases) -> int:
    mode = IDLE
    for row in range(LEASES_MAX):
        if leases.machines[row] > 0:
            mode = ON_DEMAND if is_reliable(world, leases.pool[row]) else max(mode, SPOT)
            if mode == ON_DEMAND:
                return ON_DEMAND
    return mode


@compiled
def rest_h(
    world: BacktestWorld, job: BacktestJob, leases: Leases, t: int, work_left: float
) -> float:
    """Return in how many hours what works now does the rest."""
    power = 0.0
    for row in range(LEASES_MAX):
        if leases.machines[row] > 0 and not starts(world, job, leases, row, t):
            k = leases.pool[row]
            power += leases.machines[row] * world.slots[k] * world.speed[k]
    return work_left / power**job.scaling if power > 0 else np.inf


@compiled
def time_and_work(
    world: BacktestWorld, job: BacktestJob, t: int, work_left: float
) -> tuple[float, float]:
    """Return the hours to the deadline, and the hours of the rest on demand at full size."""
    last = world.price.shape[0] - 1
    machines = job.slots // world.slots[last]
    rate = (machines * world.slots[last] * world.speed[last]) ** job.scaling
    return (job.finish_tick - t) * world.tick_h, work_left / rate


@compiled
def with_deadline(
    world: BacktestWorld, job: BacktestJob, plan: Decision, leases: Leases, t: int, work_left: float
) -> tuple[int, bool]:
    """Return the mode of the manager's guarded table, and whether time is tight."""
    time_h, work_h = time_and_work(world, job, t, work_left)
    left_h = (time_h, work_h, rest_h(world, job, leases, t, work_left))
    margin_h = job.start_h + job.morph_h + job.recovery_h + world.tick_h
    start_h = job.start_h + job.morph_h
    now = mode_now(world, leases)
    mode = guarded(plan.book, left_h, (margin_h, start_h), plan.phase[t], now)
    return mode, bool(time_h - work_h <= margin_h + start_h)


@compiled
def spot_first(
    world: BacktestWorld, job: BacktestJob, plan: Decision, leases: Leases, t: int, work_left: float
) -> int:
    """Use spot if there is some, else nothing, until only on demand can meet the deadline."""
    time_h, need_h = time_and_work(world, job, t, work_left)
    d = job.start_h + job.morph_h + job.recovery_h + world.tick_h
    mode = SPOT if plan.phase[t] < 2 else IDLE
    if time_h - need_h <= d or mode_now(world, leases) == ON_DEMAND:
        mode = ON_DEMAND
    return mode


@compiled
def uniform(
    world: BacktestWorld, job: BacktestJob, plan: Decision, leases: Leases, t: int, work_left: float
) -> int:
    """Follow Uniform Progress, as we read it.

    Spot is kept while it lasts. If there is none and progress is below an even pace, on demand
    fills in, until progress is ahead by two changeovers. Near the deadline on demand is used in any
    case.
    """
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
    return mode


@compiled
def orders_of(
    world: BacktestWorld, job: BacktestJob, plan: Decision, leases: Leases, t: int, work_left: float
) -> Orders:
    """Return the orders of the plan's strategy; the one interface to all strategies."""
    if plan.policy == ONLY_ON_DEMAND:
        return only_on_demand(world, job, leases)
    if plan.policy == STANDARD:
        return standard(world, job, plan, leases, t)
    if plan.policy == GREEDY:
        return greedy(world, job, plan, leases, t)
    if plan.policy == STUDY:
        return study(world, job, plan, leases, t)
    if plan.policy == BIDBRAIN:
        return bidbrain(world, job, leases, t)
    mode, tight = int(ANY_MODE), False
    if plan.policy == SPOT_FIRST:
        mode = spot_first(world, job, plan, leases, t, work_left)
    elif plan.policy == UNIFORM:
        mode = uniform(world, job, plan, leases, t, work_left)
    elif job.finish_tick > 0:
        mode, tight = with_deadline(world, job, plan, leases, t, work_left)
    # Asked in one place, because the whole decision is compiled into each place that asks it.
    return decided(world, job, plan, leases, (t, work_left, mode), tight)
