"""What the manager learns of a pool from its own machines."""

import pytest

from bidding.markets.observations import PoolRecord
from bidding.risk import HAZARD_PRIOR, RETURN_PRIOR

H = 3600.0


def test_a_life_without_a_loss_lowers_the_hazard():
    """Hours that are still running count, and the longer they run the calmer the pool looks."""
    record = PoolRecord().sold(0.0)
    assert record.hazard_per_h(0.0) == HAZARD_PRIOR.per_h
    assert record.hazard_per_h(H) == pytest.approx(0.5 / 5, rel=0.01)
    assert record.hazard_per_h(40 * H) < record.hazard_per_h(4 * H)


def test_a_bulk_loss_is_one_loss():
    """Three machines lost within two minutes are one event of the pool; a day later it is another."""
    record = PoolRecord().sold(0.0).lost(H, True).lost(H + 5, True).lost(H + 60, False)
    assert record.losses == pytest.approx(1, rel=0.01)
    assert record.held_h == pytest.approx(1 + 1 / 60, rel=0.05)
    assert record.sold(2 * H).lost(3 * H, False).losses == pytest.approx(2, rel=0.1)


def test_refusals_tell_how_long_capacity_is_away():
    """The time from the first refusal to the next sale counts once, however often we asked; half of the
    last gap was away.
    """
    record = PoolRecord().refused(0.0).refused(H).sold(2 * H)
    assert (record.returns, record.refused_h) == (1, 1.5)
    assert record.return_per_h(2 * H) == pytest.approx(1.5 / 2.5)
    assert PoolRecord().return_per_h(0.0) == RETURN_PRIOR.per_h


def test_what_was_seen_long_ago_loses_its_weight():
    """A pool that took machines, or refused, days ago is known as little as one that was never asked."""
    restless = PoolRecord()
    for n in range(6):
        restless = restless.sold(n * H).lost(n * H + 1800, False)
    assert restless.hazard_per_h(6 * H) > 3 * HAZARD_PRIOR.per_h
    assert restless.hazard_per_h(18 * H) < restless.hazard_per_h(6 * H)
    assert restless.hazard_per_h(800 * H) == pytest.approx(HAZARD_PRIOR.per_h, rel=0.01)
    assert restless.losses_at(6 * H) > 1
    assert restless.losses_at(800 * H) < 0.01
    away = PoolRecord().refused(0.0).refused(5 * H)
    assert away.return_per_h(5 * H) < RETURN_PRIOR.per_h / 3
    assert away.return_per_h(800 * H) == pytest.approx(RETURN_PRIOR.per_h, rel=0.01)


def test_nobody_asked_is_not_a_refusal():
    """A pool that refused once, and sells at the next asking a week later, was not away for a week."""
    asked_late = PoolRecord().refused(0.0).sold(168 * H)
    assert asked_late.refused_h <= 0.5
    assert asked_late.return_per_h(168 * H) > RETURN_PRIOR.per_h
