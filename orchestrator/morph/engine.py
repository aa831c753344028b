"""The compiled heart of the simulator: when does every action of a schedule start and end?

Two loops over the same packed programs (`agent.schedule`), both event-driven and deterministic:

* `run_in_order`: every worker keeps to its program. A worker is taken as far as it can go, then the next;
  no clock is kept and no event is queued, because in-order programs have one outcome whatever the order
  of evaluation. About five nanoseconds an action.
* `run_greedy`: whenever a worker is free it takes the first action of its program, within `reach` places,
  whose inputs are there. With a reach of one it is the same as above; with more it is Varuna's
  opportunistic deviation; with all of the program it is list scheduling, and makes new schedules.

A message leaves its sender's link when the messages before it have left, occupies the link for
bytes / bandwidth, and arrives after the latency and the jitter:

    depart = max(end, link free) + occupancy        arrive = depart + latency + jitter * u
"""

import numba
import numpy as np

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, RECOMPUTE = range(5)
ABSENT = -1.0
NEVER = 1e300
_JIT = {"cache": True, "nogil": True, "fastmath": False}


@numba.njit(inline="always", **_JIT)
def _draw(seed, key):
    """An exponential variate of mean one that depends on seed and key only (splitmix64)."""
    z = np.uint64(seed) + np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return -np.log((np.float64(z >> np.uint64(11)) + 1.0) / 9007199254740993.0)


@numba.njit(**_JIT)
def run_in_order(codes, offsets, microbatches, seconds, slowness, wire, seed, starts, ends):
    """Fill `ends_w` per worker; `starts`/`ends` per action if they are not empty.

    seconds[kind, stage]; slowness[worker]; wire[0 up | 1 down, stage boundary, occupancy | latency | jitter].
    Returns (end per worker, end per stage, busy per worker, first blocked worker or -1).
    """
    workers, stages = len(offsets) - 1, seconds.shape[1]
    size = stages * microbatches
    forward = np.full(size, ABSENT)
    gradient = np.full(size, ABSENT)
    forward[:microbatches] = 0.0
    free = np.zeros(workers)
    busy = np.zeros(workers)
    stage_end = np.zeros(stages)
    link = np.zeros((2, workers))
    at = offsets[:-1].copy()
    record = len(starts) > 0
    left = offsets[workers]
    while left > 0:
        before = left
        # Backwards, because in the steady state gradients flow towards the first stage.
        for worker in range(workers - 1, -1, -1):
            i, stop, now = at[worker], offsets[worker + 1], free[worker]
            slow, worked = slowness[worker], busy[worker]
            while i < stop:
                code = codes[i]
                kind = code >> 56
                stage = (code >> 32) & 0xFFFFFF
                cell = stage * microbatches + (code & 0xFFFFFFFF)
                if kind == FORWARD:
                    ready = forward[cell]
                elif kind >= WEIGHT_GRADIENT:
                    ready = now
                else:
                    ready = gradient[cell]
                if ready < 0.0:
                    break
                start = max(now, ready)
                spent = seconds[kind, stage] * slow
                now = start + spent
                worked += spent
                if record:
                    starts[i] = start
                    ends[i] = now
                i += 1
                if kind == FORWARD:
                    if stage + 1 == stages:
                        gradient[cell] = now
                    else:
                        occupancy = wire[0, stage, 0]
                        depart = now
                        if occupancy > 0.0:
                            depart = max(now, link[0, worker]) + occupancy
                            link[0, worker] = depart
                        depart += wire[0, stage, 1]
                        if wire[0, stage, 2] > 0.0:
                            depart += wire[0, stage, 2] * _draw(seed, 2 * cell)
                        forward[cell + microbatches] = depart
                elif kind <= INPUT_GRADIENT:
                    stage_end[stage] = max(stage_end[stage], now)
                    if stage > 0:
                        occupancy = wire[1, stage, 0]
                        depart = now
                        if occupancy > 0.0:
                            depart = max(now, link[1, worker]) + occupancy
                            link[1, worker] = depart
                        depart += wire[1, stage, 1]
                        if wire[1, stage, 2] > 0.0:
                            depart += wire[1, stage, 2] * _draw(seed, 2 * cell + 1)
                        gradient[cell - microbatches] = depart
                elif kind == WEIGHT_GRADIENT:
                    stage_end[stage] = max(stage_end[stage], now)
            left -= i - at[worker]
            at[worker], free[worker], busy[worker] = i, now, worked
        if left == before:
            for worker in range(workers):
                if at[worker] < offsets[worker + 1]:
                    return free, stage_end, busy, at[worker]
    return free, stage_end, busy, np.int64(-1)


@numba.njit(**_JIT)
def _arrival(code, microbatches, forward, gradient, own):
    """When the inputs of an action are there; ABSENT if that is not known yet."""
    kind = code >> 56
    cell = ((code >> 32) & 0xFFFFFF) * microbatches + (code & 0xFFFFFFFF)
    if kind == FORWARD:
        return forward[cell]
    if kind == WEIGHT_GRADIENT:
        return own[1, cell]
    if kind == RECOMPUTE:
        return own[0, cell]
    return gradient[cell]


