"""Where the money goes adds up to the ledger to the cent, whatever happens in a simulated month."""

import os
from collections import Counter
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from orchestrator.brain.holdings.ledger import on_demand_usd, spent_usd
from orchestrator.history.books import Books
from orchestrator.history.meter import is_told, reading_of
from orchestrator.history.outside import focus
from orchestrator.history.reader import History
from orchestrator.history.records import LeaseReading, Reading
from orchestrator.history.writer import Writer
from orchestrator.paths import Places
from orchestrator.simulated.restarts import live
from orchestrator.simulated.runs import play
from orchestrator.simulated.scenario import month, unruly, wild

CENT = 0.01
SEEDS = int(os.environ.get("SPOT_SEEDS", "20"))


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_every_job_adds_up_in_wild_deployments(bookkeeper, first):
    """Managers die, machines are lost, clocks are set, whole hours are billed and refunded."""
    for seed in range(first, first + 10):
        books = bookkeeper(seed)
        story = live((unruly if seed % 2 else wild)(seed), watch=books.look)
        assert not story.breach, f"seed {seed}: {story.breach}"
        assert books.read > 5
        assert abs(books.by_cause().get("other", 0.0)) < CENT


def test_ten_days_add_up_and_most_of_them_is_explained(bookkeeper):
    books = bookkeeper(every_s=45.0, dies=False)
    play(month(10.0, 4, seed=3), watch=books.look)
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


def test_another_journal_is_another_ledger_and_takes_nothing_back(machine):
    """It was moved away, and the new one begins with the same epochs and with nothing spent."""
    books = Books()
    first = books.take(reading(10.0, "one", 5.0, machine(5.0)))
    second = books.take(reading(20.0, "two", 1.0, machine(1.0)))
    assert sum(charge.usd for charge in first) == pytest.approx(5.0)
    assert sum(charge.usd for charge in second) == pytest.approx(1.0)


def test_a_late_reading_of_the_same_ledger_is_counted_once(machine):
    """Whichever manager made it, and an older copy of the journal takes back what it does not know."""
    books = Books()
    charges = books.take(reading(10.0, "one", 5.0, machine(5.0)))
    charges += books.take(reading(9.0, "one", 4.0, machine(4.0)))
    charges += books.take(reading(20.0, "one", 2.0, machine(2.0)))
    assert sum(charge.usd for charge in charges) == pytest.approx(2.0)


def test_books_of_before_ledgers_had_names_go_on(machine):
    books = Books()
    books.take(replace(reading(10.0, "", 5.0), leases=(machine(5.0),)))
    more = books.take(reading(20.0, "one", 6.0, machine(6.0)))
    assert sum(charge.usd for charge in more) == pytest.approx(1.0)


def test_time_after_the_last_step_is_no_useful_step(hand):
    """A script that hangs after its loop would be told to have computed steps for ten minutes more."""
    h = hand().running(slots_max=1)
    assert [lease.causes for lease in reading_of(h.state, h.at_s).leases] == [(("useful", 1.0),)]
    h.committed(h.steps_total)
    assert [lease.causes for lease in reading_of(h.state, h.at_s).leases] == [(("saving", 1.0),)]


def test_time_without_a_manager_is_no_work_of_a_machine_that_had_ended(hand):
    """An hour of it was useful, and came back as a refund."""
    h, books, causes = hand(), Books(), Counter[str]()
    h.running(slots_max=1)

    def look() -> None:
        if is_told(h.state):
            for charge in books.take(reading_of(h.state, h.at_s)):
                causes[charge.cause] += charge.usd

    for _ in range(6):
        h.train(60.0)
        look()
    (lease,) = h.leases
    ended = {"state": "terminated", "ended_by": "provider", "ended_at_s": h.at_s + 1.0}
    h.machines[lease.machine_id] = replace(h.machines[lease.machine_id], **ended)
    useful_usd = causes["useful"]
    h.at_s += 3600.0
    h.start(epoch=2)
    look()
    h.listed()
    look()
    assert causes["useful"] == pytest.approx(useful_usd, rel=0.01)
    assert causes["billing"] == pytest.approx(0.0, abs=1e-9)
    assert causes.total() == pytest.approx(spent_usd(h.state.account, h.at_s), abs=1e-7)


def test_an_export_lists_the_same_machine_time_on_demand(hand, tmp_path):
    """A disk was in two of its lines, and what a cloud refunded was missing in what was used."""
    h = hand(disk_usd_per_h=0.5, billing="aws_today", on_demand_allowed=False)
    h.running(slots_max=1)
    made = Writer(tmp_path / "history.db")
    made.take(reading_of(h.state, h.at_s))
    for _ in range(6):
        h.train(300.0)
        made.take(reading_of(h.state, h.at_s))
    (lease,) = h.leases
    h.taken(lease.machine_id)
    h.listed()
    made.take(reading_of(h.state, h.at_s))
    made.flush(last=True)
    made.close()
    rows = list(focus.rows(History.open(Places(tmp_path)).daily(), "test"))
    kinds = {row["x_Cause"]: float(str(row["BilledCost"])) for row in rows}
    assert kinds["disk"] > 0 > kinds["billing"]
    listed = sum(float(str(row["ListCost"])) for row in rows if row["x_Cause"] != "manager")
    assert listed == pytest.approx(on_demand_usd(h.state.account, h.at_s), rel=0.01)
