"""Prices that were seen: kept bounded beside the state, read again after a restart, and turned into bids."""

import math

import msgspec
import numpy as np
import pytest

from bidding.markets.files import listed_types, read_markets, read_prices, stored_prices
from bidding.markets.history import Series
from cloud.clock import HOUR_S
from cloud.market import Catalogue, PriceStep, SpotMarket, Zone
from cloud.model import InstanceType, Pool, Quote
from cloud.simulated import SimulatedCloud
from orchestrator import loop
from orchestrator.actions import KeepQuotes, Launch
from orchestrator.brain.purchases import situation
from orchestrator.events import JobSubmitted, Odds, QuotesKept
from orchestrator.live import price_files
from orchestrator.live.price_files import BROKEN, FILE, QuoteStore, odds_of
from orchestrator.settings import Settings
from orchestrator.simulated.scenario import STEPS_FOREVER, Scenario, jobs_of
from orchestrator.simulated.world import SimulatedWorld
from orchestrator.state import State
from orchestrator.view_builder import view_of
from orchestrator.world import MemoryJournal, decode_state, encode_state

KIND = InstanceType(
    name="kind", cloud="aws", slots=1, memory_bytes=1, speed=1.0, on_demand_usd_per_h=1.0
)
POOL = Pool("aws", "r", "ra", "kind")


def quote(at_s: float, price: float, pool: Pool = POOL) -> Quote:
    return Quote(pool=pool, at_s=at_s, price_usd_per_h=price)


def keep(*seen: Quote, bids: bool = False) -> KeepQuotes:
    return KeepQuotes(quotes=seen, types=(KIND,), bids=bids, because="now and then")


def test_prices_outlive_the_manager_and_the_backtest_reads_them(tmp_path):
    """What one life has seen, the next adds to; the folder is a market with its types."""
    assert QuoteStore(tmp_path).keep(keep(quote(0.0, 0.3), quote(9.0, 0.4)), 10.0).error == ""
    second = QuoteStore(tmp_path)
    second.keep(keep(quote(9.0, 0.4), quote(20.0, 0.5)), 30.0)
    markets, _ = read_markets(tmp_path)
    (listing,) = next(iter(markets.values()))
    assert listing.type.on_demand_usd_per_h == 1.0
    assert listing.price.at_s.tolist() == [0.0, 9.0, 20.0]
    assert listing.price.value.tolist() == [0.3, 0.4, 0.5]
    assert {path.name for path in tmp_path.iterdir()} == {FILE, "types.csv"}


def test_absurd_prices_are_not_kept(tmp_path):
    """Zero, below zero, a billion, and what is no number at all are left out."""
    store = QuoteStore(tmp_path)
    odd = (0.0, -1.0, 1e9, math.inf, math.nan)
    store.keep(keep(*(quote(float(n), price) for n, price in enumerate(odd))), 10.0)
    store.keep(keep(quote(50.0, 0.3)), 60.0)
    (series,) = read_prices(tmp_path)[0].values()
    assert series.value.tolist() == [0.3]


def test_the_history_of_a_pool_is_bounded(tmp_path, monkeypatch):
    """The newest points stay."""
    monkeypatch.setattr(price_files, "POINTS_KEPT", 5)
    store = QuoteStore(tmp_path)
    for n in range(20):
        store.keep(keep(quote(float(n), 0.3 + n / 100)), float(n))
    (series,) = read_prices(tmp_path)[0].values()
    assert series.at_s.tolist() == [15.0, 16.0, 17.0, 18.0, 19.0]


@pytest.mark.parametrize("junk", [b"", b"PK\x03\x04", b"PK no archive PK", bytes(range(256)) * 40])
def test_a_history_that_cannot_be_read_is_put_aside_in_one_line(tmp_path, junk):
    """The broken file is kept under another name, a new one begins, and one line says so, once."""
    (tmp_path / FILE).write_bytes(junk)
    store = QuoteStore(tmp_path)
    said = store.keep(keep(quote(0.0, 0.3)), 1.0)
    assert str(tmp_path / FILE) in said.error
    assert "\n" not in said.error
    assert (tmp_path / f"{FILE}{BROKEN}").read_bytes() == junk
    assert store.keep(keep(quote(5.0, 0.4)), 6.0).error == ""
    (series,) = read_prices(tmp_path)[0].values()
    assert series.value.tolist() == [0.3, 0.4]


