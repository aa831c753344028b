"""Reading the ledger: what each machine has cost, and what its slots are doing. Pure.

A slot is counted by what it does at the moment: from the order of a layout to its first step it is
`morphing`, or `restoring` if that layout mends a loss; a step below the highest one that the job
had before a rewind is `redone`. Nothing is counted afterwards, so no line of the past changes.
"""

from collections import Counter
from collections.abc import Iterator

from orchestrator.brain.holdings import ledger
from orchestrator.history.records import Cause, JobReading, LeaseReading, Reading
from orchestrator.state import Job, Lease, State, finished_computing

ENDED_SHOWN_S = 3900.0  # so long after an end lists may correct what its jobs have paid


def reading_of(state: State, at_s: float) -> Reading:
    """Return the ledger at a moment, with money extrapolated to it."""
    at_s = max(at_s, state.now_s)
    serving = {name: _serving(state.jobs[name]) for name in state.live_jobs}
    nobody: dict[str, None] = {}
    found = [
        _lease(lease, at_s, _causes(state, lease, serving.get(lease.job, nobody)))
        for lease in state.leases.values()
        if lease.prices
    ]
    found += [_lease(lease, at_s, (("idle", 1.0),)) for lease in _just_ended(state, at_s)]
    account = state.account
    return Reading(
        at_s=at_s,
        ledger=state.ledger,
        spent_usd=ledger.spent_usd(account, at_s),
        manager_usd=ledger.manager_usd(account, at_s),
        leases=tuple(found),
        jobs=tuple(
            JobReading(
                job.id, ledger.spent_usd(job.account, at_s), ledger.traffic_usd(job.account, at_s)
            )
            for job in state.jobs.values()
            if job.leases or (job.ended_at_s or at_s) > at_s - ENDED_SHOWN_S
        ),
    )


def is_told(state: State) -> bool:
    """Return whether this manager has asked every place once what became of our machines there.

    Before, a machine that ended while no manager lived would be read as if it ran until now.
    """
    keys = {lease.pool.place.key for lease in state.leases.values() if lease.prices}
    places = [state.places[key] for key in keys if key in state.places]
    return all(place.heard_at_s is not None or place.failures for place in places)


def _just_ended(state: State, at_s: float) -> Iterator[Lease]:
    for lease in reversed(state.ended_leases.values()):
        if (lease.ended_at_s or 0.0) >= at_s - ENDED_SHOWN_S:
            yield lease


def _lease(lease: Lease, at_s: float, causes: tuple[tuple[Cause, float], ...]) -> LeaseReading:
    return LeaseReading(
        lease.token,
        lease.machine_id,
        lease.job,
        lease.pool.key,
        lease.request.market,
        lease.prices[0][0] if lease.prices else lease.disk_from_s,
        lease.ended_at_s and (lease.gone_at_s or lease.ended_at_s),
        ledger.cost_so_far_usd(lease, at_s),
        ledger.disk_so_far_usd(lease, at_s),
        lease.egress_usd,
        lease.usd_per_h,
        lease.type.on_demand_usd_per_h,
        causes,
        lease.why_ended or lease.why_bought,
    )


def _serving(job: Job) -> dict[str, None]:
    layout = job.layouts.current
    return dict.fromkeys(layout.workers) if layout is not None else {}


def _causes(
    state: State, lease: Lease, serving: dict[str, None]
) -> tuple[tuple[Cause, float], ...]:
    """Return what the machine's slots are doing, as shares of the machine."""
    job = state.jobs[lease.job]
    if lease.state == "ending":
        return (("idle", 1.0),)
    if job.status == "DRAINING":
        return (("saving", 1.0),)
    if not lease.joined:
        return (("waiting", 1.0),)
    slots = lease.type.slots
    if slots == 1:
        return ((_cause(state, job, lease.workers.get(0), serving), 1.0),)
    counted = Counter(_cause(state, job, lease.workers.get(slot), serving) for slot in range(slots))
    return tuple((cause, count / slots) for cause, count in counted.items())


def _cause(state: State, job: Job, name: str | None, serving: dict[str, None]) -> Cause:
    worker = state.workers.get(name) if name is not None else None
    if worker is None:
        return "idle"
    if worker.id in serving:
        return _training(job)
    if worker.proving:
        return "proving"
    return "idle" if worker.ready else "waiting"


def _training(job: Job) -> Cause:
    """Return what the workers of the newest layout are doing."""
    layouts, progress = job.layouts, job.progress
    if job.status == "RECOVERING" or layouts.generation in layouts.mending:
        return "restoring"
    if finished_computing(job):
        return "saving"
    if layouts.acknowledged != layouts.generation:
        if layouts.acknowledged:
            return "morphing"
        return "restoring" if progress.step or job.spec.from_url else "waiting"
    lost = max((from_step for _, from_step, _ in progress.rewound), default=0)
    return "redone" if progress.step < lost else "useful"
