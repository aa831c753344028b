"""The backtest as one HTML page without scripts: tables and plots."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import msgspec
import numpy as np

from bidding.backtests import backtest, strategies
from bidding.compiled import Floats, Ints
from bidding.markets.grid import PLENTY, Market
from bidding.risk import Calibration
from cloud.clock import HOUR_S
from orchestrator.backtest.plots import COLOURS, PlotLine, boxes, lines, stacked
from orchestrator.formatting import plural

POINTS_MAX = 1_500
POOLS_SHOWN = 5
OTHERS, RELIABLE = "#afb8c1", "#57606a"  # greys, for the pools without a colour and for on demand
ON_DEMAND = strategies.STRATEGIES[0].name
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:900px;padding:0 1rem;color:#1f2328;background:#fff}
table{border-collapse:collapse;width:100%;font-size:13px}th,td{padding:.25rem .4rem;text-align:right;
border-bottom:1px solid #d0d7de}th:first-child,td:first-child{text-align:left}tr.ours{font-weight:600;background:#ddf4ff}
svg{width:100%;height:auto}.grid{stroke:#d0d7de}.tick{font-size:11px;fill:#57606a}.axis{font-size:12px;fill:#1f2328}
path{stroke-width:1.6}.legend span{margin-right:1rem;font-size:13px;white-space:nowrap}.legend i{display:inline-block;width:.8rem;height:.8rem;
border-radius:2px;margin-right:.35rem;vertical-align:-1px}.names{columns:3;font-size:13px}.note{color:#57606a}
@media (prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}.axis{fill:#e6edf3}
.tick,.note{fill:#8d96a0;color:#8d96a0}.grid{stroke:#30363d}th,td{border-color:#30363d}tr.ours{background:#132d4a}}
"""


class ReportSection(msgspec.Struct, frozen=True, kw_only=True):
    """One market of the report, with all results on it."""

    name: str
    market: Market
    work: backtest.Work
    results: Sequence[backtest.Result]
    frontier: Sequence[tuple[float, Sequence[backtest.Rush]]]
    calibration: Calibration | None


def write(path: Path, sections: Sequence[ReportSection], summary: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "".join(_section(s) for s in sections)
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Backtest</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style>'
        f"<h1>Backtest</h1><p>{escape(summary)}</p>{body}</html>",
        encoding="utf-8",
    )


def _section(s: ReportSection) -> str:
    parts = [
        f"<h2>{escape(s.name)}</h2>",
        _table(s),
        '<p class="note">Cost with its 95 % interval. The bound is what a buyer who knows the future '
        "(also which machines will be refunded) must at least pay to be done by the same moment; the "
        "plain figure is the least bill were nothing ever refunded. Who takes longer leaves the bound more "
        "time to wait for refunds: the dearer of two strategies may be closer to its own bound. 99 stands for a "
        "bound of next to nothing. Late jobs ran out of patience and finished on demand.</p>",
        "<h3>Cost of one job, by strategy</h3>",
        _costs(s),
        "<h3>One run: prices and holdings</h3>",
        _one_run(s),
    ]
    if s.frontier:
        parts += ["<h3>Cost against the deadline</h3>", _frontier(s)]
    if s.calibration is not None:
        parts += [
            "<h3>Evictions within the hour: predicted and observed</h3>",
            _calibration(s.calibration),
        ]
    return "".join(parts)


def _costs(s: ReportSection) -> str:
    """Draw the costs as boxes; on demand is only named, because it is far above the others."""
    apart = [r for r in s.results if r.strategy == ON_DEMAND and len(s.results) > 1]
    groups = [
        (r.strategy, np.percentile(r["cost_usd"], (5, 25, 50, 75, 95)).tolist())
        for r in s.results
        if r not in apart
    ]
    note = "".join(
        f'<p class="note">Not drawn: {escape(r.strategy)}, ${r["cost_usd"].mean():.4g}.</p>'
        for r in apart
    )
    return boxes(groups, "dollars") + note


def _table(s: ReportSection) -> str:
    head = (
        "<tr><th>strategy<th>cost $<th>interval<th>hours<th>lost slot-h<th>evictions<th>free %"
        "<th>of bound<th>95th<th>of plain<th>late</tr>"
    )
    rows = []
    for r in s.results:
        cost = backtest.interval(r["cost_usd"], lambda v: float(v.mean()))
        held = float((r["spot_h"] + r["on_demand_h"]).mean())
        rows.append(
            f'<tr class="{"ours" if r.strategy == "ours" else ""}"><td>{escape(r.strategy)}<td>{cost.value:.4g}'
            f"<td>{cost.low:.4g} to {cost.high:.4g}<td>{r['runtime_h'].mean():.2f}<td>{r['lost_h'].mean():.2f}"
            f"<td>{r['evictions'].mean():.1f}<td>{100 * r['free_h'].mean() / held:.1f}"
            f"<td>{np.median(r.ratio):.2f}<td>{np.percentile(r.ratio, 95):.2f}<td>{np.median(r.plain_ratio):.2f}<td>{int((r['finished'] == 0).sum())}</tr>"
        )
    return f"<table>{head}{''.join(rows)}</table>"


