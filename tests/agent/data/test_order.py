"""Which samples a microbatch is made of."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.data.order import Batches, Order
from agent.errors import Misuse

sizes = st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(1, 8), st.booleans())


@given(sizes, st.booleans(), st.integers(0, 3), st.integers())
def test_order_of_an_epoch_has_every_sample_once(size, shuffle: bool, epoch: int, seed: int):
    samples, batch_size, microbatches, drop_last = size
    batch_size = max(batch_size, microbatches)
    try:
        batches = Batches(
            samples=samples, batch_size=batch_size, microbatches=microbatches, drop_last=drop_last
        )
    except Misuse:
        rest = samples % batch_size
        assert samples < batch_size or (not drop_last and batch_size + rest < 2 * microbatches)
        return
    order = Order(batches, shuffle=shuffle, seed=seed)
    steps = [order.rows(epoch, place) for place in range(batches.steps)]
    seen = sorted(row for step in steps for rows in step for row in rows)
    whole, rest = divmod(samples, batch_size)
    assert len(steps) == (whole if drop_last else whole + (rest > 0))
    if drop_last:
        assert len(seen) == len(set(seen)) == whole * batch_size
    else:
        assert seen == list(range(samples))
    for step in steps:
        lengths = [len(rows) for rows in step]
        assert len(step) == microbatches
        assert min(lengths) >= 1
        assert max(lengths) <= min(min(lengths) + 1, -(-batch_size // microbatches))


def test_order_of_an_epoch_depends_on_seed_and_epoch_only():
    batches = Batches(samples=50, batch_size=10, microbatches=2, drop_last=False)

    def rows(seed: int, epoch: int) -> list[tuple[int, ...]]:
        return Order(batches, shuffle=True, seed=seed).rows(epoch, 3)

    assert rows(1, 4) == rows(1, 4)
    assert rows(1, 4) != rows(1, 5) != rows(2, 5)


def test_order_of_earlier_epochs_is_found_again():
    order = Order(
        Batches(samples=50, batch_size=10, microbatches=2, drop_last=False), shuffle=True, seed=0
    )
    before = order.rows(0, 0)
    for epoch in range(1, 6):
        order.rows(epoch, 0)
    assert order.rows(0, 0) == before


def test_order_of_an_upgraded_library_would_be_noticed_here():
    order = Order(
        Batches(samples=10, batch_size=10, microbatches=1, drop_last=False), shuffle=True, seed=0
    )
    assert order.rows(0, 0) == PINNED


PINNED = [(4, 7, 3, 2, 0, 1, 9, 6, 8, 5)]


@pytest.mark.parametrize(
    ("samples", "batch_size", "microbatches", "drop_last", "sizes"),
    [
        (16, 8, 4, False, [8, 8]),
        (20, 8, 4, False, [8, 8, 4]),
        # Two samples do not fill four microbatches: the last two batches share.
        (18, 8, 4, False, [8, 5, 5]),
        (18, 8, 4, True, [8, 8]),
        (5, 8, 4, False, [5]),
    ],
)
def test_batches_have_sizes(samples, batch_size, microbatches, drop_last, sizes):
    batches = Batches(
        samples=samples, batch_size=batch_size, microbatches=microbatches, drop_last=drop_last
    )
    found = [
        np.diff(batches.bounds(place)[:: len(batches.bounds(0)) - 1]).item()
        for place in range(batches.steps)
    ]
    assert found == sizes


@pytest.mark.parametrize(
    ("samples", "drop_last", "says"),
    [
        (0, False, "the data set is empty"),
        (3, False, "no step can be made of 3 samples"),
        (7, True, "no step can be made of 7 samples"),
        (18, False, "an epoch ends with 2 samples.*pass drop_last=True"),
    ],
)
def test_batches_that_cannot_be_made_are_refused(samples, drop_last, says):
    with pytest.raises(Misuse, match=says) as refused:
        Batches(samples=samples, batch_size=8, microbatches=8, drop_last=drop_last)
    assert "\n" not in str(refused.value)
