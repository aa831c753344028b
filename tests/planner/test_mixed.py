"""Footprints of unlike instances."""

import itertools

import msgspec
import numpy as np
import pytest
from blocks import make_profile

from orchestrator.planner import plan_book, unlike_machines
from orchestrator.planner.chains import shared_by_pace
from orchestrator.planner.errors import DoesNotFit, ProfileError
from orchestrator.planner.plans import Holding
from orchestrator.planner.search import Task


def slower(profile, factor: float, **changes):
    sections = tuple(
        msgspec.structs.replace(
            section,
            forward_s=tuple(factor * s for s in section.forward_s),
            backward_s=tuple(factor * s for s in section.backward_s),
        )
        for section in profile.sections
    )
    return msgspec.structs.replace(profile, sections=sections, **changes)


FAST = make_profile(8)
PROFILES = {"fast": FAST, "slow": slower(FAST, 2.0)}
TASK = Task(global_batch=96, microbatch_sizes=(2,))


def held(fast: int, slow: int, zone: str = "") -> list[Holding]:
    return [
        Holding(instance_type="fast", instances=fast),
        Holding(instance_type="slow", instances=slow, zone=zone),
    ]


def test_equal_instances_are_the_plain_search():
    """One type in one zone gives what the search gives for that count."""
    plan, chains = unlike_machines.best_mix(PROFILES, TASK, held(6, 0))
    assert plan.step_s == plan_book.best(FAST, TASK, 6).step_s
    assert len(chains) == plan.width


def test_the_whole_state_is_counted_once():
    """Where everyone keeps the whole state, room for it and half as much suffices for one group as for the plain search."""
    state = sum(2 * s.parameter_bytes + s.optimizer_bytes for s in FAST.sections)
    tight = {
        name: msgspec.structs.replace(p, memory_bytes=1.6 * state) for name, p in PROFILES.items()
    }
    task = msgspec.structs.replace(TASK, whole=True, schedules=("1f1b", "modulo"), depth_min=2)
    alone = plan_book.best(tight["fast"], task, 2).step_s
    assert unlike_machines.best_mix(tight, task, held(2, 0))[0].step_s == alone
    assert unlike_machines.best_mix(tight, task, held(2, 1))[0].step_s <= alone


def best_listed(names):
    """For equally fast types with unlike memory, and a slow one."""
    state = sum(2 * s.parameter_bytes + s.optimizer_bytes for s in FAST.sections)
    profiles = {
        "roomy": msgspec.structs.replace(FAST, memory_bytes=2.0 * state),
        "tight": msgspec.structs.replace(FAST, memory_bytes=0.3 * state),
        "slow": slower(FAST, 2.0, memory_bytes=0.6 * state),
    }
    holdings = [Holding(instance_type=name, instances=3) for name in names]
    return unlike_machines.best_mix(profiles, TASK, holdings)[0]


@pytest.fixture(scope="module")
def roomy_first():
    return best_listed(("roomy", "tight", "slow"))


@pytest.mark.parametrize("listed", list(itertools.permutations(("roomy", "tight", "slow"))))
def test_the_order_in_which_machines_are_listed_is_nothing(listed, roomy_first):
    """In any order: the same step, and no layout is its own runner-up."""
    plan = best_listed(listed)
    assert plan.step_s == roomy_first.step_s
    kinds = [(plan.way, plan.width), *((o.way, o.width) for o in plan.runners_up)]
    assert len(kinds) == len(set(kinds))


def test_unlike_profiles_share_the_sizes_that_both_have():
    """One type was measured at fewer sizes: chains of both compute those, whichever is the faster one."""
    few = [
        msgspec.structs.replace(s, forward_s=s.forward_s[1:2], backward_s=s.backward_s[1:2])
        for s in FAST.sections
    ]
    only = msgspec.structs.replace(FAST, microbatch_sizes=(2,), sections=tuple(few))
    task = Task(global_batch=96, schedules=("1f1b",))
    for profiles in (
        {"fast": only, "slow": slower(FAST, 2.0)},
        {"fast": FAST, "slow": slower(only, 2.0)},
    ):
        plan, chains = unlike_machines.best_mix(profiles, task, held(2, 2))
        assert len({group for chain in chains for group in chain.groups}) == 2
        assert plan.way.microbatch_size == 2


