"""A large transformer's step by its parts, as the benchmark of sizes prints it."""

import sys
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest

from orchestrator.planner import cost_model, plan_book
from orchestrator.planner.simulation import schedules, simulator

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "planner"


@pytest.fixture(scope="module")
def sizes():
    """The benchmark and its neighbours, which are scripts and no package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import _job
        import sizes

        yield sizes, _job
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def placed(sizes):
    """A block a stage, so that there is one way to cut and the search is short."""
    bench, jobs = sizes

    @cache
    def made(billions: int):
        shape = bench.SHAPES[billions]
        job = jobs.Job(shape=shape, gpu=bench.GPUS["a100"], batch=512)
        profile = jobs.profile_of(job, 1)
        asked = jobs.task(job, profile, depth_min=shape.layers, schedules=("1f1b",))
        return job, profile, asked, plan_book.best(profile, asked, jobs.WORKERS)

    return made


@pytest.mark.parametrize("billions", [7, 13, 70])
def test_the_parts_of_a_step_are_all_of_it(sizes, placed, billions):
    """Computing, bubble, exposed exchange and snapshots add up to the step that the engine plays."""
    _, jobs = sizes
    job, profile, asked, plan = placed(billions)
    tables, way = cost_model.tables(profile), plan.way
    programs = schedules.pack(way.schedule, way.depth, plan.shares[0], recompute=way.recompute)
    like = cost_model.variant(way, jobs.EACH, plan.width)
    costs = cost_model.costs(tables, plan.firsts, way, jobs.EACH, like)
    played = simulator.run(programs, costs, way.schedule)
    width = np.array([float(plan.width)])
    tail_s = cost_model.tails(tables, plan.firsts, way, width, jobs.EACH)[:, 0]
    step_s = float((played.stage_done + tail_s).max())

    found = jobs.parts(profile, asked, plan)
    assert min(msgspec.structs.astuple(found)) > 0
    assert found.compute_s + found.bubble_s + found.exchange_s == pytest.approx(step_s)
    assert found.step_s == pytest.approx(step_s + found.snapshot_s)
    # The busiest worker has the last stage, with a block and the logits.
    last = profile.sections[-1]
    again = last.forward_s[0] + last.backward_s[0]
    assert found.compute_s >= plan.shares[0] * again * (1 - 1e-9)
    assert found.step_s > sum(jobs.limits_s(job, plan)[:1])


@pytest.mark.parametrize("billions", [7, 13, 70])
def test_half_the_bytes_take_half_of_the_exchange_and_change_nothing_else(sizes, placed, billions):
    """The same layout with sums in bfloat16 computes as long, and holds less."""
    _, jobs = sizes
    job, profile, asked, plan = placed(billions)
    halved = jobs.profile_of(msgspec.structs.replace(job, exchange="bfloat16"), 1)
    whole = jobs.parts(profile, asked, plan)
    other = plan_book.exact(cost_model.tables(halved), asked, plan)
    half = jobs.parts(halved, asked, other)
    assert half.compute_s == whole.compute_s
    assert half.bubble_s == whole.bubble_s
    hops_s = 2 * (plan.width - 1) * jobs.network().reduce_inter.latency_s
    assert half.exchange_s - hops_s == pytest.approx((whole.exchange_s - hops_s) / 2, rel=0.01)
    assert max(other.memory_bytes) < max(plan.memory_bytes)
