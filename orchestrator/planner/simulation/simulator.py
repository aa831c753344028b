"""Simulation of one step: when each worker finishes, and when the step is over.

A pipeline's programs run under its costs (`kernel`); then a stage's replicas reduce its gradients:

    stage ready  r_s = max over replicas of the end of its last backward
    step         = max over stages of (r_s + tail_s) + overhead
    tail_s       = the part of all-reduce and apply that the last backward does not hide

Replicas may differ in speed, in network and in their number of microbatches. The simulation is
deterministic: jitter is drawn from the seed, the stage and the microbatch, so the same question has
the same answer.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from agent.schedule import COMPUTED, Kind, Schedule, unpack
from orchestrator.planner.compiled import Reals
from orchestrator.planner.errors import ScheduleError
from orchestrator.planner.simulation import kernel, schedules
from orchestrator.planner.simulation.kernel import Costs, Outcome, Programs

NO_TRACE = kernel.Trace(np.empty(0), np.empty(0))


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One action of one worker, with its start and end."""

    worker: int
    kind: Kind
    stage: int
    microbatch: int
    start_s: float
    end_s: float


class SimulatedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The duration of a step: `compute_s` to the last gradient, `step_s` until it is applied."""

    step_s: float
    compute_s: float
    idle: float  # the share of worker seconds before `compute_s` in which nothing was computed
    stage_ready_s: tuple[float, ...]


def costs(
    seconds: Reals, *, wire: Reals | None = None, slowness: Reals | None = None, seed: int = 0
) -> Costs:
    """Return the engine's costs for seconds[kind, stage].

    By default messages take no time and workers are equally fast.
    """
    stages = seconds.shape[1]
    wire = np.zeros((2, stages, 3)) if wire is None else wire
    slowness = np.ones(stages) if slowness is None else slowness
    return Costs(seconds, slowness, wire, seed)


def run(programs: Programs, costs: Costs, name: str = "schedule") -> Outcome:
    """Run the engine with checked shapes, and refuse a schedule that blocks itself."""
    workers, stages = len(programs.offsets) - 1, costs.seconds.shape[1]
    if len(costs.slowness) != workers or costs.wire.shape != (2, stages, 3):
        raise ScheduleError(
            f"{name}: {workers} workers and {stages} stages, but costs for {len(costs.slowness)} "
            f"workers and {costs.wire.shape[1]} stages"
        )
    outcome = kernel.run_in_order(programs, costs, NO_TRACE)
    if outcome.stuck >= 0:
        raise ScheduleError(f"{name}: {_why_stuck(programs, stages, outcome.stuck)}")
    return outcome


def _why_stuck(programs: Programs, stages: int, at: int) -> str:
    kind, stage = int(programs.codes[at]) >> 56, int(programs.codes[at]) >> 32 & kernel.STAGE
    microbatch = int(programs.codes[at]) & kernel.MICROBATCH
    if kind not in COMPUTED:
        return f"it names an action of kind {kind}, which no worker computes"
    what = f"{Kind(kind).name} of microbatch {microbatch} at stage {stage}"
    if stage >= stages:
        return f"it names stage {stage}, but there are costs for {stages}"
    if microbatch >= programs.microbatches:
        return f"{what}, but there are {programs.microbatches} microbatches"
    return f"{what} waits for what never comes"


def finish(
    outcomes: Sequence[Outcome], tail_s: Reals | None = None, overhead_s: float = 0.0
) -> SimulatedStep:
    """Return the whole step: the replicas of a stage wait for each other, reduce and apply."""
    ready = np.max([outcome.stage_done for outcome in outcomes], axis=0)
    compute_s = max(float(outcome.done.max()) for outcome in outcomes)
    end_s = compute_s if tail_s is None else float((ready + tail_s).max())
    busy_s = sum(float(outcome.busy.sum()) for outcome in outcomes)
    workers = sum(len(outcome.done) for outcome in outcomes)
    return SimulatedStep(
        step_s=max(end_s, compute_s) + overhead_s,
        compute_s=compute_s,
        idle=1 - busy_s / (workers * compute_s) if compute_s > 0 else 0.0,
        stage_ready_s=tuple(ready.tolist()),
    )


def timeline(schedule: Schedule, costs: Costs) -> tuple[Bar, ...]:
    """Return every action with its start and end, worker after worker."""
    programs = schedules.arrays(schedule)
    run(programs, costs, schedule.name)
    size = len(programs.codes)
    trace = kernel.Trace(np.empty(size), np.empty(size))
    kernel.run_in_order(programs, costs, trace)
    bars = []
    for worker in range(schedule.workers):
        for i in range(schedule.offsets[worker], schedule.offsets[worker + 1]):
            action = unpack(int(programs.codes[i]))
            bars.append(
                Bar(
                    worker=worker,
                    kind=action.kind,
                    stage=action.stage,
                    microbatch=action.microbatch,
                    start_s=float(trace.starts[i]),
                    end_s=float(trace.ends[i]),
                )
            )
    return tuple(bars)
