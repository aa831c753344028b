"""What the risk model says, against what happened."""

import math

import numpy as np
import pytest

from bidding.markets import synthetic
from bidding.markets.files import read_probes
from bidding.markets.grid import paired
from bidding.markets.history import Series
from bidding.risk import (
    HAZARD_PRIOR,
    CapacityRisk,
    Gamma,
    all_gone,
    bid_odds,
    bid_table,
    calibrate,
    climate_at,
    moods,
)

H = 3600.0


def test_beta_and_the_median_time_by_hand():
    """A price that is high every third hour evicts a low bid within the hour a third of the time."""
    at_s = np.arange(0, 300 * H, H)
    price = Series(at_s=at_s, value=np.where(np.arange(300) % 3 == 2, 2.0, 1.0))
    table = bid_table([price], 0.0, 299 * H, deltas_usd_per_h=(0.5, 1.5))
    assert table.beta[0] == pytest.approx(1 / 3, abs=0.02)
    assert table.beta[1] < 0.001
    assert table.median_s[0] == pytest.approx(1.5 * H, rel=0.1)
    assert table.median_s[1] == math.inf


def test_the_median_time_is_the_one_found_by_looking_at_every_point():
    """Prices that walk about, with the same price now and then: lives are looked up by jumps from high to higher."""
    rng = np.random.default_rng(5)
    at_s = np.cumsum(rng.integers(60, 4000, 400)).astype(float)
    price = Series(at_s=at_s, value=np.round(1.0 + np.cumsum(0.02 * rng.standard_normal(400)), 2))
    table = bid_table([price], 0.0, at_s[-1], deltas_usd_per_h=(0.005, 0.05, 0.2))
    for delta, beta, median_s in zip(
        table.delta_usd_per_h, table.beta, table.median_s, strict=True
    ):
        lives = []
        for t in np.arange(0.0, at_s[-1] - H, 300.0):
            now = price.at(t) + delta
            later = at_s[(at_s > t) & (price.value > now)]
            lives.append(later[0] - t if len(later) else math.inf)
        assert median_s == pytest.approx(np.median(lives))
        assert beta == pytest.approx((np.sum(np.array(lives) <= H) + 0.5) / (len(lives) + 1))


def test_the_mood_of_a_price_says_when_a_low_bid_is_lost():
    """A price that moves every six hours, up after two falls, takes a low bid in the hour before a rise."""
    steps = np.where(np.arange(120) % 3 == 2, 0.02, -0.01)
    price = Series(at_s=np.arange(120) * 6 * H, value=1.0 + np.cumsum(steps))
    odds = bid_odds(price, 0.0, 600 * H)[:, 0]
    (beta, *_) = bid_table([price], 0.0, 600 * H).beta
    fallen, due, risen = moods(price, np.array([6.5, 11.5, 17.5]) * H)
    assert odds[fallen] < 0.6 * beta
    assert odds[risen] < 0.7 * beta  # a fall comes next
    assert odds[due] > 5 * beta
    later = bid_odds(Series(at_s=price.at_s[:60], value=price.value[:60]), 0.0, 350 * H)
    assert later == pytest.approx(bid_odds(price, 0.0, 350 * H))  # what came after is not known


def test_bayes_moves_from_the_prior_to_what_was_seen():
    """No data is the prior; much data is its own rate; hours without a loss lower the hazard."""
    assert HAZARD_PRIOR.seen(0, 0).per_h == HAZARD_PRIOR.per_h
    assert HAZARD_PRIOR.seen(1000, 10_000).per_h == pytest.approx(0.1, rel=0.01)
    assert HAZARD_PRIOR.seen(0, 100).per_h < HAZARD_PRIOR.per_h / 20
    with pytest.raises(ValueError, match="negative"):
        Gamma(events=1, hours=1).seen(-1, 0)


def test_many_moments_at_once_are_each_moment_alone():
    """The vectorised rates are those of one moment at a time, and none knows its future."""
    listing = synthetic.capacity_bound(np.random.default_rng(1), days=20, zones=1)[0]
    risk = CapacityRisk(listing.capacity)
    moments = np.linspace(H, 19 * 24 * H, 50)
    together = np.array(risk.rates_at(moments))
    alone = np.array([risk.rates_per_h(float(t)) for t in moments]).T
    assert together == pytest.approx(alone)
    half = listing.capacity.at_s <= moments[25]
    past = CapacityRisk(
        Series(at_s=listing.capacity.at_s[half], value=listing.capacity.value[half])
    )
    assert past.rates_per_h(float(moments[25])) == pytest.approx(tuple(alone[:, 25]))


def test_a_climate_tells_young_stretches_from_old():
    """Where stretches are many short ones and a few long ones, the young end faster than the old."""
    listing = synthetic.capacity_bound(np.random.default_rng(2), days=60, zones=1)[0]
    climate = climate_at(CapacityRisk(listing.capacity), 59 * 24 * H)
    assert climate.lost_young > 2 * climate.lost_old
    assert climate.back_young > climate.back_old


def test_some_pool_is_there_more_often_than_each():
    """Two independent pools are lost together more rarely than either."""
    hazard, back = all_gone([0.5, 0.5], [0.5, 0.5])
    assert hazard < 0.5
    assert back == 1.0


def test_the_hazards_are_calibrated_on_drawn_markets():
    """Predicted and observed shares of evictions within the hour agree within a few points."""
    listings = synthetic.capacity_bound(np.random.default_rng(5), days=90, zones=4)
    assert calibrate([CapacityRisk(e.capacity) for e in listings]).mean_error < 0.06


def test_the_hazards_are_calibrated_on_real_capacity(data):
    """On the probed V100 pools of 2023 too, each hour predicted from the past alone."""
    probes = read_probes(data / "availability/spot-traces/availability/1-node/aws-02-15-2023")
    assert calibrate([CapacityRisk(s) for s in probes.values()]).mean_error < 0.06


def test_capacity_is_laid_over_prices_of_other_years():
    """A capacity series that is shorter than the prices repeats, and pools without one are left out."""
    listing = synthetic.capacity_bound(np.random.default_rng(6), days=30, zones=1)[0]
    other = synthetic.capacity_bound(np.random.default_rng(6), days=7, zones=1)[0]
    laid = paired(
        {listing.pool: listing.price},
        {f"{listing.pool.zone}/{listing.type.name}": other.capacity},
        {listing.type.name: listing.type},
    )
    assert laid[0].capacity.at_s[-1] > listing.price.at_s[-1] - 7 * 24 * H
    assert paired({listing.pool: listing.price}, {}, {listing.type.name: listing.type}) == []
