"""The clairvoyant bound is below everything that can be done, and close to the best of it."""

from itertools import combinations_with_replacement, product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bidding.backtests import backtest, clairvoyant
from bidding.markets.billing import AWS_2016, AWS_TODAY, AZURE, BillingRule, cost_usd
from bidding.markets.grid import Listing, Market, build
from bidding.markets.history import Series
from cloud.model import InstanceType, Pool

TICK_S = 1200.0
KIND = InstanceType(name="one", cloud="aws", slots=1, memory_bytes=1, on_demand_usd_per_h=3.0)


def small_market(prices, capacities, rule: BillingRule, kind: InstanceType = KIND) -> Market:
    """A market from plain lists, a tick each."""
    at_s = np.arange(len(prices[0])) * TICK_S
    listings = [
        Listing(
            pool=Pool("aws", "r", f"r{i}", "one"),
            type=kind,
            price=Series(at_s=at_s, value=np.array(p, dtype=float)),
            capacity=Series(at_s=at_s, value=np.array(c, dtype=float)),
        )
        for i, (p, c) in enumerate(zip(prices, capacities, strict=True))
    ]
    return build(listings, rule=rule, tick_s=TICK_S, start_s=0.0, end_s=len(at_s) * TICK_S)


def stretches(choice):
    """(pool, first tick, tick after the last) of every stretch in one pool."""
    found, begin = [], 0
    for i in range(1, len(choice) + 1):
        if i == len(choice) or choice[i] != choice[begin]:
            if choice[begin] >= 0:
                found.append((choice[begin], begin, i))
            begin = i
    return found


def best_by_enumeration(market: Market, start_s: float, work_h: float) -> float:
    """The least bill over every way to spend each tick in some pool, on demand (last), or nowhere."""
    pools, ticks = market.price.shape
    best = np.inf
    for choice in product(range(-1, pools + 1), repeat=ticks):
        usd, done_h = 0.0, 0.0
        for k, a, b in stretches(choice):
            if k < pools and np.any(market.capacity[k, a:b] <= 0):
                break
            done_h += max(0.0, (b - a) * TICK_S - start_s) / 3600
            if k == pools:
                usd += 3.0 * (b - a) * TICK_S / 3600
                continue
            lost = b < ticks and market.capacity[k, b] <= 0
            prices = [(t * TICK_S, market.price[k, t]) for t in range(ticks)]
            usd += cost_usd(
                market.rule, a * TICK_S, b * TICK_S, prices, "provider" if lost else "user"
            )
        else:
            if done_h >= work_h - 1e-9:
                best = min(best, usd)
    return best


@settings(max_examples=25)
@given(
    prices=st.lists(
        st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.5]), min_size=6, max_size=6),
        min_size=2,
        max_size=2,
    ),
    capacities=st.lists(
        st.lists(st.sampled_from([0, 1, 1]), min_size=6, max_size=6), min_size=2, max_size=2
    ),
    rule=st.sampled_from([AWS_TODAY, AZURE, AWS_2016]),
    work_ticks=st.integers(1, 4),
)
def test_the_bound_is_below_the_best_of_all_plans(prices, capacities, rule, work_ticks):
    """Every plan of six ticks over two pools and on demand costs at least the bound."""
    market = small_market(prices, capacities, rule)
    start_s, work_h = 300.0, work_ticks * 0.3
    bound = clairvoyant.lower_bound_usd(
        clairvoyant.terms_of(market, start_s), 0, 6, work_slot_h=work_h, slots=1
    )
    assert bound <= best_by_enumeration(market, start_s, work_h) + 1e-9


def best_of_two(market: Market, start_s: float, works_h) -> list[float]:
    """The least bills of two slots, each somewhere, on demand or nowhere at every tick; the pool takes the newest."""
    ticks, speed = market.ticks, float(market.speed[0])
    prices = [(t * TICK_S, market.price[0, t]) for t in range(ticks)]
    lives = [stretches(choice) for choice in product((-1, 0, 1), repeat=ticks)]
    best = [np.inf] * len(works_h)
    for one, other in combinations_with_replacement(lives, 2):
        both = [life for life in (*one, *other) if life[0] == 0]
        evicted = _evicted(both, market.capacity[0])
        if evicted is None:
            continue
        hours = [max(0.0, (b - a) * TICK_S - start_s) / 3600 for _, a, b in (*one, *other)]
        usd = sum(3.0 * (b - a) * TICK_S / 3600 for k, a, b in (*one, *other) if k == 1)
        for (_, a, b), gone in zip(both, evicted, strict=True):
            by = "provider" if gone else "user"
            usd += cost_usd(market.rule, a * TICK_S, b * TICK_S, prices, by)
        for i, work_h in enumerate(works_h):
            if sum(hours) * speed >= work_h - 1e-9:
                best[i] = min(best[i], usd)
    return best


