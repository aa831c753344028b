"""The workers of a job and the layout that they are in: who is started, who is in, who is out.

A loss asks for a layout without the lost at once; a newcomer waits for a step boundary, and those who
come within a moment of each other come in together. Generations only grow.
"""

from agent.layout import Layout, data_parallel
from agent.messages import (
    UNRECORDED,
    JobProfiled,
    Paced,
    Progress,
    Regrouped,
    When,
    WorkerLost,
    WorkerReady,
)
from orchestrator import jobs, leases
from orchestrator.actions import AnyAction, Regroup, StartWorker, StopWorker
from orchestrator.state import Job, Lease, State, Worker, move_lease, next_serial, note, set_alarm
from orchestrator.wording import plural

DEATHS_MAX = 4
BACKOFF_S = 1.0
BACKOFF_DOUBLINGS_MAX = 6
STALLS_MAX = 3
RECOVERIES_MAX = 200

# --- starting and losing workers -----------------------------------------------------------------


def staff(state: State, out: list[AnyAction], lease: Lease) -> None:
    """Start a worker in every free slot of the machine that the job has use for."""
    job = state.jobs[lease.job]
    if not (lease.usable and lease.state != "noticed" and job.active) or lease.leaving:
        return
    for slot in range(lease.type.slots):
        if slot in lease.workers or len(job.workers) >= job.workers_max:
            continue
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
        set_alarm(state, state.now_s + state.settings.worker_timeout_s, "worker", worker.id)
        why = f"slot {slot} of {lease.machine_id} is free and {job.id} has use for it"
        out.append(start_order(worker, lease, why))


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


def on_worker_ready(state: State, out: list[AnyAction], event: WorkerReady) -> None:
    worker = state.workers.get(event.worker)
    if worker is None:
        why = "it was given up before it was ready"
        order = StopWorker(
            job=event.job, worker=event.worker, machine_id=event.machine_id, because=why
        )
        out.append(order)
        return
    job = state.jobs[worker.job]
    if event.uncuttable != UNRECORDED:  # a newcomer does not know
        job.uncuttable = event.uncuttable
    if worker.ready or not job.active:
        return
    worker.ready = True
    job.microbatches = event.microbatches
    job.steps_total = event.steps_total
    job.state_bytes = event.state_bytes
    newcomer(state, job)
    if not job.serving:
        regroup(state, out, job)


def newcomer(state: State, job: Job) -> None:
    """Wait a moment for others, so that one layout takes them all in."""
    if job.settle_at_s is None:
        job.settle_at_s = state.now_s + state.settings.settle_s
        set_alarm(state, job.settle_at_s, "settle", job.id)


def on_settle_alarm(state: State, out: list[AnyAction], job_id: str) -> None:
    job = state.jobs[job_id]
    if job.settle_at_s is not None and state.now_s >= job.settle_at_s:
        job.settle_at_s = None
        regroup(state, out, job)


def on_worker_alarm(state: State, out: list[AnyAction], worker_id: str) -> None:
    """It should have been ready by now."""
    worker = state.workers.get(worker_id)
    if worker is not None and not worker.ready:
        patience_s = state.settings.worker_timeout_s
        _lose_worker(state, out, worker, f"not ready after {patience_s:.0f} s")


def on_worker_lost(state: State, out: list[AnyAction], event: WorkerLost) -> None:
    worker, job = state.workers.get(event.worker), state.jobs.get(event.job)
    if job is None or (worker is None and not event.owed_state):
        return
    if worker is not None:
        detail = f": {event.detail}" if event.detail else ""
        _lose_worker(state, out, worker, f"lost ({event.cause}{detail})")
    if event.owed_state and job.serving:
        job.urgent = True  # who is in the layout waits for nobody: only a new one wakes them
    regroup(state, out, job)


def _lose_worker(state: State, out: list[AnyAction], worker: Worker, because: str) -> None:
    """Gone, while its machine may well live: a fresh one takes the slot, unless they keep dying."""
    lease, job = state.leases[worker.token], state.jobs[worker.job]
    why = f"{worker.id} on {lease.machine_id} {because}"
    stop(state, out, worker, because)
    if not (job.active and lease.usable) or finished_computing(job):
        return
    lease.deaths += 1
    backoff_s = BACKOFF_S * 2 ** min(lease.deaths - 1, BACKOFF_DOUBLINGS_MAX)
    lease.slot_free_at_s[worker.slot] = state.now_s + backoff_s
    if lease.deaths >= DEATHS_MAX * lease.type.slots:
        leases.penalise(state, out, lease.pool, f"workers keep dying on {lease.machine_id}")
        leases.give_back(state, out, lease, f"workers keep dying there: {why}")
        return
    note(out, lease.machine_id, f"{why}; a fresh one starts in {backoff_s:.0f} s")
    set_alarm(state, lease.slot_free_at_s[worker.slot], "staff", lease.token)


