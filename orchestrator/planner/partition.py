"""Where to cut a model into stages: Varuna's way.

K sections become P runs so that the slowest run is as fast as possible. Each run must fit the
memory of its worker, and takes time at the pace of its worker.
"""

from typing import NamedTuple

import numpy as np

from orchestrator.planner.compiled import Codes, Reals, compiled

NEVER = 1e300
SAME = 1 + 1e-9  # factor within which sums of the same numbers in different orders are equal


class Load(NamedTuple):
    """Prefix sums over sections, and the memory limit of each stage.

    Stage s over sections i..j-1 takes pace[s] * (seconds[j] - seconds[i]) and holds
    held[j] - held[i] + stash[s] * (live[j] - live[i]) + entry[s] * input[i] bytes.
    """

    seconds: Reals
    held: Reals
    live: Reals
    input: Reals
    pace: Reals
    stash: Reals
    entry: Reals
    limit: Reals


@compiled
def _split(load: Load) -> tuple[Reals, Codes]:
    sections, stages = len(load.seconds) - 1, len(load.pace)
    worst = np.full((stages + 1, sections + 1), NEVER)
    square = np.full((stages + 1, sections + 1), NEVER)
    came = np.full((stages + 1, sections + 1), -1, np.int64)
    worst[0, 0] = square[0, 0] = 0.0
    for s in range(stages):
        for j in range(s + 1, sections - (stages - s - 1) + 1):
            for i in range(j - 1, s - 1, -1):
                spent = load.pace[s] * (load.seconds[j] - load.seconds[i])
                if spent > worst[s + 1, j] * (1 + 1e-12):
                    break
                bytes_held = (
                    load.held[j] - load.held[i] + load.stash[s] * (load.live[j] - load.live[i])
                )
                if bytes_held + load.entry[s] * load.input[i] > load.limit[s]:
                    continue
                slowest, even = max(worst[s, i], spent), square[s, i] + spent * spent
                least = worst[s + 1, j]
                if slowest < least * (1 - 1e-12) or (
                    slowest <= least * (1 + 1e-12) and even < square[s + 1, j]
                ):
                    worst[s + 1, j], square[s + 1, j], came[s + 1, j] = slowest, even, i
    return worst[stages], came


def split(load: Load) -> tuple[int, ...] | None:
    """Return the first section of every stage, or `None` if no grouping fits into memory.

    The slowest stage is as fast as possible; among such groupings the most even one is returned.
    """
    sections, stages = len(load.seconds) - 1, len(load.pace)
    if stages > sections:
        return None
    worst, came = _split(load)
    if worst[sections] >= NEVER:
        return None
    firsts, j = [], sections
    for s in range(stages, 0, -1):
        j = int(came[s, j])
        firsts.append(j)
    return tuple(reversed(firsts))


@compiled
def evened(seconds: Reals, firsts: Codes, depth: int) -> Codes:
    """Move boundaries by one section at a time while the workers' loads become more alike.

    Worker w computes the stages w, w + depth, ... A faster slowest worker is better; among equals a
    smaller sum of squares is.
    """
    stages, loads, found = len(firsts), np.zeros(depth), firsts.copy()
    ends = np.append(found[1:], len(seconds) - 1)
    for s in range(stages):
        loads[s % depth] += seconds[ends[s]] - seconds[found[s]]
    moved = True
    while moved:
        moved = False
        for s in range(1, stages):
            last = found[s + 1] if s + 1 < stages else len(seconds) - 1
            for to in (found[s] - 1, found[s] + 1):
                if not found[s - 1] < to < last:
                    continue
                more = seconds[to] - seconds[found[s]]  # of the stage before
                least, squares = loads.max(), (loads * loads).sum()
                loads[(s - 1) % depth] += more
                loads[s % depth] -= more
                slowest = loads.max()
                better = slowest < least / SAME
                if better or (slowest <= least and (loads * loads).sum() < squares / SAME):
                    found[s], moved = to, True
                    break
                loads[(s - 1) % depth] -= more
                loads[s % depth] += more
    return found
