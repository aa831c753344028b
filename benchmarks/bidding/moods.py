"""What is it worth to know how long a price has stood still, where bids evict?

    moods.py [starts]

The same decision over the same starts, with beta by the mood of the price and with one beta for all moods; and
BidBrain as printed beside both. All markets are under the rule of 2016; hazards are learned from what was before the starts.
"""

import sys
from collections.abc import Iterator

import msgspec
import numpy as np
from _bidding import data, k80_alone, on_grid, show

from bidding.backtests import backtest
from bidding.backtests.strategies import STRATEGIES
from bidding.markets import synthetic
from bidding.markets.billing import AWS_2016
from bidding.markets.files import read_markets
from bidding.markets.grid import Market

PRINTED, OURS = STRATEGIES[-2:]


def without_moods(market: Market) -> Market:
    """The same market as one who knows the whole record alone sees it."""
    alike = np.repeat(market.evicted_in_1h[:, None, :], market.evicted_in_mood.shape[1], axis=1)
    return msgspec.structs.replace(market, evicted_in_mood=np.ascontiguousarray(alike))


def markets() -> Iterator[tuple[str, Market, int]]:
    """(name, market, slots) of the recorded prices, and of auctions that were drawn."""
    found, _ = read_markets(data())
    for region in ("us-east-1", "us-east-2", "us-west-2"):
        listings = found[f"{region}, prices"]
        k80 = k80_alone(listings)
        yield f"K80 of {region}", on_grid(k80, AWS_2016), 16
        fast = [e for e in listings if e.type.accelerator == "v100"]
        yield f"V100 of {region}", on_grid(fast, AWS_2016), 16
        if region == "us-east-1":
            yield "single K80s", on_grid([e for e in k80 if e.type.slots == 1], AWS_2016), 64
    drawn = synthetic.auctions(np.random.default_rng(1), days=90)
    yield "shipped auctions", on_grid(drawn, AWS_2016), 64


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    rows = []
    for name, market, slots in markets():
        work = backtest.Work(hours=20.0, slots=slots)
        starts = backtest.draw_starts(market, work, count, seed=5)
        costs = [
            backtest.run(m, work, [s], starts=starts, bounded=())[0]["cost_usd"]
            for m, s in ((market, OURS), (without_moods(market), OURS), (market, PRINTED))
        ]
        row = [f"{name}, {slots} slots", f"{costs[0].mean():.2f}"]
        for other in costs[1:]:
            r = backtest.interval(np.stack([costs[0], other]), backtest.mean_ratio)
            row.append(f"{r.value:.4f} ({r.low:.4f} to {r.high:.4f})")
        rows.append(row)
    show(
        f"A job of 20 h, {count} starts; 95 % intervals in brackets.",
        ["market", "ours $", "of ours without moods", "of BidBrain as printed"],
        rows,
    )


if __name__ == "__main__":
    main()