def finished_computing(job: Job) -> bool:
    """Workers leave when the last step is committed; that is no loss."""
    return 0 < job.steps_total <= job.step


def stop(state: State, out: list[AnyAction], worker: Worker, because: str) -> None:
    """Forget the worker and make sure that it ends: its id never comes back."""
    lease = state.leases[worker.token]
    forget(state, worker)
    if lease.joined and lease.state not in ("ending", "ended"):
        out.append(
            StopWorker(
                job=worker.job,
                worker=worker.id,
                machine_id=lease.machine_id,
                because=f"{worker.id}: {because}",
            )
        )


def forget(state: State, worker: Worker) -> None:
    job = state.jobs[worker.job]
    lease = state.leases[worker.token]
    del state.workers[worker.id]
    del job.workers[worker.id]
    del lease.workers[worker.slot]
    if worker.id in job.serving:
        job.urgent = True


def abandon(state: State, out: list[AnyAction], lease: Lease, because: str) -> None:
    """The machine goes and takes its workers with it; the job moves on without them."""
    job = state.jobs[lease.job]
    gone = [state.workers[worker_id] for _, worker_id in sorted(lease.workers.items())]
    for worker in gone:
        forget(state, worker)
    if gone and lease.state == "ending":
        regroup(state, out, job)
    if job.urgent and job.status == "RUNNING":
        jobs.move(state, out, job, "RECOVERING", because)


def count_preemption(state: State, out: list[AnyAction], job: Job) -> None:
    job.preemptions += 1
    most = job.spec.max_preemptions
    if most is not None and job.preemptions > most:
        why = f"{job.preemptions} machines were taken away and max_preemptions is {most}"
        jobs.finish(state, out, job, "FAILED", f"preempted: {why}")


# --- layouts -------------------------------------------------------------------------------------


def regroup(state: State, out: list[AnyAction], job: Job) -> None:
    """Ask for the layout that fits who is there now, if it differs from the one asked for."""
    if not job.active or finished_computing(job):
        return
    members = _members(state, job)
    current = job.layout.workers if job.layout is not None else ()
    if job.urgent and job.status == "RUNNING":
        jobs.move(state, out, job, "RECOVERING", "a worker of the running step is gone")
    if len(members) < job.spec.slots_min:
        return
    if members == current and not job.urgent:
        return
    lost = [w for w in current if w not in job.workers]
    joined = [w for w in members if w not in current]
    when: When = "now" if job.urgent or not job.serving else "boundary"
    because = (
        f"{plural(len(members), 'worker')}: {len(joined)} new, {len(lost)} lost, step {job.step}"
    )
    job.generation += 1
    job.layout = data_parallel(job.generation, job.microbatches, members)
    job.serving = dict.fromkeys(members) if when == "now" else job.serving | dict.fromkeys(members)
    job.urgent = False
    job.progress_at_s = state.now_s
    out.append(Regroup(job=job.id, layout=job.layout, when=when, because=because))


def _members(state: State, job: Job) -> tuple[str, ...]:
    """Who can be in: those who are in keep their order, newcomers follow in the order of their start."""
    able = {
        worker_id: None
        for worker_id in job.workers
        if state.workers[worker_id].ready and not _excluded(state, state.workers[worker_id])
    }
    staying = [] if job.layout is None else [w for w in job.layout.workers if w in able]
    for worker_id in staying:
        del able[worker_id]
    return tuple([*staying, *able][: job.workers_max])


def _excluded(state: State, worker: Worker) -> bool:
    lease = state.leases[worker.token]
    return lease.doomed or not lease.joined


def on_regrouped(state: State, out: list[AnyAction], event: Regrouped) -> None:
    job = state.jobs.get(event.job)
    if job is None or job.ended or event.generation <= job.fence_generation:
        return
    if event.generation > job.acknowledged and job.status == "RECOVERING":
        job.recoveries_s.append(event.pause_s)
        del job.recoveries_s[:-RECOVERIES_MAX]
    job.heard_at_s = max(job.heard_at_s, event.at_s)
    _acknowledge(state, out, job, event.generation, event.step)


