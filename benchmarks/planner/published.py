"""Do the planner's models give what was published? One row a figure: theirs, ours, and whether they agree.

    python benchmarks/planner/published.py

Megatron (PTD-P): parameters, days and steps. Out-of-order backprop and 2BW: schedules counted by hand in the papers.
Varuna: Table 5, how much longer GPipe takes as the network slows. PipeDream: its partitions of measured models (the
profiles lie in shared/data beside the checkout; without them these rows are left out), and its programme against the
recurrence written out plainly. The exit code is 1 if any row differs.
"""

import itertools
import sys
from functools import lru_cache
from pathlib import Path

import _megatron as megatron
import _stale as stale
import numpy as np
import pipedream
from _greedy import in_flight, simulate, uniform
from _megatron import Shape
from pipedream import Graph, Level, Node

from agent.schedule import Kind
from orchestrator.planner import plan_book
from orchestrator.planner.search import Task
from orchestrator.planner.simulation import schedules, simulator

SHARED = Path(__file__).parents[3] / "shared" / "data" / "profiles" / "pipedream"
GBIT = 1e9 / 8
TABLE_4_1 = [  # parameters in 1e9, heads, hidden, layers
    (1.7, 24, 2304, 24),
    (3.6, 32, 3072, 30),
    (7.5, 32, 4096, 36),
    (18.4, 48, 6144, 40),
    (39.1, 64, 8192, 48),
    (76.1, 80, 10240, 60),
    (145.6, 96, 12288, 80),
    (310.1, 128, 16384, 96),
    (529.6, 128, 20480, 105),
    (1008.0, 160, 25600, 128),
]
TABLE_4_2 = [  # parameters in 1e9, workers, achieved Tflop/s per worker, days for 300e9 tokens
    (174.6, 384, 144, 90),
    (174.6, 768, 88, 74),
    (174.6, 1536, 44, 74),
    (174.6, 384, 153, 84),
    (174.6, 768, 149, 43),
    (174.6, 1536, 141, 23),
    (529.6, 640, 138, 169),
    (529.6, 1120, 98, 137),
    (529.6, 2240, 48, 140),
    (529.6, 560, 171, 156),
    (529.6, 1120, 167, 80),
    (529.6, 2240, 159, 42),
]
differing: list[str] = []


def row(what: str, theirs: object, ours: object, *, near: float = 0.0) -> None:
    """Print one figure; `near` is how far apart two numbers may be."""
    same = abs(theirs - ours) <= near if near else theirs == ours
    shown = f"{ours:.4g}" if isinstance(ours, float) else str(ours)
    print(f"{what:62} {theirs!s:>12} {shown:>12}  {'same' if same else 'DIFFERS'}", flush=True)
    if not same:
        differing.append(what)


def transformers() -> None:
    for billions, heads, hidden, layers in TABLE_4_1:
        shape = Shape(layers=layers, hidden=hidden, heads=heads)
        found = round(megatron.parameters(shape) / 1e9, 1)
        row(f"PTD-P, Table 4.1: parameters of {layers} x {hidden}, 1e9", billions, found)
    for billions, workers, tflops, days in TABLE_4_2:
        layers, hidden = (96, 12288) if billions < 500 else (105, 20480)
        shape = Shape(layers=layers, hidden=hidden, heads=128)
        found = megatron.days(shape, 300e9, workers, tflops * 1e12)
        row(f"PTD-P, Table 4.2: days of {billions}e9 on {workers}", days, found, near=1.0)
    gpt3 = megatron.about_days(300e9, 175e9, 1024, 140e12)
    row("PTD-P: days of GPT-3 on 1024", 34, round(gpt3))
    trillion = megatron.about_days(450e9, 1008e9, 3072, 163e12)
    row("PTD-P: days of a trillion parameters on 3072", 84, round(trillion))
    profile = megatron.profile(
        Shape(layers=48, hidden=8192, heads=64),
        pipedream.ethernet(200.0, latency_s=1e-5),
        flops_per_s=138e12,
        memory_bytes=80e9,
        sizes=(1,),
    )
    plan = plan_book.best(profile, Task(global_batch=512), 64)
    deep = plan.way.depth >= 8 and max(plan.memory_bytes) <= 80e9
    row("39e9 parameters on 80 GB: a pipeline of 8 or more that fits", True, deep)


