"""How close is our cost to that of a buyer who knows the future, and to the best other strategy?

cost.py [starts]
"""

import sys
from collections.abc import Sequence

import numpy as np
from _bidding import against, real_markets, show

from bidding.backtests import backtest


def least(results: Sequence[backtest.Result], best: str) -> float:
    """What the bound of our runs is of the best other's bill: nobody's figure can be below that."""
    other = next(r for r in results if r.strategy == best)
    return float(results[-1].bound_usd.sum() / other["cost_usd"].sum())


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    rows = []
    part = sys.argv[2] if len(sys.argv) > 2 else ""
    for name, market, slots in real_markets():
        if part not in name:
            continue
        work = backtest.Work(hours=20.0, slots=slots)
        starts = backtest.draw_starts(market, work, count, seed=0)
        results = backtest.run(market, work, starts=starts, bounded=("ours",))
        ours = results[-1]
        best, ratio = against(results)
        rows.append(
            [
                name,
                f"{ours['cost_usd'].mean():.2f}",
                f"{np.median(ours.ratio):.3f}",
                f"{np.percentile(ours.ratio, 95):.3f}",
                f"{np.median(ours.plain_ratio):.3f}",
                f"{np.percentile(ours.plain_ratio, 95):.3f}",
                best,
                f"{ratio.value:.4f}",
                f"{ratio.low:.4f}..{ratio.high:.4f}",
                f"{least(results, best):.5f}",
            ]
        )
        print("  ".join(rows[-1]), file=sys.stderr)
    show(
        f"A job of 20 h, {count} starts, a machine starts in 120 s, a change stalls 2 s, an eviction 5 s.\n"
        "bound: knows prices, capacity and which machines will be refunded, done no later than we are.\n"
        "plain: knows prices and capacity, nothing is refunded.\n"
        "Reach: ours / bound at most 1.10 (median) and 1.25 (95th); ours / best other below 1.\n"
        "at least: the bound over the best other. Close to 1 a tie is the most there is.",
        [
            "market",
            "ours $",
            "/bound",
            "95th",
            "/plain",
            "95th",
            "best other",
            "/best",
            "95 % interval",
            "at least",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