def on_progress(state: State, out: list[AnyAction], event: Progress) -> None:
    job = state.jobs.get(event.job)
    if job is None or job.ended or event.generation <= job.fence_generation:
        return
    if event.step < job.step:
        return
    job.loss, job.step_s = event.loss, event.step_s
    if job.layout is not None and event.generation == job.layout.generation:
        job.slot_step_s = event.step_s * len(job.layout.workers)
    job.heard_at_s = max(job.heard_at_s, event.at_s)
    job.steps_total = event.steps_total
    _acknowledge(state, out, job, event.generation, event.step)


def _acknowledge(state: State, out: list[AnyAction], job: Job, generation: int, step: int) -> None:
    """A step was committed under this generation."""
    if step > job.step:
        job.step, job.stalls = step, 0
        job.progress_at_s = state.now_s
    if generation <= job.acknowledged or generation < job.generation or job.layout is None:
        return
    job.acknowledged = generation
    job.serving = dict.fromkeys(w for w in job.layout.workers if w in job.workers)
    works = f"layout {job.layout.describe()} works at step {job.step}"
    if job.status in ("PROVISIONING", "RECOVERING") and not job.urgent:
        jobs.move(state, out, job, "RUNNING", works)
    elif job.status == "RUNNING":
        job.because = works  # the change of layout has been told already
    _mark_working(state, job)
    _release_the_leaving(state, out, job)


def _mark_working(state: State, job: Job) -> None:
    assert job.layout is not None
    inside = dict.fromkeys(job.layout.workers)
    for token in job.leases:
        lease = state.leases[token]
        busy = any(w in inside for w in lease.workers.values())
        if busy and lease.state == "ready":
            move_lease(lease, "working", state.now_s, "its workers are in the layout")
        elif not busy and lease.state == "working":
            move_lease(lease, "ready", state.now_s, "its workers are not in the layout")
        if busy and lease.deaths:
            lease.deaths = 0


def _release_the_leaving(state: State, out: list[AnyAction], job: Job) -> None:
    """Machines that are out of the layout that works now can go."""
    for lease in [state.leases[token] for token in job.leases]:
        if lease.leaving and lease.doomed and lease.state == "ready":
            leases.give_back(state, out, lease, lease.leaving)


# --- what is measured ----------------------------------------------------------------------------


def on_profiled(state: State, event: JobProfiled) -> None:
    """From now on layouts can be compared before they are tried."""
    job = state.jobs.get(event.job)
    if job is not None and not job.ended:
        job.profile = event.profile


def on_paced(state: State, event: Paced) -> None:
    job = state.jobs.get(event.job)
    if job is None or job.ended or event.generation < job.acknowledged:
        return
    for worker_id, microbatch_s in event.microbatch_s.items():
        if worker_id in job.workers:
            state.workers[worker_id].microbatch_s = microbatch_s


# --- silence -------------------------------------------------------------------------------------


def on_stall_alarm(state: State, out: list[AnyAction], job_id: str) -> None:
    """A layout was asked for and nothing is committed: ask again, then start all workers afresh."""
    job = state.jobs[job_id]
    if not job.active:
        return
    set_alarm(state, state.now_s + stall_s(state, job), "stall", job_id)
    silent_s = state.now_s - job.progress_at_s
    if job.layout is None or not job.serving or silent_s < stall_s(state, job):
        return
    if finished_computing(job):
        return
    job.stalls += 1
    job.urgent = True
    note(out, job_id, f"nothing was committed for {silent_s:.0f} s")
    if job.stalls % STALLS_MAX == 0:
        for worker in [state.workers[w] for w in job.workers]:
            stop(state, out, worker, "no step was committed for too long")
        for lease in [state.leases[token] for token in job.leases]:
            staff(state, out, lease)
    regroup(state, out, job)


def stall_s(state: State, job: Job) -> float:
    """Patience is a multiple of what a step takes."""
    return max(state.settings.stall_s, 20 * job.step_s)


def repeat_orders(state: State, out: list[AnyAction], job: Job) -> None:
    """After a restart it is not known which of these were carried out; doing them twice is fine."""
    for worker_id in job.workers:
        worker = state.workers[worker_id]
        if not worker.ready:
            lease = state.leases[worker.token]
            out.append(start_order(worker, lease, "the manager restarted: it may not have started"))
    if job.layout is not None and job.serving and job.acknowledged < job.generation:
        layout: Layout = job.layout
        why = "the manager restarted: the layout may not have been told"
        out.append(Regroup(job=job.id, layout=layout, when="now", because=why))