def test_a_type_that_this_life_has_not_seen_is_still_known(tmp_path):
    """After a restart another type is seen: the folder is a market with both."""
    other = msgspec.structs.replace(KIND, name="other", on_demand_usd_per_h=2.0)
    pool = Pool("aws", "r", "ra", "other")
    QuoteStore(tmp_path).keep(keep(quote(0.0, 0.3), quote(9.0, 0.4)), 10.0)
    later = KeepQuotes(quotes=(quote(20.0, 0.5, pool),), types=(other,), bids=False, because="")
    QuoteStore(tmp_path).keep(later, 30.0)
    assert set(listed_types(tmp_path)) == {"kind", "other"}


@pytest.mark.parametrize("name", ["types.csv", "other.csv", "other.json"])
def test_a_broken_file_beside_the_prices_costs_no_price(tmp_path, name):
    """Types that cannot be read are put aside with a line, what is not ours is left alone; the prices stay."""
    QuoteStore(tmp_path).keep(keep(quote(0.0, 0.3)), 10.0)
    (tmp_path / name).write_text("type,slots\nkind,what")
    said = QuoteStore(tmp_path).keep(keep(quote(20.0, 0.5)), 30.0)
    assert (name in said.error) == (name == "types.csv")
    assert (tmp_path / f"{name}{BROKEN}").exists() == (name == "types.csv")
    (series,) = stored_prices(tmp_path / FILE).values()
    assert series.value.tolist() == [0.3, 0.5]


def test_a_full_disk_is_said_with_the_place(tmp_path):
    """A write that fails says of no file that it was the one: the folder is named instead."""
    (tmp_path / "prices.part").symlink_to("/dev/full")
    said = QuoteStore(tmp_path).keep(keep(quote(0.0, 0.3)), 10.0)
    assert said.error.startswith(f"{tmp_path}: prices cannot be kept: No space left")


def test_a_disk_that_takes_nothing_is_said_and_the_rest_goes_on(tmp_path):
    """Where a file stands in the way of the folder, the answer is one line, and odds come all the same."""
    (tmp_path / "quotes").write_text("in the way")
    store = QuoteStore(tmp_path / "quotes")
    said = store.keep(keep(*(quote(n * HOUR_S, 0.3) for n in range(5)), bids=True), 5 * HOUR_S)
    assert "prices cannot be kept" in said.error
    assert said.error.count("\n") == 0
    assert POOL.key in said.odds


def test_what_a_bid_means_depends_on_when_the_price_last_moved():
    """A price that rises every six hours takes a low bid just before it does, not just after."""
    hours = np.arange(0.0, 96.0, 6.0)
    price = Series(at_s=hours * HOUR_S, value=0.3 + np.arange(16) / 100)
    after, before = (odds_of(price, at_h * HOUR_S)[0] for at_h in (90.5, 95.5))
    assert after.evicted_in_1h < 0.6 * before.evicted_in_1h


def test_quotes_go_into_the_history_every_few_minutes_at_most(hand):
    """However often prices move, the history is written once in five minutes, with all that was seen."""
    h = hand()
    h.start()
    sent: list[KeepQuotes] = []
    for n in range(60):
        h.price(*(price * (1 + n / 100) for price in (0.03, 0.06, 0.04, 0.07)))
        sent += h.only(h.wait(10.0), KeepQuotes)
    assert 2 <= len(sent) <= 3
    assert sum(len(action.quotes) for action in sent) + len(h.state.unkept) == 4 * 61
    assert {kind.name for kind in sent[0].types} == {"small", "large"}
    h.see(QuotesKept(at_s=h.at_s, error="prices.npz: a damaged file"))
    assert "a damaged file" in h.state.sentences[-1].because


