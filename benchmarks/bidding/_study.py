"""The five cumulative strategies of the pricing study (Narayanan 2021, ch. 6), by its own rules.

Its simulation steps a day at a time, one accelerator per job: the score of an instance is
    score = throughput(accelerator) / (price / accelerators)          steps per dollar
a day's quote is the lowest of that day; without one the last price stays; after the end of the log
the rest of the work is billed at the last price. Each strategy adds one freedom to the one before.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from bidding.errors import HistoryError
from bidding.markets.files import AWS_ACCELERATORS, read_prices
from bidding.markets.history import Series
from cloud.clock import DAY_S

Strategy = Literal["1xV100", "+gpu type", "+multi-gpu", "+multi-cloud", "+dynamic"]
STRATEGIES: tuple[Strategy, ...] = (
    "1xV100",
    "+gpu type",
    "+multi-gpu",
    "+multi-cloud",
    "+dynamic",
)
FREE_EGRESS_GB = 1.0


class Sold(msgspec.Struct, frozen=True, kw_only=True):
    """One instance type in one zone, with the lowest quote of each day that has one."""

    cloud: str
    zone: str
    accelerator: str
    accelerators: int
    low_usd_per_h: Mapping[int, float]

    def usd_per_accelerator_h(self, day: int) -> float | None:
        """On AWS the rest of a large machine is assumed full; on Azure the study counts it whole."""
        price = self.low_usd_per_h.get(day)
        return None if price is None else price / self.accelerators

    def scored_usd_per_h(self, day: int) -> float | None:
        return (
            self.low_usd_per_h.get(day)
            if self.cloud == "azure"
            else self.usd_per_accelerator_h(day)
        )


def daily_lows(series: Series) -> dict[int, float]:
    """The lowest quote of every day that has a quote; days are counted from 1970 in UTC."""
    lows: dict[int, float] = {}
    for at_s, value in zip(series.at_s.tolist(), series.value.tolist(), strict=True):
        day = int(at_s // DAY_S)
        lows[day] = min(value, lows.get(day, value))
    return lows


def allowed(strategy: Strategy, sold: Sequence[Sold]) -> list[Sold]:
    """What a strategy may choose from."""
    match strategy:
        case "1xV100":
            return [
                s for s in sold if (s.cloud, s.accelerator, s.accelerators) == ("aws", "v100", 1)
            ]
        case "+gpu type":
            return [s for s in sold if s.cloud == "aws" and s.accelerators == 1]
        case "+multi-gpu":
            return [s for s in sold if s.cloud == "aws"]
        case "+multi-cloud" | "+dynamic":
            return list(sold)


def best(day: int, sold: Sequence[Sold], steps_per_s: Mapping[str, float]) -> Sold:
    """The most steps per dollar among what was quoted that day."""
    scored = [
        (steps_per_s[s.accelerator] / price, -i, s)
        for i, s in enumerate(sold)
        if (price := s.scored_usd_per_h(day)) is not None
    ]
    if not scored:
        raise HistoryError(f"nothing was quoted on day {day}: choose a start inside the log")
    return max(scored, key=lambda x: x[:2])[2]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    cost_usd: float
    switches: int


def run(
    strategy: Strategy,
    sold: Sequence[Sold],
    steps_per_s: Mapping[str, float],
    v100_days: float,
    start_day: int,
    last_day: int,
) -> Run:
    """One job of `v100_days` days on a V100, begun at a day, run by the study's rules."""
    choices = allowed(strategy, sold)
    steps_left = v100_days * DAY_S * steps_per_s["v100"]
    held = best(start_day, choices, steps_per_s)
    price = held.usd_per_accelerator_h(start_day) or 0.0
    cost, switches, day = 0.0, 0, start_day
    while True:
        rate = steps_per_s[held.accelerator]
        seconds = steps_left / rate
        if day < last_day:
            seconds = min(seconds, DAY_S)
        cost += price * seconds / 3600
        steps_left -= seconds * rate
        day += 1
        if steps_left <= 1e-6 * rate:
            return Run(cost_usd=cost, switches=switches)
        if strategy == "+dynamic":
            better = best(day, choices, steps_per_s)
            switches += better is not held
            held = better
        price = held.usd_per_accelerator_h(day) or price


def mean_cost_usd(
    strategy: Strategy,
    sold: Sequence[Sold],
    steps_per_s: Mapping[str, float],
    v100_days: float,
    start_days: Sequence[int],
    last_day: int,
) -> float:
    runs = [run(strategy, sold, steps_per_s, v100_days, d, last_day) for d in start_days]
    return float(np.mean([r.cost_usd for r in runs]))


def egress_usd(gigabytes: float, usd_per_gb: float = 0.09) -> float:
    """Moving bytes out of a cloud: the first gigabyte is free (table 6.2)."""
    return max(0.0, gigabytes - FREE_EGRESS_GB) * usd_per_gb


def read_sold(aws_region: Path, azure: Path) -> list[Sold]:
    """The market of the pricing study: one AWS region, and the daily tables of Azure."""
    aws, _ = read_prices(aws_region)
    sold = [
        Sold(
            cloud="aws",
            zone=pool.zone,
            accelerator=AWS_ACCELERATORS[pool.type][0],
            accelerators=AWS_ACCELERATORS[pool.type][1],
            low_usd_per_h=daily_lows(series),
        )
        for pool, series in aws.items()
    ]
    kinds: dict[str, tuple[str, int]] = {}
    for line in (azure / "instance_mapping.csv").read_text(encoding="utf-8").splitlines()[1:]:
        name, kind, number = line.split(",")
        kinds[name] = (kind.lower(), int(number))
    days, _ = read_prices(azure)
    for pool, series in days.items():
        accelerator, count = kinds[pool.type]
        sold.append(
            Sold(
                cloud="azure",
                zone=pool.zone,
                accelerator=accelerator,
                accelerators=count,
                low_usd_per_h=daily_lows(series),
            )
        )
    return sold


def read_throughputs(path: Path) -> dict[str, dict[str, float]]:
    """Steps per second alone, by model and accelerator."""
    raw = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, dict[str, object]]])
    alone: dict[str, dict[str, float]] = {}
    for accelerator, models in raw.items():
        for model, rows in models.items():
            alone.setdefault(model, {})[accelerator] = float(str(rows["null"]))
    return alone
