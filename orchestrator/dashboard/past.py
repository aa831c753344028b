"""The footprint over time: the history on one grid of moments, as the page draws it."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, pairwise
from math import isfinite, nan
from statistics import median
from typing import Protocol

import msgspec

from cloud.clock import HOUR_S
from orchestrator.history.records import Cause, Entry, Happening, Point, Remembered, Spent
from orchestrator.history.store import WORTH_A_ROW
from orchestrator.kinds import Kind

POOLS_SHOWN_MAX = 9  # the rest are shown together
MARKS_MAX = 400
JOBS_MAX = 20  # whose layouts and losses are shown
PACED_MAX = 200  # whose steps are added up
POOLS_MAX = 200
CURVE_POINTS = 200
PRICES_S = 86_400.0
OTHERS = "others"
HELD = "held/"
UNIT_STEPS = 1000
MARKED: tuple[Kind, ...] = (
    "notice",
    "eviction",
    "layout",
    "checkpoint",
    "loss",
    "status",
    "finish",
    "failure",
    "budget",
    "order",
    "refusal",
)

Values = list[float | None]


class Past(Protocol):
    """The part of `orchestrator.history.reader.History` that the page needs."""

    def names(self, prefix: str = "") -> list[str]: ...

    def series(self, name: str, from_s: float, to_s: float, points_max: int) -> list[Point]: ...

    def events(
        self, from_s: float, to_s: float, job: str | None, kind: Sequence[Kind] | None, *, last: int
    ) -> list[Happening]: ...

    def money(self, job: str | None = None) -> list[Spent]: ...

    def entries(self, cause: Cause, job: str | None = None, most: int = -1) -> list[Entry]: ...

    def jobs(self) -> list[Remembered]: ...

    def span(self) -> tuple[float, float] | None: ...


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """How many machines of a pool and market were held at each moment."""

    pool: str
    machines: list[float]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of a job in a time: `2x3` is two stages, three replicas."""

    job: str
    from_s: float
    to_s: float
    label: str


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the chart shows of a time; None is where nothing was computed."""

    from_s: float
    to_s: float
    first_s: float  # of which anything is known
    last_s: float
    at_s: list[float]
    held: list[Band]
    steps_per_s: Values
    usd_per_h: Values
    work_usd: Values  # of 1,000 steps
    shapes: list[Shape]
    marks: list[Happening]


class _Far(msgspec.Struct):
    """The part of a remembered job that says how far it is, and where it began."""

    step: int = 0
    begun_step: int = 0


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """Points by job and by pool: step and loss, time and price."""

    losses: dict[str, list[tuple[float, float]]]
    prices: dict[str, list[tuple[float, float]]]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Which time to show: from and to, or the last seconds, or all that is known."""

    from_s: float | None = None
    to_s: float | None = None
    last_s: float | None = None


def footprint(past: Past, asked: Asked, points: int) -> Footprint:
    """Return the footprint of a time, as far as it is known."""
    first_s, last_s = past.span() or (0.0, 0.0)
    begin_s, end_s = _bounds(asked, first_s, last_s)
    width_s = (end_s - begin_s) / (points - 1)
    grid = [begin_s + width_s * n for n in range(points)]

    def read(name: str) -> list[float]:
        return held_at(past.series(name, begin_s, end_s, points), grid)

    def grown(name: str) -> list[float]:
        return counted_at(past.series(name, begin_s, end_s, points), grid)

    recent = [job for job in past.jobs() if (job.ended_at_s or end_s) >= begin_s]
    there = [job for job in recent if job.submitted_at_s <= end_s]
    far = {job.id: msgspec.json.decode(job.view, type=_Far) for job in there}
    jobs = sorted(there, key=lambda job: far[job.id].step == 0)[:PACED_MAX]  # those that wait last
    pace = _pace(grown, {job.id: far[job.id].begun_step for job in jobs}, width_s, points)
    rates = read("usd_per_h")
    return Footprint(
        from_s=begin_s,
        to_s=end_s,
        first_s=first_s,
        last_s=last_s,
        at_s=grid,
        held=_bands({name: read(name) for name in past.names(HELD)}),
        steps_per_s=[step or None for step in pace],
        usd_per_h=[None if rate != rate else rate for rate in rates],  # noqa: PLR0124 - NaN
        work_usd=[
            UNIT_STEPS * rate / HOUR_S / step if step > 0 and rate == rate else None  # noqa: PLR0124
            for rate, step in zip(rates, pace, strict=True)
        ],
        shapes=[shape for job in jobs[:JOBS_MAX] for shape in _shapes(read, job, grid)],
        marks=past.events(begin_s, end_s, None, MARKED, last=MARKS_MAX),
    )


def _bounds(asked: Asked, first_s: float, last_s: float) -> tuple[float, float]:
    """Return the time shown: what is asked, cut to what is known if these meet."""
    from_s = asked.from_s if asked.last_s is None else last_s - asked.last_s
    begin_s = max(first_s, from_s if from_s is not None else first_s)
    end_s = min(last_s, asked.to_s if asked.to_s is not None else last_s)
    if begin_s < end_s:
        return begin_s, end_s
    return (first_s, last_s) if first_s < last_s else (last_s - 1.0, last_s)


