"""What do parameter servers on spot machines cost, and what does help save? Proteus' comparison.

    python benchmarks/bidding/served.py [--starts 100] [--seeds 2] [--stories 1]

On the markets of `auctions.py` under the rule of 2016, ours is the manager's decision. Sigma and
lambda are those that `benchmarks/paramserver/pauses.py` measures in the same run, the larger of
virtual time and of processes. Help (FlexRR) counts as work per machine-hour: how much longer a clock
takes under a pattern of slow workers, on virtual time. Machines start for 120 s, which is assumed.
The machine that is never taken away is paid by those who need one: tiers and ours.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _bidding import show
from auctions import blind, checkpoint_s, recorded, statistics

from agent.paramserver.controller import DEAD_S
from agent.paramserver.help import Settings
from agent.paramserver.virtual.stragglers import Pattern, PowerLaw, SlowWorker, simulate
from bidding.backtests import backtest
from bidding.backtests.strategies import STRATEGIES
from bidding.markets.grid import Market

sys.path.insert(0, str(Path(__file__).parents[1] / "paramserver"))
from pauses import measured

WORKERS, CLOCKS = 64, 20
PATTERNS = (
    ("slow worker 100 %", lambda: SlowWorker(1.0)),
    ("power law 11", lambda: PowerLaw(11)),
    ("power law 7", lambda: PowerLaw(7)),
)
WITHOUT = Settings(size=0)
LONG_S = 60.0  # a clock that is done again, for a job of long clocks
MANAGERLESS = ("on-demand only", "standard + checkpoint")
THESIS = """
Harlap 2019, section 4.5.2 (AWS traces of June to August 2016, 1000 starts in each zone, 64 machines, 2 h and 20 h):
  Proteus costs 15 to 17 % of on-demand, 42 to 47 % less than standard + checkpoint, in 32 to 43 % less time;
  standard + AgileML costs 18 to 20 % less than standard + checkpoint, whose overhead is 17 %; 32 % of the hours free.
