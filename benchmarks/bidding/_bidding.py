"""What the bidding benchmarks share: where the real series lie, markets made of them, and a table."""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from bidding.backtests.backtest import Interval, Result, interval, mean_ratio
from bidding.markets.billing import AWS_2016, AWS_TODAY, BillingRule
from bidding.markets.files import read_markets
from bidding.markets.grid import Listing, Market, build, fitting

DATA = Path(__file__).parents[3] / "shared" / "data"
TICK_S = 300.0


def data() -> Path:
    """The folder of real series beside the checkout; without it there is nothing to measure."""
    if not DATA.is_dir():
        print(f"skipped: {DATA} is absent, and this benchmark measures against real series")
        sys.exit(0)
    return DATA


def on_grid(listings: Sequence[Listing], rule: BillingRule, tick_s: float = TICK_S) -> Market:
    """All of the span that every price series covers; bids learn from its first half."""
    start_s = max(float(e.price.at_s[0]) for e in listings)
    end_s = max(float(e.price.at_s[-1]) for e in listings)
    learned_s = (end_s - start_s) / 2 if rule.bid == "required" else 0.0
    return build(
        listings,
        rule=rule,
        tick_s=tick_s,
        start_s=start_s + learned_s,
        end_s=end_s,
        trained_from_s=start_s,
    )


def real_markets() -> list[tuple[str, Market, int]]:
    """(name, market, slots of the job) for every real set of series."""
    found, _ = read_markets(data())
    markets = []
    for name, listings in found.items():
        slots = 16 if "16-node" in name or (", prices" in name and "capacity" not in name) else 1
        few = fitting(listings, slots)
        markets.append((f"{name}, {slots} slots", on_grid(few, AWS_TODAY), slots))
    k80 = k80_alone(found["us-east-1, prices"])
    markets.append(
        ("K80 of us-east-1 2020 under the rule of 2016, 16 slots", on_grid(k80, AWS_2016), 16)
    )
    return markets


def k80_alone(listings: Sequence[Listing]) -> list[Listing]:
    """The pools of K80s, with the work of one K80 as the unit."""
    return [
        msgspec.structs.replace(e, type=msgspec.structs.replace(e.type, speed=1.0))
        for e in listings
        if e.type.accelerator == "k80"
    ]


def against(results: Sequence[Result], name: str = "ours") -> tuple[str, Interval]:
    """The best other strategy by its mean cost, and ours over it on the same starts."""
    mine = next(r for r in results if r.strategy == name)
    others = [r for r in results if r.strategy != name]
    best = min(others, key=lambda r: float(r["cost_usd"].mean()))
    pair = np.stack([mine["cost_usd"], best["cost_usd"]])
    return best.strategy, interval(pair, mean_ratio)


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A plain table; the first column to the left, the others to the right."""
    widths = [max(len(str(r[i])) for r in [head, *rows]) for i in range(len(head))]
    print(f"\n{title}")
    for row in [head, *rows]:
        cells = [
            str(c).rjust(w) if i else str(c).ljust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells))
