"""The planner's answers: layouts with their cost in time and memory, and the reason."""

from itertools import pairwise
from typing import Literal

import msgspec

from agent.schedule import recomputing
from orchestrator.formatting import plural

Sharding = Literal["none", "optimizer", "offload"]
Placement = Literal["chain", "ring"]


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How one replica computes, independent of the number of replicas.

    With placement `chain` the stages of a replica are neighbours; with `ring` the replicas of a
    stage are.
    """

    schedule: str
    depth: int
    microbatch_size: int
    recompute: tuple[bool, ...] = ()  # per stage; never on the last, and on none if empty
    chunks: int = 1
    sharding: Sharding = "none"
    placement: Placement = "chain"

    @property
    def stages(self) -> int:
        return self.depth * self.chunks

    def describe(self) -> str:
        words = [self.schedule]
        if self.chunks > 1:
            words.append(f"{self.chunks} chunks")
        if self.recompute:
            words.append(_recomputed(self.recompute))
        if self.sharding != "none":
            words.append("sharded optimizer" if self.sharding == "optimizer" else "offload")
        if self.placement == "ring":
            words.append("replicas of a stage together")
        return f"{', '.join(words)}, microbatches of {self.microbatch_size}"


def all_but_last(stages: int) -> tuple[bool, ...]:
    """Return the stages that may recompute: all but the last."""
    return recomputing(stages, (True,) * stages)


def _recomputed(again: tuple[bool, ...]) -> str:
    """Say which stages recompute, as runs of stages, unless all stages that may do so."""
    if again == all_but_last(len(again)):
        return "recompute"
    edges = [i for i, (a, b) in enumerate(pairwise((False, *again))) if a != b]
    runs = [(first, end - 1) for first, end in zip(edges[::2], edges[1::2], strict=True)]
    listed = " and ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in runs)
    return f"recompute on stage{'s' * (sum(again) > 1)} {listed}"


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a step by its parts: useful work, waiting in the pipeline, reduce and apply."""

    step_s: float
    busy_s: float
    bubble_s: float
    reduce_s: float


class RunnerUp(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that was not chosen, and its cost."""

    way: Way
    width: int
    cost: Cost


class LayoutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A layout: P x D, the stages and shares, and the predicted cost."""

    way: Way
    firsts: tuple[int, ...]  # the first section of every stage
    sections: int
    shares: tuple[int, ...]  # microbatches of every replica
    workers: int  # that were there; P * D of them are used
    samples: int  # of a step
    cost: Cost
    memory_bytes: tuple[float, ...]  # of the fullest worker of every stage
    owned: bool = False  # every worker keeps the state of its stages only, so that the plan fits
    runners_up: tuple[RunnerUp, ...] = ()

    @property
    def width(self) -> int:
        return len(self.shares)

    @property
    def step_s(self) -> float:
        return self.cost.step_s

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.cost.step_s

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """Return the first section of every stage, and the one after its last."""
        ends = (*self.firsts[1:], self.sections)
        return tuple(zip(self.firsts, ends, strict=True))

    def describe(self) -> str:
        return f"{self.way.depth}x{self.width}"

    @property
    def candidates(self) -> tuple["Candidate", ...]:
        """Return this plan and those that were not chosen."""
        others = (_candidate(one.way, one.width, one.cost, chosen=False) for one in self.runners_up)
        return (_candidate(self.way, self.width, self.cost, chosen=True), *others)

    @property
    def because(self) -> str:
        """Say in a sentence what the plan is and gives, and why the next best is slower."""
        idle = self.workers - self.way.depth * self.width
        head = (
            f"{self.describe()} on {plural(self.workers, 'worker')} ({self.way.describe()}): "
            f"{self.samples_per_s:.4g} samples/s, {self.step_s:.4g} s a step"
        )
        if idle:
            head += f", {idle} spare"
        if not self.runners_up:
            return f"{head}; nothing else is possible."
        return f"{head}; {_compare(self, self.runners_up[0])}."


def _compare(plan: LayoutPlan, other: RunnerUp) -> str:
    slower = other.cost.step_s / plan.step_s - 1
    name = f"{other.way.depth}x{other.width} ({other.way.describe()})"
    if slower < 5e-4:
        return f"{name} is as fast"
    losses = {
        "more computing for the slowest stage": other.cost.busy_s - plan.cost.busy_s,
        "a longer bubble": other.cost.bubble_s - plan.cost.bubble_s,
        "a longer all-reduce": other.cost.reduce_s - plan.cost.reduce_s,
    }
    why = max(losses, key=losses.__getitem__)
    return f"{name} is {slower:.1%} slower, by {why}"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One of the layouts that were compared."""

    layout: str
    way: str
    step_s: float
    computing_s: float  # of the busiest worker
    waiting_s: float  # inside the pipeline
    reduce_s: float
    chosen: bool


def _candidate(way: Way, width: int, cost: Cost, *, chosen: bool) -> Candidate:
    return Candidate(
        layout=f"{way.depth}x{width}",
        way=way.describe(),
        step_s=cost.step_s,
        computing_s=cost.busy_s,
        waiting_s=max(0.0, cost.bubble_s),
        reduce_s=max(0.0, cost.reduce_s),
        chosen=chosen,
    )


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """Some instances of one type in one zone, with `per_instance` accelerators each."""

    instance_type: str
    instances: int
    per_instance: int = 1
    zone: str = ""

    @property
    def workers(self) -> int:
        return self.instances * self.per_instance
