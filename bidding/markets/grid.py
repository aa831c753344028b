"""A market on a grid of ticks: price, capacity and estimated risk of every pool.

The backtest and the clairvoyant bound both read this and nothing else. The estimates (hazards,
returns, betas) are computed by `bidding.risk` from the past of each tick alone.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from bidding.compiled import Floats, Ints
from bidding.errors import HistoryError
from bidding.markets.billing import AWS_TODAY, BillingRule
from bidding.markets.history import Series
from bidding.risk import DELTAS_USD_PER_H, MOODS, CapacityRisk, bid_odds, bid_table, moods
from cloud.clock import HOUR_S
from cloud.model import InstanceType, Pool

PLENTY = 1_000_000
TICKS_MAX = 2_000_000


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """One pool of a market: its price and its capacity in machines (`None`: always enough)."""

    pool: Pool
    type: InstanceType
    price: Series
    capacity: Series | None = None


class Market(msgspec.Struct, frozen=True, kw_only=True):
    """Arrays by [pool, tick]; `capacity` in machines. All pools follow one billing rule."""

    pools: tuple[Pool, ...]
    types: tuple[InstanceType, ...]
    rule: BillingRule
    tick_s: float
    start_s: float
    price: Floats
    capacity: Ints
    hazard_per_h: Floats
    return_per_h: Floats
    deltas_usd_per_h: Floats
    evicted_in_1h: Floats  # [pool, delta], over all moods of the price
    evicted_in_mood: Floats  # [pool, mood, delta]
    mood: Ints  # [pool, tick]

    @property
    def ticks(self) -> int:
        return int(self.price.shape[1])

    @property
    def slots(self) -> Ints:
        return np.array([t.slots for t in self.types], dtype=np.int64)

    @property
    def speed(self) -> Floats:
        return np.array([t.speed for t in self.types], dtype=np.float64)

    @property
    def on_demand_usd_per_h(self) -> Floats:
        return np.array([t.on_demand_usd_per_h for t in self.types], dtype=np.float64)


def build(
    listings: Sequence[Listing],
    *,
    rule: BillingRule = AWS_TODAY,
    tick_s: float = 300.0,
    start_s: float,
    end_s: float,
    trained_from_s: float | None = None,
) -> Market:
    """Sample every series on the grid; the history for betas begins at `trained_from_s`."""
    ticks = int((end_s - start_s) // tick_s)
    if not listings or not 1 <= ticks <= TICKS_MAX:
        remedy = "give a shorter history" if ticks > TICKS_MAX else "give a longer history"
        raise HistoryError(
            f"a market needs a pool and 1 to {TICKS_MAX} ticks of {tick_s:g} s, not {len(listings)} pools and "
            f"{ticks} ticks from {start_s:.0f} s to {end_s:.0f} s; {remedy}"
        )
    grid = start_s + np.arange(ticks, dtype=np.float64) * tick_s
    price = np.stack([_sampled(entry.price, grid) for entry in listings])
    capacity = np.stack([_capacity(entry, grid, tick_s) for entry in listings])
    rates = [_rates(capacity[i], tick_s) for i in range(len(listings))]
    trained = start_s if trained_from_s is None else trained_from_s
    evicted, in_mood = _betas(listings, rule, trained, start_s)
    return Market(
        pools=tuple(entry.pool for entry in listings),
        types=tuple(entry.type for entry in listings),
        rule=rule,
        tick_s=tick_s,
        start_s=start_s,
        price=price,
        capacity=capacity,
        hazard_per_h=np.stack([r[0] for r in rates]),
        return_per_h=np.stack([r[1] for r in rates]),
        deltas_usd_per_h=np.array(DELTAS_USD_PER_H),
        evicted_in_1h=evicted,
        evicted_in_mood=in_mood,
        mood=np.stack([moods(entry.price, grid) for entry in listings]),
    )


def _sampled(series: Series, grid: Floats) -> Floats:
    where = np.maximum(np.searchsorted(series.at_s, grid, "right") - 1, 0)
    return np.ascontiguousarray(series.value[where])


def _capacity(entry: Listing, grid: Floats, tick_s: float) -> Ints:
    """Return the lowest capacity within each tick, because a machine lost within it is lost."""
    if entry.capacity is None:
        return np.full(len(grid), PLENTY, dtype=np.int64)
    lowest = _sampled(entry.capacity, grid)
    inside = (entry.capacity.at_s > grid[0]) & (entry.capacity.at_s < grid[-1] + tick_s)
    ticks = ((entry.capacity.at_s[inside] - grid[0]) // tick_s).astype(np.int64)
    np.minimum.at(lowest, ticks, entry.capacity.value[inside])
    return lowest.astype(np.int64)


def _rates(capacity: Ints, tick_s: float) -> tuple[Floats, Floats]:
    """Return hazard and return rate at every tick, estimated from the ticks before it only."""
    ticks = len(capacity)
    if capacity.min() >= PLENTY:
        return np.zeros(ticks), np.full(ticks, HOUR_S / tick_s)
    at_s = np.arange(ticks, dtype=np.float64) * tick_s
    risk = CapacityRisk(Series(at_s=at_s, value=(capacity > 0).astype(np.float64)))
    return risk.rates_at(at_s)


def _betas(
    listings: Sequence[Listing], rule: BillingRule, from_s: float, to_s: float
) -> tuple[Floats, Floats]:
    """Return the share evicted within the hour by [pool, delta], and by [pool, mood, delta]."""
    pools, deltas = len(listings), len(DELTAS_USD_PER_H)
    if rule.bid == "none" or to_s - from_s < 24 * HOUR_S:
        return np.zeros((pools, deltas)), np.zeros((pools, MOODS, deltas))
    tables = [bid_table([entry.price], from_s, to_s) for entry in listings]
    in_mood = [bid_odds(entry.price, from_s, to_s) for entry in listings]
    return np.array([t.beta for t in tables]), np.stack(in_mood)


def paired(
    prices: Mapping[Pool, Series],
    capacities: Mapping[str, Series],
    types: Mapping[str, InstanceType],
) -> list[Listing]:
    """Return the pools with both a price and a capacity series, matched by `zone/type`.

    The two were recorded in different years, so the capacity is shifted to begin with the prices,
    and repeats if it is the shorter one.
    """
    listings = []
    for pool, price in sorted(prices.items()):
        capacity = capacities.get(f"{pool.zone}/{pool.type}")
        if capacity is not None and pool.type in types:
            shifted = _laid_over(capacity, price)
            listings.append(
                Listing(pool=pool, type=types[pool.type], price=price, capacity=shifted)
            )
    return listings


def _laid_over(capacity: Series, price: Series) -> Series:
    if len(capacity.at_s) == 1:  # the capacity never changed
        return Series(at_s=price.at_s[:1], value=capacity.value)
    span_s = float(capacity.at_s[-1] - capacity.at_s[0])
    rounds = max(1, int(np.ceil((price.at_s[-1] - price.at_s[0]) / max(span_s, HOUR_S))))
    starts = price.at_s[0] + np.arange(rounds) * span_s
    at_s = (capacity.at_s[:-1] - capacity.at_s[0])[None, :] + starts[:, None]
    return Series(at_s=at_s.ravel(), value=np.tile(capacity.value[:-1], rounds))


def fitting(listings: Sequence[Listing], slots: int) -> list[Listing]:
    """Return the pools whose machines a job of this size can fill."""
    return [entry for entry in listings if entry.type.slots <= slots]
