"""Where the money goes adds up to the ledger to the cent, whatever happens in a simulated month."""

import os

import pytest

from orchestrator.simulated.restarts import live
from orchestrator.simulated.runs import play
from orchestrator.simulated.scenario import month, unruly, wild

CENT = 0.01
SEEDS = int(os.environ.get("SPOT_SEEDS", "20"))


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_every_job_adds_up_in_wild_deployments(bookkeeper, first: int) -> None:
    """Managers die, machines are lost, clocks are set, whole hours are billed and refunded."""
    for seed in range(first, first + 10):
        books = bookkeeper(seed)
        story = live((unruly if seed % 2 else wild)(seed), watch=books.look)
        assert not story.breach, f"seed {seed}: {story.breach}"
        assert books.read > 5
        assert abs(books.by_cause().get("other", 0.0)) < CENT


def test_a_month_adds_up_and_most_of_it_is_explained(bookkeeper) -> None:
    books = bookkeeper(every_s=45.0, dies=False)
    play(month(30.0, 4, seed=3), watch=books.look)
    causes = books.by_cause()
    assert causes["useful"] > 0.8 * books.whole_usd
    assert abs(causes.get("other", 0.0)) < CENT
    assert {"restoring", "waiting", "idle"} <= set(causes)
