"""Small cases, drawn at random: the search finds what trying everything finds.

`SPOT_SEEDS=5000` draws five thousand.
"""

import itertools
import os
from functools import cache

import msgspec
import numpy as np
import pytest
from blocks import make_profile, network
from test_book import compare

from orchestrator.planner import cost_model, plan_book, search, unlike_machines
from orchestrator.planner.errors import BatchError, DoesNotFit
from orchestrator.planner.plans import Holding
from orchestrator.planner.search import Task
from orchestrator.planner.simulation import kernel, schedules

CASES, TOGETHER = int(os.environ.get("SPOT_SEEDS", "120")), 30


def drawn_profile(rng, sections: int, scarce: float):
    """Uneven sections on some network; memory for everything, or for little."""
    seed = int(rng.integers(1 << 30))
    profile = make_profile(
        sections,
        seed=seed,
        network=network(float(rng.choice([3e7, 3e8, 1e10])), float(rng.choice([1e-6, 1e-4, 2e-3]))),
        send_s=float(rng.choice([0.0, 1e-4])),
        host_bytes_per_s=1e9,
        sums=float(rng.choice([0.0, 3.0])),
        copies=float(seed % 3 == 0),
    )
    state = sum(
        (2 + profile.sums) * s.parameter_bytes + s.optimizer_bytes for s in profile.sections
    )
    room = float(rng.choice([1e3, rng.uniform(0.2, 2.0)])) if scarce else 1e3
    return msgspec.structs.replace(profile, memory_bytes=room * state)


def drawn_task(rng, sections: int) -> Task:
    size = int(rng.choice([1, 2, 4]))
    deepest = int(rng.integers(1, min(sections, 4) + 1))
    return Task(
        global_batch=size * int(rng.integers(1, 9)),
        microbatch_sizes=(size,),
        per_instance=int(rng.choice([1, 1, 2])),
        depth_min=int(rng.integers(1, deepest + 1)),
        depth_max=deepest,
        shardings=(("none",), ("none", "optimizer"), ("none", "offload"))[int(rng.integers(3))],
        whole=bool(rng.integers(2)),
    )


@pytest.mark.parametrize("first", range(0, CASES, TOGETHER))
def test_equal_workers(first):
    """Every schedule, modulo placement among them, recompute, sharding, offload, scarce memory, the whole state on each
    worker, shares that differ, and several sizes of microbatches.
    """
    for seed in range(first, first + TOGETHER):
        rng = np.random.default_rng(seed)
        sections = int(rng.integers(2, 6))
        profile, task = drawn_profile(rng, sections, 1.0), drawn_task(rng, sections)
        workers = int(rng.integers(1, 6))
        if seed % 4 == 0:
            task = msgspec.structs.replace(task, microbatch_sizes=())  # all that were measured
        compare(profile, task, workers, seed)


# --- unlike workers ------------------------------------------------------------------------------


def tried(profiles, task: Task, held: dict[str, int]) -> float:
    """The shortest step over every way, every formation, every cut, all shares; each simulated in full."""
    names, least = list(held), np.inf
    tables = {name: cost_model.tables(profiles[name], whole=task.whole) for name in names}
    sections = len(profiles[names[0]].sections)
    for way in search.ways(task, profiles[names[0]], sum(held.values())):
        if way.placement == "ring":
            continue
        microbatches = task.global_batch // way.microbatch_size
        for cuts in itertools.combinations(range(1, sections), way.stages - 1):
            lanes = {
                width: one_lane(tables, way, (0, *cuts), width)
                for width in range(1, sum(held.values()) + 1)
            }
            for chains in all_formations(names, held, way.depth, microbatches):
                tail_s = tails(tables, way, (0, *cuts), chains)
                overhead_s = max(profiles[n].overhead_s for chain in chains for n in chain)
                for shares in compositions(microbatches, len(chains)):
                    lane = lanes[len(chains)]
                    ready = [lane(*pair) for pair in zip(chains, shares, strict=True)]
                    if all(one is not None for one in ready):
                        step_s = (np.max(ready, axis=0) + tail_s).max() + overhead_s
                        least = min(least, float(step_s))
    return least


