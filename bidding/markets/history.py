"""Histories of markets: prices and capacity per pool as step functions, in common formats.

Every reader takes text and returns series and an account of its repairs, because real dumps
overlap, repeat themselves, come unsorted and hold absurd rows.
"""

import csv
import io
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import msgspec
import numpy as np
from numpy.typing import NDArray

from bidding.errors import HistoryError
from cloud.clock import utc_s
from cloud.model import LINUX, Pool

Floats = NDArray[np.float64]

POINTS_MAX = 200_000  # per series; the oldest points are dropped first
USD_PER_H_MAX = 1_000.0  # no machine costs more, so a higher price is absurd
AT_S_MAX = 4_102_444_800.0  # the year 2100; a later time is absurd and may be in milliseconds
REGION = re.compile(r"[a-z]+(-[a-z]+)+-\d+")


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """A step function: `value[i]` holds from `at_s[i]` until the next point. Times increase."""

    at_s: Floats
    value: Floats

    def __post_init__(self) -> None:
        if len(self.at_s) == 0 or len(self.at_s) != len(self.value):
            raise HistoryError(
                f"a series needs as many times as values and at least one, not {len(self.at_s)} "
                f"and {len(self.value)}; drop the pool if nothing is known of it"
            )
        if np.any(np.diff(self.at_s) <= 0):
            raise HistoryError("the times of a series must increase: sort and merge its rows first")

    def at(self, at_s: float) -> float:
        """Return the value that holds; before the first point the first value holds."""
        return float(self.value[max(0, int(np.searchsorted(self.at_s, at_s, "right")) - 1)])

    def mean(self, from_s: float, to_s: float) -> float:
        """Return the time-weighted mean between two moments."""
        inside = self.at_s[(self.at_s > from_s) & (self.at_s < to_s)]
        edges = np.concatenate(([from_s], inside, [to_s]))
        where = np.maximum(np.searchsorted(self.at_s, edges[:-1], "right") - 1, 0)
        return float(np.sum(self.value[where] * np.diff(edges)) / (to_s - from_s))


