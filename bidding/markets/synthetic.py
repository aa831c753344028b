"""Markets drawn from a seed with stated statistics, which ship instead of recorded series.

`auctions`: prices as in 2015 and 2016, when spot was an auction. Each pool's price wobbles around a
fifth of the on-demand price and sometimes spikes above the on-demand price:
    level       0.18 to 0.26 of on demand, by pool
    wobble      every 90 min (mean) to a new price, log-normal around the level, sigma 0.08
    spikes      1 in 5 h (mean; `PriceForm` sets these), log-normal height with a median of 1.2 times
                on demand (sigma 0.8), log-normal length with a median of 25 min (sigma 0.8)
`capacity_bound`: prices that hardly move, capacity that comes and goes, as today: stretches with
capacity are log-normal with a median of 0.54 h (mean 3.2 h), without with 0.49 h (mean 1.8 h).
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from bidding.compiled import Floats
from bidding.markets.grid import Listing
from bidding.markets.history import Series, thin
from cloud.clock import DAY_S, HOUR_S
from cloud.model import InstanceType, Pool

WOBBLE = 0.08
SPIKE_MEDIAN, SPIKE_SPREAD = 1.2, 0.8
SPIKE_S, SPIKE_S_SPREAD = 1500.0, 0.8
ON_S, ON_SPREAD = 0.54 * HOUR_S, 1.89
OFF_S, OFF_SPREAD = 0.49 * HOUR_S, 1.63

COMPUTE = tuple(
    InstanceType(
        name=f"compute.{n}",
        cloud="aws",
        slots=n,
        memory_bytes=2 << 30,
        on_demand_usd_per_h=0.105 * n,
    )
    for n in (1, 2, 4)
)
ACCELERATED = (
    InstanceType(
        name="accelerated.1",
        cloud="aws",
        slots=1,
        memory_bytes=16 << 30,
        on_demand_usd_per_h=3.0,
        accelerator="v100",
    ),
)


class PriceForm(msgspec.Struct, frozen=True, kw_only=True):
    """The form of an auction: levels in on-demand prices, mean times between moves and spikes."""

    levels: tuple[float, float] = (0.18, 0.26)
    wobble_every_s: float = 5400.0
    spike_every_s: float = 5 * HOUR_S


OLD_EAST = PriceForm()


def auctions(
    rng: np.random.Generator,
    *,
    days: float = 30.0,
    types: Sequence[InstanceType] = COMPUTE,
    zones: int = 4,
    form: PriceForm = OLD_EAST,
) -> list[Listing]:
    """Draw a region of auction markets; pools are independent of each other."""
    return [
        Listing(
            pool=Pool("aws", "old-east", f"old-east-{'abcdefgh'[z]}", kind.name),
            type=kind,
            price=_auction(rng, kind.on_demand_usd_per_h, days * DAY_S, form),
        )
        for z in range(zones)
        for kind in types
    ]


def _auction(rng: np.random.Generator, on_demand: float, span_s: float, form: PriceForm) -> Series:
    level = on_demand * rng.uniform(*form.levels)
    count = int(span_s / form.wobble_every_s)
    at_s = np.concatenate([[0.0], np.sort(rng.uniform(0, span_s, count))])
    value = level * np.exp(WOBBLE * rng.standard_normal(len(at_s)))
    for begins in np.sort(rng.uniform(0, span_s, rng.poisson(span_s / form.spike_every_s))):
        ends = begins + SPIKE_S * np.exp(SPIKE_S_SPREAD * rng.standard_normal())
        height = on_demand * SPIKE_MEDIAN * np.exp(SPIKE_SPREAD * rng.standard_normal())
        inside = (at_s > begins) & (at_s < ends)
        before = value[np.searchsorted(at_s, begins, "right") - 1]
        at_s = np.concatenate([at_s[~inside], [begins, ends]])
        value = np.concatenate([value[~inside], [max(height, before), level]])
        order = np.argsort(at_s, kind="stable")
        at_s, value = at_s[order], value[order]
    keep = np.concatenate([[True], np.diff(at_s) > 0])
    return thin(at_s[keep], np.round(value[keep], 4))


def capacity_bound(
    rng: np.random.Generator, *, days: float = 30.0, zones: int = 4, machines: int = 1
) -> list[Listing]:
    """Draw a region as today: prices near 0.31 of on demand, capacity in stretches."""
    kind = ACCELERATED[0]
    listings = []
    for z in range(zones):
        at_s, value = _stretches(rng, days * DAY_S)
        quotes = np.arange(0.0, days * DAY_S, 6.1 * HOUR_S)
        drift = np.cumsum(0.0035 * rng.standard_normal(len(quotes)))
        ratio = np.clip(0.31 * np.exp(drift), 0.30, 0.50)
        listings.append(
            Listing(
                pool=Pool("aws", "new-east", f"new-east-{'abcdefgh'[z]}", kind.name),
                type=kind,
                price=thin(quotes, np.round(kind.on_demand_usd_per_h * ratio, 4)),
                capacity=Series(at_s=at_s, value=value * machines),
            )
        )
    return listings


def _stretches(rng: np.random.Generator, span_s: float) -> tuple[Floats, Floats]:
    at_s, value, t, on = [], [], 0.0, bool(rng.integers(2))
    while t < span_s:
        at_s.append(t)
        value.append(float(on))
        median, spread = (ON_S, ON_SPREAD) if on else (OFF_S, OFF_SPREAD)
        t += max(60.0, median * float(np.exp(spread * rng.standard_normal())))
        on = not on
    return np.array(at_s), np.array(value)
