"""How long steps take, and for how long there was none."""

from types import SimpleNamespace

import pytest

from agent.keeper import reports as module
from agent.keeper.reports import Reports
from agent.messages import Progress, Regrouped, Report


def test_a_step_that_has_a_change_in_it_is_not_taken_for_a_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is the first that a keeper commits, be it new or restarted: nobody knows when that began."""
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    said: list[Report] = []
    reports = Reports("job", said.append, None)
    step, taken, pauses = 0, [], []

    def commits(generation: int, *at_s: float) -> None:
        nonlocal step
        for now[0] in at_s:
            step += 1
            said.clear()
            reports.progress(generation, step, 100)
            taken.append(next(each.step_s for each in said if isinstance(each, Progress)))
            pauses.extend(each.pause_s for each in said if isinstance(each, Regrouped))

    commits(1, 9.0, 11.0, 13.0)  # by a keeper that was restarted
    assert taken == [0.0, 2.0, 2.0]
    reports.regrouping()
    commits(2, 20.0, 21.0, 22.0)
    assert taken[3:] == [0.0, 1.0, 1.0]
    assert pauses == [7.0]
    commits(2, 27.0)
    assert taken[6:] == [pytest.approx(0.8 * 1.0 + 0.2 * 5.0)]


def test_a_job_that_goes_on_before_its_next_layout_paused_for_its_longest_stretch_without_a_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tables that are served go on without a lost worker; what that cost is told with the layout."""
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    said: list[Report] = []
    reports = Reports("job", said.append, None)

    def commits(generation: int, step: int, at_s: float) -> None:
        now[0] = at_s
        reports.progress(generation, step, 100)

    commits(1, 1, 1.0)
    commits(1, 2, 2.0)
    now[0] = 2.5
    reports.disturbed()
    commits(1, 3, 3.0)  # it was on its way
    commits(1, 4, 7.0)
    reports.regrouping()
    commits(2, 5, 8.0)
    (regrouped,) = [each for each in said if isinstance(each, Regrouped)]
    assert (regrouped.generation, regrouped.pause_s) == (2, 4.0)
    commits(2, 9, 10.0)
    assert said[-1].step_s == 0.5


def test_work_that_was_given_to_faster_workers_is_counted_for_each_layout() -> None:
    said: list[Report] = []
    reports = Reports("job", said.append, None)
    counts = []
    for step, given in enumerate((0, 2, 99), 1):  # no worker can have given more than there is
        reports.worked(given, 8)
        reports.progress(1, step, 100)
        counts.append((said[-1].given, said[-1].computed))
    reports.regrouping()
    reports.worked(1, 8)
    reports.progress(2, 4, 100)
    assert [*counts, (said[-1].given, said[-1].computed)] == [(0, 8), (2, 16), (10, 24), (1, 8)]
