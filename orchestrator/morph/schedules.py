"""Generators of schedules: each returns data that the simulator and the executor both interpret.

| name         | from                     | idea                                                             |
|--------------|--------------------------|------------------------------------------------------------------|
| gpipe        | GPipe                    | all forwards, then all backwards, last microbatch first          |
| 1f1b         | PipeDream-Flush, PTD-P   | min(P-1-s, M) forwards, then one backward after each forward     |
| varuna       | Varuna, section 3.2      | backward > recompute > forward; recompute as the gradient nears  |
| interleaved  | PTD-P                    | v chunks a worker, so that the bubble is v times smaller         |
| zero-bubble  | out-of-order backprop    | 1F1B with weight-gradients put off into the bubbles, bounded     |
| pipedream    | PipeDream 1F1B-RR        | no flush; a replicated stage takes microbatches in turn          |
| 2bw          | PipeDream-2BW            | no flush; an update every m microbatches, two weight versions    |

The last two change the semantics of training (stale weights); the search never picks them unasked.
Bubble fractions over ideal time: (p-1)/m for gpipe and 1f1b, (1/v)(p-1)/m for interleaved.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from agent.schedule import KIND_SHIFT, STAGE_SHIFT, Kind, Schedule
from orchestrator.morph import engine
from orchestrator.morph.errors import ScheduleError

Codes = NDArray[np.int64]
STEADY = ("gpipe", "1f1b", "varuna", "interleaved", "zero-bubble")
CACHED_SCHEDULES = 512


def make(
    name: str, stages: int, microbatches: int, *, recompute: bool = False, chunks: int = 2
) -> Schedule:
    """The schedule of this name for a pipeline of `stages` workers; recompute never on the last stage."""
    if stages < 1 or microbatches < 1:
        raise ScheduleError(
            f"{name}: a pipeline of {stages} stages with {microbatches} microbatches cannot run; "
            "both must be at least 1"
        )
    if name == "gpipe":
        return gpipe(stages, microbatches, recompute=recompute)
    if name == "1f1b":
        return one_f_one_b(stages, microbatches, recompute=recompute)
    if name == "varuna":
        return varuna(stages, microbatches, recompute=recompute)
    if name == "interleaved":
        return interleaved(stages, chunks, microbatches)
    if name == "zero-bubble":
        return zero_bubble(stages, microbatches)
    raise ScheduleError(f"there is no schedule {name!r}; there are {', '.join(STEADY)}")


@lru_cache(maxsize=CACHED_SCHEDULES)
def gpipe(stages: int, microbatches: int, *, recompute: bool = False) -> Schedule:
    """All forwards, then all backwards in reverse; the microbatch that comes first needs no recompute."""
    programs = []
    for stage in range(stages):
        program = [_code(Kind.FORWARD, stage, m) for m in range(microbatches)]
        for m in reversed(range(microbatches)):
            if recompute and m != microbatches - 1:
                program.append(_code(Kind.RECOMPUTE, stage, m))
            program.append(_code(Kind.BACKWARD, stage, m))
        programs.append(program)
    return _assemble("gpipe", _chain(stages), microbatches, programs)


@lru_cache(maxsize=CACHED_SCHEDULES)
def one_f_one_b(stages: int, microbatches: int, *, recompute: bool = False) -> Schedule:
    """1F1B with flush: at stage r at most min(p - r, m) microbatches are in flight."""
    codes, offsets = engine.one_f_one_b(stages, microbatches, _all_but_last(stages, recompute), False)
    return _packed("1f1b", _chain(stages), microbatches, codes, offsets)


@lru_cache(maxsize=CACHED_SCHEDULES)
def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """1F1B whose stage s owes at most s + 1 weight-gradients, done where 1F1B would wait for gradients."""
    codes, offsets = engine.one_f_one_b(stages, microbatches, np.zeros(stages, np.bool_), True)
    return _packed("zero-bubble", _chain(stages), microbatches, codes, offsets)


@lru_cache(maxsize=CACHED_SCHEDULES)
def varuna(stages: int, microbatches: int, *, recompute: bool = True) -> Schedule:
    """Varuna's rules, played out with a forward of one unit, a backward of two, a recompute of one."""
    order, offsets = engine.varuna(stages, microbatches, _all_but_last(stages, recompute))
    return _packed("varuna", _chain(stages), microbatches, order, offsets)


