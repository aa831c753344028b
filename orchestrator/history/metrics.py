"""The view as text for Prometheus. Pure.

Names and labels are bounded: a fixed list of names, the pools and states of the view, and at most
`JOBS_MAX` jobs, the live ones first. What a script logs is no metric, as its names are anybody's.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from math import isfinite
from typing import get_args

from orchestrator.view import JobStatus, JobView, PoolView, View

JOBS_MAX = 50
LABEL_MAX = 100
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATUSES: tuple[JobStatus, ...] = get_args(JobStatus)

Sample = tuple[dict[str, str], float | None]

# What each metric says, and its value.
OF_ALL: dict[str, tuple[str, Callable[[View], float | None]]] = {
    "spot_view_timestamp_seconds": ("When the newest view was made.", lambda v: v.at_s),
    "spot_manager_epoch": ("How many managers have taken over.", lambda v: v.epoch),
    "spot_spent_usd": ("Spent so far; a refund lowers it.", lambda v: v.cost.spent_usd),
    "spot_reserved_usd": ("Reserved for giving back what is held.", lambda v: v.cost.reserved_usd),
    "spot_budget_usd": ("The budget of everything, if there is one.", lambda v: v.cost.budget_usd),
    "spot_usd_per_hour": ("What everything costs per hour now.", lambda v: v.cost.now_usd_per_h),
    "spot_on_demand_usd": ("The same machine time on demand.", lambda v: v.cost.on_demand_usd),
    "spot_saved_usd": ("The machine time on demand less its cost.", lambda v: v.cost.saved_usd),
    "spot_manager_usd": ("Spent on the manager's own machine.", lambda v: v.cost.manager_usd),
    "spot_traffic_usd": ("Spent on traffic between zones.", lambda v: v.cost.traffic_usd),
    "spot_machines_held": ("Machines that cost money now.", lambda v: v.cost.machines),
}
OF_POOLS: dict[str, tuple[str, Callable[[PoolView], float | None]]] = {
    "spot_pool_spot_usd_per_hour": ("The spot price.", lambda p: p.spot_usd_per_h),
    "spot_pool_on_demand_usd_per_hour": ("The price on demand.", lambda p: p.on_demand_usd_per_h),
    "spot_pool_held": ("Machines that we hold there.", lambda p: p.held),
    "spot_pool_blocked": (
        "Whether a refusal keeps us from buying there.",
        lambda p: int(p.blocked_until_s is not None),
    ),
}
OF_JOBS: dict[str, tuple[str, Callable[[JobView], float | None]]] = {
    "spot_job_step": ("The newest committed step; a rewind lowers it.", lambda j: j.step),
    "spot_job_steps": ("The steps that a job has in all.", lambda j: j.steps_total or None),
    "spot_job_loss": ("The newest loss.", lambda j: j.loss),
    "spot_job_step_seconds": ("What a step takes now.", lambda j: j.step_s or None),
    "spot_job_eta_seconds": ("How long the rest takes at this pace.", lambda j: j.eta_s),
    "spot_job_workers": ("Workers in the layout.", lambda j: j.workers),
    "spot_job_machines": ("Machines that a job pays for.", lambda j: j.machines),
    "spot_job_spent_usd": ("What a job has spent.", lambda j: j.spent_usd),
    "spot_job_budget_usd": ("The budget of a job, if it has one.", lambda j: j.budget_usd),
    "spot_job_usd_per_hour": ("What a job costs per hour now.", lambda j: j.now_usd_per_h),
    "spot_job_preemptions_total": (
        "Machines that a cloud took from a job.",
        lambda j: j.preemptions,
    ),
    "spot_job_failures_total": ("Failures of a job's script.", lambda j: j.failures),
    "spot_job_steps_lost_total": ("Committed steps that were lost.", lambda j: j.steps_lost),
    "spot_job_checkpoint_step": ("The newest step on the disk.", lambda j: j.checkpoint_step),
    "spot_job_backup_step": ("The newest step in the keeper's memory.", lambda j: j.backup_step),
}


def text(view: View | None) -> str:
    """Return all metrics of a view; without one, that there is none."""
    lines = ["# HELP spot_up Whether the manager has published a view.", "# TYPE spot_up gauge"]
    lines.append(f"spot_up {0 if view is None else 1}")
    for name, said, samples in _metrics(view) if view is not None else ():
        if shown := [line for sample in samples if (line := _line(name, *sample))]:
            lines += [f"# HELP {name} {said}", f"# TYPE {name} {kind_of(name)}", *shown]
    return "\n".join(lines) + "\n"


def names() -> set[str]:
    """Return the name of every metric that may be shown."""
    return {"spot_up", "spot_machines", "spot_job_status", *OF_ALL, *OF_POOLS, *OF_JOBS}


def kind_of(name: str) -> str:
    return "counter" if name.endswith("_total") else "gauge"


def _line(name: str, labels: dict[str, str], value: float | None) -> str:
    if value is None or not isfinite(value):
        return ""
    said = ",".join(f'{key}="{_escaped(one)}"' for key, one in labels.items())
    return f"{name}{{{said}}} {value!r}" if said else f"{name} {value!r}"


def _escaped(value: str) -> str:
    return value[:LABEL_MAX].replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _metrics(view: View) -> Iterator[tuple[str, str, Iterable[Sample]]]:
    jobs = _jobs(view)
    for name, (said, of_all) in OF_ALL.items():
        yield name, said, [({}, of_all(view))]
    yield "spot_machines", "Live machines by pool, market and state.", _machines(view)
    for name, (said, of_pool) in OF_POOLS.items():
        yield name, said, [({"pool": pool.pool}, of_pool(pool)) for pool in view.pools]
    yield "spot_job_status", "1 for the status that a job has.", _statuses(jobs)
    for name, (said, of_job) in OF_JOBS.items():
        yield name, said, [({"job": job.id}, of_job(job)) for job in jobs]


def _jobs(view: View) -> list[JobView]:
    live = sorted(view.jobs, key=lambda job: (job.ended_at_s is not None, -job.submitted_at_s))
    return live[:JOBS_MAX]


def _machines(view: View) -> Iterator[Sample]:
    found = Counter((m.pool, m.market, m.state) for m in view.machines if m.ended_at_s is None)
    found.update({(one.pool, one.market, one.state): one.count for one in view.unlisted})
    for (pool, market, state), count in sorted(found.items()):
        yield {"pool": pool, "market": market, "state": state}, count


def _statuses(jobs: Iterable[JobView]) -> Iterator[Sample]:
    for job in jobs:
        for status in STATUSES:
            yield {"job": job.id, "status": status}, int(job.status == status)
