"""Generators of schedules: each returns data that the simulator and the executor both interpret.

| name         | from                     | idea                                                             |
|--------------|--------------------------|------------------------------------------------------------------|
| gpipe        | GPipe                    | all forwards, then all backwards, last microbatch first          |
| 1f1b         | PipeDream-Flush, PTD-P   | min(P-1-s, M) forwards, then one backward after each forward     |
| varuna       | Varuna, section 3.2      | backward > recompute > forward; recompute as the gradient nears  |
| interleaved  | PTD-P                    | v chunks a worker, so that the bubble is v times smaller         |
| zero-bubble  | out-of-order backprop    | 1F1B with weight-gradients put off into the bubbles, bounded     |
| eager        | eager 1F1B, zero-bubble  | twice the forwards ahead; weight-gradients put off at the end    |
| modulo       | out-of-order backprop    | the same placement, with weight-gradients put off as well        |
| pipedream    | PipeDream 1F1B-RR        | no flush; a replicated stage takes microbatches in turn          |
| 2bw          | PipeDream-2BW            | no flush; an update every m microbatches, two weight versions    |

The last two change the semantics of training (stale weights); the search never picks them unasked.
Bubble fractions over ideal time: (p-1)/m for gpipe and 1f1b, (1/v)(p-1)/m for interleaved.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from agent.schedule import KIND_SHIFT, STAGE_SHIFT, Kind, Schedule, recomputing
from orchestrator.morph import engine, programs
from orchestrator.morph.compiled import Codes, Flags, Reals
from orchestrator.morph.engine import Programs
from orchestrator.morph.errors import ScheduleError

STEADY = ("gpipe", "1f1b", "varuna", "interleaved", "zero-bubble", "eager", "modulo")
MODULO = ("interleaved", "modulo")  # stage s is on worker s mod p: each worker hosts several chunks
HALVED = ("zero-bubble", "modulo")  # every backward in halves
SPLIT = (*HALVED, "eager")  # at least the last ones
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
    """The schedule of this name for a pipeline of so many workers.

    `recompute` has a word for each stage, if one does; backwards in halves and several chunks go without.
    `chunks` is how many stages a worker hosts, and matters to modulo placement only.
    """
    codes, offsets, _ = pack(name, workers, microbatches, recompute=recompute, chunks=chunks)
    hosts = _chain(workers)
    if name in MODULO:
        hosts = tuple((stage % workers,) for stage in range(workers * chunks))
    return _packed(name, hosts, microbatches, codes, offsets)


def pack(
    name: str,
    workers: int,
    microbatches: int,
    *,
    recompute: tuple[bool, ...] = (),
    chunks: int = CHUNKS,
) -> Programs:
    """The programs of `make`, as the engine reads them."""
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


def replay(schedule: Schedule, seconds: Reals, owed: int = 0) -> Schedule:
    """The schedule that workers follow if each always takes the first of its actions that is ready."""
    programs = arrays(schedule)
    wire = np.zeros((2, schedule.stages, 3))
    costs = engine.Costs(seconds, np.ones(schedule.workers), wire, 0)
    rules = engine.Rules(len(programs.codes), 0, owed)
    order = engine.run_greedy(programs, costs, rules).order
    if (order < 0).any():
        raise ScheduleError(
            f"{schedule.name}: {(order < 0).sum()} actions wait for what never comes"
        )
    codes, offsets = programs.codes[order], programs.offsets
    return _packed(schedule.name, schedule.hosts, schedule.microbatches, codes, offsets)


def arrays(schedule: Schedule) -> Programs:
    """The packed programs as the engine reads them."""
    codes = np.frombuffer(schedule.codes, np.int64).copy()
    return Programs(codes, np.array(schedule.offsets, np.int64), schedule.microbatches)


def in_flight(schedule: Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Per stage, the most microbatches stashed and the most weight-gradients owed at any time."""
    stashed, owed = engine.peaks(arrays(schedule), schedule.stages)
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


def _again(stages: int, recompute: tuple[bool, ...]) -> Flags:
    if len(recompute) not in (0, stages):
        raise ScheduleError(
            f"recompute is said of {len(recompute)} stages, and there are {stages}: one word for each"
        )
    return np.array(recomputing(stages, recompute))


def _assemble(
    name: str,
    hosts: tuple[tuple[int, ...], ...],
    microbatches: int,
    listed: list[list[int]],
    update_every: int = 0,
) -> Schedule:
    offsets = np.concatenate([[0], np.cumsum([len(program) for program in listed])])
    codes = np.array([code for program in listed for code in program], np.int64)
    return _packed(name, hosts, microbatches, codes, offsets, update_every)


def _packed(
    name: str,
    hosts: tuple[tuple[int, ...], ...],
    microbatches: int,
    codes: Codes,
    offsets: Codes,
    update_every: int = 0,
) -> Schedule:
    return Schedule(
        name=name,
        hosts=hosts,
        microbatches=microbatches,
        offsets=tuple(offsets.tolist()),
        codes=codes.tobytes(),
        update_every=update_every or microbatches,
    )
