"""Where the money goes adds up to the ledger to the cent, whatever happens in a simulated month."""

import os
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from orchestrator.history.books import Books
from orchestrator.history.records import LeaseReading, Reading
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


def reading(at_s: float, ledger: str, usd: float, *leases: LeaseReading) -> Reading:
    return Reading(at_s=at_s, ledger=ledger, spent_usd=usd, manager_usd=0.0, leases=leases, jobs=())


@pytest.fixture
def machine() -> Callable[[float], LeaseReading]:
    def costs(usd: float) -> LeaseReading:
        causes = (("useful", 1.0),)
        return LeaseReading(
            "t", "m", "a", "pool", "spot", 0.0, None, usd, 0.0, 0.0, 1.0, 2.0, causes, ""
        )

    return costs


def test_another_journal_is_another_ledger_and_takes_nothing_back(machine) -> None:
    """It was moved away, and the new one begins with the same epochs and with nothing spent."""
    books = Books()
    first = books.take(reading(10.0, "one", 5.0, machine(5.0)))
    second = books.take(reading(20.0, "two", 1.0, machine(1.0)))
    assert sum(charge.usd for charge in first) == pytest.approx(5.0)
    assert sum(charge.usd for charge in second) == pytest.approx(1.0)


def test_a_late_reading_of_the_same_ledger_is_counted_once(machine) -> None:
    """Whichever manager made it, and an older copy of the journal takes back what it does not know."""
    books = Books()
    charges = books.take(reading(10.0, "one", 5.0, machine(5.0)))
    charges += books.take(reading(9.0, "one", 4.0, machine(4.0)))
    charges += books.take(reading(20.0, "one", 2.0, machine(2.0)))
    assert sum(charge.usd for charge in charges) == pytest.approx(2.0)


def test_books_of_before_ledgers_had_names_go_on(machine) -> None:
    books = Books()
    books.take(replace(reading(10.0, "", 5.0), leases=(machine(5.0),)))
    more = books.take(reading(20.0, "one", 6.0, machine(6.0)))
    assert sum(charge.usd for charge in more) == pytest.approx(1.0)
