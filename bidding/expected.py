"""Expected cost and work of an allocation: BidBrain's equations, and what follows from billing rules.

Symbols are those of Proteus (Harlap 2019, section 4.3): k machines, price P, beta the chance of
eviction within the billing hour, t_r the part of it that remains, omega the time that can be used,
lambda what an eviction costs everybody, sigma what a change costs, nu work per machine and time,
phi how well the application scales.
"""

import math
from collections.abc import Sequence

import msgspec

from bidding import core
from bidding.billing import HOUR_S, BillingRule

REFUNDS = {
    "none": core.BY_SECOND,
    "first_hour": core.FIRST_HOUR,
    "current_quantum": core.HOURLY_REFUND,
}


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """Machines of one type, bought together at one price; times in hours as in the paper."""

    k: int
    p_usd_per_h: float
    beta: float
    t_r_h: float
    omega_h: float
    nu: float


def expected_cost_usd(allocations: Sequence[Allocation]) -> float:
    """C_A = sum_i (1 - beta_i) P_i k_i t_r + beta_i * 0 * k_i t_r                          (4.1)"""
    return sum((1 - a.beta) * a.p_usd_per_h * a.k * a.t_r_h for a in allocations)


def useful_h(
    allocation: Allocation, everyone: Sequence[Allocation], lambda_h: float, sigma_h: float
) -> float:
    """dt_i = omega_i - (1 - prod_j (1 - beta_j)) lambda - sigma                            (4.2)"""
    some_eviction = 1 - math.prod(1 - a.beta for a in everyone)
    return max(0.0, allocation.omega_h - some_eviction * lambda_h - sigma_h)


def expected_work(
    allocations: Sequence[Allocation], phi: float, lambda_h: float, sigma_h: float
) -> float:
    """W_A = (sum_i k_i dt_i nu) phi                                                       (4.3)"""
    return phi * sum(a.k * useful_h(a, allocations, lambda_h, sigma_h) * a.nu for a in allocations)


def cost_per_work(
    allocations: Sequence[Allocation], phi: float, lambda_h: float, sigma_h: float
) -> float:
    """E_A = C_A / W_A                                                                     (4.4)"""
    work = expected_work(allocations, phi, lambda_h, sigma_h)
    return expected_cost_usd(allocations) / work if work > 0 else math.inf


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """One machine's next stretch of time: dollars and working time, both per hour of the stretch."""

    usd_per_h: float
    work_share: float

    @property
    def usd_per_work_h(self) -> float:
        return self.usd_per_h / self.work_share if self.work_share > 0 else math.inf


def outlook(
    rule: BillingRule, p_usd_per_h: float, hazard_per_h: float, age_h: float, start_h: float,
    horizon_h: float,
) -> Outlook:  # fmt: skip
    """What a machine costs and does over a horizon, for the stretch that makes its work cheapest.

    With A(H) = integral of S(t) = exp(-h t) from 0 to H, for a machine a hours old:
    without refund      C(H) = p A(H),                                   W(H) = A(H) - start
    first hour free, R = 1 - a of it left
        H <= R          C(H) = p S(H) H - p (1 - S(H)) a
        H >  R          C(H) = p (S(R) R + A(H) - A(R)) - p (1 - S(R)) a
    hour by hour, refunded when evicted, R of the hour left (4.1)
                        C(R) = S(R) p R,                                 W(R) = A(R) - start
    What is paid once, such as egress, is added to C. Giving up at the end of the refundable time is always possible: the better stretch counts.
    The arithmetic itself is `bidding.core.outlook`, compiled.
    """
    price = (p_usd_per_h, 0.0)
    cost, share = core.outlook(code_of(rule), price, hazard_per_h, age_h, start_h, horizon_h)
    return Outlook(usd_per_h=cost, work_share=share)


def code_of(rule: BillingRule) -> int:
    """The billing rule as the core knows it."""
    code = REFUNDS[rule.refund]
    return core.HOURLY if rule.quantum_s >= HOUR_S and code == core.BY_SECOND else code
