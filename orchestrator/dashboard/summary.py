"""The first line of the page: what all of it has cost, brings, and will have cost at its end.

What is to come is an interval between two figures that are both known: the pace of the newest steps,
and the mean pace since the job was submitted, with every wait and every loss in it.
"""

import msgspec

from cloud.clock import HOUR_S
from orchestrator.view import JobView, View

UNIT_STEPS = 1000


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    least: float
    most: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Money in dollars; None is what cannot be known yet."""

    spent_usd: float
    committed_usd: float
    left_usd: float | None  # of the budget, after what is spent and committed
    budget_usd: float | None
    now_usd_per_h: float
    machines: int
    work_of: str  # the job whose work is priced here, "" if none runs
    work_usd: float | None  # of 1,000 steps, now
    work_mean_usd: float | None  # of 1,000 steps, since it was submitted
    on_demand_usd: float
    saved_usd: float
    lost_usd: float
    lost_s: float
    lost_steps: int
    finish_s: Interval | None  # of all that runs, in the wall clock's time
    final_usd: Interval | None


def summary_of(view: View) -> Summary:
    cost = view.cost
    live = [job for job in view.jobs if job.ended_at_s is None]
    running = [job for job in live if job.status == "RUNNING" and job.step_s > 0]
    priced = max(running, key=lambda job: job.submitted_at_s, default=None)
    left = None
    if cost.budget_usd is not None:
        left = cost.budget_usd - cost.spent_usd - cost.reserved_usd
    return Summary(
        spent_usd=cost.spent_usd,
        committed_usd=cost.reserved_usd,
        left_usd=left,
        budget_usd=cost.budget_usd,
        now_usd_per_h=cost.now_usd_per_h,
        machines=cost.machines,
        work_of=priced.id if priced is not None else "",
        work_usd=None if priced is None else UNIT_STEPS * _step_now_usd(priced),
        work_mean_usd=None if priced is None else UNIT_STEPS * _step_mean_usd(priced),
        on_demand_usd=cost.on_demand_usd,
        saved_usd=cost.saved_usd,
        lost_usd=sum(job.steps_lost * _step_mean_usd(job) for job in view.jobs),
        lost_s=sum(job.steps_lost * job.step_s for job in view.jobs),
        lost_steps=sum(job.steps_lost for job in view.jobs),
        finish_s=_finish_s(view.at_s, live, running),
        final_usd=_final_usd(cost.spent_usd, live, running),
    )


def _finish_s(at_s: float, live: list[JobView], running: list[JobView]) -> Interval | None:
    """Return when the last job ends, if the end of each is known."""
    if not live or not _known(live, running):
        return None
    spans = [(_left(job) * job.step_s, _left(job) * _step_mean_s(job)) for job in running]
    return Interval(
        least=at_s + max(min(span) for span in spans),
        most=at_s + max(max(span) for span in spans),
    )


def _final_usd(spent_usd: float, live: list[JobView], running: list[JobView]) -> Interval | None:
    if not _known(live, running):
        return None
    spans = [(_left(job) * _step_now_usd(job), _left(job) * _step_mean_usd(job)) for job in running]
    return Interval(
        least=spent_usd + sum(min(span) for span in spans),
        most=spent_usd + sum(max(span) for span in spans),
    )


def _known(live: list[JobView], running: list[JobView]) -> bool:
    return len(live) == len(running) and all(job.steps_total and job.steps_done for job in running)


def _left(job: JobView) -> int:
    return job.steps_total - job.step


def _step_now_usd(job: JobView) -> float:
    return job.now_usd_per_h * job.step_s / HOUR_S


def _step_mean_usd(job: JobView) -> float:
    return job.spent_usd / job.steps_done if job.steps_done else 0.0


def _step_mean_s(job: JobView) -> float:
    return job.took_s / job.steps_done if job.steps_done else 0.0
