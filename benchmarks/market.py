"""Is the drawn market like the real one? Its statistics beside those of public series.

The real series are read from `../shared/data`; without that folder only the drawn market is shown.
"""

import sys
from itertools import takewhile
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cloud"))

import market_statistics as statistics

from cloud.market import Catalogue, SpotMarket, Zone, local_type

REAL = Path(__file__).parents[2] / "shared" / "data"
DAYS = 90
SEEDS = (1, 2, 3)
TYPES = 60
TYPES_WITH_CAPACITY = 10
MACHINES = 16


def drawn(seed: int) -> dict[str, float]:
    zones = tuple(Zone(name=f"zone-{n}", region="region", dialect="ec2") for n in range(4))
    types = tuple(local_type(f"type-{n}", 1, 1.0) for n in range(TYPES))
    market = SpotMarket(
        Catalogue(cloud="local", types=types, zones=zones, pool_machines=MACHINES), seed=seed
    )
    end_s = DAYS * 86_400.0
    series = {
        what: [
            statistics.changes(
                (step.at_s, step.value)
                for step in takewhile(lambda step: step.at_s < end_s, ask(pool))
            )
            for pool in market.catalogue.pools[: 4 * count]
        ]
        for what, ask, count in (
            ("prices", market.prices, TYPES),
            ("capacity", market.capacity, TYPES_WITH_CAPACITY),
        )
    }
    return table_of(series["prices"], end_s, series["capacity"], MACHINES)


def real() -> dict[str, float]:
    prices, end_s = statistics.aws_prices(REAL / "prices/aws-2020")
    probes = REAL / "availability/spot-traces/availability"
    return table_of(prices, end_s, statistics.probes(probes, "*2023/*v100_*.json"), 1)


def table_of(
    prices: list[statistics.Steps], end_s: float, rooms: list[statistics.Steps], full: float
) -> dict[str, float]:
    price = statistics.prices(prices, end_s)
    room = statistics.capacity(rooms, full)
    fell = statistics.drops([steps for steps in rooms if max(v for _, v in steps) > 1])
    low, middle, high = price.level_quartiles
    return {
        "pools that stand at 0.30 of on demand": price.calm_share,
        "pools close to on demand": price.scarce_share,
        "a moving price is quoted again after, h (median)": price.quoted_every_h,
        "by (median)": price.change,
        "by (ninth decile)": price.change_ninth_decile,
        "mean of a moving price: first quartile": low,
        "mean of a moving price: median": middle,
        "mean of a moving price: third quartile": high,
        "least price": price.least,
        "share of time above 0.50": price.share_of_time_above_half,
        "spread of the logarithm": price.spread,
        "memory from quote to quote": price.memory,
        "room lasts, h (median)": room.plenty_h,
        "room lasts, h (mean)": room.plenty_mean_h,
        "less lasts, h (median)": room.short_h,
        "less lasts, h (mean)": room.short_mean_h,
        "drops that lose at least half": fell.by_half_share,
        "drops that lose all": fell.to_zero_share,
    }


def main() -> None:
    columns = {f"seed {seed}": drawn(seed) for seed in SEEDS}
    if REAL.exists():
        columns = {"real": real(), **columns}
    else:
        print(f"{REAL} is missing, so the real series are not shown")
    table = Table("statistic", *columns)
    for name in columns["seed 1"]:
        table.add_row(name, *(f"{column[name]:.4g}" for column in columns.values()))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
