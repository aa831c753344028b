"""Partitioners: against the recurrence written out plainly, against brute force, on measured profiles."""

import itertools

import numpy as np
import pytest

from orchestrator.planner import partition
from orchestrator.planner.partition import Load


def brute_split(load: Load) -> float | None:
    """The least slowest stage over every grouping."""
    sections, stages = len(load.seconds) - 1, len(load.pace)
    best = None
    for cuts in itertools.combinations(range(1, sections), stages - 1):
        edges = [0, *cuts, sections]
        spans = list(itertools.pairwise(edges))
        held = [
            load.held[j]
            - load.held[i]
            + load.stash[s] * (load.live[j] - load.live[i])
            + load.entry[s] * load.input[i]
            for s, (i, j) in enumerate(spans)
        ]
        if any(h > limit for h, limit in zip(held, load.limit, strict=True)):
            continue
        slowest = max(
            load.pace[s] * (load.seconds[j] - load.seconds[i]) for s, (i, j) in enumerate(spans)
        )
        best = slowest if best is None else min(best, slowest)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_split_is_the_best_grouping(seed):
    """Balanced grouping equals brute force, with uneven sections, unlike workers and tight memory."""
    rng = np.random.default_rng(seed)
    sections, stages = int(rng.integers(3, 9)), int(rng.integers(1, 5))

    def prefix(low: float, high: float) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(rng.uniform(low, high, sections))])

    stages = min(stages, sections)
    load = Load(
        seconds=prefix(0.1, 2),
        held=prefix(0, 3),
        live=prefix(0, 2),
        input=rng.uniform(0, 1, sections + 1),
        pace=rng.choice([1.0, 1.0, 2.0], stages),
        stash=np.arange(stages, 0, -1.0),
        entry=np.arange(stages, 0, -1.0),
        limit=np.full(stages, rng.uniform(4, 30)),
    )
    firsts = partition.split(load)
    best = brute_split(load)
    assert (firsts is None) == (best is None)
    if firsts is not None:
        edges = [*firsts, sections]
        slowest = max(
            load.pace[s] * (load.seconds[edges[s + 1]] - load.seconds[edges[s]])
            for s in range(stages)
        )
        assert slowest == pytest.approx(best, rel=1e-9)
