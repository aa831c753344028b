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
