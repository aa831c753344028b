"""What a machine costs and does under each billing rule."""

import math

import pytest

from bidding.core import code_of, outlook
from bidding.markets.billing import AWS_2016, AWS_TODAY, AZURE


def weigh(rule, hazard, age_h):
    """(dollars per hour, dollars per hour of work) of a machine of $1/h over four hours."""
    cost, share = outlook(code_of(rule), (1.0, 0.0), hazard, age_h, 0.0, 4.0)
    return cost, cost / share


def test_refunds_make_risky_first_hours_cheap():
    """Where the first hour is refunded, an eviction-prone newcomer's work is cheaper than its price."""
    assert weigh(AWS_TODAY, 0.0, 0.0)[1] == pytest.approx(1.0)
    assert weigh(AWS_TODAY, 1.0, 0.0)[1] < 0.7
    assert weigh(AZURE, 1.0, 0.0)[1] == pytest.approx(1.0)
    assert weigh(AWS_TODAY, 1.0, 2.0)[1] == pytest.approx(1.0)


def test_by_the_hour_only_the_unevicted_share_is_paid():
    """The rule of 2016: (1 - beta) P for the hour that begins."""
    beta = -math.expm1(-0.5)
    assert weigh(AWS_2016, 0.5, 0.0)[0] == pytest.approx(1 - beta)
