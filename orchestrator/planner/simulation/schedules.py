"""Generators of schedules, which are data for the simulator and the executor.

gpipe        GPipe: all forwards, then all backwards, last microbatch first
1f1b         PipeDream-Flush, PTD-P: min(P-1-s, M) forwards, then one backward after each forward
varuna       Varuna, section 3.2: backward > recompute > forward; recompute as the gradient nears
interleaved  PTD-P: v chunks a worker, so that the bubble is v times smaller
zero-bubble  out-of-order backprop: 1F1B with weight-gradients put off into the bubbles, bounded
eager        eager 1F1B, zero-bubble: twice the forwards ahead; weight-gradients off to the end
modulo       out-of-order backprop: interleaved, with weight-gradients put off as well

Bubble fractions over ideal time: (p-1)/m for gpipe and 1f1b, (1/v)(p-1)/m for interleaved.

A new one is a generator here, its row in `STEADY` (and `MODULO`, `HALVED`, `SPLIT` where that is so),
and its name in `SEARCHED` of `orchestrator/planner/search.py`.
"""

from functools import lru_cache

import numpy as np

from agent.schedule import Schedule, recomputing
from orchestrator.planner.compiled import Flags
from orchestrator.planner.errors import ScheduleError
from orchestrator.planner.simulation import programs
from orchestrator.planner.simulation.kernel import Programs

STEADY = ("gpipe", "1f1b", "varuna", "interleaved", "zero-bubble", "eager", "modulo")
MODULO = ("interleaved", "modulo")  # stage s is on worker s mod p, so a worker hosts several chunks
HALVED = ("zero-bubble", "modulo")  # every backward is in halves
SPLIT = (*HALVED, "eager")  # at least the last backwards are in halves
CHUNKS = 2
CACHED_SCHEDULES = 64


@lru_cache(maxsize=CACHED_SCHEDULES)
def make(
    name: str,
    workers: int,
    microbatches: int,
    *,
    recompute: tuple[bool, ...] = (),
    chunks: int = CHUNKS,
) -> Schedule:
    """Return the schedule of this name for a pipeline with a number of workers.

    `recompute` is empty or has a flag for each stage; it does not apply to backwards in halves or
    several chunks. `chunks` is the number of stages per worker, for modulo placement only.
    """
    codes, offsets, _ = pack(name, workers, microbatches, recompute=recompute, chunks=chunks)
    stages = workers * chunks if name in MODULO else workers
    return Schedule(
        name=name,
        hosts=tuple((stage % workers,) for stage in range(stages)),
        microbatches=microbatches,
        offsets=tuple(offsets.tolist()),
        codes=codes.tobytes(),
        update_every=microbatches,
    )


def pack(
    name: str,
    workers: int,
    microbatches: int,
    *,
    recompute: tuple[bool, ...] = (),
    chunks: int = CHUNKS,
) -> Programs:
    """Return the programs of `make`, in the engine's form."""
    if workers < 1 or microbatches < 1:
        raise ScheduleError(
            f"{name}: a pipeline of {workers} workers with {microbatches} microbatches cannot run; "
            "both must be at least 1"
        )
    again = _again(workers, () if name in (*MODULO, *SPLIT) else recompute)
    match name:
        case "gpipe":
            codes, offsets = programs.gpipe(workers, microbatches, again)
        case "1f1b":
            codes, offsets = programs.one_f_one_b(workers, microbatches, again, False, False)
        case "zero-bubble":
            codes, offsets = programs.one_f_one_b(workers, microbatches, again, True, False)
        case "eager":
            codes, offsets = programs.one_f_one_b(workers, microbatches, again, False, True)
        case "varuna":
            codes, offsets = programs.varuna(workers, microbatches, again)
        case "interleaved" | "modulo":
            _check_rounds(name, workers, microbatches)
            codes, offsets = programs.interleaved(workers, chunks, microbatches, name in HALVED)
        case _:
            raise ScheduleError(f"there is no schedule {name!r}; there are {', '.join(STEADY)}")
    return Programs(codes, offsets, microbatches)


def _check_rounds(name: str, workers: int, microbatches: int) -> None:
    if microbatches % workers:
        below = microbatches // workers * workers
        near = f"{below} or {below + workers}" if below else f"{workers}"
        raise ScheduleError(
            f"{name}: {microbatches} microbatches are not a multiple of {workers} workers; "
            f"use {near}"
        )


def arrays(schedule: Schedule) -> Programs:
    """Return the packed programs in the engine's form."""
    codes = np.frombuffer(schedule.codes, np.int64).copy()
    return Programs(codes, np.array(schedule.offsets, np.int64), schedule.microbatches)


def _again(stages: int, recompute: tuple[bool, ...]) -> Flags:
    if len(recompute) not in (0, stages):
        raise ScheduleError(
            f"recompute is said of {len(recompute)} stages, and there are {stages}: one word for each"
        )
    return np.array(recomputing(stages, recompute))
