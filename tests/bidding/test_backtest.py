"""The books of a backtest balance, and what cannot be run is refused."""

import msgspec
import numpy as np
import pytest

from bidding.backtests import backtest
from bidding.backtests.engine import evict, no_leases
from bidding.backtests.strategies import STRATEGIES
from bidding.errors import ConstraintError, HistoryError
from bidding.markets.billing import AWS_TODAY, AZURE, cost_usd
from bidding.markets.grid import build

WORK = backtest.Work(hours=4.0, slots=4)


def test_without_evictions_a_job_costs_its_price(today_market):
    """On demand the bill is hours times price, start included, and nothing is lost but the start."""
    market = today_market(AZURE)
    starts = backtest.draw_starts(market, WORK, 5, seed=0)
    only = backtest.run(market, WORK, STRATEGIES[:1], starts=starts)[0]
    price = market.types[0].on_demand_usd_per_h
    assert only["cost_usd"] == pytest.approx(price * 4 * (4 + WORK.start_s / 3600))
    assert only["lost_h"] == pytest.approx(4 * WORK.start_s / 3600)
    assert np.all(only["evictions"] == 0)


@pytest.mark.parametrize("rule", [AWS_TODAY, AZURE])
def test_the_backtest_bills_as_the_rules_do(today_market, rule):
    """One pool, held whenever it has capacity: the bill is that of each stretch under `cost_usd`."""
    whole = today_market(rule)
    market = msgspec.structs.replace(
        whole,
        pools=whole.pools[:1],
        types=whole.types[:1],
        price=whole.price[:1],
        capacity=whole.capacity[:1],
        hazard_per_h=whole.hazard_per_h[:1],
        return_per_h=whole.return_per_h[:1],
        evicted_in_1h=whole.evicted_in_1h[:1],
        evicted_in_mood=whole.evicted_in_mood[:1],
        mood=whole.mood[:1],
    )
    work = backtest.Work(hours=6.0, slots=1, patience=20.0)
    prices = [(t * market.tick_s, float(p)) for t, p in enumerate(market.price[0])]
    for start in backtest.draw_starts(market, work, 10, seed=4):
        one = backtest.run(market, work, [STRATEGIES[2]], starts=np.array([start]))[0]
        end_s = start * market.tick_s + float(one["runtime_h"][0]) * 3600
        usd, begun = 0.0, None
        for t in range(int(start), market.ticks):
            there, now_s = market.capacity[0, t] > 0, t * market.tick_s
            if begun is not None and (not there or now_s + market.tick_s >= end_s):
                ended_s = min(end_s, now_s + market.tick_s) if there else now_s
                usd += cost_usd(rule, begun, ended_s, prices, "user" if there else "provider")
                begun = None
            elif there and begun is None:
                begun = now_s
            if now_s + market.tick_s >= end_s:
                break
        if one["finished"][0]:
            assert one["cost_usd"][0] == pytest.approx(usd, rel=1e-6)


def test_every_strategy_finishes_and_the_hours_add_up(today_market):
    """Slot-hours held are the work done and the work lost, for every strategy and start."""
    market = today_market(AWS_TODAY)
    starts = backtest.draw_starts(market, WORK, 10, seed=2)
    for result in backtest.run(market, WORK, starts=starts):
        if result.strategy.endswith("checkpoint"):
            continue
        done = result["finished"] > 0
        held = result["spot_h"] + result["on_demand_h"]
        assert (held - result["lost_h"])[done] == pytest.approx(16.0, abs=1e-6), result.strategy


def test_a_trace_shows_what_was_held_of_each_pool(today_market):
    """Its slots, pool by pool, are the slot-hours of the run; its dollars end at the bill."""
    market = today_market(AWS_TODAY)
    (start,) = backtest.draw_starts(market, WORK, 1, seed=3)
    one = backtest.run(market, WORK, STRATEGIES[-1:], starts=np.array([start]), bounded=())[0]
    rows = backtest.trace(market, WORK, STRATEGIES[-1], int(start))
    hours = np.full(len(rows), market.tick_s / 3600)
    hours[-1] = float(one["runtime_h"][0]) - hours[:-1].sum()
    held = (rows[:, backtest.HELD :] * hours[:, None]).sum(axis=0)
    assert held[:-1].sum() == pytest.approx(one["spot_h"][0])
    assert held[-1] == pytest.approx(one["on_demand_h"][0])
    assert rows[-1, backtest.DOLLARS] == pytest.approx(one["cost_usd"][0])


def test_ours_is_the_cheapest_on_both_markets(today_market, auction_market):
    """Over the same starts no strategy that people run today is cheaper on average."""
    for market in (today_market(AWS_TODAY), auction_market):
        starts = backtest.draw_starts(market, WORK, 60, seed=5)
        mean = {
            r.strategy: float(r["cost_usd"].mean())
            for r in backtest.run(market, WORK, starts=starts)
        }
        assert mean["ours"] <= min(mean.values()) * 1.001


@pytest.mark.parametrize("deadline_h", [4.6, 8.0])
def test_no_deadline_is_missed(today_market, deadline_h):
    """With little and with much time to spare every job of 100 starts is done in time."""
    market = today_market(AZURE)
    starts = backtest.draw_starts(market, WORK, 100, seed=3)
    ours_ = backtest.run_with_deadline(market, WORK, deadline_h, starts=starts)[-1]
    assert ours_.missed == 0
    assert np.all(ours_.cost_usd >= ours_.bound_usd * (1 - 1e-6))
    assert ours_.share_of_saving > 0.5


def test_what_cannot_be_run_is_refused(today_market):
    """No room for a start, a deadline before the work, no pools, and senseless jobs: each says why."""
    market = today_market(AZURE)
    with pytest.raises(ConstraintError, match="hold no start"):
        backtest.draw_starts(market, backtest.Work(hours=5000.0), 1, seed=0)
    with pytest.raises(ConstraintError, match="before the 4"):
        backtest.run_with_deadline(market, WORK, 3.0, starts=np.array([500]))
    with pytest.raises(HistoryError, match="0 pools"):
        build([], start_s=0.0, end_s=100.0)
    with pytest.raises(ConstraintError, match="hours=-1"):
        backtest.Work(hours=-1.0)


def test_the_cloud_takes_the_newest_machines_first(today_market):
    """Rows of leases are used again: who was bought last goes first, wherever it stands."""
    market = today_market(AWS_TODAY)
    world, leases = backtest.world_of(market), no_leases()
    t = int(np.flatnonzero(market.capacity[0] == 4)[100])
    leases.bid[:3] = 1e6
    leases.machines[:3], leases.begun[:3] = (1, 2, 2), (t - 1, t - 9, t - 5)
    gone, _, _ = evict(world, leases, t)
    assert (gone, leases.machines[:3].tolist()) == (1, [0, 2, 2])


def test_a_job_that_is_over_within_a_tick_is_refused(today_market):
    """Nothing would be decided in it: every strategy would be on demand, and late."""
    with pytest.raises(ConstraintError, match="within one tick of 300 s"):
        backtest.draw_starts(today_market(AWS_TODAY), backtest.Work(hours=0.01), 3, seed=0)


def test_a_job_of_a_billion_slots_is_refused():
    """A decision goes through them one by one."""
    with pytest.raises(ConstraintError, match="1 <= slots <= 100000"):
        backtest.Work(slots=10**9)
