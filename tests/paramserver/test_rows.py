"""Rows of a whole table are given and taken without copies, and what was given never changes."""

import numpy as np
import pytest

from agent.paramserver.tables import Aggregate, Changes, Rows, Table

TABLE = Table("rows", 6, 2)
KEYS = np.arange(6)


def test_what_was_given_stays_as_it_was_whatever_is_put_later():
    rows = Rows(TABLE)
    before = rows.view(KEYS)
    rows.put(np.array([1, 4]), np.ones((2, 2)))
    assert not before.any()
    assert rows.get(KEYS).sum() == 4
    whole = np.full((6, 2), 7.0)
    rows.put(KEYS, whole)
    assert rows.view(KEYS) is whole
    rows.put(np.array([0]), np.zeros((1, 2)))
    assert (whole == 7.0).all()
    assert rows.get(np.array([0, 1]))[:, 0].tolist() == [0.0, 7.0]


@pytest.mark.parametrize("keys", [KEYS[::-1], np.array([0, 0, 1, 2, 3, 4]), KEYS[:5]])
def test_other_keys_than_all_in_order_are_copied(keys):
    rows = Rows(TABLE)
    found = rows.view(keys)
    found += 1
    assert not rows.get(KEYS).any()


def test_a_lone_sorted_batch_is_taken_as_it_is_and_others_are_summed():
    lone, change = Changes(TABLE), np.ones((3, 2))
    lone.add(np.array([1, 2, 5]), change)
    assert lone.all()[1] is change
    for keys in ([2, 1, 5], [1, 1, 5]):
        mixed = Changes(TABLE)
        mixed.add(np.array(keys), np.arange(6.0).reshape(3, 2))
        found, sums = mixed.all()
        assert found.tolist() == sorted(set(keys))
        assert sums.sum() == 15.0


@pytest.mark.parametrize("combine", [np.add, np.maximum, lambda one, other: one * other])
@pytest.mark.parametrize("seed", range(20))
def test_changes_of_any_keys_are_the_fold_of_those_of_each_key(combine, seed):
    draw = np.random.default_rng(seed)
    changes = Changes(Table("rows", 0, 2, aggregate=Aggregate("drawn", combine, 0.0)))
    wanted: dict[int, np.ndarray] = {}
    for _ in range(draw.integers(1, 6)):
        keys = draw.integers(0, draw.choice([3, 40]), draw.integers(1, 30))
        rows = draw.integers(-4, 5, (len(keys), 2)).astype(float)
        changes.add(keys, rows)
        for key, row in zip(keys.tolist(), rows, strict=True):
            wanted[key] = combine(wanted[key], row) if key in wanted else row
        if draw.random() < 0.3:
            changes.all()
    keys, rows = changes.all()
    assert keys.tolist() == sorted(wanted)
    np.testing.assert_array_equal(rows, [wanted[key] for key in keys.tolist()])
