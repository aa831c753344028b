"""How long should what was seen of a pool count? The manager's own record, fed with the recorded probes.

Whoever holds a machine in a pool whenever it has capacity is asked every hour how likely it is to be lost within
the next; the score is the mean logarithm of what it gave to what happened (higher is better).
"""

import math
from itertools import pairwise

import numpy as np
from _bidding import data, show

from bidding.markets import observations
from bidding.markets.files import read_probes
from bidding.markets.history import Series
from bidding.markets.observations import PoolRecord
from cloud.clock import HOUR_S

MEMORIES_H = (3.0, 6.0, 12.0, 24.0, 48.0, 168.0, 1e6)
CERTAIN = 1e-6
DAYS_LEAST = 2.0


def scores(series: Series) -> list[float]:
    """One score for each hour that begins with capacity."""
    found = []
    record = PoolRecord()
    for from_s, to_s, there in stretches(series):
        if not there:
            continue
        record = record.sold(from_s)
        for at_s in np.arange(math.ceil(from_s / HOUR_S) * HOUR_S, to_s, HOUR_S):
            lost = -math.expm1(-record.hazard_per_h(float(at_s)))
            chance = lost if to_s - at_s <= HOUR_S else 1 - lost
            found.append(math.log(max(chance, CERTAIN)))
        record = record.lost(to_s, others_left=False)
    return found


def stretches(series: Series) -> list[tuple[float, float, bool]]:
    """(from, to, has capacity), without the last one: nobody knows how it ended."""
    on = series.value > 0
    moments = [0, *(np.flatnonzero(on[1:] != on[:-1]) + 1)]
    return [
        (float(series.at_s[a]), float(series.at_s[b]), bool(on[a])) for a, b in pairwise(moments)
    ]


def main() -> None:
    probes = read_probes(data() / "availability/spot-traces/availability")
    long = {n: s for n, s in probes.items() if s.at_s[-1] >= DAYS_LEAST * 24 * HOUR_S}
    rows = []
    for memory_h in MEMORIES_H:
        observations.MEMORY_H = memory_h
        per_pool = [scores(series) for series in long.values()]
        every = [score for pool in per_pool for score in pool]
        means = [float(np.mean(pool)) for pool in per_pool if pool]
        name = "no end" if memory_h >= 1e6 else f"{memory_h:g} h"
        rows.append([name, f"{np.mean(every):.4f}", f"{np.median(means):.4f}", f"{len(every)}"])
    show(
        f"{len(long)} probed pools; what was seen loses half of its weight in so many hours.",
        ["memory", "score", "median pool", "hours asked"],
        rows,
    )


if __name__ == "__main__":
    main()
