"""The backtest and the manager make one decision: what both keep and buy is the same."""

from collections import Counter
from unittest.mock import patch

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bidding import acquire
from bidding.acquire import decide
from bidding.backtests.baselines import OURS, hazard_of, orders_of
from bidding.backtests.engine import ANY_PRICE, BacktestJob, BacktestWorld, Decision, no_leases
from bidding.core import code_of
from bidding.deadline import IDLE, NO_BOOK, ON_DEMAND, SPOT, Book
from bidding.markets.billing import AWS_2016, AWS_TODAY, AZURE
from bidding.model import Bid, Demand, HeldMachine, Limits, Offer
from cloud.model import InstanceType, Pool

TICK_S, NOW = 300.0, 400
DELTAS = np.array([0.01, 0.1, 0.4])
MOODS = 2
ZONE_USD_PER_GB, REGION_USD_PER_GB = 0.02, 0.05


class Row(msgspec.Struct, frozen=True):
    """A lease of so many machines."""

    pool: int
    machines: int
    age: int  # ticks
    delta: int


class Moment(msgspec.Struct, frozen=True):
    """A market at one tick, a job in it, and what the job holds. The last pool is on demand."""

    rule: str
    slots: tuple[int, ...]
    speed: tuple[float, ...]
    usd_per_slot_h: tuple[float, ...]
    hazard_per_h: tuple[float, ...]
    region: tuple[int, ...]
    zone: tuple[int, ...]
    exchange_gb: float
    away: tuple[bool, ...]
    refused: tuple[bool, ...]
    losses_seen: tuple[bool, ...]
    lost_in_1h: tuple[float, ...]
    rows: tuple[Row, ...]
    wanted: int
    start_s: float
    morph_s: float
    recovery_s: float
    scaling: float
    haste: float
    work_left: float
    manager_usd_per_h: float


@st.composite
def moments(draw):
    n = draw(st.integers(1, 5))
    wanted = draw(st.sampled_from([1, 2, 4, 16]))

    def each(of, count=n):
        return tuple(draw(st.lists(of, min_size=count, max_size=count)))

    sizes = st.sampled_from([s for s in (1, 2, 4) if s <= wanted])
    rows = st.builds(
        Row, st.integers(0, n), st.integers(1, 3), st.integers(1, 40), st.integers(0, 2)
    )
    hazards = st.sampled_from([0.0, 0.01, 0.2, 1.0, 6.0])
    return Moment(
        rule=draw(st.sampled_from([AWS_TODAY.name, AZURE.name, AWS_2016.name])),
        slots=each(sizes, n + 1),
        speed=each(st.sampled_from([0.15, 1.0, 1.3]), n + 1),
        usd_per_slot_h=(*each(st.floats(0.1, 1.0)), draw(st.sampled_from([0.4, 1.0, 3.0]))),
        hazard_per_h=each(hazards),
        region=tuple(sorted(each(st.integers(0, 1)))),
        zone=tuple(sorted(each(st.integers(0, 2)))),
        exchange_gb=draw(st.sampled_from([0.0, 0.0, 0.5, 20.0, 400.0])),
        away=each(st.booleans()),
        refused=each(st.sampled_from([False, False, True])),
        losses_seen=each(st.booleans()),
        lost_in_1h=tuple(
            sorted(each(st.sampled_from([0.0, 0.05, 0.4, 1.0]), len(DELTAS)), reverse=True)
        ),
        rows=tuple(draw(st.lists(rows, max_size=5))),
        wanted=wanted,
        start_s=draw(st.sampled_from([30.0, 120.0, 900.0, 2400.0])),
        morph_s=draw(st.sampled_from([0.0, 2.0, 60.0])),
        recovery_s=draw(st.sampled_from([0.0, 5.0, 300.0])),
        scaling=draw(st.sampled_from([1.0, 0.8])),
        haste=draw(st.sampled_from([0.0, 0.5, np.inf])),
        work_left=draw(st.sampled_from([0.02, 0.5, 5.0, 300.0, np.inf])),
        manager_usd_per_h=draw(st.sampled_from([0.0, 0.2])),
    )


