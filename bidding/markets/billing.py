"""How a cloud bills the life of a machine: rules as data, and how a rule is applied.

Prices are step functions: a sequence of (from_s, usd_per_h), each holding until the next.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

import msgspec

from bidding.errors import ConstraintError
from cloud.clock import HOUR_S
from cloud.model import EndedBy, Market

Prices = Sequence[tuple[float, float]]


class BillingRule(msgspec.Struct, frozen=True, kw_only=True):
    """What is charged for a machine.

    Every begun unit of `quantum_s` is paid, at the price at its beginning. `refund` says what the
    cloud gives back when *it* ends the machine: nothing, the unit that was running, or everything
    if that happened within the first hour.
    """

    name: str
    quantum_s: float
    refund: Literal["none", "current_quantum", "first_hour"] = "none"
    minimum_s: float = 0.0
    bid: Literal["none", "optional", "required"] = "none"
    life_max_s: float | None = None


AWS_2016 = BillingRule(name="aws_2016", quantum_s=HOUR_S, refund="current_quantum", bid="required")
AWS_TODAY = BillingRule(name="aws_today", quantum_s=1.0, refund="first_hour", minimum_s=60.0)
AZURE = BillingRule(name="azure", quantum_s=1.0, bid="optional")
LOCAL = BillingRule(name="local", quantum_s=1.0)
ON_DEMAND_2016 = BillingRule(name="on_demand_2016", quantum_s=HOUR_S)
ON_DEMAND_TODAY = BillingRule(name="on_demand_today", quantum_s=1.0, minimum_s=60.0)
FIXED_DISCOUNT = BillingRule(name="fixed_discount", quantum_s=1.0, life_max_s=24 * HOUR_S)

RULES = {r.name: r for r in (AWS_2016, AWS_TODAY, AZURE, LOCAL, FIXED_DISCOUNT)}


ON_DEMAND = {AWS_2016.name: ON_DEMAND_2016, AWS_TODAY.name: ON_DEMAND_TODAY}
USUAL = {"aws": AWS_TODAY, "azure": AZURE, "local": LOCAL}


def rule_of(name: str | None, cloud: str, market: Market) -> BillingRule:
    """Return the rule by name, else the cloud's usual one; on-demand rules refund nothing."""
    if name is not None and name not in RULES:
        raise ConstraintError(f"billing rule {name!r} is not one of {', '.join(sorted(RULES))}")
    rule = USUAL.get(cloud, LOCAL) if name is None else RULES[name]
    return rule if market == "spot" else ON_DEMAND.get(rule.name, LOCAL)


def price_at(prices: Prices, at_s: float) -> float:
    """Return the price that holds at a moment; before the first point the first price holds."""
    if not prices:
        raise ValueError("no price is known: a cost needs at least one (from_s, usd_per_h)")
    return prices[max(0, bisect_right(prices, at_s, key=lambda p: p[0]) - 1)][1]


def cost_usd(
    rule: BillingRule, start_s: float, end_s: float, prices: Prices, ended_by: EndedBy | None
) -> float:
    """Return the cost of a machine up to `end_s`; `ended_by=None` means that it still runs."""
    if end_s < start_s:
        raise ValueError(f"a machine cannot end at {end_s} s before it starts at {start_s} s")
    evicted = ended_by == "provider"
    if evicted and rule.refund == "first_hour" and end_s - start_s < HOUR_S:
        return 0.0
    if rule.quantum_s >= HOUR_S:
        return _by_the_quantum(rule, start_s, end_s, prices, evicted)
    return _by_the_second(prices, start_s, max(end_s, start_s + rule.minimum_s))


def _by_the_quantum(
    rule: BillingRule, start_s: float, end_s: float, prices: Prices, evicted: bool
) -> float:
    """Return the cost if every begun quantum is owed at the price at its beginning."""
    total, begins_s = 0.0, start_s
    while begins_s < end_s:
        refunded = (
            evicted and rule.refund == "current_quantum" and begins_s + rule.quantum_s > end_s
        )
        if not refunded:
            total += price_at(prices, begins_s) * rule.quantum_s / HOUR_S
        begins_s += rule.quantum_s
    return total


def _by_the_second(prices: Prices, start_s: float, end_s: float) -> float:
    """Return the integral of the price over the life of the machine."""
    total, at_s = 0.0, start_s
    usd_per_h = price_at(prices, start_s)
    first = bisect_right(prices, start_s, key=lambda p: p[0])
    for from_s, next_usd_per_h in prices[first:]:
        if from_s >= end_s:
            break
        total += usd_per_h * (from_s - at_s)
        at_s, usd_per_h = from_s, next_usd_per_h
    return (total + usd_per_h * (end_s - at_s)) / HOUR_S
