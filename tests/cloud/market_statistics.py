"""The statistics that the synthetic market is calibrated to, of any price or capacity series."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import msgspec

from cloud.clock import HOUR_S

CALM_BELOW = 0.302
SCARCE_ABOVE = 0.85
Steps = Sequence[tuple[float, float]]
"""Time in seconds and value, sorted; consecutive values differ."""


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Of many pools. Ratios are prices by the on-demand price."""

    pools: int
    calm_share: float
    scarce_share: float
    quoted_every_h: float
    change: float
    change_ninth_decile: float
    level_quartiles: tuple[float, float, float]
    least: float
    share_of_time_above_half: float
    spread: float
    memory: float


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Of one or more pools: how long there is room, how long there is less."""

    plenty_h: float
    plenty_mean_h: float
    short_h: float
    short_mean_h: float


class Drops(msgspec.Struct, frozen=True, kw_only=True):
    """Of several machines together."""

    count: int
    by_half_share: float
    to_zero_share: float


def changes(rows: Iterable[tuple[float, float]]) -> Steps:
    kept: list[tuple[float, float]] = []
    for at_s, value in sorted(set(rows)):
        if not kept or value != kept[-1][1]:
            kept.append((at_s, value))
    return kept


def prices(pools: Sequence[Steps], end_s: float) -> Prices:
    calm = [steps for steps in pools if max(value for _, value in steps) < CALM_BELOW]
    scarce = [steps for steps in pools if _average(steps, end_s) > SCARCE_ABOVE]
    moving = [steps for steps in pools if steps not in calm and steps not in scarce]
    gaps = [b[0] - a[0] for steps in moving for a, b in pairwise(steps)]
    moves = [abs(b[1] / a[1] - 1) for steps in moving for a, b in pairwise(steps)]
    levels = [_average(steps, end_s) for steps in moving]
    logs = [_log_ratios(steps) for steps in moving if len(steps) > 20]
    low, middle, high = statistics.quantiles(levels, n=4)
    return Prices(
        pools=len(pools),
        calm_share=len(calm) / len(pools),
        scarce_share=len(scarce) / len(pools),
        quoted_every_h=statistics.median(gaps) / HOUR_S,
        change=statistics.median(moves),
        change_ninth_decile=statistics.quantiles(moves, n=10)[8],
        level_quartiles=(low, middle, high),
        least=min(value for steps in pools for _, value in steps),
        share_of_time_above_half=statistics.fmean(_above(steps, end_s, 0.5) for steps in moving),
        spread=statistics.median(statistics.pstdev(series) for series in logs),
        memory=statistics.median(_memory(series) for series in logs),
    )


def capacity(pools: Sequence[Steps], full: float) -> Capacity:
    plenty, short = [], []
    for steps in pools:
        whole = changes((at_s, float(value >= full)) for at_s, value in steps)
        for now, then in pairwise(whole):
            (plenty if now[1] else short).append((then[0] - now[0]) / HOUR_S)
    return Capacity(
        plenty_h=statistics.median(plenty),
        plenty_mean_h=statistics.fmean(plenty),
        short_h=statistics.median(short),
        short_mean_h=statistics.fmean(short),
    )


def drops(pools: Sequence[Steps]) -> Drops:
    pairs = [pair for steps in pools for pair in pairwise(steps)]
    fell = [(a[1], b[1]) for a, b in pairs if b[1] < a[1]]
    return Drops(
        count=len(fell),
        by_half_share=sum(after <= before / 2 for before, after in fell) / len(fell),
        to_zero_share=sum(after == 0 for _, after in fell) / len(fell),
    )


# Reading the real series


ON_DEMAND = {
    "p2.xlarge": 0.90,
    "p2.8xlarge": 7.20,
    "p2.16xlarge": 14.40,
    "p3.2xlarge": 3.06,
    "p3.8xlarge": 12.24,
    "p3.16xlarge": 24.48,
}


def aws_prices(directory: Path) -> tuple[list[Steps], float]:
    """Price ratios of every pool, all overlapping dumps together, and the time of the last row."""
    pools: dict[tuple[str, str], set[tuple[float, float]]] = {}
    for path in sorted(directory.rglob("*.json")):
        if not path.stat().st_size:
            continue
        for row in json.loads(path.read_text())["SpotPriceHistory"]:
            if row["InstanceType"] in ON_DEMAND and row["ProductDescription"] == "Linux/UNIX":
                at_s = datetime.fromisoformat(row["Timestamp"]).timestamp()
                ratio = float(row["SpotPrice"]) / ON_DEMAND[row["InstanceType"]]
                key = (row["AvailabilityZone"], row["InstanceType"])
                pools.setdefault(key, set()).add((at_s, ratio))
    end_s = max(at_s for rows in pools.values() for at_s, _ in rows)
    return [changes(rows) for rows in pools.values()], end_s


def probes(directory: Path, names: str) -> list[Steps]:
    """Counts of machines that were to be had, one series a file."""
    found = []
    for path in sorted(directory.rglob(names)):
        said = json.loads(path.read_text())
        gap_s = float(said["metadata"]["gap_seconds"])
        found.append(changes((nth * gap_s, float(v)) for nth, v in enumerate(said["data"])))
    return found


def _average(steps: Steps, end_s: float) -> float:
    return _integral(steps, end_s) / (end_s - steps[0][0])


def _above(steps: Steps, end_s: float, level: float) -> float:
    return _average([(at_s, float(value > level)) for at_s, value in steps], end_s)


def _integral(steps: Steps, end_s: float) -> float:
    ends = [at_s for at_s, _ in steps[1:]] + [end_s]
    return sum(value * (end - at_s) for (at_s, value), end in zip(steps, ends, strict=True))


def _log_ratios(steps: Steps) -> list[float]:
    return [math.log(value) for _, value in steps]


def _memory(series: Sequence[float]) -> float:
    """The correlation of a series with itself one quote later."""
    return statistics.correlation(series[:-1], series[1:])
