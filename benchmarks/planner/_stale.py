"""Schedules that the planner never picks: PipeDream and 2BW compute with stale weights, out-of-order plays unit layers."""

from collections.abc import Sequence

import numpy as np
from _greedy import replay

from agent.schedule import KIND_SHIFT, STAGE_SHIFT, Kind, Schedule


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


def two_bw(stages: int, microbatches: int, per_update: int) -> Schedule:
    """1F1B that never flushes; gradients are accumulated over `per_update` >= p microbatches."""
    if per_update < stages:
        raise ValueError(
            f"2bw: an update every {per_update} microbatches needs more than two weight versions in a "
            f"pipeline of {stages} stages; use at least {stages}"
        )
    programs = [_alternate(s, range(microbatches), stages - s) for s in range(stages)]
    return _assemble(
        "2bw",
        tuple((stage,) for stage in range(stages)),
        microbatches,
        programs,
        update_every=per_update,
    )


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


def _assemble(
    name: str,
    hosts: tuple[tuple[int, ...], ...],
    microbatches: int,
    listed: list[list[int]],
    update_every: int = 0,
) -> Schedule:
    offsets = np.concatenate([[0], np.cumsum([len(program) for program in listed])])
    codes = np.array([code for program in listed for code in program], np.int64)
    return Schedule(
        name=name,
        hosts=hosts,
        microbatches=microbatches,
        offsets=tuple(offsets.tolist()),
        codes=codes.tobytes(),
        update_every=update_every or microbatches,
    )
