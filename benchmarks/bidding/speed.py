"""How long does one decision take, and a thousand starts under every strategy?

speed.py [starts]
"""

import random
import resource
import statistics
import sys
import time

from _bidding import on_grid, show

from bidding.acquire import decide
from bidding.backtests import backtest
from bidding.markets.billing import AWS_TODAY
from bidding.markets.files import read_markets
from bidding.markets.grid import fitting
from bidding.model import Demand, HeldMachine, Limits, Offer
from cloud.model import InstanceType, Pool

KINDS = [
    InstanceType(
        name=f"kind.{i}",
        cloud="aws",
        slots=1 + i % 4,
        memory_bytes=0,
        on_demand_usd_per_h=1.0 + i % 4,
        speed=1.0 + i / 20,
    )
    for i in range(10)
]


class Linear:
    """Work as the sum of the slots' speeds: what the manager uses until it has measured."""

    def __init__(self) -> None:
        self.power = {k.name: k.slots * k.speed for k in KINDS}

    def work_per_s(self, counts) -> float:
        return sum(n * self.power[name] for name, n in counts.items())


def one_decision(pools: int, leases: int, rng: random.Random) -> float:
    """Seconds of one decision over so many pools and leases."""
    offers = [
        Offer(
            pool=Pool("aws", "r", f"zone-{i // 10}", KINDS[i % 10].name),
            type=KINDS[i % 10],
            market="spot",
            price_usd_per_h=rng.uniform(0.2, 0.6),
            hazard_per_h=rng.uniform(0, 0.5),
        )
        for i in range(pools)
    ]
    holdings = [
        HeldMachine(
            lease=f"lease-{i}",
            pool=offers[i % pools].pool,
            type=offers[i % pools].type,
            market="spot",
            price_usd_per_h=rng.uniform(0.2, 0.6),
            bid_usd_per_h=None,
            started_at_s=rng.uniform(0, 7200),
            hazard_per_h=rng.uniform(0, 0.5),
        )
        for i in range(leases)
    ]
    demand = Demand(work_left=1e9, start_s=60.0, morph_s=2.0, recovery_s=5.0)
    limits = Limits(slots_min=1, slots_max=2500)
    began = time.process_time()
    decide(offers, holdings, demand, limits, Linear(), 7200.0)
    return time.process_time() - began


def thousand_starts(count: int) -> tuple[float, float, str]:
    """(CPU seconds, seconds) of every strategy with its bounds on one region's data."""
    from _bidding import data

    found, _ = read_markets(data())
    name = "us-east-1, prices"
    market = on_grid(fitting(found[name], 1), AWS_TODAY)
    work = backtest.Work(hours=20.0)
    backtest.run(market, work, starts=backtest.draw_starts(market, work, 2, seed=1))  # compiles
    began, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    backtest.run(market, work, starts=backtest.draw_starts(market, work, count, seed=0))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_utime - cpu
    return used, time.perf_counter() - began, f"{name}, {len(market.pools)} pools"


def main() -> None:
    rng = random.Random(0)
    one_decision(10, 10, rng)
    rows = []
    for pools, leases in ((50, 100), (500, 1000)):
        times = [one_decision(pools, leases, rng) * 1e3 for _ in range(21)]
        rows.append(
            [
                f"{pools} pools, {leases} leases",
                f"{statistics.median(times):.1f}",
                f"{max(times):.1f}",
            ]
        )
    show(
        "One decision, CPU milliseconds. Reach: 50 at 500 pools and 1,000 leases.",
        ["size", "median", "most of 21"],
        rows,
    )
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    cpu_s, wall_s, what = thousand_starts(count)
    show(
        "Every strategy and both bounds, 20 h, one process, compiled before. Reach: 60 s on two cores.",
        ["data", "starts", "CPU s", "s"],
        [[what, str(count), f"{cpu_s:.1f}", f"{wall_s:.1f}"]],
    )


if __name__ == "__main__":
    main()