def counted() -> None:
    """Schedules that papers count by hand."""
    for layers, workers, m, answers in ((8, 2, 1, (23, 19, 16)), (16, 4, 4, (83, 68, 51))):
        found = out_of_order(layers, workers, m)
        row(f"out-of-order backprop: units of {layers} layers on {workers}", answers, found)
    for layers, n, m in ((8, 2, 2), (12, 4, 4), (24, 4, 8), (12, 3, 5)):
        q = layers // n
        closed = (m + n - 1) * q + max((n - 2) * q + 2 * q * m, (n - 1) * q + 2 * q * m - m)
        what = f"out-of-order backprop: closed form, {layers} layers, {n} workers, {m}"
        row(what, closed, out_of_order(layers, n, m)[1])
    versions = tuple(stale.two_bw_version(k, 4) for k in (1, 8, 9, 12, 13))
    row("2BW: weights that microbatches 1, 8, 9, 12, 13 of m = 4 use", (0, 0, 1, 1, 2), versions)
    row("2BW: most versions that a stage of four holds", 2, most_versions())
    for replicas in ((2, 1), (3, 2, 1), (1, 1, 1), (15, 1)):
        program = stale.pipedream(replicas, 60).program(0)
        admitted = next(i for i, action in enumerate(program) if action.kind == Kind.BACKWARD)
        noam = -(-sum(replicas) // replicas[0])
        row(f"PipeDream: forwards that {replicas} admit before a backward", noam, admitted)


def out_of_order(layers: int, workers: int, m: int) -> tuple[int, int, int]:
    """Unit-time layers: GPipe, gradient fast-forwarding, modulo placement."""
    q = layers // workers
    fused = np.zeros((5, workers))
    fused[Kind.FORWARD], fused[Kind.BACKWARD] = q, 2 * q
    fused[Kind.BACKWARD, 0] -= 1  # nothing needs the gradient of the model's input
    plain = simulate(schedules.make("gpipe", workers, m), simulator.costs(fused))
    seconds = np.ones((5, layers))
    seconds[Kind.INPUT_GRADIENT, 0] = 0
    costs = simulator.costs(seconds, slowness=np.ones(workers))
    near = stale.out_of_order(stale.contiguous(layers, workers), m, barrier=True)
    far = stale.out_of_order(stale.modulo(layers, workers), m, barrier=False)
    steps = (plain, simulate(near, costs), simulate(far, costs))
    first, second, third = (round(step.step_s) for step in steps)
    return first, second, third


def most_versions() -> int:
    schedule, most = stale.two_bw(4, 16, 4), 0
    for stage in range(4):
        held: set[int] = set()
        for action in schedule.program(stage):
            change = held.add if action.kind == Kind.FORWARD else held.discard
            change(action.microbatch + 1)
            most = max(most, len({stale.two_bw_version(k, 4) for k in held}))
    return most


def varuna() -> None:
    """Table 5; a message takes 1.33 forward passes of a stage at normal speed, which is not published."""
    for slower, gap in ((1.0, 0.09), (1.5, 0.23), (2.0, 0.38)):
        stages, share, forward_s = 19, -(-8192 // 12), 0.087
        wire = np.zeros((2, stages, 3))
        wire[:, :, 0], wire[:, :, 2] = 1.33 * slower * forward_s, 0.1 * forward_s
        costs = simulator.costs(uniform(stages, forward_s, 2 * forward_s), wire=wire)
        gpipe = schedules.make("gpipe", stages, share, recompute=(True,) * stages)
        ours = schedules.make("varuna", stages, share, recompute=(True,) * stages)
        found = simulate(gpipe, costs).step_s / simulate(ours, costs, stash=0).step_s - 1
        row(
            f"Varuna, Table 5: GPipe takes longer, network {slower} x slower", gap, found, near=0.02
        )
    schedule = schedules.make("varuna", 6, 32, recompute=(True,) * 6)
    held, wire, steps = max(in_flight(schedule)[0]), np.full((2, 6, 3), 0.1), []
    wire[:, :, 2] = 0.8
    for seed in range(12):
        costs = simulator.costs(uniform(6, 1.0, 2.0), wire=wire, seed=seed)
        steps.append([simulate(schedule, costs, stash=s).step_s for s in (None, held)])
    strict, free = np.mean(steps, axis=0)
    row("Varuna: deviation loses less to jitter", True, bool(free < strict))


def partitions() -> None:
    if not SHARED.is_dir():
        print(f"PipeDream's partitions are left out: the measured profiles are not here ({SHARED})")
        return
    for name, gigabit, answer in (
        ("vgg16", 10, "15-1"),
        ("vgg16", 25, "15-1"),
        ("alexnet", 10, "15-1"),
        ("gnmt", 10, "-".join("1" * 16)),
    ):
        found = partitioned(name, Level(components=16, bandwidth_bytes_per_s=gigabit * GBIT))
        row(f"PipeDream: {name} on 16 at {gigabit} Gbit/s, flat", answer, found.describe())
    servers = (
        Level(components=8, bandwidth_bytes_per_s=5e9),
        Level(components=2, bandwidth_bytes_per_s=25 * GBIT),
    )
    found = partitioned("resnet50", *servers)
    nested = [(part.replicas, [p.replicas for p in part.inner]) for part in found.parts]
    row("PipeDream: ResNet-50 on two servers of eight", [(2, [8])], nested)
    # Each byte counted four times, as the published program does, is half the bandwidth.
    for gigabit, answer in ((16.5, "15-1"), (17.0, "14-1-1"), (25.0, "14-1-1"), (12.5, "15-1")):
        found = partitioned("alexnet", Level(components=16, bandwidth_bytes_per_s=gigabit * GBIT))
        row(f"the recurrence: alexnet on 16 at {gigabit} Gbit/s", answer, found.describe())


def partitioned(name: str, *levels: Level) -> pipedream.Partition:
    graph = pipedream.load_pipedream(SHARED / f"{name}.txt")
    return pipedream.pipedream(pipedream.states_of(graph), levels)


def programme() -> None:
    """The programme against the recurrence as it is written down, on drawn chains and levels."""
    shapes, worst = [(1,), (3,), (5,), (2, 2), (2, 3), (2, 2, 2)], 0.0
    for seed, shape in itertools.product(range(12), shapes):
        rng = np.random.default_rng(seed)
        nodes = tuple(
            Node(
                name=f"n{i}",
                kind="Layer",
                forward_s=float(rng.uniform(0.1, 1)),
                backward_s=float(rng.uniform(0.1, 2)),
                activation_bytes=float(rng.uniform(1, 9)),
                parameter_bytes=float(rng.uniform(0, 40)),
            )
            for i in range(7)
        )
        graph = Graph(nodes=nodes, edges=tuple(itertools.pairwise(range(7))))
        pace = rng.uniform(5, 80, len(shape)).tolist()
        levels = [
            Level(components=m, bandwidth_bytes_per_s=speed)
            for m, speed in zip(shape, pace, strict=True)
        ]
        found = pipedream.pipedream(pipedream.states_of(graph), levels).input_s
        worst = max(worst, abs(found / plain_recurrence(graph, levels) - 1))
    row("PipeDream's programme: largest difference to its recurrence", 0.0, worst, near=1e-9)


def plain_recurrence(graph: Graph, levels: list[Level]) -> float:
    nodes = graph.nodes
    seconds = [node.forward_s + node.backward_s for node in nodes]

    @lru_cache(None)
    def best(k: int, i: int, j: int, m: int) -> float:
        if m == 1:
            return best(k - 1, i, j, levels[k - 1].components) if k > 0 else sum(seconds[i:j])
        link = 2 / levels[k].bandwidth_bytes_per_s
        found = single(k, i, j, m)
        for s, replicas in itertools.product(range(i + 1, j), range(1, m)):
            cut = link * nodes[s - 1].activation_bytes
            found = min(found, max(best(k, i, s, m - replicas), cut, single(k, s, j, replicas)))
        return found

    def single(k: int, i: int, j: int, m: int) -> float:
        below = best(k - 1, i, j, levels[k - 1].components) if k > 0 else sum(seconds[i:j])
        weights = sum(node.parameter_bytes for node in nodes[i:j])
        return max(below, 2 * (m - 1) * weights / levels[k].bandwidth_bytes_per_s) / m

    return best(len(levels) - 1, 0, len(nodes), levels[-1].components)


def main() -> int:
    print(f"{'figure':62} {'published':>12} {'here':>12}")
    for part in (transformers, counted, varuna, partitions, programme):
        part()
    print(f"{len(differing)} of the figures differ" if differing else "every figure agrees")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
