"""The search against exhaustive enumeration, the book against the search, and what is refused."""

import itertools

import msgspec
import numpy as np
import pytest
from blocks import make_profile, network

from orchestrator.planner import cost_model, plan_book, search
from orchestrator.planner.errors import BatchError, DoesNotFit
from orchestrator.planner.plans import Cost, LayoutPlan
from orchestrator.planner.search import Task
from orchestrator.planner.simulation.schedules import MODULO


def exhaustive(profile, task: Task, workers: int) -> float:
    """The shortest step over every way, every width, every grouping of sections, simulated in full."""
    tables, sections = cost_model.tables(profile, whole=task.whole), len(profile.sections)
    least = np.inf
    for way in search.ways(task, profile, workers):
        microbatches = task.global_batch // way.microbatch_size
        for width in range(1, min(workers // way.depth, microbatches) + 1):
            shares = plan_book.shared_out(microbatches, width)
            if way.schedule in MODULO and (shares[0] != shares[-1] or shares[0] % way.depth):
                continue
            for cuts in itertools.combinations(range(1, sections), way.stages - 1):
                plan = LayoutPlan(
                    way=way,
                    firsts=(0, *cuts),
                    sections=sections,
                    shares=shares,
                    workers=workers,
                    samples=task.global_batch,
                    cost=Cost(step_s=0, busy_s=0, bubble_s=0, reduce_s=0),
                    memory_bytes=(),
                )
                plan = plan_book.exact(tables, task, plan)
                if max(plan.memory_bytes) <= profile.memory_bytes:
                    least = min(least, plan.step_s)
    return least


def compare(profile, task: Task, workers: int, case: object = None) -> None:
    """The search finds the very step that enumeration finds, or refuses where nothing fits."""
    expected = exhaustive(profile, task, workers)
    try:
        found = plan_book.best(profile, task, workers).step_s
    except DoesNotFit:
        found = np.inf
    assert found == pytest.approx(expected, rel=1e-9), case


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_the_book_is_the_search(seed):
    """For every count the book's step is within six parts in a hundred of the refined search's: the most where a
    worker has several stages of uneven sections, whose boundaries only the search moves.
    """
    profile = make_profile(12, seed=seed)
    task = Task(global_batch=96)
    made = plan_book.book(profile, task, 24)
    for workers in (1, 2, 3, 5, 8, 12, 17, 24):
        found = plan_book.best(profile, task, workers)
        assert made.at(workers).step_s == pytest.approx(found.step_s, rel=0.06)


def test_prices_along_a_curve_are_those_of_the_simulator():
    """The book's straight lines against full simulation, for every plan that it holds."""
    profile = make_profile(24, seed=5)
    task = Task(global_batch=2048)
    made, tables = plan_book.book(profile, task, 48), cost_model.tables(profile)
    for plan in made.plans[1:]:
        assert plan is not None
        assert plan.step_s == pytest.approx(plan_book.exact(tables, task, plan).step_s, rel=5e-3)


def test_a_plan_says_why():
    """The sentence names the layout, the pace, and the next best with what it would lose by."""
    plan = plan_book.best(make_profile(12), Task(global_batch=96), 7)
    assert plan.because.startswith(f"{plan.describe()} on 7 workers (")
    assert "samples/s" in plan.because
    assert len(plan.runners_up) == search.RUNNERS_UP
    other = plan.runners_up[0]
    assert f"{other.way.depth}x{other.width}" in plan.because
    assert all(
        a.cost.step_s <= b.cost.step_s * (1 + 1e-9) for a, b in itertools.pairwise(plan.runners_up)
    )


@pytest.mark.parametrize("per_instance", [1, 2, 4])
def test_no_layout_is_its_own_runner_up(per_instance):
    """What is compared differs in what is said of it; and one replica less is something else, too."""
    task = Task(global_batch=16, per_instance=per_instance, microbatch_sizes=(1,))
    for plan in plan_book.book(make_profile(8), task, 9).plans[1:]:
        ways = [(plan.way, plan.width), *((o.way, o.width) for o in plan.runners_up)]
        assert len({(way.depth, width, way.describe()) for way, width in ways}) == len(ways)
    alone, two, *_ = plan_book.book(
        make_profile(1), Task(global_batch=16, microbatch_sizes=(1,)), 2
    ).plans[1:]
    assert [(o.way.depth, o.width) for o in two.runners_up] == [(1, 1)]
    assert "; 1x1 (" in two.because
    assert alone.runners_up == ()
    assert "nothing else is possible" in alone.because


def test_scarce_memory_deepens_the_pipeline():
    """What does not fit on one worker is cut into as many stages as it needs."""
    ample = make_profile(8, network=network(1e11, 1e-7))
    scarce = msgspec.structs.replace(ample, memory_bytes=5e7)
    task = Task(global_batch=32, microbatch_sizes=(1,))
    assert plan_book.best(ample, task, 4).way.depth == 1
    plan = plan_book.best(scarce, task, 4)
    assert plan.way.depth >= 3
    assert max(plan.memory_bytes) <= 5e7


def test_sharding_the_optimizer_saves_memory():
    """Where the optimizer's state does not fit on each, ZeRO-1 over two replicas may."""
    profile = make_profile(2, memory_bytes=3.0e7)
    narrow = Task(global_batch=8, microbatch_sizes=(1,), depth_max=1)
    with pytest.raises(DoesNotFit):
        plan_book.best(profile, narrow, 2)
    wide = msgspec.structs.replace(narrow, shardings=("none", "optimizer"))
    plan = plan_book.best(profile, wide, 2)
    assert (plan.way.sharding, plan.width) == ("optimizer", 2)


@pytest.mark.parametrize("seed", range(40))
def test_the_more_replicas_share_a_state_the_less_each_keeps(seed):
    """Memory that suffices for some widths only, with other stages for each: the search finds what enumeration finds."""
    rng = np.random.default_rng(seed)
    profile = make_profile(int(rng.integers(1, 5)), seed=seed, network=network(1e9, 1e-5))
    state = sum(2 * s.parameter_bytes + s.optimizer_bytes for s in profile.sections)
    profile = msgspec.structs.replace(
        profile, memory_bytes=float(rng.uniform(0.2, 1.1)) * state, copies=float(seed % 2)
    )
    task = Task(
        global_batch=int(rng.integers(1, 13)),
        microbatch_sizes=(1,),
        depth_max=int(rng.integers(1, len(profile.sections) + 1)),
        shardings=("none", "optimizer")[: 1 + seed % 3],
        schedules=("1f1b", "gpipe"),
    )
    compare(profile, task, workers=int(rng.integers(3, 9)))


def test_offloading_is_the_last_resort():
    """With a way to host memory the optimizer can live there, at a price."""
    profile = make_profile(2, memory_bytes=2.5e7, host_bytes_per_s=1e9)
    task = Task(global_batch=8, microbatch_sizes=(1,), shardings=("none", "offload"))
    assert plan_book.best(profile, task, 1).way.sharding == "offload"


def test_a_model_that_does_not_fit_is_refused_with_what_would_do():
    """The refusal names the smallest memory and every stage's; with that memory it fits."""
    task = Task(global_batch=8)
    with pytest.raises(
        DoesNotFit, match=r"into 976.57 KiB .* the least that would do is .* MiB with 2 stages"
    ) as refusal:
        plan_book.best(make_profile(4, memory_bytes=1e6), task, 2)
    mib = float(str(refusal.value).split("would do is ")[1].split(" MiB")[0])
    roomy = make_profile(4, memory_bytes=mib * 2**20)
    assert plan_book.best(roomy, task, 2).way.depth == 2
    with pytest.raises(DoesNotFit, match="nothing fits"):
        plan_book.book(make_profile(4, memory_bytes=1e6), task, 4).at(3)


def test_too_few_workers_are_told_how_many_are_needed():
    """Where only deeper pipelines fit, small counts are answered with the count that does."""
    scarce = make_profile(8, memory_bytes=5e7)
    made = plan_book.book(scarce, Task(global_batch=32, microbatch_sizes=(1,)), 8)
    assert made.fewest >= 3
    with pytest.raises(DoesNotFit, match=f"^on 1 worker: at least {made.fewest} are needed"):
        made.at(1)


@pytest.mark.parametrize("seed", range(30))
def test_the_smallest_memory_that_is_named_is_the_smallest(seed):
    """Against every way, width and grouping: with that memory something fits, with a thousandth less nothing does."""
    rng = np.random.default_rng(seed)
    sections, workers = int(rng.integers(1, 5)), int(rng.integers(1, 6))
    profile = make_profile(
        sections, seed=seed, host_bytes_per_s=1e9, memory_bytes=1e3, copies=float(seed % 2)
    )
    task = Task(
        global_batch=int(rng.integers(1, 9)),
        microbatch_sizes=(1,),
        shardings=(("none",), ("none", "optimizer"), ("offload",))[seed % 3],
        whole=bool(rng.integers(2)),
    )
    named = plan_book.smallest(cost_model.tables(profile, whole=task.whole), task, workers)
    mib = float(named.split("would do is ")[1].split(" MiB")[0].replace(",", ""))
    enough = msgspec.structs.replace(profile, memory_bytes=mib * 2**20)
    short = msgspec.structs.replace(profile, memory_bytes=(mib - 0.02) * 2**20)
    assert exhaustive(enough, task, workers) < np.inf
    assert exhaustive(short, task, workers) == np.inf


@pytest.mark.parametrize("workers", [0, 1, 10_000])
def test_any_number_of_workers_is_answered(workers):
    """None, one, ten thousand: a sentence or a plan."""
    profile, task = make_profile(12), Task(global_batch=512, microbatch_sizes=(4,))
    if workers == 0:
        for ask in (
            lambda: plan_book.best(profile, task, 0),
            lambda: plan_book.book(profile, task, 2).at(0),
        ):
            with pytest.raises(DoesNotFit, match="no workers; the job waits for 1"):
                ask()
    else:
        plan = plan_book.best(profile, task, workers)
        assert plan.workers == workers
        assert plan.way.depth * plan.width <= workers
    assert plan_book.book(profile, task, 4).at(10_000).way.depth >= 1


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        (Task(global_batch=10, microbatch_sizes=(4,)), "the nearest that are: 8, 12"),
        (Task(global_batch=8, microbatch_sizes=(3,)), "microbatches of 3 were not measured"),
    ],
)
def test_a_batch_that_does_not_divide_is_explained(task, answer):
    """A global batch that no measured microbatch divides is refused with the nearest that one does."""
    with pytest.raises(BatchError, match=answer):
        plan_book.best(make_profile(4), task, 2)
    with pytest.raises(BatchError, match="both must be at least 1"):
        Task(global_batch=0)


