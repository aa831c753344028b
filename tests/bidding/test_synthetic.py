"""The drawn markets have the statistics that they state."""

import numpy as np
import pytest

from bidding.markets import synthetic
from cloud.clock import HOUR_S

DAYS = 90.0


@pytest.fixture(scope="module")
def drawn():
    return synthetic.auctions(np.random.default_rng(0), days=DAYS)


def test_auction_prices_stand_at_a_fifth_and_spike(drawn):
    """The median is a fifth of on demand, and prices rise above it every few hours to days."""
    for listing in drawn:
        ratio = listing.price.value / listing.type.on_demand_usd_per_h
        assert 0.17 < np.median(ratio) < 0.27
        spikes = np.sum((ratio[1:] > 1) & (ratio[:-1] <= 1)) / DAYS
        assert 1.0 < spikes < 5.0


def test_capacity_comes_and_goes_as_stated():
    """Stretches with and without capacity have the stated medians."""
    on, off = [], []
    for listing in synthetic.capacity_bound(np.random.default_rng(1), days=DAYS, zones=6):
        lengths = np.diff(listing.capacity.at_s) / HOUR_S
        there = listing.capacity.value[:-1] > 0
        on.extend(lengths[there])
        off.extend(lengths[~there])
    assert np.median(on) == pytest.approx(0.54, rel=0.2)
    assert np.median(off) == pytest.approx(0.49, rel=0.2)


def test_a_seed_is_a_market(drawn):
    """The same seed draws the same prices, another seed others."""
    again = synthetic.auctions(np.random.default_rng(0), days=DAYS)
    other = synthetic.auctions(np.random.default_rng(1), days=DAYS)
    assert all(
        np.array_equal(a.price.value, b.price.value) for a, b in zip(drawn, again, strict=True)
    )
    assert not np.array_equal(drawn[0].price.value, other[0].price.value)