def column(values):
    """The values of pools, at every tick until now."""
    return np.repeat(np.array(values)[:, None], NOW + 1, axis=1)


def as_world(m):
    n = len(m.away)
    rule = {r.name: r for r in (AWS_TODAY, AZURE, AWS_2016)}[m.rule]
    price = np.array(m.usd_per_slot_h) * np.array(m.slots)
    return BacktestWorld(
        price=column(price),
        capacity=column([0 if a else 1_000_000 for a in (*m.away, False)]),
        hazard_per_h=column((*m.hazard_per_h, 0.0)),
        losses_seen=column((*m.losses_seen, False)),
        moved=np.ones(NOW + 1, np.bool_),
        slots=np.array(m.slots),
        speed=np.array(m.speed),
        region=np.array((*m.region, m.region[-1])),
        deltas=DELTAS,
        evicted_in_1h=np.zeros((n, len(DELTAS))),
        evicted_in_mood=np.tile(np.array(m.lost_in_1h), (n, MOODS, 1)),
        mood=np.zeros((n, NOW + 1), np.int64),
        tick_h=TICK_S / 3600,
        rule=code_of(rule),
        bids=rule.bid == "required",
        zone=np.array([zone_of(m, k) for k in range(n + 1)]),
        zone_usd_per_gb=ZONE_USD_PER_GB,
        region_usd_per_gb=REGION_USD_PER_GB,
    )


def as_job(m, finish_tick=0):
    return BacktestJob(
        slots=m.wanted,
        work_h=100.0,
        start_h=m.start_s / 3600,
        morph_h=m.morph_s / 3600,
        recovery_h=m.recovery_s / 3600,
        manager_usd_per_h=m.manager_usd_per_h,
        scaling=m.scaling,
        begin_tick=0,
        finish_tick=finish_tick,
        exchange_gb_per_work=m.exchange_gb,
    )


def as_plan(m, book_=NO_BOOK):
    return Decision(
        policy=OURS,
        allowed=np.ones(len(m.slots), np.bool_),
        rechoose_ticks=0,
        checkpoint_h=0.0,
        haste=m.haste,
        bid_on_demand=False,
        book=book_,
        phase=np.zeros(NOW + 1, np.int64),
    )


def as_leases(m, world):
    leases = no_leases(len(m.slots))
    for i, row in enumerate(m.rows):
        leases.pool[i], leases.machines[i], leases.begun[i] = row.pool, row.machines, NOW - row.age
        leases.bid[i] = bid_of(m, world, row)
    leases.shut_until[:-1] = [NOW + 1.0 if r else 0.0 for r in m.refused]
    return leases


def bid_of(m, world, row):
    reliable = row.pool == len(m.away)
    return (
        ANY_PRICE if reliable or not world.bids else world.price[row.pool, NOW] + DELTAS[row.delta]
    )


class Power:
    """The power law of the backtest, as a planner that the manager asks."""

    def __init__(self, m):
        self.scaling = m.scaling
        self.power = {
            k.name: k.slots * k.speed for k in map(kind, [m] * len(m.slots), range(len(m.slots)))
        }

    def work_per_s(self, counts):
        return sum(n * self.power[name] for name, n in counts.items()) ** self.scaling / 3600


def kind(m, k):
    return InstanceType(
        name=f"kind.{k}",
        cloud="aws",
        slots=m.slots[k],
        memory_bytes=1,
        on_demand_usd_per_h=1.0,
        speed=m.speed[k],
    )


def place(m, k):
    region = m.region[min(k, len(m.region) - 1)]
    return Pool("aws", f"r{region}", f"zone-{zone_of(m, k)}", f"kind.{k}")


def zone_of(m, k):
    """The number of its zone; that of the pool on demand is the last pool's."""
    zones = list(dict.fromkeys(zip(m.region, m.zone, strict=True)))
    k = min(k, len(m.zone) - 1)
    return zones.index((m.region[k], m.zone[k]))


