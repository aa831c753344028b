"""Are deadlines kept, and at which cost? Beside our reading of Uniform Progress.

deadlines.py [starts in all, per deadline]
"""

import sys

import numpy as np
from _bidding import data, real_markets, show

from bidding.backtests import backtest
from bidding.markets.billing import AZURE
from bidding.markets.files import read_probes
from bidding.markets.grid import Listing, build
from bidding.markets.history import Series
from cloud.model import InstanceType, Pool

V100 = InstanceType(
    name="p3.2xlarge", cloud="aws", slots=1, memory_bytes=0, on_demand_usd_per_h=3.06
)
SPOT_USD_PER_H = 0.918
HOURS = 20.0
DEADLINES = (("loose, 2 x", 2.0), ("1.5 x", 1.5), ("1.25 x", 1.25), ("tight, 1.1 x", 1.1))


def probed() -> list:
    """A market per probed zone: one price, capacity as it was seen."""
    markets = []
    for name, series in read_probes(
        data() / "availability/spot-traces/availability/1-node"
    ).items():
        zone = name.split("/")[-1].split("_")[0]
        listing = Listing(
            pool=Pool("aws", zone[:-1], zone, name),
            type=V100,
            capacity=series,
            price=Series(at_s=np.array([0.0]), value=np.array([SPOT_USD_PER_H])),
        )
        tick_s = 600.0 if "k80" in name else 195.0
        markets.append(
            build([listing], rule=AZURE, tick_s=tick_s, start_s=0.0, end_s=float(series.at_s[-1]))
        )
    return markets


def table(title: str, markets: list, count: int, start_s: float) -> None:
    rows = []
    for name, factor in DEADLINES:
        work = backtest.Work(hours=HOURS, start_s=start_s, patience=factor)
        sums: dict[str, list[float]] = {}
        ratios: dict[str, list[float]] = {}
        for market in markets:
            starts = backtest.draw_starts(market, work, -(-count // len(markets)), seed=0)
            for r in backtest.run_with_deadline(market, work, factor * HOURS, starts=starts):
                total = sums.setdefault(r.strategy, [0.0] * 6)
                n = len(starts)
                costs = (r.cost_usd.sum(), r.bound_usd.sum(), r.plain_usd.sum())
                for i, v in enumerate((r.on_demand_usd * n, *costs, r.missed, n)):
                    total[i] += float(v)
                ratios.setdefault(r.strategy, []).extend(
                    r.cost_usd / np.maximum(r.bound_usd, r.cost_usd / backtest.RATIO_MAX)
                )
        for strategy, (on_demand, cost, bound, plain, missed, n) in sums.items():
            rows.append(
                [
                    f"{name}, {strategy}",
                    f"{(on_demand - cost) / (on_demand - bound):.3f}",
                    f"{cost / bound:.3f}",
                    *(f"{np.percentile(ratios[strategy], q):.3f}" for q in (50, 95)),
                    f"{cost / plain:.3f}",
                    f"{int(missed)} of {int(n)}",
                ]
            )
    head = ["of the saving", "/bound", "median", "95th", "/plain", "missed"]
    show(title, ["deadline and strategy", *head], rows)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    zones = probed()
    reach = "Reach: 0 missed, cost / bound at most 1.15; of the saving at least 0.85 (loose), 0.65 (tight)."
    table(
        f"Every probed zone alone, 20 h of work, a machine starts in 120 s, no refunds. {reach}",
        zones,
        count,
        120.0,
    )
    table("The same where a machine takes 10 min to start.", zones, count, 600.0)
    real = [m for name, m, slots in real_markets() if "all regions" in name and slots == 1]
    table(
        "All regions together: prices of 2020, today's rules. The bound knows which machines will be refunded;\n"
        "plain is the least bill were nothing refunded.",
        real,
        count,
        120.0,
    )


if __name__ == "__main__":
    main()