def _one_run(s: ReportSection) -> str:
    """Draw one typical run of our strategy: prices of work, slots held, and dollars spent.

    It shows the pools that were held longest, then those with the cheapest work. A pool has the
    same colour in all plots.
    """
    start = _typical_start(s.results[-1])
    rows = backtest.trace(s.market, s.work, strategies.STRATEGIES[-1], start)
    every = max(1, len(rows) // POINTS_MAX)
    tick_h = s.market.tick_s / HOUR_S
    hours = [float(h) for h in np.arange(0, len(rows), every) * tick_h]
    ticks = np.arange(start, start + len(rows), every)
    usd = s.market.price[:, ticks] / (s.market.slots * s.market.speed)[:, None]
    held = rows[::every, backtest.HELD :].T
    shown = np.lexsort((usd.mean(axis=1), -held[:-1].sum(axis=1)))[:POOLS_SHOWN]
    usd = np.where(s.market.capacity[:, ticks] > 0, usd, np.nan)
    prices = [
        PlotLine(name=s.market.pools[k].key, x=hours, y=usd[k].tolist(), steps=True) for k in shown
    ]
    spent = [PlotLine(name="dollars so far", x=hours, y=rows[::every, backtest.DOLLARS].tolist())]
    return (
        '<p class="note">Lines break where a pool has nothing to sell. Holdings have the colours of their pools.</p>'
        + lines(prices, "hours since the start", "$ per hour of work", from_zero=False)
        + stacked(
            _holdings(s.market, held, shown, hours),
            "hours since the start",
            "slots held",
            len(rows) * tick_h,
        )
        + lines(spent, "hours since the start", "dollars")
    )


def _holdings(market: Market, held: Floats, shown: Ints, hours: Sequence[float]) -> list[PlotLine]:
    """Return the slots held as one band per shown pool, one for all others, one for on demand.

    Bands without slots are left out.
    """
    bands = [(market.pools[k].key, held[k], COLOURS[i]) for i, k in enumerate(shown.tolist())]
    others = np.setdiff1d(np.flatnonzero(held[:-1].any(axis=1)), shown)
    bands.append((plural(len(others), "other pool"), held[others].sum(axis=0), OTHERS))
    bands.append(("on demand", held[-1], RELIABLE))
    return [
        PlotLine(name=name, x=hours, y=slots.tolist(), colour=colour)
        for name, slots, colour in bands
        if slots.any()
    ]


def _typical_start(result: backtest.Result) -> int:
    """Return the first start with the median number of evictions, or the next number above it."""
    evictions = result["evictions"]
    enough = np.flatnonzero(evictions >= np.median(evictions))
    return int(result.starts[enough[np.argmin(evictions[enough])]])


def _frontier(s: ReportSection) -> str:
    names = [rush.strategy for rush in s.frontier[0][1]]
    series = [
        PlotLine(
            name=name,
            x=[h for h, _ in s.frontier],
            dots=True,
            y=[float(runs[i].cost_usd.mean()) for _, runs in s.frontier],
        )
        for i, name in enumerate(names)
        if name != ON_DEMAND
    ]
    bound = [float(runs[0].bound_usd.mean()) for _, runs in s.frontier]
    series.append(
        PlotLine(name="clairvoyant bound", x=[h for h, _ in s.frontier], y=bound, dots=True)
    )
    missed = ", ".join(
        f"{name}: {sum(runs[i].missed for _, runs in s.frontier)}" for i, name in enumerate(names)
    )
    return (
        lines(series, "deadline, hours after the start", "dollars", from_zero=False)
        + f'<p class="note">Not drawn: {ON_DEMAND}, ${s.frontier[0][1][0].on_demand_usd:.4g}. '
        f"Deadlines missed: {missed}.</p>"
    )


def _calibration(c: Calibration) -> str:
    top = max(*c.predicted, *c.observed)
    points = PlotLine(
        name="tenths of the predictions", x=list(c.predicted), y=list(c.observed), dots=True
    )
    ideal = PlotLine(name="predicted = observed", x=[0.0, top], y=[0.0, top])
    return (
        lines([points, ideal], "predicted share", "observed share")
        + f'<p class="note">Mean error {c.mean_error:.3f} over {sum(c.count):,} machine-hours.</p>'
    )


def has_capacity_series(market: Market) -> bool:
    return bool(market.capacity.min() < PLENTY)