def test_neighbours_share_an_instance():
    """Four accelerators an instance: a chain of four never leaves it, one of three does for some replica."""
    way = search.Way(schedule="1f1b", depth=4, microbatch_size=1)
    assert not cost_model.crossings(way, 4, 1 << 30)[:3].any()
    three = msgspec.structs.replace(way, depth=3)
    assert cost_model.crossings(three, 4, 1 << 30)[:2].all()
    assert not cost_model.crossings(three, 4, 1)[:2].any()


def test_the_cheap_link_goes_to_the_heavy_traffic():
    """Heavy weights bring the replicas of a stage together, heavy activations the stages of a replica."""
    slow = network(1e7, 1e-5, faster=100)
    heavy = make_profile(4, network=slow)
    task = Task(global_batch=64, per_instance=4, depth_max=4, schedules=("1f1b",))
    deep = msgspec.structs.replace(task, recompute=(False,))
    plans = {
        way.placement: way
        for way in search.ways(deep, heavy, 16)
        if way.depth == 4 and way.microbatch_size == 1
    }
    tables = cost_model.tables(heavy)
    firsts = (0, 1, 2, 3)
    tail = {
        placement: cost_model.tails(tables, firsts, way, np.array([4.0]), 4).max()
        for placement, way in plans.items()
    }
    wire = {
        placement: cost_model.wires(tables, firsts, way, 4, 4)[0, :3, 0].max()
        for placement, way in plans.items()
    }
    assert tail["ring"] < tail["chain"]
    assert wire["chain"] < wire["ring"]


