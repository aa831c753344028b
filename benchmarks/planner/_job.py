"""A transformer as a worker of the product would measure it, on 32 machines of eight accelerators."""

import _megatron as megatron
import msgspec
from _megatron import Shape

from agent.keeper.storage.sharding import SHARE, Passing, between, replay
from agent.profile import EXCHANGED, Link, Network, Profile, SumFormat
from agent.tensors.tree import Tree
from orchestrator.brain.layouts.layout_choice import task_of
from orchestrator.planner import cost_model, plan_book
from orchestrator.planner.plans import LayoutPlan
from orchestrator.planner.search import Task

MACHINES, EACH = 32, 8
WORKERS = MACHINES * EACH
LINK_BYTES_S = 25e9 / 8  # of a machine, shared by its workers
NEAR_BYTES_S = 4.7e9  # of two workers of one machine: 256 MiB in 56.7 ms, docs/data-path.md
HOST_BYTES_S = 54e9  # between an accelerator and pinned memory, docs/data-path.md
MAX_REPLAY_S = 60.0  # the product's default
FLOAT32, ADAM = 4, 8  # bytes of a parameter, and of its two moments


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    flops_per_s: float  # achieved, not the peak
    memory_bytes: float
    usd_per_h: float
    source: str


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained on which accelerators, and how its gradients cross."""

    shape: Shape
    gpu: Gpu
    batch: int  # sequences of a step
    exchange: SumFormat = "float32"
    deterministic: bool = True

    @property
    def tokens(self) -> int:
        return self.batch * self.shape.sequence

    @property
    def sum_bytes(self) -> float:
        return FLOAT32 * megatron.parameters(self.shape) * EXCHANGED[self.exchange]


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step's time goes; the parts are all of it."""

    compute_s: float  # of the busiest worker
    bubble_s: float
    exchange_s: float  # what is exposed of it
    snapshot_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.bubble_s + self.exchange_s + self.snapshot_s


def network(share: float = 1.0) -> Network:
    """Between machines only this share of the link is there."""
    inter = Link(bandwidth_bytes_per_s=share * LINK_BYTES_S, latency_s=50e-6)
    intra = Link(bandwidth_bytes_per_s=NEAR_BYTES_S, latency_s=10e-6, lanes=EACH)
    return Network(intra=intra, inter=inter, reduce_intra=intra, reduce_inter=inter)


def profile_of(job: Job, size: int) -> Profile:
    """What a worker would tell: parameters and sums in float32, activations in half of that."""
    found = megatron.profile(
        job.shape,
        network(),
        flops_per_s=job.gpu.flops_per_s,
        memory_bytes=job.gpu.memory_bytes,
        sizes=(size,),
    )
    sections = []
    for section in found.sections:
        count = section.parameter_bytes / megatron.BYTES
        sections.append(
            msgspec.structs.replace(
                section, parameter_bytes=FLOAT32 * count, optimizer_bytes=ADAM * count
            )
        )
    tree, exchanged = Tree(job.batch // size), EXCHANGED[job.exchange]
    held = tree.most(tree.root) if job.deterministic else 1
    return msgspec.structs.replace(
        found, sections=tuple(sections), exchanged=exchanged, sums=held * exchanged
    )


def task(job: Job, profile: Profile, **rule: object) -> Task:
    """The task that the manager would ask, by `rule` where a peer has one; none of these models is whole on a worker."""
    (size,) = profile.microbatch_sizes
    asked = task_of(profile, job.batch // size, None, len(profile.sections), EACH)
    return msgspec.structs.replace(asked, whole=False, **rule)


def parts(profile: Profile, asked: Task, plan: LayoutPlan) -> Parts:
    return Parts(
        compute_s=plan.cost.busy_s,
        bubble_s=plan.cost.bubble_s,
        exchange_s=plan.cost.reduce_s,
        snapshot_s=snapshot_s(profile, asked, plan),
    )


def snapshot_s(profile: Profile, asked: Task, plan: LayoutPlan) -> float:
    """What snapshots add to a step in the mean.

    While one is written it has its share of each link, and the step takes what it takes on the rest;
    and each worker copies its share of the state to the host between two steps.
    """
    state = sum(s.parameter_bytes + s.optimizer_bytes for s in profile.sections)
    passing = Passing(
        state_bytes=int(state),
        sum_bytes=int(profile.sum_bytes),
        every=1,
        step_s=plan.step_s,
        bytes_s=LINK_BYTES_S,
        memory_bytes=4 << 30,
    )
    assert passing.costly  # so it goes straight to the store
    writes_s = replay(passing, MACHINES, LINK_BYTES_S, MAX_REPLAY_S).writes_s
    every_s = between(writes_s, MAX_REPLAY_S)
    slower = msgspec.structs.replace(profile, network=network(1 - SHARE))
    meanwhile_s = plan_book.exact(cost_model.tables(slower), asked, plan).step_s
    copied_s = state / (plan.way.depth * plan.width) / HOST_BYTES_S
    crowded_s = max(0.0, meanwhile_s - plan.step_s)
    return crowded_s * min(1.0, writes_s / every_s) + copied_s * min(1.0, plan.step_s / every_s)


def limits_s(job: Job, plan: LayoutPlan) -> tuple[float, float]:
    """By hand: six operations a parameter and token on all workers; what a machine sends of the sums of this layout."""
    compute_s = 6 * megatron.parameters(job.shape) * job.tokens / (WORKERS * job.gpu.flops_per_s)
    depth, width = plan.way.depth, plan.width
    near = min(width, EACH) if plan.way.placement == "ring" else max(1, EACH // depth)
    held = min(1.0, EACH / depth) if near == 1 else EACH / depth
    return compute_s, held * job.sum_bytes * 2 * (width - near) / width / LINK_BYTES_S
