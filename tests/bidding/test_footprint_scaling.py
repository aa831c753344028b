"""How a footprint of another size would do, from what steps took on some."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidding.acquire import decide
from bidding.markets.observations import Scaling
from bidding.model import Demand, Limits, Offer
from cloud.model import InstanceType, Pool
from orchestrator.brain.purchases.situation import SlotSpeed

KIND = InstanceType(
    name="small", cloud="local", slots=1, memory_bytes=1 << 30, on_demand_usd_per_h=0.4
)
POOL = Pool("local", "here", "here-a", "small")


def seen(step_s: dict[float, float]) -> Scaling:
    scaling = Scaling()
    for size, took_s in step_s.items():
        scaling = scaling.saw(size, took_s)
    return scaling


@given(
    shared=st.floats(0.01, 100),
    fixed=st.floats(0, 10),
    sizes=st.lists(st.integers(1, 100), min_size=2, unique=True),
)
def test_what_is_shared_and_what_is_not_are_told_apart(shared, fixed, sizes):
    scaling = seen({float(n): shared / n + fixed for n in sizes[:16]})
    for n in (1, 7, 200):
        assert scaling.work_per_s(n) == pytest.approx(1 / (shared / n + fixed), rel=1e-3)


def test_one_size_says_nothing_and_a_newer_sight_of_a_size_replaces_the_older():
    assert seen({4.0: 1.0}).work_per_s(8.0) is None
    scaling = seen({4.0: 9.0, 8.0: 1.0}).saw(4.0, 2.0)
    assert scaling.work_per_s(16.0) == pytest.approx(2.0)


@pytest.mark.parametrize("step_s", [{2.0: 1.0, 4.0: 1.5}, {2.0: 1.0, 4.0: 0.1}])
def test_noise_makes_no_part_of_a_step_shorter_than_nothing(step_s):
    """Longer with more machines, or shorter than to share it alone could make it."""
    rates = [seen(step_s).work_per_s(n) for n in (1.0, 2.0, 4.0, 1000.0)]
    assert all(0 < one <= other for one, other in pairwise(rates))


def test_the_bidder_buys_no_machines_that_would_not_shorten_a_step():
    """Served tables have no profile: of a job whose clocks hardly get shorter, one machine is enough."""
    offer = Offer(pool=POOL, type=KIND, market="spot", price_usd_per_h=0.1)
    demand = Demand(work_left=1e5, start_s=60.0, morph_s=1.0, recovery_s=5.0)

    def bought(scaling: Scaling) -> int:
        speed = SlotSpeed(types={"small": KIND}, slots_max=8, scaling=scaling)
        purchase = decide([offer], [], demand, Limits(slots_max=8, haste=0.5), speed, 0.0)
        return sum(part.count for part in purchase.acquire)

    assert bought(seen({1.0: 1.0, 2.0: 0.51})) == 8
    assert bought(seen({1.0: 1.0, 2.0: 0.95})) == 1


def test_scaling_of_sizes_that_rounding_tells_apart_is_that_of_one():
    """A footprint's speeds are added in another order after a loss."""
    assert seen({0.1 + 0.2: 1.0, 0.3: 1.1}).work_per_s(3.0) is None
    assert seen({0.3: 1.0, 0.1 + 0.2: 1.1, 0.6: 0.55}).work_per_s(1.2) == pytest.approx(1 / 0.275)
