"""The programs of a pipeline, as data that two interpreters read. No torch here.

The simulator reads them with measured costs and the executor with tensors, so that the two cannot
drift apart. A *stage* is a run of consecutive sections of the model; a worker hosts one stage,
several (interleaved, modulo placement), or shares one with replicas that take microbatches in turn.
The *program* of a worker is what it computes, in order: packed actions, eight bytes each.
Communication is not listed, because it follows from the programs by one rule:

* an activation goes to the host of the next stage as soon as its forward is done, a gradient to
  the host of the previous stage as soon as its backward (or input-gradient) is done, and neither
  blocks the sender;
* gradients of a stage are reduced when its worker has done the last backward of an update, then
  applied.
"""

import itertools
import struct
from enum import IntEnum
from functools import lru_cache

import msgspec

from cloud.ranges import Count, Microbatches, Name


class Kind(IntEnum):
    """A kind of action. The first five are computed; a reduction follows by the rule above."""

    FORWARD = 0
    BACKWARD = 1  # input-gradient and weight-gradient in one
    INPUT_GRADIENT = 2
    WEIGHT_GRADIENT = 3
    RECOMPUTE = 4
    REDUCE = 9


COMPUTED = (
    Kind.FORWARD,
    Kind.BACKWARD,
    Kind.INPUT_GRADIENT,
    Kind.WEIGHT_GRADIENT,
    Kind.RECOMPUTE,
)
CACHED_SCHEDULES = 64
STAGE_SHIFT, KIND_SHIFT = 32, 56
MICROBATCH_MASK, STAGE_MASK = (1 << 32) - 1, (1 << 24) - 1


class Action(msgspec.Struct, frozen=True):
    """One action of a worker for a stage.

    For a REDUCE, `microbatch` is the last one.
    """

    kind: Kind
    stage: Count
    microbatch: Count

    def pack(self) -> int:
        return self.kind << KIND_SHIFT | self.stage << STAGE_SHIFT | self.microbatch


def unpack(code: int) -> Action:
    """Return the action that `Action.pack` has packed."""
    return Action(
        Kind(code >> KIND_SHIFT), code >> STAGE_SHIFT & STAGE_MASK, code & MICROBATCH_MASK
    )


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """The programs of one pipeline for `microbatches` microbatches.

    Worker `hosts[s][i % len(hosts[s])]` computes microbatch `i` of stage `s`. The program of worker
    `w` is `codes[8 * offsets[w] : 8 * offsets[w + 1]]`, little-endian. Weights are updated after
    every `update_every` microbatches; with a flush that is all of them.
    """

    name: Name
    hosts: tuple[tuple[Count, ...], ...]
    microbatches: Microbatches
    offsets: tuple[Count, ...]
    codes: bytes
    update_every: Count

    def __post_init__(self) -> None:
        if not self.hosts or self.microbatches < 1 or self.update_every < 1:
            raise ValueError(
                f"schedule {self.name}: {len(self.hosts)} stages, {self.microbatches} microbatches, "
                f"update_every={self.update_every} must all be at least 1"
            )
        ends = (0, *self.offsets)
        if any(not hosts for hosts in self.hosts) or list(ends) != sorted(ends):
            raise ValueError(
                f"schedule {self.name}: a stage has no worker, or its offsets do not rise"
            )
        if ends[-1] * 8 != len(self.codes):
            raise ValueError(
                f"schedule {self.name}: {len(self.codes)} bytes for {ends[-1]} actions"
            )

    @property
    def stages(self) -> int:
        return len(self.hosts)

    @property
    def workers(self) -> int:
        return len(self.offsets) - 1

    def host(self, stage: int, microbatch: int) -> int:
        hosts = self.hosts[stage]
        return hosts[microbatch % len(hosts)]

    def program(self, worker: int) -> tuple[Action, ...]:
        """Return what this worker computes, in order."""
        view = memoryview(self.codes)[8 * self.offsets[worker] : 8 * self.offsets[worker + 1]]
        return tuple(unpack(code) for code in view.cast("q"))


def recomputing(stages: int, said: tuple[bool, ...] = ()) -> tuple[bool, ...]:
    """Return which stages recompute, as `said` for each, or none; the last never does."""
    return (*(said[:-1] or [False] * (stages - 1)), False)


@lru_cache(maxsize=CACHED_SCHEDULES)
def one_f_one_b(workers: int, microbatches: int, *, recompute: tuple[bool, ...] = ()) -> Schedule:
    """Return 1F1B with a flush, which a chain plays by default.

    Worker s starts with min(P - 1 - s, M) forwards. From then on a backward follows each forward,
    after a recompute if `recompute` says so of s.
    """
    programs: list[list[Action]] = []
    for stage, again in enumerate(recomputing(workers, recompute)):
        warm = min(workers - 1 - stage, microbatches)
        program = []
        for turn in range(microbatches + warm):
            if turn < microbatches:
                program.append(Action(Kind.FORWARD, stage, turn))
            if turn >= warm:
                if again:
                    program.append(Action(Kind.RECOMPUTE, stage, turn - warm))
                program.append(Action(Kind.BACKWARD, stage, turn - warm))
        programs.append(program)
    return _packed("1f1b", tuple((stage,) for stage in range(workers)), microbatches, programs)


@lru_cache(maxsize=CACHED_SCHEDULES)
def one_by_one(like: Schedule) -> Schedule:
    """Lead one microbatch through the stages of another schedule and back."""
    programs: list[list[Action]] = [[] for _ in range(like.workers)]
    for stage in range(like.stages):
        programs[like.host(stage, 0)].append(Action(Kind.FORWARD, stage, 0))
    for stage in reversed(range(like.stages)):
        programs[like.host(stage, 0)].append(Action(Kind.BACKWARD, stage, 0))
    return _packed("one by one", like.hosts, 1, programs)


def _packed(
    name: str, hosts: tuple[tuple[int, ...], ...], microbatches: int, programs: list[list[Action]]
) -> Schedule:
    packed = [action.pack() for program in programs for action in program]
    return Schedule(
        name=name,
        hosts=hosts,
        microbatches=microbatches,
        offsets=(0, *itertools.accumulate(len(program) for program in programs)),
        codes=struct.pack(f"<{len(packed)}q", *packed),
        update_every=microbatches,
    )
