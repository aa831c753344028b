"""What the view shows of jobs: all that may still cost money, and those that ended last."""

from typing import Any

import pytest
from msgspec.structs import replace

from agent.messages import Recalled, Rewound
from orchestrator import view_builder
from orchestrator.cli import tables
from orchestrator.events import JobBranched
from orchestrator.history import metrics
from orchestrator.view import JobView
from orchestrator.view_builder import job_view, view_of

MANY = 5


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_builder, "JOBS_SHOWN_MAX", MANY - 1)
    monkeypatch.setattr(view_builder, "ENDED_SHOWN_MAX", MANY - 2)


def shown(h: Any) -> list[str]:
    return [job.id for job in view_of(h.state, h.at_s).jobs]


def test_each_live_job_is_shown_however_many_there_are(hand):
    """Cancel and submit look for a job in the view: one that is not there could not be ended."""
    h = hand()
    names = [f"job-{n}" for n in range(MANY)]
    for name in names:
        h.submit(name)
    assert shown(h) == names
    h.cancel(names[-1])
    assert h.state.jobs[names[-1]].ended
    assert shown(h)[-1] == names[-1], "how it ended is shown beside many that live"


def test_a_job_that_has_just_ended_is_shown_though_many_were_submitted_after_it(hand):
    """Who follows a long job learns how it ended, whatever short ones came and went meanwhile."""
    h = hand()
    h.submit("blocker")
    h.submit("long")
    for n in range(MANY):
        h.at_s += 1.0
        h.submit(f"short-{n}")
        h.cancel(f"short-{n}")
    h.at_s += 1.0
    h.cancel("long")
    assert h.state.jobs["long"].ended
    assert "long" in shown(h)


def test_job_whose_steps_are_done_says_what_may_still_cost(hand):
    """A script that hangs after its loop has its machines for ten minutes more."""
    h = hand()
    h.start()
    h.submit(slots_max=1)
    h.goes_on(1)
    assert "after its loop" not in job_view(h.state, h.job, h.at_s).because
    h.goes_on(h.steps_total)
    waits = "all steps are done: what its script does after its loop may take 10 min 0 s (job."
    assert job_view(h.state, h.job, h.at_s).because.startswith(waits)


def test_what_the_last_bits_are_is_said_in_a_line(hand):
    """Exact or not and why, and the first step that machines of another kind have computed."""
    h = hand()
    h.keys = {"small": "a", "large": "b"}
    h.start()
    h.submit(slots_max=1)

    def shown() -> JobView:
        return job_view(h.state, h.job, h.at_s)

    assert (shown().exact, shown().bits) == (True, "exact: only machines that round alike train it")
    h.goes_on(1)
    assert shown().bits == "exact: only machines that round alike train it (cpu)"
    h.job.layouts.unlike_step = 1200
    assert (shown().unlike_step, shown().bits.partition(":")[0]) == (
        1200,
        "exact up to step 1,200 only",
    )
    rewound = Rewound(at_s=h.at_s, job="job", from_step=1, to_step=0)
    h.see(rewound)
    assert shown().unlike_step == 0
    h.job.layouts.exact = False
    assert "deterministic=False" in shown().bits and not shown().exact
    h.job.spec = replace(h.job.spec, exact=False)
    assert "job.exact = false" in shown().bits


def test_what_a_job_has_done_itself_is_told_apart_from_where_it_began(hand):
    """Its money and time are those of its own steps, also after it went back to a version of its own."""
    h = hand().running(slots_max=1)
    h.see(
        JobBranched(
            at_s=h.at_s, job="job", name="job-2", step=40, from_url="file:///c/job#40", by="ann"
        )
    )
    h.see(Recalled(at_s=h.at_s, job="job-2", step=40, because="version 40 from its store"))
    branch = h.state.jobs["job-2"]
    assert job_view(h.state, branch, h.at_s).steps_done == 0
    h.served_after(2.0)
    h.committed(43, "job-2")
    h.see(Recalled(at_s=h.at_s, job="job-2", step=42, because="version 42 from the disk"))
    seen = job_view(h.state, branch, h.at_s)
    assert (seen.step, seen.begun_step, seen.steps_done) == (43, 40, 3)
    h.see(Recalled(at_s=h.at_s, job="job", step=1, because="version 1 from the disk"))
    assert job_view(h.state, h.job, h.at_s).begun_step == 0


def test_machines_that_are_not_listed_are_counted(hand, monkeypatch):
    """Of a thousand machines two hundred are listed, and a chart of them showed two hundred."""
    h = hand().running(slots_max=4)
    for token, lease in list(h.state.leases.items()):
        h.state.leases |= {f"{token}-{n}": lease for n in range(60)}
    live = len(h.state.leases)
    monkeypatch.setattr(view_builder, "MACHINES_SHOWN_MAX", 55)
    view = view_of(h.state, h.at_s)
    lines = [one for one in metrics.text(view).splitlines() if one.startswith("spot_machines{")]
    assert sum(float(line.split()[-1]) for line in lines) == live
    table = tables.machines(view.machines, view.at_s, tables.live(view))
    assert table.caption == f"and {live - tables.MACHINES_SHOWN} more: orchestrator status --json"
