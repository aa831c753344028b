"""Workers: starting them in free slots and stopping them. An id is never used twice."""

from orchestrator.actions import AnyAction, StartWorker, StopWorker
from orchestrator.state import (
    Job,
    Lease,
    State,
    Worker,
    move_job,
    next_serial,
    set_alarm,
    want_layout,
)


def staff(state: State, out: list[AnyAction], lease: Lease) -> None:
    """Start a worker in every free slot of the machine that the job has use for."""
    job = state.jobs[lease.job]
    if not (lease.usable and lease.state != "noticed" and job.active) or lease.released:
        return
    free = [slot for slot in range(lease.type.slots) if slot not in lease.workers]
    room = job.workers_max - staying(state, job) if free else 0
    for slot in free:
        if room <= 0:
            break
        free_at_s = lease.slot_free_at_s.get(slot, 0.0)
        if state.now_s < free_at_s:
            set_alarm(state, free_at_s, "staff", lease.token)
            continue
        worker = Worker(
            id=f"w{next_serial(state)}",
            job=job.id,
            token=lease.token,
            slot=slot,
            started_at_s=state.now_s,
        )
        state.workers[worker.id] = worker
        job.workers[worker.id] = None
        lease.workers[slot] = worker.id
        room -= 1
        set_alarm(state, state.now_s + ready_s(state, job), "worker", worker.id)
        why = f"slot {slot} of {lease.machine_id} is free and {job.id} has use for it"
        out.append(start_order(worker, lease, why))


def staying(state: State, job: Job) -> int:
    """Count the workers on machines that stay.

    The others do not count, because their replacements have to start beside them.
    """
    return sum(state.leases[state.workers[worker].token].stays for worker in job.workers)


def start_order(worker: Worker, lease: Lease, because: str) -> StartWorker:
    return StartWorker(
        job=worker.job,
        worker=worker.id,
        machine_id=lease.machine_id,
        slot=worker.slot,
        because=because,
    )


def on_staff_alarm(state: State, out: list[AnyAction], token: str) -> None:
    lease = state.leases.get(token)
    if lease is not None:
        staff(state, out, lease)


def ready_s(state: State, job: Job) -> float:
    """Return how long a worker may take until it is ready.

    A script may have to load a lot, so each timeout doubles the time for the next worker.
    """
    return job.trouble.ready_s or state.settings.worker_timeout_s


def stop(state: State, out: list[AnyAction], worker: Worker, because: str) -> None:
    """Forget the worker and make sure that it ends; its id is never used again."""
    lease = state.leases[worker.token]
    forget(state, worker)
    if lease.joined and lease.state not in ("ending", "ended"):
        out.append(
            StopWorker(
                job=worker.job,
                worker=worker.id,
                machine_id=lease.machine_id,
                because=because,
            )
        )


def forget(state: State, worker: Worker) -> None:
    job = state.jobs[worker.job]
    lease = state.leases[worker.token]
    del state.workers[worker.id]
    del job.workers[worker.id]
    del lease.workers[worker.slot]
    if worker.id in job.layouts.serving:
        job.layouts.urgent = True


def abandon(state: State, out: list[AnyAction], lease: Lease, because: str) -> None:
    """Forget all workers of a machine that goes; the job continues without them."""
    job = state.jobs[lease.job]
    gone = [state.workers[worker_id] for _, worker_id in sorted(lease.workers.items())]
    for worker in gone:
        forget(state, worker)
    if gone and lease.state == "ending":
        want_layout(state, job)
    if job.layouts.urgent and job.status == "RUNNING":
        move_job(state, out, job, "RECOVERING", because)
