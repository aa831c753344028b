"""Where would a step's time go with 7, 13 and 70 billion parameters on 32 machines x 8 GPUs at 25 Gbit/s?

    python benchmarks/planner/sizes.py [--gpu a100] [--batch 2048] [--svg file.svg] [--only 7 13]

Simulated: the planner of the product chooses the layout, with microbatches of one and of two sequences, from profiles
that _megatron.py makes of the papers' equations, and its engine plays the step. Beside it the same job by the rules of
others, priced by the same engine, on the same network, without tensor parallelism, which would not leave a machine:

    data parallel     every worker computes the whole model
    least depth       PTD-P's second rule: just as many stages as fit, 1F1B, the rest in width
    Varuna            its schedule, recompute everywhere, and only depths that divide the blocks

The a100 has 80 GB and 138 Tflop/s, as PTD-P achieved of 312 with 39e9 parameters; its price is assumed. The v100 is that
of a p3.16xlarge, eight with 16 GB on 25 Gbit/s, 45 Tflop/s achieved (2BW's paper), for 7.344 $/h (spot, us-east-1, 2020).
"limit" is reckoned by hand: 6 N tokens on all 256 GPUs, and what a machine sends of its layout's sums over its link.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import _megatron as megatron
import msgspec
from _bars import bars
from _job import EACH, WORKERS, Gpu, Job, Parts, limits_s, parts, profile_of, task
from _megatron import Shape

from orchestrator.planner import plan_book
from orchestrator.planner.errors import DoesNotFit
from orchestrator.planner.plans import LayoutPlan

SHAPES = {
    7: Shape(layers=34, hidden=4096, heads=32),
    13: Shape(layers=40, hidden=5120, heads=40),
    70: Shape(layers=86, hidden=8192, heads=64),
}
GPUS = {
    "a100": Gpu(
        name="A100 80 GB",
        flops_per_s=138e12,
        memory_bytes=80e9,
        usd_per_h=1.2,
        source="PTD-P, Table 4.1; the price is assumed",
    ),
    "v100": Gpu(
        name="V100 16 GB",
        flops_per_s=45e12,
        memory_bytes=16e9,
        usd_per_h=7.344 / EACH,
        source="2BW's paper; p3.16xlarge, spot, us-east-1, 2020",
    ),
}
MICROBATCHES = (1, 2)
FORMATS = (("float32", True), ("float32", False), ("bfloat16", True))


class Row(NamedTuple):
    job: Job
    plan: LayoutPlan
    parts: Parts


def planned(job: Job, **rule: object) -> Row:
    """The best of all microbatch sizes; what the planner says of the first if none fits."""
    rows, said = [], None
    for size in MICROBATCHES:
        profile = profile_of(job, size)
        asked = task(job, profile, **rule)
        try:
            plan = plan_book.best(profile, asked, WORKERS)
        except DoesNotFit as error:
            said = said or error
            continue
        rows.append(Row(job, plan, parts(profile, asked, plan)))
    if not rows:
        assert said is not None
        raise said
    return min(rows, key=lambda row: row.parts.step_s)


def least_depth(job: Job) -> Row:
    """As many stages as fit, and not one more."""
    for depth in range(1, job.shape.layers):
        try:
            return planned(job, depth_min=depth, depth_max=depth, schedules=("1f1b",))
        except DoesNotFit:
            continue
    return planned(job, depth_min=job.shape.layers, schedules=("1f1b",))


def varuna(job: Job) -> Row:
    rows, said = [], None
    blocks = job.shape.layers
    for depth in (p for p in range(2, blocks + 1) if blocks % p == 0):
        rule = {"depth_min": depth, "depth_max": depth}
        try:
            rows.append(planned(job, **rule, schedules=("varuna",), recompute=(True,)))
        except DoesNotFit as error:
            said = error
    if not rows:
        assert said is not None
        raise said
    return min(rows, key=lambda row: row.parts.step_s)


RULES = {
    "data parallel": lambda job: planned(job, depth_max=1),
    "least depth": least_depth,
    "Varuna": varuna,
}


def fewest(job: Job) -> int:
    """From how many workers on it can be placed; 0 if not on four times as many."""
    found = []
    for size in MICROBATCHES:
        profile = profile_of(job, size)
        found.append(plan_book.book(profile, task(job, profile), 4 * WORKERS).fewest)
    return min((count for count in found if count), default=0)


# --- what is printed -------------------------------------------------------------------------------

HEAD = (
    f"{'':26}{'P x D':>8}{'mb':>3}{'step':>8}{'compute':>9}{'exchange':>9}{'bubble':>8}{'snapsh.':>8}"
    f"{'seq/s':>7}{'tokens/s':>10}{'$/step':>8}{'$/1e9':>7}   limit: compute + exchange, ours / limit"
)


def show(name: str, row: Row) -> None:
    found, plan, job = row.parts, row.plan, row.job
    usd = found.step_s / 3600 * WORKERS * job.gpu.usd_per_h
    least_s = limits_s(job, plan)
    again = " R" if plan.way.recompute else ""
    near = " ring" if plan.way.placement == "ring" else ""
    print(
        f"{name:26}{plan.describe():>8}{plan.way.microbatch_size:3}{found.step_s:8.2f}"
        f"{found.compute_s:9.2f}{found.exchange_s:9.2f}{found.bubble_s:8.2f}{found.snapshot_s:8.3f}"
        f"{job.batch / found.step_s:7.1f}{job.tokens / found.step_s:10,.0f}{usd:8.3f}"
        f"{usd / job.tokens * 1e9:7.1f}   {least_s[0]:.2f} + {least_s[1]:.2f}, "
        f"{found.step_s / sum(least_s):.2f}  {plan.way.schedule}{again}{near}",
        flush=True,
    )


def answers(job: Job) -> Iterator[Row]:
    """Print ours in every format, then the others' rules; yield ours."""
    for exchange, deterministic in FORMATS:
        name = f"ours, {exchange}{'' if deterministic else ', any order'}"
        asked = msgspec.structs.replace(job, exchange=exchange, deterministic=deterministic)
        try:
            row = planned(asked)
        except DoesNotFit as error:
            print(f"{name:26}{error}", flush=True)
            continue
        show(name, row)
        yield row
    for name, rule in RULES.items():
        try:
            show(name, rule(job))
        except DoesNotFit as error:
            print(f"{name:26}{error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", choices=list(GPUS), default="a100")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--usd-per-gpu-h", type=float)
    parser.add_argument("--only", type=int, nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    gpu = GPUS[options.gpu]
    if options.usd_per_gpu_h:
        gpu = msgspec.structs.replace(
            gpu, usd_per_h=options.usd_per_gpu_h, source="price as asked for"
        )
    print(
        f"{WORKERS} x {gpu.name}: {gpu.flops_per_s / 1e12:g} Tflop/s, {gpu.usd_per_h:g} $/h each "
        f"({gpu.source})\n{options.batch} sequences of 2048 a step, seconds; R: recompute; ring: the replicas of a "
        f"stage side by side; any order: deterministic=False; the others' rules in float32\n{HEAD}"
    )
    drawn: list[Row] = []
    for billions in options.only:
        job = Job(shape=SHAPES[billions], gpu=gpu, batch=options.batch)
        exact = megatron.parameters(job.shape) / 1e9
        print(
            f"{billions} B: {exact:.1f}e9 parameters, {job.shape.layers} blocks of {job.shape.hidden}; "
            f"in float32 from {fewest(job) or f'no number up to {4 * WORKERS}'} GPUs on"
        )
        drawn += answers(job)
    if options.svg:
        options.svg.write_text(bars([(label(row), row.parts) for row in drawn]), encoding="utf-8")


def label(row: Row) -> tuple[str, str, str]:
    size = next(f"{billions} B" for billions, shape in SHAPES.items() if shape == row.job.shape)
    order = row.job.exchange if row.job.deterministic else "any order"
    return size, order, row.plan.describe()


if __name__ == "__main__":
    main()
