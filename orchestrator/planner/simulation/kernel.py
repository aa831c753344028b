"""The compiled core of the simulator: when every action of a schedule starts and ends.

`run_in_order` plays packed programs (`agent.schedule`), one per worker, each in its order. It
advances one worker as far as possible, then the next. It needs no clock and no event queue, because
in-order programs have the same outcome in any order of evaluation. An action takes four to six
nanoseconds.

A message leaves its sender's link when the messages before it have left, occupies the link for
bytes / bandwidth, and arrives after the latency and the jitter:

    depart = max(end, link free) + occupancy        arrive = depart + latency + jitter * u
"""

from typing import NamedTuple

import numpy as np

from orchestrator.planner.compiled import Codes, Reals, compiled

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, RECOMPUTE = range(5)
ABSENT = -1.0
MICROBATCH, STAGE = 0xFFFFFFFF, 0xFFFFFF
OCCUPANCY, LATENCY, JITTER = range(3)
U64 = np.uint64
KIND, SHIFT = U64(56), U64(32)


class Programs(NamedTuple):
    """The packed actions of worker w are codes[offsets[w] : offsets[w + 1]]."""

    codes: Codes
    offsets: Codes
    microbatches: int


class Costs(NamedTuple):
    """The costs of actions and messages.

    They are seconds[kind, stage], slowness[worker], and wire[up 0 | down 1, sending stage,
    occupancy..jitter].
    """

    seconds: Reals
    slowness: Reals
    wire: Reals
    seed: int


class Trace(NamedTuple):
    """Starts and ends of every action, in the order of the codes; empty if not wanted."""

    starts: Reals
    ends: Reals


class Outcome(NamedTuple):
    """The end and computing time of each worker, and the last gradient of each stage."""

    done: Reals
    stage_done: Reals
    busy: Reals
    stuck: int  # the first action that waits for ever, or -1


@compiled
def drawn(seed: int, key: np.uint64) -> float:
    """Return an exponential variate of mean one, from seed and key only (splitmix64)."""
    z = np.uint64(seed) + key * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return float(-np.log((np.float64(z >> np.uint64(11)) + 1.0) / 9007199254740993.0))


@compiled
def run_in_order(programs: Programs, costs: Costs, trace: Trace) -> Outcome:  # noqa: PLR0912, PLR0915
    """Run every worker's program in its order, and return when all are done or stuck.

    It is one function without views, because a call or a slice would count references in the
    innermost loop. Indices there are unsigned, because a signed one is first checked for counting
    from the end.
    """
    microbatches, codes = U64(programs.microbatches), programs.codes.view(U64)
    seconds, slowness, wire, seed = costs
    workers, stages = len(programs.offsets) - 1, seconds.shape[1]
    forward = np.full(stages * programs.microbatches, ABSENT)  # when the activation is there
    gradient = np.full(stages * programs.microbatches, ABSENT)
    forward[: programs.microbatches] = 0.0
    free, busy, stage_done = np.zeros(workers), np.zeros(workers), np.zeros(stages)
    up, down = wire[0], wire[1]
    link = np.zeros((2, workers))  # when a worker's link is free, up and down
    at, stops = programs.offsets[:-1].astype(U64), programs.offsets[1:].astype(U64)
    starts, ends, each = trace.starts, trace.ends, seconds.ravel()
    cells = U64(stages) * microbatches
    record, jitters, moved = len(starts) > 0, wire[:, :, JITTER].max() > 0.0, True
    while moved:
        moved = False
        # Backwards, because in the steady state gradients flow towards the first stage.
        for turn in range(workers):
            worker = U64(workers - 1 - turn)
            first, stop, now = at[worker], stops[worker], free[worker]
            i, slow, worked = first, slowness[worker], busy[worker]
            up_free, down_free = link[U64(0), worker], link[U64(1), worker]
            while i < stop:
                kind, stage = codes[i] >> KIND, codes[i] >> SHIFT & U64(STAGE)
                cell = stage * microbatches + (codes[i] & U64(MICROBATCH))
                if cell >= cells or kind > U64(RECOMPUTE):
                    break  # there is no such action; the caller finds the reason
                if kind == U64(RECOMPUTE):  # it waits for no message, and no worker waits for it
                    spent = each[kind * U64(stages) + stage] * slow
                    now += spent
                    worked += spent
                    if record:
                        starts[i], ends[i] = now - spent, now
                    i += U64(1)
                    continue
                if kind == U64(FORWARD):
                    ready = forward[cell]
                elif kind == U64(WEIGHT_GRADIENT):
                    ready = now
                else:
                    ready = gradient[cell]
                if ready < 0.0:
                    break
                spent = each[kind * U64(stages) + stage] * slow
                now = max(now, ready) + spent
                worked += spent
                if record:
                    starts[i], ends[i] = now - spent, now
                i += U64(1)
                if kind == U64(FORWARD):
                    if stage + U64(1) == U64(stages):
                        gradient[cell] = now
                        continue
                    arrival, occupancy = now, up[stage, U64(OCCUPANCY)]
                    if occupancy > 0.0:
                        arrival = up_free = max(now, up_free) + occupancy
                    arrival += up[stage, U64(LATENCY)]
                    if jitters:
                        arrival += up[stage, U64(JITTER)] * drawn(seed, U64(2) * cell)
                    forward[cell + microbatches] = arrival
                else:
                    stage_done[stage] = max(stage_done[stage], now)
                    if kind == U64(WEIGHT_GRADIENT) or stage == U64(0):
                        continue
                    arrival, occupancy = now, down[stage, U64(OCCUPANCY)]
                    if occupancy > 0.0:
                        arrival = down_free = max(now, down_free) + occupancy
                    arrival += down[stage, U64(LATENCY)]
                    if jitters:
                        arrival += down[stage, U64(JITTER)] * drawn(seed, U64(2) * cell + U64(1))
                    gradient[cell - microbatches] = arrival
            moved |= i > first
            link[U64(0), worker], link[U64(1), worker] = up_free, down_free
            at[worker], free[worker], busy[worker] = i, now, worked
    waiting = at.view(np.int64)[at < stops]
    return Outcome(free, stage_done, busy, int(waiting[-1]) if len(waiting) else -1)


@compiled
def peaks(programs: Programs, stages: int) -> Codes:
    """Return per stage the most microbatches stashed [0] and weight-gradients owed [1].

    They are counted in program order.
    """
    codes, offsets, _ = programs
    most = np.zeros((2, stages), np.int64)
    for worker in range(len(offsets) - 1):
        held = np.zeros((2, stages), np.int64)
        for i in range(offsets[worker], offsets[worker + 1]):
            kind, stage = codes[i] >> 56, (codes[i] >> 32) & STAGE
            if kind == FORWARD:
                held[0, stage] += 1
                most[0, stage] = max(most[0, stage], held[0, stage])
            elif kind == INPUT_GRADIENT:
                held[1, stage] += 1
                most[1, stage] = max(most[1, stage], held[1, stage])
            elif kind == BACKWARD:
                held[0, stage] -= 1
            elif kind == WEIGHT_GRADIENT:
                held[:, stage] -= 1
    return most