def test_the_chosen_bid_is_in_the_launch_where_bids_are_taken_and_nowhere_else(hand):
    """Before anything is known the on-demand price is bid, then the bid with the cheapest work; else none."""
    h = hand(billing="aws_2016", on_demand_allowed=False)
    launch = h.orders()
    assert launch.request.bid_usd_per_h == launch.request.pool.type.count("s") * 0.10
    assert f"bidding ${launch.request.bid_usd_per_h:.4f}/h" in launch.because
    (shown,) = view_of(h.state, h.at_s).machines
    assert shown.bid_usd_per_h == launch.request.bid_usd_per_h

    known = hand(billing="aws_2016", on_demand_allowed=False)
    known.start()
    odds = tuple(
        Odds(above_usd_per_h=above, evicted_in_1h=lost)
        for above, lost in ((0.001, 0.9), (0.01, 0.4), (0.05, 0.01))
    )
    keys = list(known.state.pools)
    known.see(QuotesKept(at_s=known.at_s, odds=dict.fromkeys(keys, odds)))
    known.state = decode_state(encode_state(known.state))  # a restart knows it too
    known.submit(slots_max=1)
    (launch,) = known.only(known.wait(2.0), Launch)
    price = known.state.pools[launch.request.pool.key].spot_usd_per_h
    assert launch.request.bid_usd_per_h in {price + o.above_usd_per_h for o in odds}

    for billing in ("local", "aws_today", "azure"):
        today = hand(billing=billing, on_demand_allowed=False)
        today.start()
        today.submit(slots_max=1)
        (launch,) = today.only(today.wait(2.0), Launch)
        assert launch.request.bid_usd_per_h is None
        assert not any(offer.bids for offer in situation.offers(today.state, today.job))


def test_a_price_above_the_bid_ends_the_machine_and_the_hour_is_refunded():
    """The whole loop on an auction: prices spike, the market takes what is outbid, the ledger refunds the hour."""
    zone = Zone(name="a", region="r", dialect="ec2")
    catalogue = Catalogue(cloud="simulated", types=(KIND,), zones=(zone,), pool_machines=50)
    (pool,) = catalogue.pools
    spikes = [PriceStep(0.0, 0.2)]
    for n in range(1, 12):
        spikes += [PriceStep(n * 2.7 * HOUR_S, 3.0), PriceStep(n * 2.7 * HOUR_S + 600.0, 0.2)]
    settings = Settings(
        deployment="simulated",
        billing="aws_2016",
        rethink_s=30.0,
        control_period_s=10.0,
        listing_period_s=30.0,
    )
    scenario = Scenario(days=1, job_slots=2, steps=STEPS_FOREVER, settings=settings)
    market = SpotMarket(catalogue, replay={pool: spikes})
    world = SimulatedWorld(SimulatedCloud(market, "simulated"), scenario)
    world.start(1, settings)
    for spec in jobs_of(scenario):
        world.say(JobSubmitted(at_s=0.0, spec=spec))
    journal = MemoryJournal()
    state = loop.run_now(loop.run(world, journal, State()))
    launches = [a for e in journal.entries for a in e.actions if isinstance(a, Launch)]
    spot = [a.request for a in launches if a.request.market == "spot"]
    assert all(0.2 < request.bid_usd_per_h <= 1.0 for request in spot)
    assert len({request.bid_usd_per_h for request in spot}) > 1  # the past has taught what to bid
    assert all(a.request.bid_usd_per_h is None for a in launches if a.request.market != "spot")
    taken = [lease for lease in state.ended_leases.values() if "taken" in lease.why_ended]
    assert len(taken) >= 4
    for lease in taken:
        assert all(price <= lease.request.bid_usd_per_h for _, price in lease.prices)
        hours = (lease.ended_at_s - lease.prices[0][0]) / HOUR_S
        assert lease.cost_usd == pytest.approx(0.2 * math.floor(hours), abs=1e-9)