@lru_cache(maxsize=CACHED_SCHEDULES)
def interleaved(workers: int, chunks: int, microbatches: int) -> Schedule:
    """v chunks a worker, strided: worker w hosts stages w, w + p, ...; m must be a multiple of p.

    Worker w runs 2(p - w - 1) + (v - 1)p chunk-forwards before its first backward (all of them if m = p).
    """
    if microbatches % workers:
        raise ScheduleError(
            f"interleaved: {microbatches} microbatches are not a multiple of {workers} workers; "
            f"use {microbatches // workers * workers or workers} or "
            f"{(microbatches // workers + 1) * workers}"
        )
    stages, total = workers * chunks, microbatches * chunks
    rounds = np.arange(total)
    chunk = rounds // workers % chunks
    microbatch = rounds // (workers * chunks) * workers + rounds % workers
    programs = []
    for worker in range(workers):
        warm = 2 * (workers - worker - 1) + (chunks - 1) * workers
        warm = total if microbatches == workers else min(warm, total)
        forward = [_code(Kind.FORWARD, c * workers + worker, m) for c, m in _pairs(chunk, microbatch)]
        backward = [
            _code(Kind.BACKWARD, (chunks - 1 - c) * workers + worker, m)
            for c, m in _pairs(chunk, microbatch)
        ]
        program = forward[:warm]
        for step in range(total - warm):
            program += [forward[warm + step], backward[step]]
        programs.append(program + backward[total - warm :])
    hosts = tuple((stage % workers,) for stage in range(stages))
    return _assemble("interleaved", hosts, microbatches, programs)


