"""Running a backtest: from a person's choices to figures and a report."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bidding.backtests import backtest as engine
from bidding.backtests.strategies import STRATEGIES, Strategy
from bidding.errors import ConstraintError
from bidding.markets import synthetic
from bidding.markets.billing import AWS_2016, RULES, BillingRule
from bidding.markets.files import read_markets
from bidding.markets.grid import Listing, Market, build, fitting
from bidding.markets.history import Repairs, Series
from bidding.risk import Calibration, CapacityRisk, calibrate
from orchestrator.backtest import report as backtest_report
from orchestrator.formatting import plural

SYNTHETIC = "synthetic"
TICK_S = 300.0
DEADLINES = (1.1, 1.25, 1.5, 2.0)
FRONTIER_STARTS = 100
STARTS_MAX = 100_000


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """What a person may choose; other parameters of the job are the defaults of `engine.Work`."""

    hours: float = 20.0
    slots: int = 1
    billing: str = "aws_today"
    seed: int = 0
    market: str = ""  # only markets whose name holds this

    def __post_init__(self) -> None:
        if self.billing not in RULES:
            raise ConstraintError(
                f"--billing {self.billing!r} is not one of {', '.join(sorted(RULES))}"
            )


def measure(
    data: str, strategy: str, starts: int, report: Path, choices: Choices
) -> tuple[list[backtest_report.ReportSection], str]:
    """Run the backtest on every chosen market, and write the report.

    Return the sections of the report, and a line on how it was run.
    """
    began = time.monotonic()
    if not 1 <= starts <= STARTS_MAX:
        raise ConstraintError(f"--starts must be 1 to {STARTS_MAX}, not {starts}")
    chosen = _strategies(strategy)
    work = engine.Work(hours=choices.hours, slots=choices.slots)
    _make_room(report)
    markets, repairs = _markets(data, choices)
    sections = [
        _section(name, market, work, chosen, (starts, choices.seed)) for name, market in markets
    ]
    summary = _summary(starts, choices, work, time.monotonic() - began) + _left_out(repairs)
    backtest_report.write(report, sections, summary)
    return sections, summary


def figures(section: backtest_report.ReportSection) -> dict[str, Any]:
    """Return the figures of a market for programs: means over all starts, and 95 % intervals."""
    return {
        "market": section.name,
        "strategies": [_figures_of(r) for r in section.results],
        "deadlines": [
            {
                "hours": hours,
                "strategies": [
                    {
                        "strategy": r.strategy,
                        "cost_usd": float(r.cost_usd.mean()),
                        "bound_usd": float(r.bound_usd.mean()),
                        "share_of_saving": r.share_of_saving,
                        "missed": r.missed,
                    }
                    for r in runs
                ],
            }
            for hours, runs in section.frontier
        ],
        "calibration": None
        if section.calibration is None
        else {
            **msgspec.structs.asdict(section.calibration),
            "mean_error": section.calibration.mean_error,
        },
    }


def _figures_of(r: engine.Result) -> dict[str, Any]:
    cost = engine.interval(r["cost_usd"], lambda v: float(v.mean()))
    held_h = float((r["spot_h"] + r["on_demand_h"]).mean())
    return {
        "strategy": r.strategy,
        "cost_usd": cost.value,
        "cost_usd_low": cost.low,
        "cost_usd_high": cost.high,
        "hours": float(r["runtime_h"].mean()),
        "lost_slot_h": float(r["lost_h"].mean()),
        "held_slot_h": held_h,
        "evictions": float(r["evictions"].mean()),
        "free_share": float(r["free_h"].mean()) / held_h,
        "to_bound_median": float(np.median(r.ratio)),
        "to_bound_p95": float(np.percentile(r.ratio, 95)),
        "to_plain_median": float(np.median(r.plain_ratio)),
        "late": int((r["finished"] == 0).sum()),
    }


def _strategies(name: str) -> tuple[Strategy, ...]:
    if name == "all":
        return STRATEGIES
    found = tuple(s for s in STRATEGIES if s.name == name)
    if not found:
        known = ", ".join(repr(s.name) for s in STRATEGIES)
        raise ConstraintError(f"--strategy {name!r} is not one of 'all', {known}")
    return found


def _make_room(report: Path) -> None:
    """Raise `ConstraintError` if the report cannot be written, before anything is run."""
    new = not report.exists()
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.open("a").close()
        if new:
            report.unlink()
    except OSError as e:
        raise ConstraintError(
            f"--report {report}: {e.strerror}; name a file that can be written"
        ) from e


def _left_out(repairs: Repairs) -> str:
    """Return in words which rows of the files were left out, or "" if none were."""
    bad = repairs.absurd + repairs.unreadable
    said = [f"{bad:,} were no prices"] if bad else []
    said += [f"{repairs.other:,} not of Linux in dollars per hour"] if repairs.other else []
    said += [f"{repairs.over_bound:,} were the oldest of too many"] if repairs.over_bound else []
    return f"; of {plural(repairs.rows, 'row')} {', '.join(said)} and left out" if said else ""


def _markets(data: str, choices: Choices) -> tuple[list[tuple[str, Market]], Repairs]:
    repairs = Repairs()
    if data == SYNTHETIC:
        rng = np.random.default_rng(choices.seed)
        markets = {
            "synthetic: auctions as in 2016": synthetic.auctions(rng, days=60),
            "synthetic: capacity as today": synthetic.capacity_bound(
                rng, days=60, machines=choices.slots
            ),
        }
    else:
        folder = Path(data)
        if not folder.is_dir():
            raise ConstraintError(
                f"--data {data}: no such folder; give one with price files, or {SYNTHETIC!r}"
            )
        markets, repairs = read_markets(folder)
    return _chosen(markets, data, choices), repairs


def _chosen(
    markets: dict[str, list[Listing]], data: str, choices: Choices
) -> list[tuple[str, Market]]:
    """Return the chosen markets, without machines that are larger than the job."""
    rule = RULES[choices.billing]
    kept = []
    for name, listings in markets.items():
        few = fitting(listings, choices.slots)
        if choices.market in name and few:
            auctions = data == SYNTHETIC and "auctions" in name
            kept.append((name, _on_grid(few, AWS_2016 if auctions else rule)))
    if not kept:
        raise ConstraintError(_none_fits(markets, data, choices))
    return kept


def _none_fits(markets: dict[str, list[Listing]], data: str, choices: Choices) -> str:
    """Return why no market is left: its name does not match, or its machines are too large."""
    named = [listings for name, listings in markets.items() if choices.market in name]
    if not named:
        there = "; ".join(markets)
        return (
            f"no market of {data} has --market {choices.market!r} in its name; there are: {there}"
        )
    least = min(entry.type.slots for listings in named for entry in listings)
    return (
        f"a job of {plural(choices.slots, 'slot')} fills no machine of {data}: the smallest has {least}; "
        f"give --slots {least} or more"
    )


def _on_grid(listings: Sequence[Listing], rule: BillingRule) -> Market:
    """Return the market over the span that every price series covers.

    If the billing rule needs bids, the first half of the span is history to learn from.
    """
    start_s = max(float(entry.price.at_s[0]) for entry in listings)
    end_s = max(float(entry.price.at_s[-1]) for entry in listings)
    learned_s = (end_s - start_s) / 2 if rule.bid == "required" else 0.0
    return build(
        listings,
        rule=rule,
        tick_s=TICK_S,
        start_s=start_s + learned_s,
        end_s=end_s,
        trained_from_s=start_s,
    )


def _section(
    name: str, market: Market, work: engine.Work, chosen: Sequence[Strategy], draw: tuple[int, int]
) -> backtest_report.ReportSection:
    starts = engine.draw_starts(market, work, *draw)
    few = starts[:FRONTIER_STARTS]
    frontier = [
        (f * work.hours, engine.run_with_deadline(market, work, f * work.hours, starts=few))
        for f in DEADLINES
        if backtest_report.has_capacity_series(market)
    ]
    return backtest_report.ReportSection(
        name=name,
        market=market,
        work=work,
        results=engine.run(market, work, chosen, starts=starts),
        frontier=frontier,
        calibration=_calibration(market),
    )


def _calibration(market: Market) -> Calibration | None:
    """Return predicted against observed evictions, over every pool whose capacity is known."""
    if not backtest_report.has_capacity_series(market):
        return None
    at_s = np.arange(market.ticks, dtype=np.float64) * market.tick_s
    return calibrate(
        [
            CapacityRisk(Series(at_s=at_s, value=(row > 0).astype(np.float64)))
            for row in market.capacity
            if 0 < (row > 0).mean() < 1
        ]
    )


def _summary(starts: int, choices: Choices, work: engine.Work, wall_s: float) -> str:
    return (
        f"{starts} starts of a job of {work.hours:g} h on {plural(work.slots, 'slot')}, billing "
        f"{choices.billing}, ticks of {TICK_S / 60:g} min; a machine starts in "
        f"{work.start_s:g} s, a change stalls {work.morph_s:g} s, an eviction {work.recovery_s:g} s; "
        f"took {wall_s:.0f} s"
    )
