"""One job through a market, tick by tick, under any strategy; compiled for speed.

In every tick the cloud evicts, the strategy decides (if something happened, or its period is over),
its orders are carried out, hours are charged, and the job works for the rest of the tick. Every
strategy pays for changes alike: machines start for `start_h`, a change of footprint stalls all
machines for `morph_h`, an eviction for `recovery_h`. A strategy with checkpoints instead pays for
writing them all the time, and loses its work since the last one.
"""

from typing import NamedTuple

import numpy as np

from bidding.compiled import Flags, Floats, Ints, compiled
from bidding.core import FIRST_HOUR, HOURLY, HOURLY_REFUND
from bidding.deadline import Book
from bidding.traffic import Exchange, nowhere, place, usd_per_work

LEASES_MAX = 192
ANY_PRICE = 1_000_000.0  # a bid that nothing outbids
PENALTY_H, DOUBLINGS_MAX = 0.05, 4  # how long the manager does not ask a pool that refused


class BacktestWorld(NamedTuple):
    """A market in arrays by pool, some also by tick, delta or mood; the last is on demand."""

    price: Floats
    capacity: Ints
    hazard_per_h: Floats
    losses_seen: Flags  # [pool, tick]: the pool had taken all of its machines before
    moved: Flags  # [tick]: some price, or whether some pool has capacity, has changed
    slots: Ints
    speed: Floats
    region: Ints
    deltas: Floats
    evicted_in_1h: Floats
    evicted_in_mood: Floats
    mood: Ints
    tick_h: float
    rule: int
    bids: bool
    zone: Ints
    zone_usd_per_gb: float
    region_usd_per_gb: float


class BacktestJob(NamedTuple):
    slots: int
    work_h: float  # slot-hours at speed one
    start_h: float
    morph_h: float
    recovery_h: float
    manager_usd_per_h: float
    scaling: float  # rate = power ** scaling
    begin_tick: int
    finish_tick: int  # of the deadline; 0 without one
    exchange_gb_per_work: float


class Decision(NamedTuple):
    """A strategy as data: its policy, its pools, and its way of keeping state."""

    policy: int
    allowed: Flags  # [pool]
    rechoose_ticks: int  # 0: only when there is a reason
    checkpoint_h: float  # 0: tiers keep the state, nothing is lost
    haste: float
    bid_on_demand: bool
    book: Book  # for deadlines
    phase: Ints  # [tick]: how long some pool has had capacity, or none


class Leases(NamedTuple):
    """The held machines, one row per purchase; a row with no machines is free."""

    pool: Ints
    machines: Ints
    begun: Ints  # tick
    bid: Floats
    hour_usd: Floats  # per machine: owed for the hour under way
    spent_usd: Floats  # per machine: owed since it began
    shut_until: Floats  # [pool]: the tick until which a pool that refused is not asked
    refusals: Ints  # [pool]: refusals in a row


class Orders(NamedTuple):
    """How many machines of each row stay, how many of each pool are bought, and at which bid.

    `unfinished` says that the order is a part of an exchange, which the next tick continues.
    """

    keep: Ints
    buy: Ints
    bid: Floats
    unfinished: bool


class Outcome(NamedTuple):
    cost_usd: float
    runtime_h: float
    lost_h: float  # slot-hours whose work was lost, or that stood still
    evictions: float  # machines
    free_h: float  # slot-hours given back by the cloud
    spot_h: float
    on_demand_h: float
    finished: float
    changes: float


def no_leases(pools: int = LEASES_MAX) -> Leases:
    return Leases(
        pool=np.zeros(LEASES_MAX, np.int64),
        machines=np.zeros(LEASES_MAX, np.int64),
        begun=np.zeros(LEASES_MAX, np.int64),
        bid=np.zeros(LEASES_MAX),
        hour_usd=np.zeros(LEASES_MAX),
        spent_usd=np.zeros(LEASES_MAX),
        shut_until=np.zeros(pools),
        refusals=np.zeros(pools, np.int64),
    )


