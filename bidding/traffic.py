"""What the exchange of a job's machines costs between zones and regions, compiled.

After each step every worker sends its part of the sum to the owner of each slice, and gets that
slice back, so each ordered pair of N slots exchanges 2 G / N of the gradients' bytes G:

    dollars per work = X / N · sum over zones z of  n_z (p_z (R_z - n_z) + q_z (N - R_z))

with X = 2 G per work, n_z slots in the zone, R_z in its region, p_z the price of a byte to another
zone of the region and q_z to another region. In chains of P workers only replicas of one stage
exchange, so X = 2 G / P, and a chain whose zone runs out sends its activations to the next zone.
"""

from typing import NamedTuple

import numpy as np

from bidding.compiled import Floats, Ints, compiled


class Exchange(NamedTuple):
    """What one work of the job sends: X, and what passes each boundary of a split chain."""

    gb_per_work: float
    depth: int
    boundary_gb_per_work: float


NO_EXCHANGE = Exchange(0.0, 1, 0.0)


class Spread(NamedTuple):
    """The slots of a footprint by zone and by region, and what a byte costs from each zone."""

    zone: Ints
    region: Ints
    region_of: Ints  # [zone]
    zone_usd_per_gb: Floats  # [zone]
    region_usd_per_gb: Floats  # [zone]


@compiled
def nowhere(zones: int) -> Spread:
    """Return the spread of no slots; no zone or region may have a number of `zones` or more."""
    return Spread(
        np.zeros(zones, np.int64),
        np.zeros(zones, np.int64),
        np.zeros(zones, np.int64),
        np.zeros(zones),
        np.zeros(zones),
    )


@compiled
def place(spread: Spread, slots: int, at: tuple[int, int], usd_per_gb: tuple[float, float]) -> None:
    """Add slots in a zone of a region, with the prices to other zones and to other regions."""
    zone, region = at
    spread.zone[zone] += slots
    spread.region[region] += slots
    spread.region_of[zone] = region
    spread.zone_usd_per_gb[zone], spread.region_usd_per_gb[zone] = usd_per_gb


@compiled
def usd_per_work(spread: Spread, exchange: Exchange) -> float:
    """Return what this footprint pays for traffic per work; 0 within one zone."""
    total = spread.zone.sum()
    if exchange.gb_per_work <= 0.0 or total == 0:
        return 0.0
    pairs, split, dearest = 0.0, 0, 0.0
    for z in range(len(spread.zone)):
        here = spread.zone[z]
        near = spread.region[spread.region_of[z]]
        if here in (0, total):
            continue
        p, q = spread.zone_usd_per_gb[z], spread.region_usd_per_gb[z]
        pairs += here * (p * (near - here) + q * (total - near))
        split += 1 if here % exchange.depth > 0 else 0
        dearest = max(dearest, q if near < total else p)
    boundaries = max(0, split - 1)
    return float(
        exchange.gb_per_work * pairs / total + exchange.boundary_gb_per_work * boundaries * dearest
    )
