"""Compiled generators of schedules, which write programs as fast as they are simulated."""

import numpy as np

from orchestrator.planner.compiled import Codes, Flags, compiled
from orchestrator.planner.simulation.kernel import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECOMPUTE,
    WEIGHT_GRADIENT,
)

KIND_SHIFT, STAGE_SHIFT = 56, 32


@compiled
def gpipe(stages: int, microbatches: int, recompute: Flags) -> tuple[Codes, Codes]:
    """Return all forwards, then all backwards, last microbatch first.

    The last microbatch needs no recompute.
    """
    offsets = np.zeros(stages + 1, np.int64)
    for s in range(stages):
        again = microbatches - 1 if recompute[s] else 0
        offsets[s + 1] = offsets[s] + 2 * microbatches + again
    codes = np.empty(offsets[stages], np.int64)
    for s in range(stages):
        i, tag = offsets[s], np.int64(s) << STAGE_SHIFT
        for m in range(microbatches):
            codes[i] = tag | m
            i += 1
        for m in range(microbatches - 1, -1, -1):
            if recompute[s] and m != microbatches - 1:
                codes[i] = np.int64(RECOMPUTE) << KIND_SHIFT | tag | m
                i += 1
            codes[i] = np.int64(BACKWARD) << KIND_SHIFT | tag | m
            i += 1
    return codes, offsets


@compiled
def one_f_one_b(
    stages: int, microbatches: int, recompute: Flags, split: bool, eager: bool
) -> tuple[Codes, Codes]:
    """Return the packed programs of 1F1B with flush; see `schedules`.

    With `split`, stage s puts off each weight-gradient by s microbatches at most, and does the rest
    at the end. Its slack is the time that a gradient takes from s to the first stage.

    `eager` runs twice the forwards ahead, so a message may take half a microbatch's time without
    making a worker wait. Only the last 2 s + P - 2 backwards of stage s > 0 are in halves then,
    because their weight-gradients fill the drain.
    """
    again, weight = np.int64(RECOMPUTE) << KIND_SHIFT, np.int64(WEIGHT_GRADIENT) << KIND_SHIFT
    offsets = np.zeros(stages + 1, np.int64)
    halved, late = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
    for s in range(stages):
        if eager:
            halved[s], late[s] = min(2 * s + stages - 2, microbatches) if s else 0, microbatches
        elif split:
            halved[s], late[s] = microbatches, s
        each = 2 + (1 if recompute[s] else 0)
        offsets[s + 1] = offsets[s] + each * microbatches + halved[s]
    codes = np.empty(offsets[stages], np.int64)
    for s in range(stages):
        i, tag, whole = offsets[s], np.int64(s) << STAGE_SHIFT, microbatches - halved[s]
        warm = min((2 if eager else 1) * (stages - 1 - s), microbatches)
        for step in range(microbatches + warm):
            if step < microbatches:
                codes[i] = tag | step
                i += 1
            m = step - warm
            if m >= 0:
                if recompute[s]:
                    codes[i] = again | tag | m
                    i += 1
                kind = INPUT_GRADIENT if m >= whole else BACKWARD
                codes[i] = np.int64(kind) << KIND_SHIFT | tag | m
                i += 1
                if m - late[s] >= whole:
                    codes[i] = weight | tag | (m - late[s])
                    i += 1
        for m in range(max(whole, microbatches - late[s]), microbatches):
            codes[i] = weight | tag | m
            i += 1
    return codes, offsets


@compiled
def _backward_of(workers: int, chunks: int, w: int, back: int) -> int:
    """Return stage and microbatch, packed, of a worker's backward number `back`."""
    chunk = chunks - 1 - back // workers % chunks
    m = back // (workers * chunks) * workers + back % workers
    return int(np.int64(chunk * workers + w) << STAGE_SHIFT | m)


