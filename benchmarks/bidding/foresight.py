"""Where does the gap to the clairvoyant bound come from? The manager's decision, told more and more.

    foresight.py [starts [part of a market's name]]

The bound knows which machines the cloud will take within their free hour. Here the same decision is
given better hazards than it can have: those by age of the whole series (hindsight), and the truth
about the next minutes (foresight). What is left at an hour of foresight is beyond the free hour.
"""

import sys

import msgspec
import numpy as np
from _bidding import real_markets, show

from bidding.backtests import backtest
from bidding.backtests.backtest import interval
from bidding.backtests.strategies import STRATEGIES
from bidding.compiled import Floats, Ints
from bidding.markets.grid import Market

AGES_H = np.array([0, 1 / 6, 1 / 3, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 48])
SURE_PER_H = 5.0  # a hazard that as good as says: within the hour
FORESIGHT_H = (0.25, 1.0)


def stretches(capacity: Ints) -> tuple[Ints, Ints]:
    """(first tick, tick after the last) of every stretch with capacity."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], capacity > 0, [0]]).astype(np.int64)))
    return edges[::2], edges[1::2]


def hindsight(capacity: Ints, tick_h: float) -> Floats:
    """Hazard over the next hour by age, counted over the whole series, its future too."""
    begins, ends = stretches(capacity)
    lengths_h = (ends - begins) * tick_h
    over = ends < len(capacity)
    ages_to = np.append(AGES_H[1:], np.inf)
    hours = np.clip(lengths_h[:, None] - AGES_H, 0, ages_to - AGES_H).sum(axis=0)
    bucket = np.searchsorted(AGES_H, lengths_h - 1e-9, "right") - 1
    events = np.bincount(bucket[over], minlength=len(AGES_H))
    overall = max(over.sum(), 0.5) / lengths_h.sum()
    per_h = (events + 1.0) / (hours + 1.0 / overall)
    hazard = np.zeros(len(capacity))
    for b, e in zip(begins, ends, strict=True):
        age_h = (np.arange(e - b) * tick_h)[:, None]
        ahead = np.minimum(age_h + 1.0, ages_to) - np.maximum(age_h, AGES_H)
        hazard[b:e] = (np.maximum(ahead, 0.0) * per_h).sum(axis=1)
    return hazard


def foresight(capacity: Ints, known_per_h: Floats, tick_h: float, hours: float) -> Floats:
    """The truth about losses within `hours`; beyond them what was known, or nothing after a whole hour."""
    hazard = np.where(capacity > 0, known_per_h if hours < 1.0 else 0.0, 0.0)
    for b, e in zip(*stretches(capacity), strict=True):
        if e < len(capacity):
            first = max(b, e - round(hours / tick_h))
            left_h = (e - np.arange(first, e)) * tick_h
            hazard[first:e] = np.maximum(SURE_PER_H, 3.0 / left_h)
    return hazard


def told(market: Market) -> list[tuple[str, Market]]:
    """The market with the hazards that each row of the table is told."""
    tick_h = market.tick_s / 3600
    rows = [("what its past says", market.hazard_per_h)]
    rows.append(
        ("hazards by age, in hindsight", np.stack([hindsight(c, tick_h) for c in market.capacity]))
    )
    for hours in FORESIGHT_H:
        rows.append(
            (
                f"losses of the next {hours * 60:g} min",
                np.stack(
                    [
                        foresight(c, h, tick_h, hours)
                        for c, h in zip(market.capacity, market.hazard_per_h, strict=True)
                    ]
                ),
            )
        )
    return [(name, msgspec.structs.replace(market, hazard_per_h=h)) for name, h in rows]


def figures(result: backtest.Result) -> list[str]:
    ratio = interval(result.ratio, lambda v: float(np.median(v)))
    free = result["free_h"].sum() / (result["spot_h"] + result["on_demand_h"]).sum()
    return [
        f"{result['cost_usd'].mean():.2f}",
        f"{result['runtime_h'].mean():.1f}",
        f"{free:.0%}",
        f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
        f"{np.percentile(result.ratio, 95):.2f}",
        f"{np.median(result.plain_ratio):.2f}",
    ]


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    part = sys.argv[2] if len(sys.argv) > 2 else ""
    rows = []
    for name, market, slots in real_markets():
        if "capacity" not in name or part not in name:
            continue
        work = backtest.Work(hours=20.0, slots=slots)
        starts = backtest.draw_starts(market, work, count, seed=0)
        for what, known in told(market):
            result = backtest.run(known, work, STRATEGIES[-1:], starts=starts)[0]
            rows.append([f"{name}: {what}", *figures(result)])
    show(
        f"A job of 20 h, {count} starts, today's rules; the manager's decision, told more than it can know.",
        [
            "market and what is known",
            "$",
            "hours",
            "free",
            "/bound, median (95 %)",
            "95th",
            "/plain",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