Section 3: help against BSP takes 35 % less time on 64 c4.2xlarge (MF), 48 % less under power law 11.
No bill with help is there."""


class Pauses(NamedTuple):
    sigma_s: float
    lambda_s: float
    killed_s: float


class Row(NamedTuple):
    """One strategy: how much longer its clocks take, and what a change and an eviction cost."""

    title: str
    strategy: str
    factor: float
    pauses: Pauses
    write_s: float = 600.0


def pauses_of(stories: int, link: float) -> Pauses:
    """Return the larger median of all clusters that were measured; a gain counts as nothing."""
    found = [costs for _, costs in measured(stories, link)]

    def worst(field: str) -> float:
        return max(0.0, *(float(np.median(getattr(costs, field))) for costs in found))

    added, warned, killed = worst("added"), worst("warned"), worst("killed")
    return Pauses(max(added, warned), warned, killed + DEAD_S)


def clock(pattern: Pattern, slack: int, settings: Settings, seed: int) -> float:
    return simulate(
        pattern,
        machines=WORKERS // 8,
        clocks=CLOCKS,
        slack=slack,
        settings=settings,
        seed=seed,
    ).clock


def factors(seeds: int) -> list[tuple[str, float, float]]:
    """Return (pattern, time of a clock under BSP, with help), where 1 is that of no slow worker."""
    found = []
    print(f"\ntime of a clock, {WORKERS} workers, {CLOCKS} clocks, median of {seeds} seeds (range)")
    for name, make in PATTERNS:
        bsp = [clock(make(), 0, WITHOUT, seed) for seed in range(seeds)]
        flex = [clock(make(), 1, Settings(), seed) for seed in range(seeds)]
        print(
            f"{name:18} BSP {np.median(bsp):.3f} ({min(bsp):.3f} to {max(bsp):.3f})  "
            f"FlexRR {np.median(flex):.3f} ({min(flex):.3f} to {max(flex):.3f})",
            flush=True,
        )
        found.append((name, float(np.median(bsp)), float(np.median(flex))))
    return found


def run(market: Market, slots: int, hours: float, row: Row, starts) -> backtest.Result:
    manager_usd_per_h = float(market.on_demand_usd_per_h.min())
    work = backtest.Work(
        hours=hours * row.factor,
        slots=slots,
        morph_s=row.pauses.sigma_s,
        recovery_s=row.pauses.lambda_s,
        checkpoint_s=row.write_s,
        manager_usd_per_h=manager_usd_per_h,
    )
    chosen = [s for s in STRATEGIES if s.name == row.strategy]
    (result,) = backtest.run(market, work, chosen, starts=starts, bounded=())
    if row.strategy in MANAGERLESS:
        result.outcome["cost_usd"] -= manager_usd_per_h * result["runtime_h"]
    return result


def plain_rows(market: Market, hours: float, pauses: Pauses) -> list[Row]:
    heavy_s = checkpoint_s(market, hours)
    unwarned = pauses._replace(lambda_s=pauses.killed_s)
    long = pauses._replace(lambda_s=pauses.killed_s + LONG_S)
    return [
        Row("on-demand", "on-demand only", 1.0, pauses),
        Row("standard + checkpoint, 17 %", "standard + checkpoint", 1.0, pauses, heavy_s),
        Row("standard + checkpoint of 10 min", "standard + checkpoint", 1.0, pauses),
        Row("standard + our tiers", "standard + tiers", 1.0, pauses),
        Row("ours", "ours", 1.0, pauses),
        Row("ours, never warned", "ours", 1.0, unwarned),
        Row("ours, never warned, clock of 60 s", "ours", 1.0, long),
    ]


def slow_rows(market: Market, hours: float, pauses: Pauses, bsp: float, flex: float) -> list[Row]:
    heavy_s = checkpoint_s(market, hours * bsp)
    return [
        Row("on-demand", "on-demand only", bsp, pauses),
        Row("standard + checkpoint, 17 %", "standard + checkpoint", bsp, pauses, heavy_s),
        Row("standard + our tiers", "standard + tiers", bsp, pauses),
        Row("standard + our tiers, help", "standard + tiers", flex, pauses),
        Row("ours", "ours", bsp, pauses),
        Row("ours, help", "ours", flex, pauses),
    ]


def compare(title: str, market: Market, job: tuple[float, int], rows: list[Row], starts) -> None:
    """Show rows beside the first, which is on-demand, and the second, standard + checkpoint."""
    hours, slots = job
    results = [run(market, slots, hours, row, starts) for row in rows]
    on_demand, standard = results[:2]
    cells = []
    for row, r in zip(rows, results, strict=True):
        held = float((r["spot_h"] + r["on_demand_h"]).sum())
        under = less(r, standard)
        cells.append(
            [
                row.title,
                f"{r['cost_usd'].mean():.2f}",
                f"{r['cost_usd'].sum() / on_demand['cost_usd'].sum():.1%}",
                f"{under.value:.0%} ({under.low:.0%} to {under.high:.0%})",
                f"{r['runtime_h'].sum() / on_demand['runtime_h'].sum():.3f}",
                f"{r['runtime_h'].sum() / standard['runtime_h'].sum():.3f}",
                f"{r['free_h'].sum() / held:.0%}",
                f"{r['evictions'].mean():.1f}",
            ]
        )
    show(
        f"{title}, {hours:g} h on {slots} slots, {len(starts)} starts",
        [
            "strategy",
            "$",
            "of on-demand",
            "under std+ckpt (95 %)",
            "time, of on-demand",
            "of std+ckpt",
            "free",
            "evictions",
        ],
        cells,
    )
    if rows[-1].title == "ours, help":
        saved = less(results[-1], results[-2])
        print(f"help saves {saved.value:.1%} ({saved.low:.1%} to {saved.high:.1%}) of ours' bill")
    sys.stdout.flush()


def less(mine: backtest.Result, other: backtest.Result) -> backtest.Interval:
    pair = np.stack([mine["cost_usd"], other["cost_usd"]])
    return backtest.interval(pair, lambda v: 1 - backtest.mean_ratio(v))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--starts", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--stories", type=int, default=1, help="of pauses in processes")
    parser.add_argument("--link", type=float, default=10.0, help="models a second")
    given = parser.parse_args()
    markets = [(title, market, 64) for title, market in recorded()]
    markets.append(("Blind auctions, seed 2", blind(), 128))
    pauses = pauses_of(given.stories, given.link)
    print(
        f"fed into the bills: sigma {pauses.sigma_s:.2f} s, lambda {pauses.lambda_s:.2f} s, "
        f"without a warning {pauses.killed_s:.2f} s"
    )
    slow = factors(given.seeds)
    longest = max(bsp for _, bsp, _ in slow)
    for title, market, slots in markets:
        print(f"\n{title}: {statistics(market)}")
        for hours in (2.0, 20.0):
            longest_job = backtest.Work(hours=hours * longest, slots=slots)
            starts = backtest.draw_starts(market, longest_job, given.starts, seed=0)
            job = (hours, slots)
            compare("no slow worker", market, job, plain_rows(market, hours, pauses), starts)
            for name, bsp, flex in slow:
                rows = slow_rows(market, hours, pauses, bsp, flex)
                compare(name, market, job, rows, starts)
    print(THESIS)


if __name__ == "__main__":
    main()