def one_lane(tables, way, firsts, width: int):
    """When a chain's stages are ready after so many microbatches; None if that does not fit."""

    @cache
    def ready(chain: tuple[str, ...], share: int):
        programs = schedules.pack(way.schedule, way.depth, share, recompute=way.recompute)
        peaks = search.peaks(way, programs)[:, :, None]
        seconds, wire = np.zeros((5, way.depth)), np.zeros((2, way.depth, 3))
        for stage, name in enumerate(chain):
            mine = tables[name]
            held = cost_model.memory_bytes(mine, firsts, way, np.array([float(width)]), peaks)
            if held[stage, 0] > mine.profile.memory_bytes:
                return None
            seconds[:, stage] = cost_model.seconds(mine, firsts, way)[:, stage]
            for way_of, other in ((0, stage + 1), (1, stage - 1)):
                if 0 <= other < way.depth:
                    both = [tables[n] for n in (name, chain[other])]
                    wires = [cost_model.wires(t, firsts, way, 1, 1)[way_of, stage] for t in both]
                    wire[way_of, stage] = np.maximum(*wires)
        costs = kernel.Costs(seconds, np.ones(way.depth), wire, 0)
        return search.gradients_done(programs, costs)

    return ready


def tails(tables, way, firsts, chains):
    """Every stage's ring is as slow as the slowest of its workers."""
    width, each = np.array([float(len(chains))]), np.zeros(way.depth)
    for chain in chains:
        for stage, name in enumerate(chain):
            its = cost_model.tails(tables[name], firsts, way, width, 1)[stage, 0]
            each[stage] = max(each[stage], its)
    return each