def test_reduction_hides_behind_the_last_backward():
    """Where sections reduce as they finish, the tail is shorter, and never shorter than the first section's."""
    plain = make_profile(6, network=network(1e9))
    tables = cost_model.tables(plain)
    hidden = cost_model.tables(msgspec.structs.replace(plain, reduce_overlaps=True))
    way = search.Way(schedule="1f1b", depth=2, microbatch_size=4)
    wide = np.array([1.0, 2.0, 8.0])
    late, early = (cost_model.tails(t, (0, 3), way, wide, 1) for t in (tables, hidden))
    assert (early <= late + 1e-12).all()
    assert (early[:, 1:] < late[:, 1:]).all()


@pytest.mark.parametrize("overlaps", [False, True])
def test_gradients_in_bfloat16_are_reduced_in_half_of_the_time(overlaps):
    """Of their bytes; what is applied are gradients of the parameters' type again."""
    plain = make_profile(6, network=network(1e9, latency_s=0.0))
    plain = msgspec.structs.replace(plain, reduce_overlaps=overlaps, apply_s_per_byte=0.0)
    half = msgspec.structs.replace(plain, exchanged=0.5)
    assert half.sum_bytes == plain.sum_bytes / 2 == half.parameter_bytes / 2
    way = search.Way(schedule="1f1b", depth=6, microbatch_size=4)  # a section for each stage
    late, early = (
        cost_model.tails(cost_model.tables(each), range(6), way, np.array([8.0]), 1)
        for each in (plain, half)
    )
    assert early == pytest.approx(late / 2)