def _evicted(lives, capacity):
    """Whom the pool takes as his stretch ends; None if somebody is where there is no place."""
    if any(sum(a <= t < b for _, a, b in lives) > capacity[t] for t in range(len(capacity))):
        return None
    gone = [False] * len(lives)
    for t in range(1, len(capacity)):
        held = sorted(
            (i for i, (_, a, b) in enumerate(lives) if a < t <= b), key=lambda i: -lives[i][1]
        )
        for i in held[: max(0, len(held) - capacity[t])]:
            gone[i] = lives[i][2] == t
    return gone


@pytest.mark.parametrize("rule", [AWS_TODAY, AZURE, AWS_2016])
@pytest.mark.parametrize(
    ("speed", "capacity"), [(0.5, [2, 1, 2, 1, 2]), (1.0, [2, 2, 1, 1, 1]), (2.0, [2, 2, 1, 0, 1])]
)
def test_the_bound_holds_where_a_part_of_the_machines_is_taken(rule, speed, capacity):
    """Two slots of machines of any speed, of which the cloud takes one and leaves the other."""
    kind = InstanceType(
        name="one", cloud="aws", slots=1, memory_bytes=1, on_demand_usd_per_h=3.0, speed=speed
    )
    market = small_market([[1.0, 1.5, 1.0, 0.5, 1.0]], [capacity], rule, kind)
    terms = clairvoyant.terms_of(market, 300.0)
    works_h = (0.3 * speed, speed, 2.2 * speed)
    for work_h, least in zip(works_h, best_of_two(market, 300.0, works_h), strict=True):
        bound = clairvoyant.lower_bound_usd(terms, 0, 5, work_slot_h=work_h, slots=2)
        assert bound <= least + 1e-9


def test_what_can_be_refunded_at_once_is_no_more_than_what_is_taken():
    """Of two machines for one hour the cloud takes one after 50 minutes: the other one is paid."""
    capacity = [2.0] * 10 + [1.0] * 2
    at_s = np.arange(12) * 300.0
    listing = Listing(
        pool=Pool("aws", "r", "ra", "one"),
        type=KIND,
        price=Series(at_s=at_s[:1], value=np.array([1.0])),
        capacity=Series(at_s=at_s, value=np.array(capacity)),
    )
    market = build([listing], rule=AWS_TODAY, tick_s=300.0, start_s=0.0, end_s=3600.0)
    bound = clairvoyant.lower_bound_usd(
        clairvoyant.terms_of(market, 0.0), 0, 12, work_slot_h=10 / 6, slots=2
    )
    assert 0.8 * 10 / 12 <= bound <= 10 / 12 + 1e-9


def test_a_fast_machine_on_demand_is_as_cheap_as_it_is():
    """Twice as fast as the unit of work, it does two hours of it in one: at $3, and its start."""
    kind = msgspec.structs.replace(KIND, speed=2.0)
    market = small_market([[1.0] * 5], [[0] * 5], AZURE, kind)
    bound = clairvoyant.lower_bound_usd(
        clairvoyant.terms_of(market, 300.0), 0, 5, work_slot_h=2.0, slots=1
    )
    assert bound <= 3.0 * (1 + 300 / 3600) + 1e-9


def test_the_bound_is_tight_where_the_choice_is_plain():
    """With one pool at one price the bound is the bill of simply running there."""
    market = small_market([[1.0] * 6], [[1] * 6], AZURE)
    bound = clairvoyant.lower_bound_usd(
        clairvoyant.terms_of(market, 300.0), 0, 6, work_slot_h=1.0, slots=1
    )
    assert bound == pytest.approx(1.0 + 300 / 3600, rel=0.1)


@pytest.mark.parametrize("rule", [AWS_TODAY, AZURE, AWS_2016])
def test_no_strategy_beats_the_bound(auction_market, today_market, rule):
    """Over many starts on both synthetic markets every strategy pays at least the bound."""
    market = auction_market if rule is AWS_2016 else today_market(rule)
    work = backtest.Work(hours=3.0, slots=2)
    starts = backtest.draw_starts(market, work, 20, seed=1)
    for result in backtest.run(market, work, starts=starts):
        assert np.all(result["cost_usd"] >= result.bound_usd * (1 - 1e-6)), result.strategy


def test_no_strategy_beats_the_bound_where_machines_go_one_by_one():
    """The capacity of four machines goes up and down by any number; each strategy wants all four."""
    rng = np.random.default_rng(7)
    ticks = 12 * 24 * 6
    capacity = np.repeat(rng.integers(0, 5, ticks // 4), 4)
    at_s = np.arange(ticks) * 300.0
    listing = Listing(
        pool=Pool("aws", "r", "ra", "one"),
        type=KIND,
        price=Series(at_s=at_s[:1], value=np.array([1.0])),
        capacity=Series(at_s=at_s, value=capacity.astype(float)),
    )
    market = build([listing], rule=AWS_TODAY, tick_s=300.0, start_s=0.0, end_s=ticks * 300.0)
    work = backtest.Work(hours=3.0, slots=4)
    starts = backtest.draw_starts(market, work, 20, seed=1)
    for result in backtest.run(market, work, starts=starts):
        assert np.all(result["cost_usd"] >= result.bound_usd * (1 - 1e-6)), result.strategy
