"""Traffic between zones: what it costs, and that a footprint stays in one zone unless it pays."""

from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bidding.acquire import decide
from bidding.backtests import backtest
from bidding.backtests.strategies import STRATEGIES
from bidding.markets import grid, synthetic
from bidding.model import Demand, HeldMachine, Limits, Offer
from bidding.traffic import Exchange, nowhere, place, usd_per_work
from cloud.model import InstanceType, Pool

ZONE_USD_PER_GB, REGION_USD_PER_GB = 0.02, 0.02  # AWS: a cent each way
MARKETS = 1000
# The parameters of a model, and the seconds of a step on one slot.
MODELS = ((10e6, 0.5), (100e6, 2.0), (1.3e9, 30.0), (7e9, 200.0))


class Steps:
    """Steps per second where slots share a step; slots beyond `most` have nothing to do."""

    def __init__(self, step_s, most):
        self.step_s, self.most = step_s, most

    def work_per_s(self, counts):
        slots = sum(n * (2 if name == "large" else 1) for name, n in counts.items())
        return min(slots, self.most) / self.step_s


def demand(parameters, **more):
    return Demand(
        work_left=None,
        start_s=120.0,
        morph_s=2.0,
        recovery_s=5.0,
        exchange_gb_per_work=2 * 4 * parameters / 1e9,
        **more,
    )


def offer(dice, region, zone, size, market, usd_per_gb):
    kind = InstanceType(
        name=size,
        cloud="aws",
        slots=2 if size == "large" else 1,
        memory_bytes=1,
        on_demand_usd_per_h=1.0,
    )
    price = kind.slots * (dice.uniform(0.2, 0.6) if market == "spot" else dice.uniform(0.9, 1.1))
    return Offer(
        pool=Pool("aws", region, zone, size),
        type=kind,
        market=market,
        price_usd_per_h=price,
        machines_max=dice.randint(0, 8),
        hazard_per_h=dice.choice((0.0, 0.1, 0.5)),
        blocked=dice.random() < 0.1,
        zone_usd_per_gb=usd_per_gb[0],
        region_usd_per_gb=usd_per_gb[1],
    )


def drawn(seed, usd_per_gb=(ZONE_USD_PER_GB, REGION_USD_PER_GB)):
    """Offers of some zones, slots wanted, and a model."""
    dice = Random(seed)
    zones = [(f"r{n % 2}", f"r{n % 2}-{n}") for n in range(dice.randint(2, 6))]
    offers = [
        offer(dice, region, zone, size, market, usd_per_gb)
        for region, zone in zones
        for size in ("small", "large")
        for market in ("spot", "on_demand")
    ]
    return offers, dice.choice((2, 4, 8)), dice.choice(MODELS)


def test_with_the_rule_of_aws_no_gradient_leaves_a_zone_in_a_thousand_markets():
    """Where one zone can fill the footprint. Elsewhere it is smaller, or pays and says what."""
    sufficed, spread_out = 0, 0
    for seed in range(MARKETS):
        offers, wanted, (parameters, step_s) = drawn(seed)
        limits = Limits(slots_max=wanted, haste=0.5)
        said = decide(offers, [], demand(parameters), limits, Steps(step_s, wanted), 0.0)
        zones = {a.pool.zone for a in said.acquire}
        slots = {}
        for o in offers:
            if not o.blocked and o.market == "spot":
                slots[o.pool.zone] = slots.get(o.pool.zone, 0) + o.machines_max * o.type.slots
        if max(slots.values()) >= wanted:
            sufficed += 1
            assert len(zones) <= 1, f"seed {seed}: {said.because}"
        if len(zones) > 1:
            spread_out += 1
            assert "zones, though their traffic costs $" in said.because
    assert sufficed > MARKETS // 2
    free = 0
    for seed in range(100):
        offers, wanted, (parameters, step_s) = drawn(seed, (0.0, 0.0))
        limits = Limits(slots_max=wanted, haste=0.5)
        said = decide(offers, [], demand(parameters), limits, Steps(step_s, wanted), 0.0)
        free += len({a.pool.zone for a in said.acquire}) > 1
    assert free > 10  # the rule is what keeps them together


def test_a_second_zone_is_used_where_it_pays_and_the_sentence_says_what_it_costs():
    """A small model with long steps: 4 MB in 600 s cost less than a machine less."""
    dice = Random(1)
    offers = [
        msgspec.structs.replace(
            offer(dice, "r", zone, "small", "spot", (ZONE_USD_PER_GB, REGION_USD_PER_GB)),
            price_usd_per_h=0.3,
            machines_max=2,
            blocked=False,
            hazard_per_h=0.0,
        )
        for zone in ("a", "b")
    ]
    long = decide(offers, [], demand(1e6), Limits(slots_max=4), Steps(600.0, 4), 0.0)
    assert sum(a.count for a in long.acquire) == 4
    assert "2 zones, though their traffic costs $" in long.because
    short = decide(offers, [], demand(1e9), Limits(slots_max=4), Steps(1.0, 4), 0.0)
    assert sum(a.count for a in short.acquire) == 2
    assert "in one zone, as traffic between several would cost $" in short.because


