"""The compiled heart of the simulator: when does every action of a schedule start and end?

Two loops over the same packed programs (`agent.schedule`), both event-driven and deterministic:

* `run_in_order`: every worker keeps to its program. A worker is taken as far as it can go, then the next;
  no clock is kept and no event is queued, because in-order programs have one outcome whatever the order
  of evaluation. Four to six nanoseconds an action.
* `run_greedy`: whenever a worker is free it takes the first action of its program, within `reach` places,
  whose inputs are there. With a reach of one it is the same as above; with more it is Varuna's
  opportunistic deviation; with all of the program it is list scheduling, and makes new schedules.

A message leaves its sender's link when the messages before it have left, occupies the link for
bytes / bandwidth, and arrives after the latency and the jitter:

    depart = max(end, link free) + occupancy        arrive = depart + latency + jitter * u
"""

from typing import NamedTuple

import numpy as np

from orchestrator.morph.compiled import Codes, Reals, compiled

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, RECOMPUTE = range(5)
ABSENT = -1.0
NEVER = 1e300
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
    """seconds[kind, stage]; slowness[worker]; wire[up 0 | down 1, stage that sends, occupancy..jitter]."""

    seconds: Reals
    slowness: Reals
    wire: Reals
    seed: int


class Trace(NamedTuple):
    """Starts and ends of every action, in the order of the codes; empty if nobody looks."""

    starts: Reals
    ends: Reals


class Outcome(NamedTuple):
    """Per worker: when it is done and how long it computed; per stage: its last gradient."""

    done: Reals
    stage_done: Reals
    busy: Reals
    stuck: int  # the first action that waits for ever, or -1


@compiled
def _draw(seed: int, key: np.uint64) -> float:
    """An exponential variate of mean one that depends on seed and key only (splitmix64)."""
    z = np.uint64(seed) + key * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return float(-np.log((np.float64(z >> np.uint64(11)) + 1.0) / 9007199254740993.0))


@compiled
def run_in_order(programs: Programs, costs: Costs, trace: Trace) -> Outcome:  # noqa: PLR0912, PLR0915
    """Every worker keeps to its program.

    One function without views: a call or a slice would count references in the innermost loop. What
    counts there is unsigned, since a signed index is asked first whether it counts from the end.
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
                    break  # there is no such thing: whoever asked looks for the reason
                if kind == U64(RECOMPUTE):  # it waits for nobody, and nobody for it
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
                        arrival += up[stage, U64(JITTER)] * _draw(seed, U64(2) * cell)
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
                        arrival += down[stage, U64(JITTER)] * _draw(seed, U64(2) * cell + U64(1))
                    gradient[cell - microbatches] = arrival
            moved |= i > first
            link[U64(0), worker], link[U64(1), worker] = up_free, down_free
            at[worker], free[worker], busy[worker] = i, now, worked
    waiting = at.view(np.int64)[at < stops]
    return Outcome(free, stage_done, busy, int(waiting[-1]) if len(waiting) else -1)


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


@compiled
def _post(costs: Costs, link: Reals, sender: tuple[int, int, int], now: float, cell: int) -> float:
    """When a message that is ready at `now` arrives; `link` says when each sender's is free again."""
    way, stage, worker = sender
    depart = now
    occupancy, jitter = costs.wire[way, stage, 0], costs.wire[way, stage, 2]
    if occupancy > 0.0:
        depart = max(now, link[way, worker]) + occupancy
        link[way, worker] = depart
    if jitter > 0.0:
        depart += jitter * _draw(costs.seed, U64(2 * cell + way))
    return float(depart + costs.wire[way, stage, 1])


@compiled
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


@compiled
def _allowed(rules: Rules, kind: int, counts: Codes) -> bool:
    """A worker stashes and owes no more than it may; a recompute waits for its backward only."""
    if kind == FORWARD:
        return bool(counts[2] == 0 and (rules.stashed == 0 or counts[0] < rules.stashed))
    if kind == INPUT_GRADIENT:
        return bool(rules.owed == 0 or counts[1] < rules.owed)
    if kind == RECOMPUTE:
        return bool(counts[2] == 0)
    return True


@compiled
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


@compiled
def _awaited(world: _World, code: int, now: float) -> bool:
    """The gradient for which a recompute is made is there."""
    cell = ((code >> 32) & STAGE) * world.programs.microbatches + (code & MICROBATCH)
    return bool(0.0 <= world.gradient[cell] <= now)


@compiled
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


@compiled
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


@compiled
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


@compiled
def peaks(programs: Programs, stages: int) -> Codes:
    """Per stage, the most microbatches stashed [0] and weight-gradients owed [1], in program order."""
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