def as_the_manager_sees_it(m, world):
    """The same moment as offers and holdings."""
    offers, held = [], []
    for k in range(len(m.slots)):
        reliable = k == len(m.away)
        bids = tuple(
            Bid(
                bid_usd_per_h=float(world.price[k, NOW] + d),
                evicted_in_1h=-np.expm1(-hazard_of(world, k, world.price[k, NOW] + d, NOW)),
            )
            for d in (DELTAS if world.bids and not reliable else ())
        )
        offers.append(
            Offer(
                pool=place(m, k),
                type=kind(m, k),
                market="on_demand" if reliable else "spot",
                price_usd_per_h=float(world.price[k, NOW]),
                bids=bids,
                billing=m.rule,
                blocked=not reliable and (m.away[k] or m.refused[k]),
                hazard_per_h=float(world.hazard_per_h[k, NOW]),
                losses_seen=bool(world.losses_seen[k, NOW]),
                zone_usd_per_gb=ZONE_USD_PER_GB,
                region_usd_per_gb=REGION_USD_PER_GB,
            )
        )
    for i, row in enumerate(m.rows):
        o = offers[row.pool]
        bid = bid_of(m, world, row)
        held += [
            HeldMachine(
                lease=f"{i:02}-{j}",
                pool=o.pool,
                type=o.type,
                market=o.market,
                price_usd_per_h=o.price_usd_per_h,
                bid_usd_per_h=float(bid),
                started_at_s=(NOW - row.age) * TICK_S,
                billing=m.rule,
                doing="starts" if row.age * TICK_S < m.start_s else "works",
                losses_seen=o.losses_seen,
                hazard_per_h=float(hazard_of(world, row.pool, bid, NOW)),
                zone_usd_per_gb=ZONE_USD_PER_GB,
                region_usd_per_gb=REGION_USD_PER_GB,
            )
            for j in range(row.machines)
        ]
    return offers, held


def both(m, finish_tick=0, table=NO_BOOK):
    """What is kept of each row and bought of each pool: by the backtest, and by the manager."""
    world = as_world(m)
    job, plan = as_job(m, finish_tick), as_plan(m, table)
    orders = orders_of(world, job, plan, as_leases(m, world), NOW, m.work_left)
    offers, held = as_the_manager_sees_it(m, world)
    said = decide(
        offers,
        held,
        Demand(
            work_left=None if m.work_left == np.inf else m.work_left,
            start_s=m.start_s,
            morph_s=m.morph_s,
            recovery_s=m.recovery_s,
            manager_usd_per_h=m.manager_usd_per_h,
            exchange_gb_per_work=m.exchange_gb,
        ),
        Limits(
            slots_min=1,
            slots_max=m.wanted,
            haste=m.haste,
            finish_by_s=finish_tick * TICK_S if finish_tick else None,
        ),
        Power(m),
        NOW * TICK_S,
    )
    gone = {r.lease for r in said.release}
    kept = Counter(int(h.lease[:2]) for h in held if h.lease not in gone)
    bought = Counter()
    bids = {}
    for a in said.acquire:
        k = int(a.pool.type.removeprefix("kind."))
        bought[k], bids[k] = a.count, a.bid_usd_per_h
    ours_bids = {k: orders.bid[k] if orders.bid[k] < ANY_PRICE else None for k in bids}
    return (
        (
            Counter({i: n for i, n in enumerate(orders.keep.tolist()) if n}),
            Counter({k: n for k, n in enumerate(orders.buy.tolist()) if n}),
            ours_bids,
        ),
        (kept, bought, bids),
    )


@settings(max_examples=600)
@given(moments())
def test_the_backtest_keeps_and_buys_what_the_manager_does(m):
    """Held machines, pools that sell nothing or refused, several slots, every kind of billing."""
    backtest, manager = both(m)
    assert backtest == manager


@settings(max_examples=200)
@given(moments(), st.sampled_from([1, 12, 240, 4000]), st.sampled_from([IDLE, ON_DEMAND, SPOT]))
def test_with_a_deadline_the_backtest_keeps_and_buys_what_the_manager_does(m, ticks, mode):
    """Too late, tight, and with time to spare; both look up the same table, which says one mode."""
    if m.work_left < np.inf:
        table = Book(np.full((1, 2, 4, 3), mode, dtype=np.uint8), 1.0)
        with patch.object(acquire, "book", lambda *_: table):
            backtest, manager = both(m, NOW + ticks, table)
        assert backtest == manager
