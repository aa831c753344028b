"""Proteus' comparison on auction markets: ours, standard bidding, checkpoints and tiers.

    bidding_auctions.py [starts]

Paper (2 h and 20 h, 64 machines): 83-85 % cheaper than on demand, 42-47 % cheaper and 32-43 % faster
than standard bidding with checkpoints, 32 % of the machine hours free.
"""

import sys

import numpy as np
from _bidding import data, k80_alone, on_grid, show

from bidding import backtest, synthetic
from bidding.billing import AWS_2016
from bidding.files import read_markets
from bidding.market import Market, build
from bidding.strategies import STRATEGIES, Strategy

DAY_S = 86_400.0
NAMES = ("on-demand only", "standard + checkpoint", "standard + tiers", "bidbrain + checkpoint",
         "bidbrain as printed", "ours")  # fmt: skip
CHECKPOINT_S = 600.0  # gives standard bidding an overhead like the 17 % that the paper measured


def chosen() -> list[Strategy]:
    return [s for s in STRATEGIES if s.name in NAMES]


def statistics(market: Market) -> str:
    ratio = market.price / market.on_demand_usd_per_h[:, None]
    rises = np.sum((ratio[:, 1:] > 1) & (ratio[:, :-1] <= 1), axis=1)
    days = market.ticks * market.tick_s / DAY_S
    changes = np.mean(np.diff(ratio, axis=1) != 0) * DAY_S / market.tick_s
    return (
        f"price over on-demand: median {np.median(ratio):.2f}, above it {np.mean(ratio > 1):.1%} of the "
        f"time, {rises.mean() / days:.1f} times a day and pool; {changes:.0f} prices a day and pool; "
        f"evicted within the hour at the smallest and the largest delta: "
        f"{market.evicted_in_1h[:, 0].mean():.2f}, {market.evicted_in_1h[:, -1].mean():.2f}"
    )


def table(title: str, market: Market, slots: int, count: int) -> None:
    for hours in (2.0, 20.0):
        work = backtest.Work(hours=hours, slots=slots, checkpoint_s=CHECKPOINT_S,
                             manager_usd_per_h=float(market.on_demand_usd_per_h.min()))  # fmt: skip
        starts = backtest.draw_starts(market, work, count, seed=0)
        results = {
            r.strategy: r
            for r in backtest.run(market, work, chosen(), starts=starts, bounded=("ours",))
        }
        on_demand, standard = results["on-demand only"], results["standard + checkpoint"]
        rows = []
        for name in NAMES:
            r = results[name]
            held = float((r["spot_h"] + r["on_demand_h"]).sum())
            rows.append([
                name, f"{r['cost_usd'].mean():.2f}", f"{1 - r['cost_usd'].sum() / on_demand['cost_usd'].sum():.0%}",
                f"{1 - r['cost_usd'].sum() / standard['cost_usd'].sum():.0%}",
                f"{1 - r['runtime_h'].sum() / standard['runtime_h'].sum():.0%}",
                f"{r['runtime_h'].mean():.2f}", f"{r['free_h'].sum() / held:.0%}",
                f"{r['lost_h'].sum() / held:.0%}", f"{np.median(r.ratio):.2f}",
            ])  # fmt: skip
        show(
            f"{title}: {hours:g} h on {slots} slots, {count} starts, checkpoints of {CHECKPOINT_S:g} s.\n"
            f"{statistics(market)}",
            [
                "strategy",
                "$",
                "under on-demand",
                "under std+ckpt",
                "faster",
                "hours",
                "free",
                "lost",
                "/bound",
            ],
            rows,
        )


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    listings = synthetic.auctions(np.random.default_rng(1), days=90)
    drawn = build(listings, rule=AWS_2016, tick_s=300.0, start_s=45 * DAY_S, end_s=90 * DAY_S,
                  trained_from_s=0.0)  # fmt: skip
    table("Synthetic auctions, seed 1", drawn, 64, count)
    found, _ = read_markets(data())
    k80 = k80_alone(found["us-east-1, prices"])
    table(
        "K80 prices of us-east-1 in 2020 under the rule of 2016", on_grid(k80, AWS_2016), 64, count
    )


if __name__ == "__main__":
    main()