@compiled
def interleaved(workers: int, chunks: int, microbatches: int, split: bool) -> tuple[Codes, Codes]:
    """Return the packed programs of the interleaved schedule.

    Worker w runs 2(p - w - 1) + (v - 1)p chunk-forwards (all if m = p), then one forward, one
    backward. With `split` worker w puts off each weight-gradient by w of its backwards at most, as
    in 1F1B.
    """
    total = chunks * microbatches
    offsets = np.arange(workers + 1) * ((3 if split else 2) * total)
    backward = np.int64(INPUT_GRADIENT if split else BACKWARD) << KIND_SHIFT
    weight = np.int64(WEIGHT_GRADIENT) << KIND_SHIFT
    codes = np.empty(offsets[workers], np.int64)
    for w in range(workers):
        i = offsets[w]
        warm = total if microbatches == workers else 2 * (workers - w - 1) + (chunks - 1) * workers
        warm = min(warm, total)
        for step in range(total + warm):
            if step < total:
                chunk = step // workers % chunks
                m = step // (workers * chunks) * workers + step % workers
                codes[i] = np.int64(chunk * workers + w) << STAGE_SHIFT | m
                i += 1
            if step >= warm:
                back = step - warm
                codes[i] = backward | _backward_of(workers, chunks, w, back)
                i += 1
                if split and back >= w:
                    codes[i] = weight | _backward_of(workers, chunks, w, back - w)
                    i += 1
        if split:
            for back in range(max(0, total - w), total):
                codes[i] = weight | _backward_of(workers, chunks, w, back)
                i += 1
    return codes, offsets


FORWARDS, RECOMPUTES, BACKWARDS, HALVES = range(4)


@compiled
def varuna(stages: int, microbatches: int, recompute: Flags) -> tuple[Codes, Codes]:
    """Return Varuna's rule-based order, simulated in quanta.

    Forward and recompute take one quantum, a backward two. A worker prefers, in this order: the
    second half of a backward; a backward whose recompute is done; a recompute; a forward. When
    stage k is half through the backward of microbatch m, stage k-1 is asked for the recompute of m,
    so that it is done as the gradient arrives.
    """
    offsets = np.zeros(stages + 1, np.int64)
    for s in range(stages):
        offsets[s + 1] = offsets[s] + (3 if recompute[s] else 2) * microbatches
    codes = np.empty(offsets[stages], np.int64)
    put = offsets[:-1].copy()
    asked, heads = np.zeros((4, stages), np.int64), np.zeros((4, stages), np.int64)
    queues = np.empty((4, stages, microbatches), np.int64)
    queues[FORWARDS, 0] = np.arange(microbatches)
    asked[FORWARDS, 0] = microbatches
    chosen, moved = np.empty((2, stages), np.int64), True
    while moved:
        moved = False
        for s in range(stages):
            queue = HALVES
            while queue >= 0 and heads[queue, s] >= asked[queue, s]:
                queue -= 1
            chosen[0, s] = queue
            if queue < 0:
                continue
            moved = True
            m = chosen[1, s] = queues[queue, s, heads[queue, s]]
            heads[queue, s] += 1
            if queue != HALVES:
                kind = RECOMPUTE if queue == RECOMPUTES else BACKWARD
                kind = FORWARD if queue == FORWARDS else kind
                codes[put[s]] = np.int64(kind) << KIND_SHIFT | np.int64(s) << STAGE_SHIFT | m
                put[s] += 1
        for s in range(stages):
            queue, m = chosen[0, s], chosen[1, s]
            to, target = -1, s
            if queue == FORWARDS:
                to, target = (FORWARDS, s + 1) if s + 1 < stages else (BACKWARDS, s)
            elif queue == RECOMPUTES:
                to = BACKWARDS
            elif queue == BACKWARDS:
                to = HALVES
            # A recompute is due one quantum before the gradient comes, a backward when it comes.
            early = s > 0 and queue == BACKWARDS and recompute[s - 1]
            if early or (s > 0 and queue == HALVES and not recompute[s - 1]):
                again = RECOMPUTES if early else BACKWARDS
                queues[again, s - 1, asked[again, s - 1]] = m
                asked[again, s - 1] += 1
            if to >= 0:
                queues[to, target, asked[to, target]] = m
                asked[to, target] += 1
    return codes, offsets
