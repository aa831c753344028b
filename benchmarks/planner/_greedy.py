"""Greedy workers: Varuna's opportunistic deviation, and list scheduling of out-of-order backprop.

Whenever a worker is free it takes the first action of its program, within `reach` places, whose inputs are there.
With a reach of one that is a worker that keeps to its program, as the planner's own engine plays it; with more it is
Varuna's deviation; with all of the program it is list scheduling, and makes new schedules.
"""

from typing import NamedTuple

import msgspec
import numpy as np
from numba import njit

from agent.schedule import Schedule
from orchestrator.planner.compiled import Codes, Reals
from orchestrator.planner.errors import ScheduleError
from orchestrator.planner.simulation import kernel, schedules, simulator
from orchestrator.planner.simulation.kernel import (
    ABSENT,
    FORWARD,
    INPUT_GRADIENT,
    MICROBATCH,
    RECOMPUTE,
    STAGE,
    U64,
    WEIGHT_GRADIENT,
    Costs,
    Outcome,
    Programs,
    drawn,
)

NEVER = 1e300
REACH = 32  # how many actions ahead a worker looks when it deviates


class Rules(NamedTuple):
    """How far a worker may look ahead, and what it may hold; 0 means no limit."""

    reach: int
    stashed: int
    owed: int


class Taken(NamedTuple):
    """Which action each worker took in which order (-1 where it waits for ever), and when."""

    order: Codes
    starts: Reals
    ends: Reals


class _World(NamedTuple):
    """All that greedy workers see; a cell is stage * microbatches + microbatch, ABSENT not known yet."""

    programs: Programs
    costs: Costs
    rules: Rules
    forward: Reals  # when the activation is there
    gradient: Reals
    stashed: Reals  # when the recompute may start
    owed: Reals  # when the weight-gradient may start
    link: Reals
    taken: Codes  # 1 where an action has been taken
    counts: Codes  # per worker: forwards stashed, weight-gradients owed, recomputes waiting


@njit
def _post(costs: Costs, link: Reals, sender: tuple[int, int, int], now: float, cell: int) -> float:
    """When a message that is ready at `now` arrives; `link` says when each sender's is free again."""
    way, stage, worker = sender
    depart = now
    occupancy, jitter = costs.wire[way, stage, 0], costs.wire[way, stage, 2]
    if occupancy > 0.0:
        depart = max(now, link[way, worker]) + occupancy
        link[way, worker] = depart
    if jitter > 0.0:
        depart += jitter * drawn(costs.seed, U64(2 * cell + way))
    return float(depart + costs.wire[way, stage, 1])


@njit
def _arrival(world: _World, code: int) -> float:
    kind = code >> 56
    cell = ((code >> 32) & STAGE) * world.programs.microbatches + (code & MICROBATCH)
    if kind == FORWARD:
        return float(world.forward[cell])
    if kind == WEIGHT_GRADIENT:
        return float(world.owed[cell])
    if kind == RECOMPUTE:
        return float(world.stashed[cell])
    return float(world.gradient[cell])


@njit
def _allowed(rules: Rules, kind: int, counts: Codes) -> bool:
    """A worker stashes and owes no more than it may; a recompute waits for its backward only."""
    if kind == FORWARD:
        return bool(counts[2] == 0 and (rules.stashed == 0 or counts[0] < rules.stashed))
    if kind == INPUT_GRADIENT:
        return bool(rules.owed == 0 or counts[1] < rules.owed)
    if kind == RECOMPUTE:
        return bool(counts[2] == 0)
    return True


@njit
def _pick(world: _World, worker: int, first: int, now: float) -> tuple[int, float]:
    """The first action within reach that can start by `now` (or -1), and when the earliest of them can."""
    codes, stop = world.programs.codes, world.programs.offsets[worker + 1]
    earliest, seen, i, owing, due = NEVER, 0, first, False, -1
    while i < stop and seen < world.rules.reach:
        if world.taken[i] == 0:
            seen += 1
            kind, arrival = codes[i] >> 56, _arrival(world, codes[i])
            # A recompute is never early, and behind one that is due only a forward may overtake.
            early = (owing and kind != FORWARD) or (kind == RECOMPUTE and seen > 1)
            owing |= kind == RECOMPUTE
            if arrival >= 0.0 and not early and _allowed(world.rules, kind, world.counts[worker]):
                if arrival <= now and kind == RECOMPUTE and not _awaited(world, codes[i], now):
                    due = i  # there is time for a forward first, if one is ready
                elif arrival <= now:
                    return i, now
                else:
                    earliest = min(earliest, arrival)
        i += 1
    return due, now if due >= 0 else earliest


@njit
def _awaited(world: _World, code: int, now: float) -> bool:
    """The gradient for which a recompute is made is there."""
    cell = ((code >> 32) & STAGE) * world.programs.microbatches + (code & MICROBATCH)
    return bool(0.0 <= world.gradient[cell] <= now)


@njit
def _finish(world: _World, worker: int, code: int, end: float) -> float:
    """Book what an action leaves behind; when its message arrives, or NEVER if it sends none."""
    microbatches, counts = world.programs.microbatches, world.counts[worker]
    kind, stage = code >> 56, (code >> 32) & STAGE
    cell = stage * microbatches + (code & MICROBATCH)
    arrival = NEVER
    if kind == FORWARD:
        counts[0] += 1
        world.stashed[cell] = end
        if stage + 1 == world.costs.seconds.shape[1]:
            world.gradient[cell] = end
        else:
            arrival = _post(world.costs, world.link, (0, stage, worker), end, cell)
            world.forward[cell + microbatches] = arrival
        return arrival
    if kind == RECOMPUTE:
        counts[2] += 1
        return arrival
    if kind == WEIGHT_GRADIENT:
        counts[1] -= 1
        counts[0] -= 1
        return arrival
    counts[2] = 0
    if kind == INPUT_GRADIENT:
        world.owed[cell] = end
        counts[1] += 1
    else:
        counts[0] -= 1
    if stage > 0:
        arrival = _post(world.costs, world.link, (1, stage, worker), end, cell)
        world.gradient[cell - microbatches] = arrival
    return arrival


