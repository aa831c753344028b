"""BidBrain's equations, by hand and on its toy example."""

import math

import pytest

from bidding.billing import AWS_2016, AWS_TODAY, AZURE
from bidding.expected import (
    Allocation,
    cost_per_work,
    expected_cost_usd,
    expected_work,
    outlook,
    useful_h,
)


def allocation(k=4, p=0.1, beta=0.2, t_r=1.0, omega=1.0, nu=1.0):
    return Allocation(k=k, p_usd_per_h=p, beta=beta, t_r_h=t_r, omega_h=omega, nu=nu)


def test_the_four_equations_by_hand():
    """C, dt, W and E of two allocations are what a pocket calculator says."""
    two = [allocation(), allocation(k=2, p=0.3, beta=0.5, t_r=0.5, omega=0.5, nu=2.0)]
    assert expected_cost_usd(two) == pytest.approx(0.8 * 0.1 * 4 * 1.0 + 0.5 * 0.3 * 2 * 0.5)
    lost = (1 - 0.8 * 0.5) * 0.1
    assert useful_h(two[0], two, 0.1, 0.05) == pytest.approx(1.0 - lost - 0.05)
    work = 0.9 * (4 * (1 - lost - 0.05) * 1.0 + 2 * (0.5 - lost - 0.05) * 2.0)
    assert expected_work(two, 0.9, 0.1, 0.05) == pytest.approx(work)
    assert cost_per_work(two, 0.9, 0.1, 0.05) == pytest.approx(expected_cost_usd(two) / work)
    assert cost_per_work([], 1.0, 0.0, 0.0) == math.inf


def test_a_second_allocation_that_dilutes_the_reliable_one_is_worth_it():
    """The toy example: spend rises, cost per work falls, since the idle reliable machine is shared."""
    reliable = allocation(k=1, p=0.2, beta=0.0, nu=0.0)
    first = allocation(k=2, p=0.05, beta=0.1)
    second = allocation(k=2, p=0.06, beta=0.1)
    before, after = [reliable, first], [reliable, first, second]
    assert expected_cost_usd(after) > expected_cost_usd(before)
    assert cost_per_work(after, 1.0, 0.02, 0.02) < cost_per_work(before, 1.0, 0.02, 0.02)


def test_an_allocation_that_costs_more_than_it_dilutes_is_not():
    """The other half of the toy: dear machines that evict often raise cost per work."""
    reliable = allocation(k=1, p=0.2, beta=0.0, nu=0.0)
    first = allocation(k=2, p=0.05, beta=0.1)
    dear = allocation(k=2, p=0.5, beta=0.5)
    before = cost_per_work([reliable, first], 1.0, 0.1, 0.02)
    assert cost_per_work([reliable, first, dear], 1.0, 0.1, 0.02) > before


def test_refunds_make_risky_first_hours_cheap():
    """Where the first hour is refunded, an eviction-prone newcomer's work is cheaper than its price."""
    calm = outlook(AWS_TODAY, 1.0, 0.0, 0.0, 0.0, 4.0)
    risky = outlook(AWS_TODAY, 1.0, 1.0, 0.0, 0.0, 4.0)
    assert calm.usd_per_work_h == pytest.approx(1.0)
    assert risky.usd_per_work_h < 0.7
    assert outlook(AZURE, 1.0, 1.0, 0.0, 0.0, 4.0).usd_per_work_h == pytest.approx(1.0)
    old = outlook(AWS_TODAY, 1.0, 1.0, 2.0, 0.0, 4.0)
    assert old.usd_per_work_h == pytest.approx(1.0)


def test_by_the_hour_only_the_unevicted_share_is_paid():
    """The rule of 2016: (1 - beta) P for the hour that begins."""
    beta = -math.expm1(-0.5)
    seen = outlook(AWS_2016, 1.0, 0.5, 0.0, 0.0, 4.0)
    assert seen.usd_per_h == pytest.approx(1 - beta)