@lru_cache(maxsize=CACHED_SCHEDULES)
def pipedream(replicas: tuple[int, ...], microbatches: int) -> Schedule:
    """PipeDream's 1F1B-RR: no flush, microbatch i of a stage goes to its replica i mod r.

    Before its first backward a replica of stage s has admitted ceil(workers in stages >= s / r_s) forwards;
    at the input stage that is NOAM.
    """
    hosts, programs, first = [], [], 0
    for stage, count in enumerate(replicas):
        hosts.append(tuple(range(first, first + count)))
        first += count
        warm = -(-sum(replicas[stage:]) // count)
        for replica in range(count):
            mine = range(replica, microbatches, count)
            programs.append(_alternate(stage, mine, warm))
    return _assemble("pipedream", tuple(hosts), microbatches, programs, update_every=1)


@lru_cache(maxsize=CACHED_SCHEDULES)
def two_bw(stages: int, microbatches: int, per_update: int) -> Schedule:
    """1F1B that never flushes; gradients are accumulated over `per_update` >= p microbatches."""
    if per_update < stages:
        raise ScheduleError(
            f"2bw: an update every {per_update} microbatches needs more than two weight versions in a "
            f"pipeline of {stages} stages; use at least {stages}"
        )
    programs = [_alternate(s, range(microbatches), stages - s) for s in range(stages)]
    return _assemble("2bw", _chain(stages), microbatches, programs, update_every=per_update)


def two_bw_version(microbatch: int, per_update: int) -> int:
    """v(k) = max(floor((k-1)/m) - 1, 0): the weights that microbatch k = 1, 2, ... uses, in updates."""
    return max((microbatch - 1) // per_update - 1, 0)


def out_of_order(hosts: Sequence[int], microbatches: int, *, barrier: bool) -> Schedule:
    """Gradient fast-forwarding: every stage is a layer, input-gradients go before weight-gradients.

    With `barrier` forwards go first; without it a gradient that is ready goes before a forward, which is the
    better order for modulo placement (layer l on worker l mod n). Played out in unit time.
    """
    stages, workers = len(hosts), max(hosts) + 1
    programs: list[list[int]] = [[] for _ in range(workers)]
    kinds = [Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT]
    if not barrier:
        kinds[:2] = kinds[1::-1]
    for kind in kinds:
        layers = range(stages) if kind == Kind.FORWARD else range(stages - 1, -1, -1)
        for m in range(microbatches):
            for layer in layers:
                programs[hosts[layer]].append(_code(kind, layer, m))
    seconds = np.ones((5, stages))
    seconds[Kind.INPUT_GRADIENT, 0] = 0.0  # nobody needs the gradient of the model's input
    drawn = _assemble("out-of-order", tuple((h,) for h in hosts), microbatches, programs)
    return replay(drawn, seconds)


def modulo(layers: int, workers: int) -> tuple[int, ...]:
    """Modulo placement: every gradient goes straight to the next worker, bubbles shrink, messages grow."""
    return tuple(layer % workers for layer in range(layers))


def contiguous(layers: int, workers: int) -> tuple[int, ...]:
    return tuple(layer * workers // layers for layer in range(layers))


def replay(schedule: Schedule, seconds: NDArray[np.float64], pending: int = 0) -> Schedule:
    """The schedule that workers follow if each always takes the first of its actions that is ready."""
    codes, offsets = arrays(schedule)
    order, _, _ = engine.run_greedy(
        codes,
        offsets,
        schedule.microbatches,
        seconds,
        np.ones(schedule.workers),
        np.zeros((2, schedule.stages, 3)),
        0,
        len(codes),
        np.array([0, pending]),
    )
    if (order < 0).any():
        raise ScheduleError(f"{schedule.name}: {(order < 0).sum()} actions wait for what never comes")
    return _packed(schedule.name, schedule.hosts, schedule.microbatches, codes[order], offsets)


def arrays(schedule: Schedule) -> tuple[Codes, Codes]:
    """The packed programs as the engine reads them, without a copy."""
    codes = np.frombuffer(schedule.codes, np.int64)
    return codes, np.array(schedule.offsets, np.int64)


def in_flight(schedule: Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Per stage, the most microbatches stashed and the most weight-gradients owed at any time."""
    stashed, owed = engine.peaks(*arrays(schedule), schedule.stages)
    return tuple(stashed.tolist()), tuple(owed.tolist())


def _alternate(stage: int, mine: Sequence[int], warm: int) -> list[int]:
    """`warm` forwards, the last of them followed by a backward, then strictly one forward, one backward."""
    program = [_code(Kind.FORWARD, stage, m) for m in mine[: warm - 1]]
    for position, m in enumerate(mine):
        if position + warm - 1 < len(mine):
            program.append(_code(Kind.FORWARD, stage, mine[position + warm - 1]))
        program.append(_code(Kind.BACKWARD, stage, m))
    return program


def _code(kind: Kind, stage: int, microbatch: int) -> int:
    return kind << KIND_SHIFT | stage << STAGE_SHIFT | microbatch


def _chain(stages: int) -> tuple[tuple[int, ...], ...]:
    return tuple((stage,) for stage in range(stages))


def _all_but_last(stages: int, recompute: bool) -> NDArray[np.bool_]:
    again = np.full(stages, recompute)
    again[-1] = False
    return again


def _pairs(chunk: Codes, microbatch: Codes) -> list[tuple[int, int]]:
    return list(zip(chunk.tolist(), microbatch.tolist(), strict=True))


def _assemble(
    name: str,
    hosts: tuple[tuple[int, ...], ...],
    microbatches: int,
    programs: list[list[int]],
    update_every: int = 0,
) -> Schedule:
    offsets = np.concatenate([[0], np.cumsum([len(program) for program in programs])])
    codes = np.array([code for program in programs for code in program], np.int64)
    return Schedule(
        name=name,
        hosts=hosts,
        microbatches=microbatches,
        offsets=tuple(offsets.tolist()),
        codes=codes.tobytes(),
        update_every=update_every or microbatches,
    )


def _packed(
    name: str, hosts: tuple[tuple[int, ...], ...], microbatches: int, codes: Codes, offsets: Codes
) -> Schedule:
    return Schedule(
        name=name,
        hosts=hosts,
        microbatches=microbatches,
        offsets=tuple(offsets.tolist()),
        codes=codes.tobytes(),
        update_every=microbatches,
    )
