"""Blocks that leave while the last backward runs: the bits are those of one process, whatever the script does."""

import pytest
from leaving import (
    MICROBATCHES,
    Forward,
    alone,
    changed_late,
    check,
    in_two_parts,
    kept,
    plain,
    together,
    workers,
)

from agent.profile import SumFormat


@pytest.mark.parametrize("exchange", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_blocks_leave_while_the_last_backward_runs(count: int, exchange: SumFormat) -> None:
    """The first step is watched; in the next ones rounds have left when the backward is over."""
    with workers(count, exchange) as made:
        for step in range(3):
            together(made, step, plain)
            wanted = alone(step, plain, exchange=exchange)
            check(made, wanted)
            assert kept(made, step) == bytes(made[0].total.memory(0, wanted.space.total_bytes))
            assert all(worker.left_early for worker in made) == (step > 0)


@pytest.mark.parametrize("odd", [in_two_parts, changed_late])
def test_a_gradient_that_changes_after_it_left_is_exchanged_again(odd: Forward) -> None:
    """One worker finds that out after it has sent: all have the right sum, and nobody sends early again."""
    with workers(3) as made:
        together(made, 0, plain)
        together(made, 1, odd, plain)
        share = made[0].layout.replica_of(made[0].me)
        check(made, alone(1, plain, odd, share.count))
        assert not any(worker.preparing._told for worker in made), "the keeper goes on without it"
        for worker in made:
            worker.left_early = False
        together(made, 2, plain)
        check(made, alone(2, plain))
        assert not any(worker.left_early for worker in made)


def test_nothing_leaves_early_where_that_was_seen_before() -> None:
    with workers(2) as made:
        for step in range(2):
            together(made, step, in_two_parts)
            check(made, alone(step, in_two_parts))
            assert not any(worker.left_early for worker in made)


def test_the_memory_of_a_gradient_that_a_script_has_kept_is_not_written_early() -> None:
    with workers(1) as made:
        together(made, 0, plain)
        (worker,) = made
        worker.partial.space.install(worker.total, MICROBATCHES)
        kept_one = worker.model.last.weight.grad
        assert kept_one is not None
        together(made, 1, plain)
        assert not worker.left_early
        del kept_one
        together(made, 2, plain)
        assert worker.left_early