def test_a_slow_replica_gets_fewer_microbatches():
    """Two replicas, one on instances of half the speed: it is given about half as much."""
    task = msgspec.structs.replace(TASK, depth_max=1)
    plan, chains = unlike_machines.best_mix(PROFILES, task, held(1, 1))
    assert [chain.groups for chain in chains] == [(0,), (1,)]
    assert plan.shares == (32, 16)
    assert sum(plan.shares) * 2 == 96


def test_slow_instances_help_or_are_left_out():
    """More instances never make the step longer, however slow they are."""
    alone = plan_book.best(FAST, TASK, 4).step_s
    with_slow, _ = unlike_machines.best_mix(PROFILES, TASK, held(4, 3))
    assert with_slow.step_s < alone
    snails = {"fast": FAST, "slow": slower(FAST, 500.0)}
    with_snails, chains = unlike_machines.best_mix(snails, TASK, held(4, 3))
    assert with_snails.step_s <= alone * 1.03
    assert all(set(chain.groups) == {0} for chain in chains)


def test_a_chain_can_cross_types():
    """Where only a deep pipeline fits, one of unlike workers is formed, the slow one with less to do."""
    tight = {name: msgspec.structs.replace(p, memory_bytes=8e7) for name, p in PROFILES.items()}
    task = Task(global_batch=32, microbatch_sizes=(1,))
    plan, chains = unlike_machines.best_mix(tight, task, held(2, 1))
    assert plan.way.depth == 3
    assert sorted(chains[0].groups) == [0, 0, 1]
    spans = [end - first for first, end in plan.stages]
    assert spans[chains[0].groups.index(1)] == min(spans)


def test_two_zones_keep_their_chains_apart():
    """Chains are formed inside a zone as far as they go."""
    holdings = [
        Holding(instance_type="fast", instances=4, zone="a"),
        Holding(instance_type="fast", instances=4, zone="b"),
    ]
    deep = msgspec.structs.replace(TASK, depth_max=4)
    plan, chains = unlike_machines.best_mix(PROFILES, deep, holdings)
    if plan.way.depth in (1, 2, 4):
        assert all(len(set(chain.groups)) == 1 for chain in chains)
    assert plan.width * plan.way.depth <= 8


@pytest.mark.parametrize("seed", range(20))
def test_shares_by_pace_are_the_best(seed):
    """No other way to share out the microbatches lets the last replica finish earlier."""
    rng = np.random.default_rng(seed)
    at, each = rng.uniform(0, 2, 3).tolist(), rng.uniform(0.2, 2, 3).tolist()
    shares = shared_by_pace(9, at, each)
    assert sum(shares) == 9

    def end_s(counts) -> float:
        return max(a + n * e for a, n, e in zip(at, counts, each, strict=True))

    options = [c for c in itertools.product(range(1, 8), repeat=3) if sum(c) == 9]
    assert end_s(shares) == pytest.approx(min(map(end_s, options)))


def test_what_cannot_be_planned_is_said():
    """No instances, a type without a profile, profiles of two models: one line each."""
    with pytest.raises(DoesNotFit, match="no workers"):
        unlike_machines.best_mix(PROFILES, TASK, [])
    with pytest.raises(ProfileError, match="p9: there is no profile for this type"):
        unlike_machines.best_mix(PROFILES, TASK, [Holding(instance_type="p9", instances=1)])
    with pytest.raises(ProfileError, match="must be of one model"):
        unlike_machines.best_mix({"fast": FAST, "slow": make_profile(9)}, TASK, held(1, 1))
    with pytest.raises(
        ProfileError, match=r"section block0 has parameters of .* must be of one model"
    ):
        unlike_machines.best_mix({"fast": FAST, "slow": make_profile(8, seed=1)}, TASK, held(1, 1))
    tiny = {name: msgspec.structs.replace(p, memory_bytes=1e6) for name, p in PROFILES.items()}
    with pytest.raises(DoesNotFit, match="no layout of 4 workers fits"):
        unlike_machines.best_mix(tiny, TASK, held(2, 2))
