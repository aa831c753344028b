"""Bills, worked out by hand."""

import pytest

from bidding.markets.billing import AWS_2016, AWS_TODAY, AZURE, LOCAL, cost_usd

H = 3600.0
RISING = [(0.0, 1.0), (1.5 * H, 2.0), (3 * H, 4.0)]


@pytest.mark.parametrize(
    ("rule", "start", "end", "ended_by", "usd"),
    [
        (AWS_2016, 0, 2.5 * H, "user", 1 + 1 + 2),
        (AWS_2016, 0, 2.5 * H, "provider", 1 + 1),
        (AWS_2016, 0, 2 * H, "provider", 1 + 1),
        (AWS_2016, 0, 0.1 * H, "provider", 0),
        (AWS_2016, 0, 0.1 * H, None, 1),
        (AWS_TODAY, 0, 0.9 * H, "provider", 0),
        (AWS_TODAY, 0, 0.9 * H, "user", 0.9),
        (AWS_TODAY, 0, 1.0 * H, "provider", 1.0),
        (AWS_TODAY, 0, 2.5 * H, "provider", 1.5 + 2),
        (AWS_TODAY, 0, 1.0, "user", 60 / H),
        (AZURE, 0, 0.5 * H, "provider", 0.5),
        (LOCAL, 1 * H, 4 * H, "user", 0.5 + 3 + 4),
        (LOCAL, 5, 5, "user", 0),
    ],
)
def test_bills_by_hand(rule, start, end, ended_by, usd):
    """Quanta begun are owed, refunds are given where the rule has them, seconds are integrated."""
    assert cost_usd(rule, start, end, RISING, ended_by) == pytest.approx(usd)


def test_time_that_runs_backwards_is_refused():
    """A machine that ends before it starts is an error, not a negative bill."""
    with pytest.raises(ValueError, match="cannot end"):
        cost_usd(LOCAL, 10, 9, RISING, "user")


def test_no_price_is_no_cost():
    """A bill without any price is refused with what is missing."""
    with pytest.raises(ValueError, match="no price"):
        cost_usd(LOCAL, 0, 9, [], "user")