@compiled
def is_reliable(world: BacktestWorld, pool: int) -> bool:
    return bool(pool == world.price.shape[0] - 1)


@compiled
def evict(world: BacktestWorld, leases: Leases, t: int) -> tuple[int, float, float]:
    """Take machines that are outbid or exceed their pool's capacity, the newest first.

    Return (machines, dollars back, slot-hours back).
    """
    gone, back_usd, back_h = 0, 0.0, 0.0
    place = world.capacity[:, t].copy()
    for row in range(LEASES_MAX):
        n, k = leases.machines[row], leases.pool[row]
        if n == 0 or is_reliable(world, k):
            continue
        lost = n if world.price[k, t] > leases.bid[row] else 0
        place[k] -= n - lost
        if lost > 0:
            usd, hours = take(world, leases, row, lost, t)
            gone, back_usd, back_h = gone + lost, back_usd + usd, back_h + hours
    for k in range(len(place)):
        while place[k] < 0 and not is_reliable(world, k):
            row = newest(leases, k)
            lost = min(leases.machines[row], -place[k])
            place[k] += lost
            usd, hours = take(world, leases, row, lost, t)
            gone, back_usd, back_h = gone + lost, back_usd + usd, back_h + hours
    return gone, back_usd, back_h


@compiled
def newest(leases: Leases, k: int) -> int:
    """Return the row of pool k that was bought last."""
    found = -1
    for row in range(LEASES_MAX):
        if leases.machines[row] > 0 and leases.pool[row] == k:
            found = row if found < 0 or leases.begun[row] > leases.begun[found] else found
    return found


@compiled
def take(world: BacktestWorld, leases: Leases, row: int, lost: int, t: int) -> tuple[float, float]:
    """Remove `lost` machines from a row; return (dollars back, slot-hours back)."""
    usd, hours = refund(world, leases, row, t)
    leases.machines[row] -= lost
    return lost * usd, lost * hours * world.slots[leases.pool[row]]


@compiled
def refund(world: BacktestWorld, leases: Leases, row: int, t: int) -> tuple[float, float]:
    """Return what the cloud refunds per machine that it ends now: (dollars, hours)."""
    age_h = (t - leases.begun[row]) * world.tick_h
    if world.rule == FIRST_HOUR and age_h < 1.0 - 1e-9:
        return leases.spent_usd[row], age_h
    into_h = age_h - np.floor(age_h + 1e-9)
    if world.rule == HOURLY_REFUND:
        return (leases.hour_usd[row], into_h) if into_h > 1e-9 else (0.0, 0.0)
    return 0.0, 0.0


@compiled
def is_shut(leases: Leases, pool: int, t: int) -> bool:
    """Return whether the pool refused lately, so that the manager would not ask it now."""
    return bool(t < leases.shut_until[pool])


@compiled
def granted(
    world: BacktestWorld, leases: Leases, orders: Orders, t: int, holds_on: bool
) -> tuple[Ints, bool]:
    """Return how many ordered machines each pool sells, and whether some pool sells less.

    A pool that refuses is not asked for a while, longer for each refusal in a row. If some pool
    sells less and the strategy `holds_on`, then like the manager it keeps its machines, except in
    pools that sell some.
    """
    pools = world.price.shape[0]
    held, sold, refused = np.zeros(pools, np.int64), np.zeros(pools, np.int64), False
    for row in range(LEASES_MAX):
        held[leases.pool[row]] += min(leases.machines[row], orders.keep[row])
    for k in range(pools):
        wanted = orders.buy[k]
        if wanted <= 0:
            continue
        if orders.bid[k] >= world.price[k, t]:
            sold[k] = min(wanted, max(0, world.capacity[k, t] - held[k]))
        if sold[k] < wanted:
            refused = True
            leases.refusals[k] = 1 if sold[k] > 0 else leases.refusals[k] + 1
            wait_h = PENALTY_H * 2.0 ** min(leases.refusals[k] - 1, DOUBLINGS_MAX)
            leases.shut_until[k] = t + max(1e-9, wait_h / world.tick_h)
        else:
            leases.refusals[k] = 0
    if refused and holds_on:
        for row in range(LEASES_MAX):
            if sold[leases.pool[row]] == 0:
                orders.keep[row] = leases.machines[row]
    return sold, refused


