"""What the manager learns of a pool from its own machines."""

import pytest

from bidding.observed import PoolRecord
from bidding.risk import HAZARD_PRIOR, RETURN_PRIOR

H = 3600.0


def test_a_life_without_a_loss_lowers_the_hazard():
    """Hours that are still running count, and the longer they run the calmer the pool looks."""
    record = PoolRecord().sold(0.0)
    assert record.hazard_per_h(0.0) == HAZARD_PRIOR.per_h
    assert record.hazard_per_h(4 * H) == pytest.approx(0.5 / 8)
    assert record.hazard_per_h(40 * H) < record.hazard_per_h(4 * H)


def test_a_bulk_loss_is_one_loss():
    """Three machines lost within two minutes are one event of the pool; a day later it is another."""
    record = PoolRecord().sold(0.0).lost(H, True).lost(H + 5, True).lost(H + 60, False)
    assert record.losses == 1
    assert record.held_h == pytest.approx(1 + 1 / 60)
    assert record.sold(2 * H).lost(26 * H, False).losses == 2


def test_refusals_tell_how_long_capacity_is_away():
    """The time from the first refusal to the next sale counts once, however often we asked."""
    record = PoolRecord().refused(0.0).refused(H).sold(2 * H)
    assert (record.returns, record.refused_h) == (1, 2.0)
    assert record.return_per_h(2 * H) == pytest.approx(1.5 / 3)
    assert PoolRecord().return_per_h(0.0) == RETURN_PRIOR.per_h


def test_a_clock_that_jumps_back_makes_no_negative_time():
    """Giving back before the sale, by the clock, adds nothing and breaks nothing."""
    record = PoolRecord().sold(5000.0).left(4000.0)
    assert record.held_h == 0.0
    assert record.left(9000.0) == record
