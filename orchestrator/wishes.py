"""What a person asks of a job: examined first, then an event for the manager.

The command line and the page ask in the same way, so both are refused alike and both can say what
would be done before it is done.
"""

import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec

from cloud.clock import DAY_S, HOUR_S
from orchestrator.client import Checkpoint
from orchestrator.errors import OrchestratorError
from orchestrator.events import AnyEvent, JobBranched, JobCancelled, JobChanged, JobResumed
from orchestrator.formatting import duration, moment, plural, usd, usd_enough
from orchestrator.view import JobStatus, JobView

ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")
RESUMABLE = ("FAILED", "CANCELLED")
LIVE: tuple[str, ...] = tuple(status for status in get_args(JobStatus) if status not in ENDED)
DEADLINE_DAYS_MAX = 3650

Bound = float | Literal["kept"] | None  # None is no bound


class Refused(OrchestratorError):  # noqa: N818 - it names what happened
    """The manager would do nothing about it; the message says why."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """An event to post, and what it would do, in a few sentences."""

    event: AnyEvent
    would: str


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """By which way a person asks, and when."""

    by: str
    at_s: float


def cancel(job: JobView, asker: Asker) -> Wish:
    """Stop a job that has not ended."""
    if job.status in ENDED:
        raise Refused(f"{job.id} has ended already: {job.status}: {job.because}")
    given_back = "no machine is held"
    if job.machines:
        verb = "is" if job.machines == 1 else "are"
        rate = f"{usd(job.now_usd_per_h)}/h"
        given_back = f"{plural(job.machines, 'machine')} ({rate}) {verb} given back"
    would = (
        f"A checkpoint is written at step {job.step:,} or later, and {given_back}. "
        "Resume goes on from there."
    )
    return Wish(event=JobCancelled(at_s=asker.at_s, job=job.id, by=asker.by), would=would)


def resume(job: JobView, has_script: bool, asker: Asker) -> Wish:
    """Go on with a failed or cancelled job."""
    if job.status not in RESUMABLE:
        raise Refused(f"{job.id} is {job.status}; only what failed or was cancelled is resumed")
    _look_for_script(job, has_script)
    if job.deadline_s is not None and job.deadline_s <= asker.at_s:
        raise Refused(
            f"the deadline of {job.id} passed {duration(asker.at_s - job.deadline_s)} ago; give it another, or none: "
            f"orchestrator change {job.id} --deadline none"
        )
    if job.budget_usd is not None and job.budget_usd <= job.spent_usd:
        raise Refused(
            f"{job.id} has spent {usd(job.spent_usd)} of {usd(job.budget_usd)}; give it more: "
            f"orchestrator change {job.id} --budget USD"
        )
    would = f"Machines are bought again, and it goes on from step {job.step:,}. "
    would += "Its budget has no limit."
    if job.budget_usd is not None:
        left = job.budget_usd - job.spent_usd
        would = would.replace("has no limit", f"has {usd(left)} left")
    return Wish(event=JobResumed(at_s=asker.at_s, job=job.id, by=asker.by), would=would)


def branch(
    job: JobView, stored: Sequence[Checkpoint], step: int, has_script: bool, asker: Asker
) -> Wish:
    """Begin a new job like this one, from a state that it has stored."""
    found = next((one for one in stored if one.step == step), None)
    if found is None:
        there = ", ".join(f"{one.step:,}" for one in stored) or "none"
        raise Refused(f"{job.id} has not stored step {step:,}, or not any more; there are: {there}")
    _look_for_script(job, has_script)
    event = JobBranched(
        at_s=asker.at_s,
        job=job.id,
        name=job_id(Path(job.script)),
        step=step,
        from_url=found.uri,
        by=asker.by,
    )
    budget = (
        "without a limit"
        if job.budget_usd is None
        else f"up to {usd(job.budget_usd)}, apart from what this job has spent"
    )
    would = (
        f"A new job goes on from step {step:,} with the same script and arguments, and "
        f"may spend {budget}. {job.id} stays unchanged."
    )
    return Wish(event=event, would=would)


def job_id(script: Path) -> str:
    """Return a new job id: short, readable and unique."""
    own = script.parent.name if script.stem == "__main__" else script.stem
    name = re.sub(r"[^a-z0-9]+", "-", own.lower()).strip("-")[:20] or "job"
    return f"{name}-{secrets.token_hex(4)}"


def _look_for_script(job: JobView, has_script: bool) -> None:
    if not has_script:
        raise Refused(
            f"the script of {job.id} is not kept any more, or is damaged; submit it again: "
            f"orchestrator submit {job.script} --from URL"
        )


def change(job: JobView, budget_usd: Bound, deadline_s: Bound, asker: Asker) -> Wish:
    """Give a job another budget, another deadline, or both."""
    budget = job.budget_usd if budget_usd == "kept" else budget_usd
    deadline = job.deadline_s if deadline_s == "kept" else deadline_s
    if job.status == "SUCCEEDED":
        raise Refused(f"{job.id} has reached its last step; its bounds change nothing any more")
    owed = job.spent_usd + job.reserved_usd
    if budget_usd != "kept" and budget is not None and budget < owed:
        raise Refused(
            f"{job.id} has spent or reserved {usd_enough(owed)}, more than {usd(budget)}; "
            f"to spend nothing more: orchestrator cancel {job.id}"
        )
    if deadline_s != "kept" and deadline is not None and deadline <= asker.at_s:
        raise Refused(f"that deadline passed {duration(asker.at_s - deadline)} ago")
    if deadline_s != "kept" and deadline is not None and deadline > latest_s(asker.at_s):
        raise Refused(
            f"a deadline lies at most {DEADLINE_DAYS_MAX:,} days from now; to have none: "
            f"orchestrator change {job.id} --deadline none"
        )
    event = JobChanged(
        at_s=asker.at_s, job=job.id, budget_usd=budget_usd, deadline_s=deadline_s, by=asker.by
    )
    would = f"{_of_budget(job, budget)} {_of_deadline(job, deadline, asker)}"
    if job.status == "DRAINING":
        would += " But it has begun to end, and it ends all the same: resume it then."
    return Wish(event=event, would=would)


def latest_s(now_s: float) -> float:
    """Return the latest deadline that a job may have."""
    return now_s + DEADLINE_DAYS_MAX * DAY_S


def final_usd(job: JobView) -> float | None:
    """Return what the job will have cost at its end, at what it costs now; None if unknown."""
    if job.ended_at_s is not None:
        return job.spent_usd
    return None if job.eta_s is None else job.spent_usd + job.now_usd_per_h * job.eta_s / HOUR_S


def _of_budget(job: JobView, budget_usd: float | None) -> str:
    if budget_usd is None:
        return "It may spend without a limit."
    left = budget_usd - job.spent_usd - job.reserved_usd
    said = f"It may spend {usd(left)} more"
    if job.now_usd_per_h > 0:
        said += f", {duration(left / job.now_usd_per_h * HOUR_S)} at {usd(job.now_usd_per_h)}/h"
    final = final_usd(job)
    if final is None or job.ended_at_s is not None:
        return f"{said}."
    said += f"; its last step is expected at {usd(final)}"
    if final + job.reserved_usd <= budget_usd:
        return f"{said}, within the budget."
    if final <= budget_usd:
        said += f" with {usd(job.reserved_usd)} held back to give its machines back"
    return f"{said}, so it would be stopped before, with a checkpoint."


def _of_deadline(job: JobView, deadline_s: float | None, asker: Asker) -> str:
    if deadline_s is None:
        return "It has no deadline."
    said = (
        f"It is to end by {moment(deadline_s, asker.at_s)}, in {duration(deadline_s - asker.at_s)}"
    )
    if job.eta_s is None:
        return f"{said}."
    if asker.at_s + job.eta_s <= deadline_s:
        return f"{said}; at the present pace it ends {duration(job.eta_s)} from now, in time."
    return (
        f"{said}; at the present pace it takes {duration(job.eta_s)}, so machines that cost more for "
        "their work are bought, as far as the budget allows."
    )