@compiled
def carry_out(leases: Leases, orders: Orders, sold: Ints, t: int) -> int:
    """Give back and buy; return how many machines changed."""
    changed = 0
    for row in range(LEASES_MAX):
        if leases.machines[row] > orders.keep[row]:
            changed += leases.machines[row] - orders.keep[row]
            leases.machines[row] = orders.keep[row]
    row = 0
    for k in range(len(sold)):
        if sold[k] <= 0:
            continue
        while row < LEASES_MAX and leases.machines[row] > 0:
            row += 1
        if row == LEASES_MAX:
            break
        leases.pool[row], leases.machines[row] = k, sold[k]
        leases.begun[row], leases.bid[row] = t, orders.bid[k]
        leases.hour_usd[row] = leases.spent_usd[row] = 0.0
        changed += sold[k]
    return changed


@compiled
def charge(world: BacktestWorld, leases: Leases, t: int, share: float) -> float:
    """Return the cost of the machines for the tick, or for the `share` of it that is used.

    The rest of a begun hour is left to the next job, for every strategy alike.
    """
    total = 0.0
    for row in range(LEASES_MAX):
        n, k = leases.machines[row], leases.pool[row]
        if n == 0:
            continue
        usd = world.price[k, t] * world.tick_h * share
        if world.rule >= HOURLY:
            hour = round(1.0 / world.tick_h)
            since = (t - leases.begun[row]) % hour
            begins = t - since
            if since == 0:
                leases.hour_usd[row] = 0.0
            usd = world.price[k, begins] * world.tick_h * share
        leases.hour_usd[row] += usd
        leases.spent_usd[row] += usd
        total += n * usd
    return total


@compiled
def traffic_usd_per_work(world: BacktestWorld, job: BacktestJob, leases: Leases) -> float:
    """Return what the machines pay for what they send to other zones, per work."""
    spread = nowhere(world.price.shape[0])
    for row in range(LEASES_MAX):
        k = leases.pool[row]
        place(
            spread,
            leases.machines[row] * world.slots[k],
            (world.zone[k], world.region[k]),
            (world.zone_usd_per_gb, world.region_usd_per_gb),
        )
    return usd_per_work(spread, Exchange(job.exchange_gb_per_work, 1, 0.0))


@compiled
def owed_when_given_back(world: BacktestWorld, leases: Leases, orders: Orders, t: int) -> float:
    """Return the cost of the rest of the begun hours of machines that are given back.

    Only rules by the hour charge it.
    """
    if world.rule < HOURLY:
        return 0.0
    total = 0.0
    hour = round(1.0 / world.tick_h)
    for row in range(LEASES_MAX):
        lost = leases.machines[row] - orders.keep[row]
        since = (t - leases.begun[row]) % hour
        if lost > 0 and since > 0:
            k = leases.pool[row]
            total += lost * world.price[k, t - since] * (hour - since) * world.tick_h
    return total


@compiled
def work_rate(
    world: BacktestWorld, job: BacktestJob, leases: Leases, t: int
) -> tuple[float, float, float]:
    """Return (work per hour, slots of spot, slots on demand) in this tick.

    Machines that start during the tick work for the rest of it.
    """
    power, full, spot, reliable = 0.0, 0.0, 0.0, 0.0
    for row in range(LEASES_MAX):
        n, k = leases.machines[row], leases.pool[row]
        if n == 0:
            continue
        slots = float(n * world.slots[k])
        boots_h = min(world.tick_h, max(0.0, job.start_h - (t - leases.begun[row]) * world.tick_h))
        power += slots * world.speed[k] * (1.0 - boots_h / world.tick_h)
        full += slots
        if is_reliable(world, k):
            reliable += slots
        else:
            spot += slots
    if full > job.slots:
        power *= job.slots / full
    return power**job.scaling if power > 0 else 0.0, spot, reliable