class Repairs(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that a reader saw, and how many of them it had to drop or sort.

    `other` counts prices of systems that we do not start, or in units other than dollars per hour.
    """

    rows: int = 0
    duplicate: int = 0
    unsorted: int = 0
    absurd: int = 0
    unreadable: int = 0
    over_bound: int = 0
    other: int = 0

    def __add__(self, other: "Repairs") -> "Repairs":
        return Repairs(**{f: getattr(self, f) + getattr(other, f) for f in self.__struct_fields__})


class Point(msgspec.Struct, frozen=True):
    """One row of a dump: a pool, a moment, a price or a count."""

    pool: Pool
    at_s: float
    value: float


History = Mapping[Pool, Series]


def build(
    points: Iterable[Point], value_max: float = USD_PER_H_MAX, zero_is_fine: bool = False
) -> tuple[dict[Pool, Series], Repairs]:
    """Build series from rows in any order; of two rows for one moment the last read counts."""
    rows: dict[Pool, dict[float, float]] = {}
    last: dict[Pool, float] = {}
    seen = duplicate = unsorted = absurd = 0
    for p in points:
        seen += 1
        low_enough = 0 <= p.value <= value_max if zero_is_fine else 0 < p.value <= value_max
        if not low_enough or not p.at_s <= AT_S_MAX:
            absurd += 1
            continue
        of_pool = rows.setdefault(p.pool, {})
        duplicate += p.at_s in of_pool
        unsorted += p.at_s < last.get(p.pool, p.at_s)
        last[p.pool] = p.at_s
        of_pool[p.at_s] = p.value
    over = sum(max(0, len(of_pool) - POINTS_MAX) for of_pool in rows.values())
    series = {pool: _series(of_pool) for pool, of_pool in sorted(rows.items())}
    return series, Repairs(
        rows=seen, duplicate=duplicate, unsorted=unsorted, absurd=absurd, over_bound=over
    )


def _series(rows: Mapping[float, float]) -> Series:
    ordered = sorted(rows.items())[-POINTS_MAX:]
    return Series(
        at_s=np.array([t for t, _ in ordered], dtype=np.float64),
        value=np.array([v for _, v in ordered], dtype=np.float64),
    )


def read_aws(text: str) -> tuple[dict[Pool, Series], Repairs]:
    """Read the Linux prices that `aws ec2 describe-spot-price-history` prints.

    An empty file is an empty history.
    """
    if not text.strip():
        return {}, Repairs()
    try:
        rows = msgspec.json.decode(text, type=dict[str, object]).get("SpotPriceHistory", [])
    except ValueError as e:
        raise HistoryError(f"not the JSON of describe-spot-price-history: {e}") from e
    return _from_rows(rows if isinstance(rows, list) else [], _aws_point)


def read_azure_retail(text: str) -> tuple[dict[Pool, Series], Repairs]:
    """Read a page of the Azure retail prices API.

    Only its Spot meters of Linux in US dollars per hour count.
    """
    try:
        rows = msgspec.json.decode(text, type=dict[str, object]).get("Items", [])
    except ValueError as e:
        raise HistoryError(f"not the JSON of the Azure retail prices API: {e}") from e
    spot = [
        row
        for row in (rows if isinstance(rows, list) else [])
        if not isinstance(row, dict) or "Spot" in str(row.get("skuName", ""))
    ]
    return _from_rows(spot, _azure_point)


def read_csv(text: str) -> tuple[dict[Pool, Series], Repairs]:
    """Read columns `at,cloud,region,zone,type,usd_per_h`; `at` is ISO 8601 or seconds."""
    return _from_rows(_table(text), _csv_point)


def read_azure_daily(text: str, region: str) -> tuple[dict[Pool, Series], Repairs]:
    """Read a table of US dates and `$` prices, one column per type; blank means not offered."""
    cells = (
        {"at": row.get("Date", ""), "type": type_, "price": price}
        for row in _table(text)
        for type_, price in row.items()
        if type_ and type_ != "Date" and price and price.strip()
    )

    def point(cell: Mapping[str, str]) -> Point:
        at = datetime.strptime(cell["at"], "%m/%d/%Y").replace(tzinfo=UTC)
        pool = Pool("azure", region, region, cell["type"])
        return Point(pool, at.timestamp(), float(cell["price"].strip().lstrip("$")))

    return _from_rows(cells, point)


def _table(text: str) -> Iterable[dict[str, str]]:
    """Yield the rows of a CSV, with or without a byte order mark at its beginning."""
    reader = csv.DictReader(io.StringIO(text.lstrip("\ufeff")))
    try:
        yield from reader
    except csv.Error as e:
        raise HistoryError(
            f"after line {reader.line_num} it is no table: {e}; a quote may never end: take that row away"
        ) from e


def _from_rows(rows: Iterable[object], point: object) -> tuple[dict[Pool, Series], Repairs]:
    assert callable(point)
    points: list[Point] = []
    unreadable = other = 0
    for row in rows:
        try:
            found = point(row)
        except (KeyError, TypeError, ValueError, AttributeError):
            unreadable += 1
            continue
        if found is None:
            other += 1
        else:
            points.append(found)
    series, repairs = build(points)
    return series, repairs + Repairs(rows=unreadable + other, unreadable=unreadable, other=other)


def _moment(text: str) -> float:
    return utc_s(datetime.fromisoformat(text))


def _aws_point(row: Mapping[str, str]) -> Point | None:
    """Return the point of a Linux row, else `None`.

    Other systems have rows with higher prices at the same moments in the same zones. A local zone
    belongs to the region that its name begins with.
    """
    if not row.get("ProductDescription", LINUX).startswith(LINUX):
        return None
    zone = row["AvailabilityZone"]
    region = REGION.match(zone)
    pool = Pool("aws", region[0] if region else zone[:-1], zone, row["InstanceType"])
    return Point(pool, _moment(row["Timestamp"]), float(row["SpotPrice"]))


def _azure_point(row: Mapping[str, str]) -> Point | None:
    in_usd = (row.get("currencyCode", "USD"), row.get("unitOfMeasure", "1 Hour")) == (
        "USD",
        "1 Hour",
    )
    if not in_usd or "Windows" in row.get("productName", ""):
        return None
    region = row["armRegionName"]
    pool = Pool("azure", region, region, row["armSkuName"])
    return Point(pool, _moment(row["effectiveStartDate"]), float(row["retailPrice"]))


def _csv_point(row: Mapping[str, str]) -> Point:
    pool = Pool(row["cloud"], row["region"], row["zone"], row["type"])
    at = row["at"]
    seconds = float(at) if at.replace(".", "", 1).isdigit() else _moment(at)
    return Point(pool, seconds, float(row["usd_per_h"]))


class _Probe(msgspec.Struct):
    metadata: dict[str, float]
    data: list[float]


def read_probe(text: str) -> Series:
    """Read capacity per tick: `{"metadata": {"gap_seconds": g}, "data": [...]}`, from time 0."""
    try:
        probe = msgspec.json.decode(text, type=_Probe)
        gap_s = probe.metadata["gap_seconds"]
    except (ValueError, KeyError) as e:
        raise HistoryError(
            f"not an availability probe with metadata.gap_seconds and data: {e}"
        ) from e
    counts = np.array(probe.data, dtype=np.float64)
    if len(counts) == 0 or gap_s <= 0 or counts.min() < 0:
        raise HistoryError(
            f"an availability probe needs ticks, a positive gap and counts of zero or more, "
            f"not {len(counts)} ticks every {gap_s} s"
        )
    return thin(np.arange(len(counts), dtype=np.float64) * gap_s, counts)


def thin(at_s: Floats, value: Floats) -> Series:
    """Return the same step function without the points at which nothing changes."""
    keep = np.concatenate(([True], np.diff(value) != 0))
    return Series(at_s=at_s[keep].astype(np.float64), value=value[keep].astype(np.float64))


def merge(histories: Iterable[History]) -> dict[Pool, Series]:
    """Merge overlapping dumps into one history; equal moments count once."""
    rows: dict[Pool, dict[float, float]] = {}
    for history in histories:
        for pool, series in history.items():
            rows.setdefault(pool, {}).update(
                zip(series.at_s.tolist(), series.value.tolist(), strict=True)
            )
    return {pool: _series(of_pool) for pool, of_pool in sorted(rows.items())}
