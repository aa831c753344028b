"""The view as text for Prometheus. Pure.

Names and labels are bounded: a fixed list of names, the pools and states of the view, and at most
`JOBS_MAX` jobs, the live ones first. What a script logs is no metric, as its names are anybody's.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from math import isfinite
from typing import Literal, NamedTuple

from orchestrator.view import JobStatus, JobView, PoolView, View

JOBS_MAX = 50
LABEL_MAX = 100
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATUSES: tuple[JobStatus, ...] = (
    "PENDING",
    "PROVISIONING",
    "RUNNING",
    "RECOVERING",
    "DRAINING",
    "SUCCEEDED",
    "FAILED",
    "CANCELLED",
)

Sample = tuple[dict[str, str], float | None]


class Metric(NamedTuple):
    name: str
    kind: Literal["gauge", "counter"]
    said: str
    samples: Callable[[View], Iterable[Sample]]


def text(view: View | None) -> str:
    """Return all metrics of a view; without one, that there is none."""
    lines = ["# HELP spot_up Whether the manager has published a view.", "# TYPE spot_up gauge"]
    lines.append(f"spot_up {0 if view is None else 1}")
    for metric in METRICS if view is not None else ():
        found = [_line(metric.name, *sample) for sample in metric.samples(view)]  # type: ignore[arg-type]
        if shown := [line for line in found if line]:
            lines += [f"# HELP {metric.name} {metric.said}", f"# TYPE {metric.name} {metric.kind}"]
            lines += shown
    return "\n".join(lines) + "\n"


def names() -> set[str]:
    """Return the name of every metric that may be shown."""
    return {"spot_up", *(metric.name for metric in METRICS)}


def _line(name: str, labels: dict[str, str], value: float | None) -> str:
    if value is None or not isfinite(value):
        return ""
    said = ",".join(f'{key}="{_escaped(one)}"' for key, one in labels.items())
    return f"{name}{{{said}}} {value!r}" if said else f"{name} {value!r}"


def _escaped(value: str) -> str:
    return value[:LABEL_MAX].replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _whole(value: Callable[[View], float | None]) -> Callable[[View], Iterable[Sample]]:
    return lambda view: [({}, value(view))]


def _jobs(view: View) -> list[JobView]:
    live = sorted(view.jobs, key=lambda job: (job.ended_at_s is not None, -job.submitted_at_s))
    return live[:JOBS_MAX]


def _each_job(value: Callable[[JobView], float | None]) -> Callable[[View], Iterable[Sample]]:
    return lambda view: [({"job": job.id}, value(job)) for job in _jobs(view)]


def _each_pool(value: Callable[[PoolView], float | None]) -> Callable[[View], Iterable[Sample]]:
    return lambda view: [({"pool": pool.pool}, value(pool)) for pool in view.pools]


def _machines(view: View) -> Iterator[Sample]:
    found = Counter((m.pool, m.market, m.state) for m in view.machines if m.ended_at_s is None)
    found.update({(one.pool, one.market, one.state): one.count for one in view.unlisted})
    for (pool, market, state), count in sorted(found.items()):
        yield {"pool": pool, "market": market, "state": state}, count


def _statuses(view: View) -> Iterator[Sample]:
    for job in _jobs(view):
        for status in STATUSES:
            yield {"job": job.id, "status": status}, int(job.status == status)


METRICS: tuple[Metric, ...] = (
    Metric(
        "spot_view_timestamp_seconds",
        "gauge",
        "When the newest view was made.",
        _whole(lambda v: v.at_s),
    ),
    Metric(
        "spot_manager_epoch",
        "gauge",
        "How many managers have taken over.",
        _whole(lambda v: v.epoch),
    ),
    Metric(
        "spot_spent_usd",
        "gauge",
        "Spent so far; a refund lowers it.",
        _whole(lambda v: v.cost.spent_usd),
    ),
    Metric(
        "spot_reserved_usd",
        "gauge",
        "Reserved for giving back what is held.",
        _whole(lambda v: v.cost.reserved_usd),
    ),
    Metric(
        "spot_budget_usd",
        "gauge",
        "The budget of everything, if there is one.",
        _whole(lambda v: v.cost.budget_usd),
    ),
    Metric(
        "spot_usd_per_hour",
        "gauge",
        "What everything costs per hour now.",
        _whole(lambda v: v.cost.now_usd_per_h),
    ),
    Metric(
        "spot_on_demand_usd",
        "gauge",
        "The same machine time on demand.",
        _whole(lambda v: v.cost.on_demand_usd),
    ),
    Metric(
        "spot_saved_usd",
        "gauge",
        "The machine time on demand less its cost.",
        _whole(lambda v: v.cost.saved_usd),
    ),
    Metric(
        "spot_manager_usd",
        "gauge",
        "Spent on the manager's own machine.",
        _whole(lambda v: v.cost.manager_usd),
    ),
    Metric(
        "spot_traffic_usd",
        "gauge",
        "Spent on traffic between zones.",
        _whole(lambda v: v.cost.traffic_usd),
    ),
    Metric(
        "spot_machines_held",
        "gauge",
        "Machines that cost money now.",
        _whole(lambda v: v.cost.machines),
    ),
    Metric("spot_machines", "gauge", "Live machines by pool, market and state.", _machines),
    Metric(
        "spot_pool_spot_usd_per_hour",
        "gauge",
        "The spot price.",
        _each_pool(lambda p: p.spot_usd_per_h),
    ),
    Metric(
        "spot_pool_on_demand_usd_per_hour",
        "gauge",
        "The price on demand.",
        _each_pool(lambda p: p.on_demand_usd_per_h),
    ),
    Metric("spot_pool_held", "gauge", "Machines that we hold there.", _each_pool(lambda p: p.held)),
    Metric(
        "spot_pool_blocked",
        "gauge",
        "Whether a refusal keeps us from buying there.",
        _each_pool(lambda p: int(p.blocked_until_s is not None)),
    ),
    Metric("spot_job_status", "gauge", "1 for the status that a job has.", _statuses),
    Metric(
        "spot_job_step",
        "gauge",
        "The newest committed step; a rewind lowers it.",
        _each_job(lambda j: j.step),
    ),
    Metric(
        "spot_job_steps",
        "gauge",
        "The steps that a job has in all.",
        _each_job(lambda j: j.steps_total or None),
    ),
    Metric("spot_job_loss", "gauge", "The newest loss.", _each_job(lambda j: j.loss)),
    Metric(
        "spot_job_step_seconds",
        "gauge",
        "What a step takes now.",
        _each_job(lambda j: j.step_s or None),
    ),
    Metric(
        "spot_job_eta_seconds",
        "gauge",
        "How long the rest takes at this pace.",
        _each_job(lambda j: j.eta_s),
    ),
    Metric("spot_job_workers", "gauge", "Workers in the layout.", _each_job(lambda j: j.workers)),
    Metric(
        "spot_job_machines",
        "gauge",
        "Machines that a job pays for.",
        _each_job(lambda j: j.machines),
    ),
    Metric(
        "spot_job_spent_usd", "gauge", "What a job has spent.", _each_job(lambda j: j.spent_usd)
    ),
    Metric(
        "spot_job_budget_usd",
        "gauge",
        "The budget of a job, if it has one.",
        _each_job(lambda j: j.budget_usd),
    ),
    Metric(
        "spot_job_usd_per_hour",
        "gauge",
        "What a job costs per hour now.",
        _each_job(lambda j: j.now_usd_per_h),
    ),
    Metric(
        "spot_job_preemptions_total",
        "counter",
        "Machines that a cloud took from a job.",
        _each_job(lambda j: j.preemptions),
    ),
    Metric(
        "spot_job_failures_total",
        "counter",
        "Failures of a job's script.",
        _each_job(lambda j: j.failures),
    ),
    Metric(
        "spot_job_steps_lost_total",
        "counter",
        "Committed steps that were lost.",
        _each_job(lambda j: j.steps_lost),
    ),
    Metric(
        "spot_job_checkpoint_step",
        "gauge",
        "The newest step on the disk.",
        _each_job(lambda j: j.checkpoint_step),
    ),
    Metric(
        "spot_job_backup_step",
        "gauge",
        "The newest step in the keeper's memory.",
        _each_job(lambda j: j.backup_step),
    ),
)