def all_formations(names, held, depth: int, most: int):
    kinds = list(itertools.product(names, repeat=depth))
    for width in range(1, min(sum(held.values()) // depth, most) + 1):
        for chains in itertools.combinations_with_replacement(kinds, width):
            used = [name for chain in chains for name in chain]
            if all(used.count(name) <= held[name] for name in names):
                yield chains


def compositions(total: int, parts: int):
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


@pytest.mark.parametrize("first", range(0, CASES, TOGETHER))
def test_unlike_workers(first):
    """Two or three kinds that differ in pace, memory and network: formation, cuts and shares together."""
    for seed in range(first, first + TOGETHER):
        compare_unlike(seed)


@pytest.mark.parametrize("seed", [354, 635, 837, 983, 1199])
def test_drafts_that_look_slow_or_too_large_may_be_the_best(seed):
    """Memory moves the cuts: formations far down by straight lines, or behind a hundred that do not fit, are the best."""
    compare_unlike(seed)


def compare_unlike(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sections, kinds = int(rng.integers(2, 5)), int(rng.integers(2, 4))
    base = drawn_profile(rng, sections, 1.0)
    profiles = {str(k): paced(base, rng) for k in range(kinds)}
    held = {str(k): int(rng.integers(1, 3)) for k in range(kinds)}
    task = msgspec.structs.replace(
        drawn_task(rng, sections),
        per_instance=1,
        shardings=("none",),
        schedules=("1f1b", "gpipe", "zero-bubble", "eager"),
    )
    holdings = [Holding(instance_type=name, instances=n) for name, n in held.items()]
    expected = tried(profiles, task, held)
    try:
        found = unlike_machines.best_mix(profiles, task, holdings)[0].step_s
    except DoesNotFit:
        found = np.inf
    assert found == pytest.approx(expected, rel=1e-9), seed


def paced(profile, rng):
    """The same model on another kind of worker."""
    factor = float(rng.choice([1.0, 1.3, 2.0, 3.0]))
    sections = tuple(
        msgspec.structs.replace(
            section,
            forward_s=tuple(factor * s for s in section.forward_s),
            backward_s=tuple(factor * s for s in section.backward_s),
        )
        for section in profile.sections
    )
    return msgspec.structs.replace(
        profile,
        sections=sections,
        memory_bytes=profile.memory_bytes * float(rng.choice([1.0, 1.0, 0.6, 1.7])),
        network=network(float(rng.choice([3e7, 3e8, 1e10])), float(rng.choice([1e-6, 1e-4, 2e-3]))),
    )


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_asked_is_answered(seed):
    """Any batch, any number of workers, any memory: a plan that covers the batch and fits, or one sentence."""
    rng = np.random.default_rng(seed)
    for _ in range(10):
        sections = int(rng.integers(1, 12))
        profile = drawn_profile(rng, sections, 1.0)
        task = Task(global_batch=int(rng.integers(1, 200)), per_instance=int(rng.integers(1, 9)))
        workers = int(rng.choice([0, 1, 2, 7, 40]))
        try:
            plan = plan_book.best(profile, task, workers)
        except (DoesNotFit, BatchError) as refusal:
            assert len(str(refusal).splitlines()) == 1
            continue
        assert sum(plan.shares) * plan.way.microbatch_size == task.global_batch
        assert min(plan.shares) >= 1
        assert max(plan.shares) - min(plan.shares) <= 1
        assert plan.way.depth * plan.width <= workers
        assert max(plan.memory_bytes) <= profile.memory_bytes
        assert list(plan.firsts) == sorted(set(plan.firsts))


@pytest.mark.parametrize("seed", range(12))
def test_a_worker_more_never_harms(seed):
    """In the book of any model: the step for one worker more is no longer, and every plan fits."""
    rng = np.random.default_rng(seed)
    profile = drawn_profile(rng, int(rng.integers(2, 14)), 1.0)
    task = Task(global_batch=4 * int(rng.integers(2, 40)), per_instance=int(rng.choice([1, 4])))
    made = plan_book.book(profile, task, 40)
    plans = [plan for plan in made.plans if plan is not None]
    assert made.plans[1:] == (None,) * (40 - len(plans)) + tuple(plans)
    for fewer, more in itertools.pairwise(plans):
        assert more.step_s <= fewer.step_s * (1 + 1e-6)
    assert all(max(plan.memory_bytes) <= profile.memory_bytes for plan in plans)


@pytest.mark.parametrize("seed", range(6))
def test_unlike_workers_are_never_worse_than_some_of_them(seed):
    """Larger footprints, where not everything can be tried: as fast as without any kind, or as one alone, and batches are whole."""
    rng = np.random.default_rng(seed)
    base = drawn_profile(rng, int(rng.integers(3, 12)), 0.0)
    profiles = {str(k): paced(base, rng) for k in range(3)}
    task = Task(global_batch=4 * int(rng.integers(8, 40)), microbatch_sizes=(4,))
    held = [
        Holding(instance_type=str(k), instances=int(rng.integers(1, 9)), per_instance=per)
        for k, per in enumerate(rng.choice([1, 2, 4], 3).tolist())
    ]
    plan, chains = unlike_machines.best_mix(profiles, task, held)
    assert sum(plan.shares) * 4 == task.global_batch
    assert len(chains) == plan.width
    groups = unlike_machines.in_order(profiles, task, held)
    used = [sum(chain.groups.count(g) for chain in chains) for g in range(3)]
    assert all(n <= group.workers for n, group in zip(used, groups, strict=True))
    for one in held:
        only = msgspec.structs.replace(task, per_instance=one.per_instance)
        alone = plan_book.best(profiles[one.instance_type], only, one.workers)
        assert plan.step_s <= alone.step_s * (1 + 1e-9)
        fewer, _ = unlike_machines.best_mix(
            profiles, task, [other for other in held if other is not one]
        )
        assert plan.step_s <= fewer.step_s * (1 + 1e-9)