def curves(past: Past, jobs: Iterable[str], pools: Iterable[str]) -> Curves:
    """Return the losses of jobs over their steps, and the last day's prices of pools."""
    first_s, last_s = past.span() or (0.0, 0.0)
    losses = {job: loss_curve(past, job, first_s, last_s) for job in islice(jobs, JOBS_MAX)}
    from_s = max(first_s, last_s - PRICES_S)
    prices = {
        pool: [
            (point.at_s, point.last)
            for point in past.series(f"price/{pool}", from_s, last_s, CURVE_POINTS)
        ]
        for pool in islice(pools, POOLS_MAX)
    }
    return Curves(
        losses={job: found for job, found in losses.items() if found},
        prices={pool: found for pool, found in prices.items() if found},
    )


def loss_curve(past: Past, job: str, first_s: float, last_s: float) -> list[tuple[float, float]]:
    """Return the loss of a job at each step; where a job went back, only its last way counts."""
    losses = past.series(f"job/{job}/loss", first_s, last_s, CURVE_POINTS)
    steps = past.series(f"job/{job}/step", first_s, last_s, CURVE_POINTS)
    found: list[tuple[float, float]] = []
    at = held_at(steps, [point.at_s for point in losses])
    for point, step in zip(losses, at, strict=True):
        if not isfinite(step) or not isfinite(point.last):
            continue
        while found and found[-1][0] >= step:
            found.pop()
        found.append((step, point.last))
    return found


def held_at(points: Sequence[Point], grid: Sequence[float]) -> list[float]:
    """Return the value that held at each moment, NaN before the first: a value holds until the next."""
    starts = [point.at_s for point in points]
    found = (bisect_right(starts, at_s) for at_s in grid)
    return [points[n - 1].last if n else nan for n in found]


def counted_at(points: Sequence[Point], grid: Sequence[float]) -> list[float]:
    """Return how far a count was at each moment: it grows evenly from one point to the next.

    Where points are missing it stood still, because a value that does not change is kept once in
    `WORTH_A_ROW` points only; where more are missing, nobody looked, and it may have grown all along.
    """
    import numpy as np  # here, because short commands import this module

    if not points:
        return [nan] * len(grid)
    even_s = median([b.at_s - a.at_s for a, b in pairwise(points)] or [0.0])
    at_s, counts = [points[0].at_s], [points[0].last]
    for before, point in pairwise(points):
        if 1.5 * even_s < point.at_s - before.at_s <= (WORTH_A_ROW + 1) * even_s:
            at_s.append(point.at_s - even_s)
            counts.append(before.last)
        at_s.append(point.at_s)
        counts.append(point.last)
    return [float(value) for value in np.interp(grid, at_s, counts, left=nan)]


def _pace(
    grown: Callable[[str], list[float]], begun: Mapping[str, int], width_s: float, points: int
) -> list[float]:
    """Return the steps per second of all jobs, from how far each was at each moment.

    Steps of another job, from which one went on, are not its own.
    """
    total = [0.0] * points
    for name, first in begun.items():
        steps = [max(step, float(first)) for step in grown(f"job/{name}/step")]
        for n in range(1, points):
            gone = steps[n] - steps[n - 1]
            if gone > 0:  # a job that went back is doing steps again, and NaN is none
                total[n] += gone / width_s
    return total


def _bands(held: dict[str, list[float]]) -> list[Band]:
    """Return the pools held most, in order of their names, and all others as one."""
    amounts = {
        name.removeprefix(HELD): [value if value > 0 else 0.0 for value in values]
        for name, values in held.items()
    }
    shown = sorted((name for name in amounts if any(amounts[name])), key=lambda x: -sum(amounts[x]))
    bands = [Band(pool=name, machines=amounts[name]) for name in sorted(shown[:POOLS_SHOWN_MAX])]
    if rest := [amounts[name] for name in shown[POOLS_SHOWN_MAX:]]:
        bands.append(
            Band(pool=OTHERS, machines=[sum(column) for column in zip(*rest, strict=True)])
        )
    return bands


def _shapes(read: Callable[[str], list[float]], job: Remembered, grid: list[float]) -> list[Shape]:
    """Return the times in which a job's layout stayed the same."""
    depths, widths = read(f"job/{job.id}/depth"), read(f"job/{job.id}/width")
    until_s = job.ended_at_s if job.ended_at_s is not None else grid[-1]
    shapes: list[Shape] = []
    for at_s, depth, width in zip(grid, depths, widths, strict=True):
        label = f"{depth:.0f}x{width:.0f}" if depth > 0 and width > 0 and at_s <= until_s else ""
        if shapes and shapes[-1].label == label:
            shapes[-1] = msgspec.structs.replace(shapes[-1], to_s=at_s)
            continue
        if shapes:
            shapes[-1] = msgspec.structs.replace(shapes[-1], to_s=at_s)
        shapes.append(Shape(job=job.id, from_s=at_s, to_s=at_s, label=label))
    return [shape for shape in shapes if shape.label]