@numba.njit(**_JIT)
def _allowed(kind, stash, deferred, recomputed, limits):
    """The bounds that a worker keeps: forwards stashed, weight-gradients pending, one recompute."""
    if kind == FORWARD:
        return limits[0] == 0 or stash < limits[0]
    if kind == INPUT_GRADIENT:
        return limits[1] == 0 or deferred < limits[1]
    if kind == RECOMPUTE:
        return recomputed == 0
    return True


@numba.njit(**_JIT)
def _pick(codes, first, stop, done, state, now):
    """The first action within reach that can start by `now`, and when the earliest of them all can."""
    microbatches, reach, forward, gradient, own, limits, counts = state
    earliest, seen, i = NEVER, 0, first
    while i < stop and seen < reach:
        if not done[i]:
            seen += 1
            arrival = _arrival(codes[i], microbatches, forward, gradient, own)
            if arrival >= 0.0 and _allowed(codes[i] >> 56, counts[0], counts[1], counts[2], limits):
                if arrival <= now:
                    return i, now
                earliest = min(earliest, arrival)
        i += 1
    return np.int64(-1), earliest


@numba.njit(**_JIT)
def _post(now, sender, cell, wire, link, seed):
    """When a message that is ready at `now` arrives; `wire` holds occupancy, latency, jitter."""
    depart = now
    if wire[0] > 0.0:
        depart = max(now, link[sender]) + wire[0]
        link[sender] = depart
    if wire[2] > 0.0:
        depart += wire[2] * _draw(seed, cell)
    return depart + wire[1]


@numba.njit(**_JIT)
def _finish(code, end, worker, world, counts, wire, seed):
    """Book what an action leaves behind; returns when its message arrives, or NEVER if it sends none."""
    microbatches, stages, forward, gradient, own, link = world
    kind, stage = code >> 56, (code >> 32) & 0xFFFFFF
    cell = stage * microbatches + (code & 0xFFFFFFFF)
    arrival = NEVER
    if kind == FORWARD:
        counts[0] += 1
        own[0, cell] = end
        if stage + 1 == stages:
            gradient[cell] = end
        else:
            arrival = _post(end, worker, 2 * cell, wire[0, stage], link[0], seed)
            forward[cell + microbatches] = arrival
    elif kind == RECOMPUTE:
        counts[2] += 1
    elif kind == WEIGHT_GRADIENT:
        counts[1] -= 1
        counts[0] -= 1
    else:
        counts[2] = 0
        if kind == INPUT_GRADIENT:
            own[1, cell] = end
            counts[1] += 1
        else:
            counts[0] -= 1
        if stage > 0:
            arrival = _post(end, worker, 2 * cell + 1, wire[1, stage], link[1], seed)
            gradient[cell - microbatches] = arrival
    return arrival


@numba.njit(**_JIT)
def run_greedy(codes, offsets, microbatches, seconds, slowness, wire, seed, reach, limits):
    """Order of the actions taken (flat index, by worker), their starts and ends; -1 where deadlocked.

    limits = (forwards stashed, weight-gradients pending) per worker; 0 means no limit.
    """
    workers, stages = len(offsets) - 1, seconds.shape[1]
    size, total = stages * microbatches, offsets[workers]
    forward, gradient = np.full(size, ABSENT), np.full(size, ABSENT)
    own = np.full((2, size), ABSENT)  # when recompute, and weight-gradient, could start
    forward[:microbatches] = 0.0
    order, starts, ends = np.full(total, -1, np.int64), np.zeros(total), np.zeros(total)
    done = np.zeros(total, np.bool_)
    first, put = offsets[:-1].copy(), offsets[:-1].copy()
    free, wake = np.zeros(workers), np.zeros(workers)
    counts = np.zeros((workers, 3), np.int64)  # stashed, deferred, recomputed
    world = (microbatches, stages, forward, gradient, own, np.zeros((2, workers)))
    while True:
        worker = np.argmin(wake)
        now = wake[worker]
        if now >= NEVER:
            return order, starts, ends
        state = (microbatches, reach, forward, gradient, own, limits, counts[worker])
        chosen, earliest = _pick(codes, first[worker], offsets[worker + 1], done, state, now)
        if chosen < 0:
            wake[worker] = earliest
            continue
        code = codes[chosen]
        end = now + seconds[code >> 56, (code >> 32) & 0xFFFFFF] * slowness[worker]
        done[chosen] = True
        order[put[worker]] = chosen
        starts[chosen], ends[chosen] = now, end
        put[worker] += 1
        free[worker] = wake[worker] = end
        while first[worker] < offsets[worker + 1] and done[first[worker]]:
            first[worker] += 1
        arrival = _finish(code, end, worker, world, counts[worker], wire, seed)
        # Whoever waits looks again when the message arrives; whoever works looks when it is free.
        for other in range(workers):
            if wake[other] > arrival:
                wake[other] = max(arrival, free[other])