@njit
def _begin(programs: Programs, costs: Costs, rules: Rules) -> _World:
    workers, stages = len(programs.offsets) - 1, costs.seconds.shape[1]
    size = stages * programs.microbatches
    forward = np.full(size, ABSENT)
    forward[: programs.microbatches] = 0.0
    return _World(
        programs,
        costs,
        rules,
        forward,
        np.full(size, ABSENT),
        np.full(size, ABSENT),
        np.full(size, ABSENT),
        np.zeros((2, workers)),
        np.zeros(len(programs.codes), np.int64),
        np.zeros((workers, 3), np.int64),
    )


@njit
def run_greedy(programs: Programs, costs: Costs, rules: Rules) -> Taken:
    """Whenever a worker is free it takes the first of its actions, within reach, that is ready."""
    codes, offsets = programs.codes, programs.offsets
    workers, total = len(offsets) - 1, len(codes)
    world = _begin(programs, costs, rules)
    order, starts, ends = np.full(total, -1, np.int64), np.zeros(total), np.zeros(total)
    first, put = offsets[:-1].copy(), offsets[:-1].copy()
    free, wake = np.zeros(workers), np.zeros(workers)
    while True:
        worker = int(np.argmin(wake))
        now = wake[worker]
        if now >= NEVER:
            return Taken(order, starts, ends)
        chosen, earliest = _pick(world, worker, first[worker], now)
        if chosen < 0:
            wake[worker] = earliest
            continue
        code = codes[chosen]
        end = now + costs.seconds[code >> 56, (code >> 32) & STAGE] * costs.slowness[worker]
        world.taken[chosen] = 1
        order[put[worker]] = chosen
        starts[chosen], ends[chosen] = now, end
        put[worker] += 1
        free[worker] = wake[worker] = end
        while first[worker] < offsets[worker + 1] and world.taken[first[worker]] == 1:
            first[worker] += 1
        arrival = _finish(world, worker, code, end)
        # Whoever waits looks again when the message arrives; whoever works looks when it is free.
        for other in range(workers):
            if wake[other] > arrival:
                wake[other] = max(arrival, free[other])


def uniform(stages: int, forward_s: float, backward_s: float, *, input_share: float = 0.5) -> Reals:
    """Equal stages: a recompute is a forward again, a backward is input- and weight-gradient."""
    each = (
        forward_s,
        backward_s,
        backward_s * input_share,
        backward_s * (1 - input_share),
        forward_s,
    )
    return np.repeat(np.array(each)[:, None], stages, axis=1)


def simulate(
    schedule: Schedule, costs: Costs, *, stash: int | None = None
) -> simulator.SimulatedStep:
    """One pipeline, nothing reduced.

    With `stash` a worker whose input is late takes another action, as long as it holds at most so many
    forwards; 0 is no limit. Without, everybody keeps to the program.
    """
    programs = schedules.arrays(schedule)
    outcome = simulator.run(programs, costs, schedule.name)
    if stash is None:
        return simulator.finish([outcome])
    taken = run_greedy(programs, costs, Rules(REACH, stash, 0))
    if (taken.order < 0).any():
        raise ScheduleError(
            f"{schedule.name}: with at most {stash} forwards stashed an action waits for what never "
            f"comes; its program holds {max(in_flight(schedule)[0])}"
        )
    return simulator.finish([_outcome(programs, costs, taken)])


def _outcome(programs: Programs, costs: Costs, taken: Taken) -> Outcome:
    codes, offsets, _ = programs
    workers, stages = len(offsets) - 1, costs.seconds.shape[1]
    done, busy, stage_done = np.zeros(workers), np.zeros(workers), np.zeros(stages)
    for worker in range(workers):
        mine = slice(offsets[worker], offsets[worker + 1])
        done[worker] = taken.ends[mine].max()
        busy[worker] = (taken.ends[mine] - taken.starts[mine]).sum()
    kinds, stage = codes >> 56, codes >> 32 & kernel.STAGE
    ending = (kinds != kernel.FORWARD) & (kinds != kernel.RECOMPUTE)
    np.maximum.at(stage_done, stage[ending], taken.ends[ending])
    return Outcome(done, stage_done, busy, -1)


def in_flight(schedule: Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Per stage, the most microbatches stashed and the most weight-gradients owed at any time."""
    stashed, owed = kernel.peaks(schedules.arrays(schedule), schedule.stages)
    return tuple(stashed.tolist()), tuple(owed.tolist())


def replay(schedule: Schedule, seconds: Reals, owed: int = 0) -> Schedule:
    """The schedule that workers follow if each always takes the first of its actions that is ready."""
    programs = schedules.arrays(schedule)
    wire = np.zeros((2, schedule.stages, 3))
    costs = kernel.Costs(seconds, np.ones(schedule.workers), wire, 0)
    rules = Rules(len(programs.codes), 0, owed)
    order = run_greedy(programs, costs, rules).order
    if (order < 0).any():
        raise ScheduleError(
            f"{schedule.name}: {(order < 0).sum()} actions wait for what never comes"
        )
    codes, offsets = programs.codes[order], programs.offsets
    return msgspec.structs.replace(schedule, codes=codes.tobytes(), offsets=tuple(offsets.tolist()))
