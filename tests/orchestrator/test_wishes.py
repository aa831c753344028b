"""What a person asks of a job is examined before it is posted, and says what it would do."""

from datetime import datetime
from typing import Any

import msgspec
import pytest

from orchestrator import wishes
from orchestrator.formatting import moment
from orchestrator.view import JobView

NOW_S = datetime(2030, 3, 1, 12, 0).timestamp()
DAY_S = 86_400.0
ASKER = wishes.Asker(by="a test", at_s=NOW_S)


def running() -> JobView:
    """Return a job that runs, with zero wherever a number is asked for."""
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(JobView):
        if field.required:
            fields[field.name] = {str: "", int: 0, float: 0.0}.get(field.type)
    return JobView(**(fields | {"id": "train-1", "status": "RUNNING"}))


def test_a_deadline_of_another_day_is_said_with_its_date():
    """Of today the time is enough; three days ahead a time alone would be read as today's."""
    soon = wishes.change(running(), "kept", NOW_S + 3600, ASKER).would
    assert "by 13:00:00, in 1 h" in soon
    later = wishes.change(running(), "kept", NOW_S + 3 * DAY_S, ASKER).would
    assert "by 2030-03-04 12:00, in 3 days 0 h" in later
    almost = wishes.change(running(), "kept", NOW_S + 3 * DAY_S - 1800, ASKER).would
    assert "by 2030-03-04 11:30, in 2 days 23 h" in almost


def test_a_budget_of_what_was_shown_as_spent_is_refused_with_one_that_will_do():
    """A person types what they see, $12.35; "more than $12.35" would not say what is too little about it."""
    job = msgspec.structs.replace(running(), spent_usd=12.3412, reserved_usd=0.0102)
    with pytest.raises(wishes.Refused, match=r"reserved \$12\.36, more than \$12\.35;"):
        wishes.change(job, 12.35, "kept", ASKER)
    assert wishes.change(job, 12.36, "kept", ASKER).would.startswith("It may spend $0.00")


@pytest.mark.parametrize("ahead_s", [3651 * DAY_S, 9e8 * 3600])
def test_a_deadline_beyond_ten_years_is_refused_as_it_is_by_submit(ahead_s):
    with pytest.raises(wishes.Refused, match="at most 3,650 days from now"):
        wishes.change(running(), "kept", NOW_S + ahead_s, ASKER)


def test_a_moment_that_no_calendar_has_is_said_in_words():
    assert moment(1e18, NOW_S) == "after the year 9999"


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"deadline_s": NOW_S - 60}, "the deadline of train-1 passed 1 min 0 s ago"),
        ({"budget_usd": 2.0, "spent_usd": 2.0}, r"has spent \$2.00 of \$2.00; give it more"),
    ],
)
def test_a_job_whose_bounds_are_used_up_is_not_resumed_only_to_fail_at_once(over, says):
    """The manager would end it in the same turn; what is said instead is how to give it more."""
    job = msgspec.structs.replace(running(), status="FAILED", **over)
    with pytest.raises(wishes.Refused, match=says):
        wishes.resume(job, has_script=True, asker=ASKER)


def test_what_is_held_back_to_give_machines_back_pays_for_no_step():
    """A job is drained as soon as its budget has the reserve left, so this is no room for its end."""
    costs = {"spent_usd": 1.0, "reserved_usd": 0.5, "now_usd_per_h": 1.0, "eta_s": 3600.0}
    job = msgspec.structs.replace(running(), **costs)
    short = wishes.change(job, 2.25, "kept", ASKER).would
    assert "within the budget" not in short
    assert "expected at $2.00 with $0.5000 held back to give its machines back" in short
    assert "so it would be stopped before" in short
    assert "within the budget" in wishes.change(job, 2.5, "kept", ASKER).would