@numba.njit(**_JIT)
def peaks(codes, offsets, stages):
    """Most microbatches stashed per stage, most weight-gradients pending per stage, in program order."""
    stashed, deferred = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
    for worker in range(len(offsets) - 1):
        held, owed = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
        for i in range(offsets[worker], offsets[worker + 1]):
            kind, stage = codes[i] >> 56, (codes[i] >> 32) & 0xFFFFFF
            if kind == FORWARD:
                held[stage] += 1
                stashed[stage] = max(stashed[stage], held[stage])
            elif kind == INPUT_GRADIENT:
                owed[stage] += 1
                deferred[stage] = max(deferred[stage], owed[stage])
            elif kind == BACKWARD:
                held[stage] -= 1
            elif kind == WEIGHT_GRADIENT:
                owed[stage] -= 1
                held[stage] -= 1
    return stashed, deferred


@numba.njit(**_JIT)
def one_f_one_b(stages, microbatches, recompute, split):
    """The packed programs of 1F1B with flush; see `schedules.one_f_one_b`.

    With `split`, stage s puts off each weight-gradient by s microbatches at most (it has as much slack as
    the pipeline takes to bring a gradient from s to the first stage), and does what is left at the end.
    """
    forward, backward = np.int64(0), np.int64(BACKWARD) << 56
    if split:
        backward = np.int64(INPUT_GRADIENT) << 56
    again, weight = np.int64(RECOMPUTE) << 56, np.int64(WEIGHT_GRADIENT) << 56
    offsets = np.zeros(stages + 1, np.int64)
    for s in range(stages):
        each = 2 + (1 if recompute[s] else 0) + (1 if split else 0)
        offsets[s + 1] = offsets[s] + each * microbatches
    codes = np.empty(offsets[stages], np.int64)
    for s in range(stages):
        i, tag = offsets[s], np.int64(s) << 32
        warm = min(stages - 1 - s, microbatches)
        for step in range(microbatches + warm):
            if step < microbatches:
                codes[i] = forward | tag | step
                i += 1
            m = step - warm
            if m >= 0:
                if recompute[s]:
                    codes[i] = again | tag | m
                    i += 1
                codes[i] = backward | tag | m
                i += 1
                if split and m >= s:
                    codes[i] = weight | tag | (m - s)
                    i += 1
        if split:
            for m in range(max(0, microbatches - s), microbatches):
                codes[i] = weight | tag | m
                i += 1
    return codes, offsets


@numba.njit(**_JIT)
def varuna(stages, microbatches, recompute):
    """Varuna's rule-based order, played out in quanta: forward and recompute take one, a backward two.

    A worker prefers, in this order: the second half of a backward; a backward whose recompute is done
    (it waits for nothing else after that); a recompute; a forward. When stage k is half through the
    backward of microbatch m, stage k-1 is asked for the recompute of m, so that it is done as the
    gradient arrives.
    """
    offsets = np.zeros(stages + 1, np.int64)
    for s in range(stages):
        offsets[s + 1] = offsets[s] + (3 if recompute[s] else 2) * microbatches
    codes = np.empty(offsets[stages], np.int64)
    put = offsets[:-1].copy()
    asked, heads = np.zeros((4, stages), np.int64), np.zeros((4, stages), np.int64)
    queues = np.empty((4, stages, microbatches), np.int64)  # forward, recompute, backward, its 2nd half
    queues[0, 0] = np.arange(microbatches)
    asked[0, 0] = microbatches
    chosen, moved = np.empty((2, stages), np.int64), 1
    while moved:
        moved = 0
        for s in range(stages):
            chosen[0, s] = -1
            for queue in (3, 2, 1, 0):
                if heads[queue, s] < asked[queue, s]:
                    m = queues[queue, s, heads[queue, s]]
                    heads[queue, s] += 1
                    chosen[0, s], chosen[1, s] = queue, m
                    moved = 1
                    if queue < 3:
                        kind = np.array([FORWARD, RECOMPUTE, BACKWARD])[queue]
                        codes[put[s]] = np.int64(kind) << 56 | np.int64(s) << 32 | m
                        put[s] += 1
                    break
        for s in range(stages):
            queue, m = chosen[0, s], chosen[1, s]
            to, target = -1, s
            if queue == 0:
                to, target = (0, s + 1) if s + 1 < stages else (2, s)
            elif queue == 1:
                to = 2
            elif queue == 2:
                queues[3, s, asked[3, s]] = m
                asked[3, s] += 1
                if s > 0:
                    to, target = (1 if recompute[s - 1] else 2), s - 1
            if to >= 0:
                queues[to, target, asked[to, target]] = m
                asked[to, target] += 1
    return codes, offsets
