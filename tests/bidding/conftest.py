"""Where the real series lie: measured against, never shipped."""

from pathlib import Path

import numpy as np
import pytest

from bidding.markets import synthetic
from bidding.markets.billing import AWS_2016
from bidding.markets.grid import build


@pytest.fixture(scope="session")
def data():
    """The folder of real series beside the repository; tests that need it skip without it."""
    folder = Path(__file__).parents[3] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent: this test measures against real series")
    return folder


@pytest.fixture(scope="session")
def auction_market():
    """A month of an auction market, bids and all."""
    listings = synthetic.auctions(np.random.default_rng(3), days=30, zones=2)
    day = 86_400.0
    return build(
        listings, rule=AWS_2016, tick_s=300.0, start_s=15 * day, end_s=30 * day, trained_from_s=0.0
    )


@pytest.fixture(scope="session")
def today_market():
    """A month of a market whose capacity evicts, under any rule."""

    def made(rule):
        listings = synthetic.capacity_bound(np.random.default_rng(4), days=30, machines=4)
        return build(listings, rule=rule, tick_s=300.0, start_s=0.0, end_s=30 * 86_400.0)

    return made