def test_machines_do_not_hop_between_zones_for_a_hair_and_move_as_a_whole():
    """Half a percent is not worth a move; half the price is, and then all move at once."""
    dice = Random(2)
    both = [offer(dice, "r", zone, "small", "spot", (0.02, 0.02)) for zone in ("a", "b")]
    a, b = (
        msgspec.structs.replace(
            o, price_usd_per_h=p, machines_max=8, blocked=False, hazard_per_h=0.0
        )
        for o, p in zip(both, (0.3, 0.2995), strict=True)
    )
    held = [
        HeldMachine(
            lease=f"{n}",
            pool=a.pool,
            type=a.type,
            market="spot",
            price_usd_per_h=0.3,
            bid_usd_per_h=None,
            started_at_s=-7200.0,
            hazard_per_h=0.0,
            zone_usd_per_gb=0.02,
            region_usd_per_gb=0.02,
        )
        for n in range(8)
    ]
    wants = demand(100e6), Limits(slots_max=8), Steps(2.0, 8), 0.0
    stays = decide([a, b], held, *wants)
    assert not stays.acquire
    assert not stays.release
    cheap = msgspec.structs.replace(b, price_usd_per_h=0.15)
    moves = decide([a, cheap], held, *wants)
    assert [(x.pool.zone, x.count) for x in moves.acquire] == [("b", 8)]
    assert len(moves.release) == 8
    poor = decide([a, cheap], held, wants[0], Limits(slots_max=8, usd_per_h_max=3.0), *wants[2:])
    assert sum(x.count for x in poor.acquire) < 8  # both at once would pass the limit per hour


def test_where_traffic_is_free_every_decision_is_what_it_was():
    """However much is sent: prices of zero make no walk of a zone, and no sentence."""
    for seed in range(200):
        offers, wanted, (parameters, step_s) = drawn(seed, (0.0, 0.0))
        asked = Limits(slots_max=wanted), Steps(step_s, wanted), 0.0
        assert decide(offers, [], demand(parameters), *asked) == decide(
            offers, [], demand(0.0), *asked
        )


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 4)), max_size=6),
    st.floats(0.0, 0.1),
    st.floats(0.0, 0.2),
    st.floats(0.1, 100.0),
)
def test_the_price_is_that_of_every_pair_of_slots(groups, zone_usd, region_usd, gb):
    """Each ordered pair exchanges its part of the bytes, at the price of the sender's wire."""
    spread, slots = nowhere(6), []
    for zone, region, count in groups:
        place(spread, count, (2 * zone + region, region), (zone_usd, region_usd))
        slots += [(zone, region)] * count
    pairs = sum(
        (zone_usd if one[1] == other[1] else region_usd) if one != other else 0.0
        for one in slots
        for other in slots
    )
    expected = gb * pairs / len(slots) if slots else 0.0
    assert usd_per_work(spread, Exchange(gb, 1, 0.0)) == pytest.approx(expected, abs=1e-12)


def test_two_zones_cost_what_the_clouds_price_list_says():
    """Two nodes in two zones, fp32: $0.0016 a step at 10 M parameters, $0.21 at 1.3 B, $1.12 at 7 B."""
    spread = nowhere(2)
    for zone in range(2):
        place(spread, 1, (zone, 0), (ZONE_USD_PER_GB, REGION_USD_PER_GB))
    for parameters, usd in ((10e6, 0.0016), (1.3e9, 0.208), (7e9, 1.12)):
        paid = usd_per_work(spread, Exchange(2 * 4 * parameters / 1e9, 1, 0.0))
        assert paid == pytest.approx(usd)


def test_a_backtest_pays_for_traffic_and_ours_has_none():
    """The manager's rule splits its machines where traffic is free, and keeps to a zone where it is not."""
    rng = np.random.default_rng(5)
    listings = synthetic.capacity_bound(rng, days=12.0, zones=3, machines=3)
    market = grid.build(listings, start_s=0.0, end_s=12 * 86_400.0)
    free = backtest.Work(hours=6.0, slots=4)
    dear = msgspec.structs.replace(
        free,
        exchange_gb_per_work=80.0,
        zone_usd_per_gb=ZONE_USD_PER_GB,
        region_usd_per_gb=REGION_USD_PER_GB,
    )
    ours = next(s for s in STRATEGIES if s.name == "ours")
    starts = backtest.draw_starts(market, free, 8, seed=1).tolist()
    assert any(split(market, free, ours, start) for start in starts)
    assert not any(split(market, dear, ours, start) for start in starts)
    others = next(s for s in STRATEGIES if s.name == "standard + tiers")
    runs = [
        backtest.run(market, work, [others], starts=np.array(starts), bounded=())[0]
        for work in (free, dear)
    ]
    assert runs[1]["cost_usd"].sum() > 1.05 * runs[0]["cost_usd"].sum()


def split(market, work, strategy, start):
    """Whether machines of two zones work at the same moment."""
    held = backtest.trace(market, work, strategy, int(start))[:, backtest.HELD :]
    return bool(((held > 0).sum(axis=1) > 1).any())
