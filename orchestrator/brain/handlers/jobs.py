"""The life of a job: admission, failures, budgets, its end, and the fate of its machines."""

import msgspec
from msgspec.structs import replace

from agent.messages import (
    BackupHeld,
    CheckpointCopied,
    CheckpointFailed,
    CheckpointWritten,
    CopyFailed,
    JobCompleted,
    JobOrder,
    Logged,
    OutputKept,
    Recalled,
    RecallFailed,
    RecordsDamaged,
    Rewound,
    StateSeen,
    SumsKept,
    TablesServed,
    WorkerFailed,
    WorkerLost,
)
from cloud.clock import HOUR_S
from cloud.model import Place
from orchestrator.actions import AnyAction, CloseJob, OpenJob, WriteCheckpoint
from orchestrator.brain.holdings import alike, leases, ledger, staffing
from orchestrator.brain.layouts import forecast, stragglers
from orchestrator.events import (
    JobBranched,
    JobCancelled,
    JobChanged,
    JobResumed,
    JobSubmitted,
    PartSetAside,
)
from orchestrator.formatting import duration, loss, memory, nth, plural, reason_of, usd, usd_enough
from orchestrator.state import (
    Account,
    Job,
    Lease,
    Moved,
    PoolState,
    State,
    Tables,
    consider,
    leases_of,
    move_job,
    note,
    set_alarm,
    set_stall_alarm,
    want_layout,
)
from orchestrator.validity import flaw_of_spec
from orchestrator.view import JobStatus

JOBS_MAX = 1000
REWINDS_KEPT = 8
CHEAPER = 0.03  # a running machine beats a starting one that is cheaper by no more than this
# Failures that another try would only repeat.
FATAL_KINDS = ("nan", "no_session", "refused", "unsupported")

GONE = (
    "a checkpoint of step {} was stored, and now all are gone or damaged: put its folder in checkpoints/ back, then "
    "resume; if there is none to put back, resume begins at step 0"
)
DAMAGED = (
    "{}: how far the job has come is not known any more. Put a copy of redis/ in its place while the house is down; or "
    "resume, which goes on from {}"
)
# A person can make room on the disk meanwhile; the idle machines cost money, so the wait is bounded.
STORED_S = 600.0
LISTED_S = 10.0  # in which places answer with their first lists
NEAR_STEPS, NEAR_S = 10.0, 2.0
WHY_CHARS_MAX = 500  # of an exception's text; its traceback has all of it
RESUME = "resume continues from the last committed step"  # only the keeper knows its number


class Least(msgspec.Struct, frozen=True, kw_only=True):
    """The money that must be left before anything is bought, and why."""

    usd: float
    because: str


def on_submitted(state: State, out: list[AnyAction], event: JobSubmitted) -> None:
    spec = event.spec
    if spec.job in state.jobs:
        return
    fewest = "" if spec.slots_min == spec.slots_max else f"{spec.slots_min} to "
    because = f"{spec.script} wants {fewest}{plural(spec.slots_max, 'worker')}"
    layouts, market = forecast.known_before(state, spec)
    job = Job(
        spec=spec,
        status="PENDING",
        because=because,
        history=[Moved(state.now_s, "PENDING", because)],
        submitted_at_s=state.now_s,
        account=Account(cap_usd=spec.budget_usd, at_s=state.now_s),
        layouts=layouts,
        market=market,
    )
    state.jobs[spec.job] = job
    state.live_jobs[spec.job] = None
    _forget_old_jobs(state)
    note(out, job.id, f"PENDING: {because}")
    refusal = _refusal(state, job)
    if refusal is not None:
        finish(state, out, job, "FAILED", refusal)
        return
    admit(state, out)


def _refusal(state: State, job: Job) -> str | None:
    """Return why this job can never run, with the arithmetic; `None` if it can."""
    spec = job.spec
    if flaw := flaw_of_spec(spec):
        return flaw
    most, manager = state.settings.usd_per_h_max, state.settings.manager_usd_per_h
    if most is not None and most <= manager:
        return (
            f"budget: ${most:.4f} may be spent per hour, and the manager's own machine alone costs "
            f"${manager:.4f}: raise budget.per_h_usd"
        )
    if state.stopping:
        return "the manager is shutting down; submit it again after `orchestrator up`"
    wall_s = state.now_s - state.skew_s
    late = spec.deadline_s is not None and spec.deadline_s <= wall_s
    if late and not job.active:  # one that has begun goes on, with the work that it has paid for
        return f"its deadline passed {duration(wall_s - (spec.deadline_s or 0.0))} ago"
    for name, account in (
        ("budget_usd of the job", job.account),
        ("budget.total_usd", state.account),
    ):
        refusal = _too_poor(state, job, account, name)
        if refusal is not None:
            return refusal
    return None


def _too_poor(state: State, job: Job, account: Account, name: str) -> str | None:
    """Return why the account cannot pay for the machines of one step; `None` if it can."""
    if account.cap_usd is None:
        return None
    spent = ledger.spent_usd(account, state.now_s)
    left = account.cap_usd - spent
    if left <= 0:
        return (
            f"budget: {name} is {usd(account.cap_usd)}, and {usd(spent)} are spent: it buys no step"
        )
    least = least_of(state, job, account)
    if least is None or least.usd <= left:
        return None
    step_s = (
        f"one of {job.progress.step_s:.2f} s"
        if job.progress.step_s
        else "the first, of unknown length"
    )
    return (
        f"budget: {name} is too small for one step ({step_s}): it has to be {least.because}; "
        f"${left:.4f} are left"
    )


def least_of(state: State, job: Job, account: Account | None = None) -> Least | None:
    """Return the money needed before a machine is bought for the job.

    It is `None` while no price is known.
    """
    cheapest = _cheapest(state, job.workers_min)
    if cheapest is None:
        return None
    usd_per_h, machines, place = cheapest
    terms = leases.terms_of(state, place)
    needed = ledger.needed_usd(state.settings, terms, usd_per_h)
    held_s = needed / usd_per_h * HOUR_S
    reserve_usd = ledger.reserve_usd(state.settings, terms.billing, usd_per_h)
    reserve_s = reserve_usd / usd_per_h * HOUR_S
    manager = 0.0 if account is None else account.manager_usd_per_h * held_s / HOUR_S
    meanwhile = f", ${manager:.4f} of it for the manager's own machine" if manager else ""
    because = (
        f"${needed + manager:.4f} at least{meanwhile}: the cheapest way to {plural(job.workers_min, 'slot')} is "
        f"{machines} at up to ${usd_per_h:.4f}/h, of which {held_s:.0f} s must be there when it is bought: "
        f"{reserve_s:.0f} s are held back until it is given back, and a launch may cost for {held_s - reserve_s:.0f} s "
        "before we hear of it"
    )
    return Least(usd=needed + manager, because=because)


def _cheapest(state: State, slots: int) -> tuple[float, str, Place] | None:
    """Return the lowest ceiling per hour for so many slots, the machines that have it, and where.

    It is `None` while no pool is known to sell.
    """
    found = []
    for known in state.pools.values():
        if not known.sold:
            continue
        kind = known.kind
        ceiling = ledger.ceiling_usd_per_h(
            kind, "spot", known.spot_usd_per_h, state.settings.disk_usd_per_h
        )
        count = -(-slots // kind.slots)
        found.append((ceiling * count, f"{count} x {kind.name}", known.pool.place))
    return min(found, default=None)


def admit(state: State, out: list[AnyAction]) -> None:
    """Start pending jobs in the order of submission, while `machines_max` leaves room."""
    if state.stopping or not state.pools:
        return
    taken = sum(state.jobs[j].spec.slots_max for j in state.live_jobs if state.jobs[j].active)
    for job in [state.jobs[j] for j in state.live_jobs]:
        if job.status != "PENDING":
            continue
        refusal = _refusal(state, job)
        if refusal is not None:
            finish(state, out, job, "FAILED", refusal)
            continue
        if taken and taken + job.spec.slots_max > state.settings.machines_max:
            return
        taken += job.spec.slots_max
        move_job(state, out, job, "PROVISIONING", f"its turn has come: {_to_buy(job)}")
        out.append(OpenJob(order=order_of(job), because=f"{job.id} may start"))
        job.progress.at_s = state.now_s
        set_stall_alarm(state, job, state.now_s + stragglers.stall_s(state, job))
        consider(state, job)


def _to_buy(job: Job) -> str:
    if job.layouts.microbatches or job.spec.slots_max == 1:
        return "machines are bought for it"
    return f"machines for {plural(job.spec.slots_max, 'slot')} are bought; its first worker tells how many it can use"


def order_of(job: Job) -> JobOrder:
    spec = job.spec
    return JobOrder(
        job=spec.job,
        script=spec.script,
        script_sha=spec.script_sha,
        argv=spec.argv,
        nan=spec.nan,
        backup_every_steps=spec.backup_every_steps,
        sums=spec.sums,
        checkpoint_every_s=spec.checkpoint_every_s,
        max_replay_s=spec.max_replay_s,
        tail_s=spec.tail_s,
        checkpoints_kept=spec.checkpoints_kept,
        from_url=spec.from_url,
        begins_with=spec.slots_min,
        microbatches=job.layouts.microbatches if job.progress.step else 0,
        output_files=spec.output_files,
        output_bytes=spec.output_bytes,
        exact=spec.exact,
        transport=spec.transport,
    )


# --- ends ----------------------------------------------------------------------------------------


def drain(state: State, out: list[AnyAction], job: Job, to: JobStatus, because: str) -> None:
    """Save the job's state, then end it; a job without state ends at once."""
    if job.ended or job.status == "DRAINING":
        return
    if job.status in ("PENDING", "PROVISIONING") or job.layouts.current is None:
        finish(state, out, job, to, because)
        return
    job.ending, job.progress.drained_from = (to, because), job.progress.step
    move_job(state, out, job, "DRAINING", because)
    out.append(WriteCheckpoint(job=job.id, because=f"before it ends: {because}"))
    for token in job.leases:
        ledger.start_draining(state, state.leases[token])
    # Without the sums the keeper needs a whole state, and loses the steps since its last one if none
    # arrives; so it gets more time.
    part = 0.25 if job.progress.sums_kept else 0.75
    job.drain_due_s = state.now_s + part * state.settings.drain_s
    set_alarm(state, job.drain_due_s, "drain", job.id)


def on_drain_alarm(state: State, out: list[AnyAction], job_id: str) -> None:
    job = state.jobs.get(job_id)
    if job is None or state.now_s < job.drain_due_s:
        return
    if job.status == "DRAINING" and job.ending is not None:
        finish(state, out, job, *job.ending)


def finish(state: State, out: list[AnyAction], job: Job, to: JobStatus, because: str) -> None:
    """End the job: close it, stop its workers, and pass on or give back its machines."""
    opened = job.status != "PENDING" or job.spec.from_url
    move_job(state, out, job, to, because)
    job.ending, job.ended_at_s, job.market.waiting, job.layouts.unfit = None, state.now_s, "", ""
    alike.lacks_nothing(job)
    state.live_jobs.pop(job.id, None)
    if opened:
        out.append(CloseJob(job=job.id, because=f"{to}: {because}"))
    for worker in [state.workers[w] for w in job.workers]:
        staffing.stop(state, out, worker, f"{job.id} has ended")
    (
        job.layouts.current,
        job.layouts.plan,
        job.layouts.serving,
        job.layouts.urgent,
        job.layouts.settle_at_s,
    ) = None, None, {}, False, None
    ledger.charge_traffic(state, job, 0.0, 0.0)
    admit(state, out)
    for lease in leases_of(state, job):
        _pass_on(state, out, lease, f"{job.id} has ended and nobody needs it")


def _pass_on(state: State, out: list[AnyAction], lease: Lease, because: str) -> None:
    """Hand a usable machine to the first job that has room for it; else give it back."""
    if lease.usable and lease.state != "noticed" and not lease.released:
        for job_id in state.live_jobs:
            heir = state.jobs[job_id]
            spared = _spared(state, heir, lease)
            if spared is None or not heir.active or lease.draining_since_s is not None:
                continue
            if not alike.may_hold(heir, alike.kind_of(state, heir), lease):
                continue
            if not leases.free_to_bring(state, heir, lease.pool):
                continue  # the job may still buy there, if that is worth the transfer
            terms = leases.terms_of(state, lease.pool.place)
            if ledger.affordable(state, heir, terms, lease.ceiling_usd_per_h):
                del state.jobs[lease.job].leases[lease.token]
                ledger.hand_over(state, lease, heir)
                heir.leases[lease.token] = None
                note(out, lease.machine_id, f"works for {heir.id} now")
                why = f"{lease.machine_id} is there for {heir.id} before it has started"
                for other in spared:
                    leases.give_back(state, out, other, why)
                staffing.staff(state, out, lease)
                return
    leases.give_back(state, out, lease, because)


def _spared(state: State, heir: Job, lease: Lease) -> list[Lease] | None:
    """Return the starting machines that the heir can cancel if it gets this machine.

    The newest come first, until there is room for this machine; none of them is much cheaper than
    it, and together they have no more slots. `None` means that there is no room.
    """
    stays = [other for other in leases_of(state, heir) if other.stays]
    room = heir.workers_max - sum(other.type.slots for other in stays)
    spared: list[Lease] = []
    most_usd = lease.usd_per_h / (lease.type.slots * lease.type.speed)
    for other in reversed(stays):
        if room >= lease.type.slots:
            break
        dear = other.usd_per_h / (other.type.slots * other.type.speed) >= most_usd * (1 - CHEAPER)
        small = sum(e.type.slots for e in spared) + other.type.slots <= lease.type.slots
        if other.state in ("intended", "pending", "booting") and dear and small:
            spared.append(other)
            room += other.type.slots
    return spared if room >= lease.type.slots else None


def set_aside(state: State, out: list[AnyAction], event: PartSetAside) -> None:
    """Forget all values of a job or a pool, because a turn fails on them, and go on without.

    The job has failed, and can be resumed: what it has committed is with the keeper. Its machines
    are given back as ones that no lease claims. A pool is not bought from until it is sold anew.
    """
    note(out, event.name, f"set aside, because the manager cannot decide with it: {event.why}")
    if event.part == "pool":
        known = state.pools.get(event.name)
        if known is not None:
            fresh = PoolState(pool=known.pool, kind=known.kind, sold=False, leases=known.leases)
            state.pools[event.name] = fresh
        return
    for worker in [w for w in state.workers.values() if w.job == event.name]:
        del state.workers[worker.id]
    mine = [lease for lease in state.leases.values() if lease.job == event.name]
    for lease in mine:
        leases.disown(state, out, lease, f"{event.name} is set aside")
    for names in (state.live_jobs, state.unsettled, state.considered):
        names.pop(event.name, None)
    job = state.jobs.get(event.name)
    if job is None:
        return
    because = f"the manager cannot decide with what it knows of it: {event.why}; {RESUME}"
    spent_usd = ledger.forget(state, job, mine)
    account = Account(cap_usd=job.spec.budget_usd, at_s=state.now_s, spent_usd=spent_usd)
    state.jobs[event.name] = Job(
        spec=job.spec,
        status="FAILED",
        because=because,
        history=[Moved(state.now_s, "FAILED", because)],
        submitted_at_s=job.submitted_at_s,
        ended_at_s=state.now_s,
        account=account,
    )
    out.append(CloseJob(job=event.name, because=because))


def on_completed(state: State, out: list[AnyAction], event: JobCompleted) -> None:
    job = state.jobs.get(event.job)
    if job is None or job.ended:
        return
    steps = max(0, event.step - job.progress.step)
    step_usd = job.layouts.steps_usd.get(job.layouts.worked, 0.0)
    ledger.charge_traffic(state, job, steps * step_usd, 0.0)
    job.progress.step, job.progress.loss, job.progress.export_uri = (
        max(job.progress.step, event.step),
        event.loss,
        event.export_uri,
    )
    finish(state, out, job, "SUCCEEDED", ": ".join(filter(None, (event.why, _done(job, event)))))


def _done(job: Job, event: JobCompleted) -> str:
    if 0 < job.progress.steps_total < event.step:
        return (
            f"nothing was left to do: what it began from has {plural(event.step, 'step')}, and its script asks for "
            f"{job.progress.steps_total}"
        )
    if event.step < job.progress.steps_total:
        ended = "its training" if job.layouts.tables is not None else "its script's loop"
        return (
            f"{ended} ended after {event.step} of {plural(job.progress.steps_total, 'step')} had trained: all of these "
            f"are committed, loss {loss(event.loss)}"
        )
    return f"all of {plural(event.step, 'step')} committed, loss {loss(event.loss)}"


def on_worker_failed(state: State, out: list[AnyAction], event: WorkerFailed) -> None:
    """Count a failure of the script itself, and try again or fail the job.

    The same failure on several workers at the same step counts once.
    """
    worker = state.workers.get(event.worker)
    if worker is None:
        return
    job, lease = state.jobs[worker.job], state.leases[worker.token]
    staffing.stop(state, out, worker, f"the script failed ({event.kind})")
    if not job.active:
        return
    what = _failure(job, event)
    if event.kind in FATAL_KINDS:
        job.trouble.failures += _is_new_failure(job, worker.started_at_s)
        finish(state, out, job, "FAILED", what)
        return
    repeats = event.kind in ("exception", "exit")
    if _count_failure(state, out, job, what, worker.started_at_s, repeats=repeats):
        delay_s = 2.0 ** min(job.trouble.failures, 6)
        lease.slot_free_at_s[worker.slot] = state.now_s + delay_s
        set_alarm(state, state.now_s + delay_s, "staff", lease.token)
        want_layout(state, job)


def _is_new_failure(job: Job, started_at_s: float) -> bool:
    """Return whether the worker began after the last failure, or steps were committed since."""
    return started_at_s > job.trouble.failed_at_s or job.progress.step > job.trouble.failed_step


def _count_failure(
    state: State, out: list[AnyAction], job: Job, what: str, started_at_s: float, *, repeats: bool
) -> bool:
    """Count a failure of the script; return whether the job goes on.

    `repeats` says that before the first step the failure would only repeat, so the job fails then.
    """
    again = _is_new_failure(job, started_at_s)
    if again:
        job.trouble.failures += 1
        job.trouble.failed_at_s, job.trouble.failed_step = state.now_s, job.progress.step
    if job.trouble.failures > job.spec.max_failures:
        most = job.spec.max_failures
        finish(
            state,
            out,
            job,
            "FAILED",
            f"{what} (the {nth(job.trouble.failures)} failure, and max_failures allows {most})",
        )
    elif job.progress.step == 0 and repeats:
        finish(state, out, job, "FAILED", f"{what} (no step was committed: it would only repeat)")
    elif again:
        _tried_again(state, out, job, what)
    return job.active


def on_crash(state: State, out: list[AnyAction], event: WorkerLost) -> None:
    """Note that a worker's process crashed while its machine lives.

    Crashes near the same step on two machines count as a failure of the script. Until then the
    machine may be at fault, so after two crashes it is given back and a different machine is tried.
    """
    job, lease = state.jobs[event.job], leases.lease_of(state, event.machine_id)
    if not job.active:
        return
    if job.trouble.crash_step < 0 or abs(job.progress.step - job.trouble.crash_step) > _near_steps(
        job
    ):
        job.trouble.crashes = {}
    job.trouble.crash_step = job.progress.step
    job.trouble.crashes[event.machine_id] = job.trouble.crashes.get(event.machine_id, 0) + 1
    if lease is not None:
        lease.deaths = lease.crashes = 0  # the machine is not known to be at fault
    if len(job.trouble.crashes) > 1:
        what = _crash(job, event)
        _count_failure(state, out, job, what, state.now_s - event.lived_s, repeats=True)
    elif job.trouble.crashes[event.machine_id] > 1 and lease is not None:
        why = f"{event.signal} twice near step {job.progress.step}: another machine shows if it is the script"
        leases.give_back(state, out, lease, why)
        consider(state, job)
    else:
        note(out, event.machine_id, f"{event.worker} crashed there: {_crash(job, event)}")


def _near_steps(job: Job) -> float:
    """Return how many steps apart two crashes may be and count as near the same step.

    It is more than 0 because reports of steps come late.
    """
    return max(NEAR_STEPS, NEAR_S / job.progress.step_s) if job.progress.step_s else NEAR_STEPS


def _crash(job: Job, event: WorkerLost) -> str:
    many = (
        f" on {plural(len(job.trouble.crashes), 'machine')}" if len(job.trouble.crashes) > 1 else ""
    )
    where = f" at {event.detail}" if event.detail else ""
    said = " / ".join(event.printed)[-WHY_CHARS_MAX:]
    last = f"; it printed last: {said}" if said else ""
    return (
        f"the process crashed with {event.signal} near step {job.progress.step}{many}{where}{last}"
    )


def _failure(job: Job, event: WorkerFailed) -> str:
    """Say which failure it was, in or after which step, and the last line of its traceback."""
    last = reason_of(event.detail)[:WHY_CHARS_MAX]
    if event.step is not None:
        return f"{event.kind} in step {event.step} (the {nth(event.step + 1)}): {last}"
    if not job.progress.step:
        return f"{event.kind}: {last}"
    where = "" if job.layouts.tables is not None else " outside of the loop"
    return f"{event.kind}{where}, {plural(job.progress.step, 'step')} committed: {last}"


def _tried_again(state: State, out: list[AnyAction], job: Job, what: str) -> None:
    """Note the failure; while the job does not run, its status line shows it as the reason."""
    because = f"failure {job.trouble.failures} of {job.spec.max_failures} allowed: {what}"
    if job.status == "RUNNING" and job.layouts.urgent:
        move_job(state, out, job, "RECOVERING", because)
        return
    if job.status != "RUNNING":
        job.because = because
    note(out, job.id, because)


def on_cancelled(state: State, out: list[AnyAction], event: JobCancelled) -> None:
    job = state.jobs.get(event.job)
    if job is None or job.ended:
        return
    drain(
        state,
        out,
        job,
        "CANCELLED",
        f"cancelled by {event.by}; {RESUME}",
    )


def on_resumed(state: State, out: list[AnyAction], event: JobResumed) -> None:
    """Resume an ended job from its last commit, with its failures forgiven."""
    job = state.jobs.get(event.job)
    if job is None or job.status not in ("FAILED", "CANCELLED"):
        return
    if state.stopping:
        note(out, job.id, "not resumed: the manager is shutting down")
        return
    job.trouble.failures, job.trouble.stalls, job.trouble.worn, job.trouble.unread = 0, 0, 0, ""
    job.market.forgiven = job.market.preemptions
    job.lain_s += state.now_s - (job.ended_at_s or state.now_s)
    job.trouble.failed_at_s, job.trouble.failed_step, job.ended_at_s = -1.0, -1, None
    job.trouble.crash_step, job.trouble.crashes = -1, {}
    job.trouble.unstored_at_s = None
    move_job(state, out, job, "PENDING", f"resumed by {event.by} from step {job.progress.step}")
    state.live_jobs[job.id] = None
    admit(state, out)


def on_branched(state: State, out: list[AnyAction], event: JobBranched) -> None:
    """Begin a job like another one, from a stored state; the other one stays unchanged.

    A deadline that has passed is left out, because the new job could not keep it.
    """
    job = state.jobs.get(event.job)
    if job is None or event.name in state.jobs:
        return
    if state.stopping:
        note(out, job.id, f"{event.name} is not begun: the manager is shutting down")
        return
    note(out, job.id, f"its step {event.step} is where {event.name} begins, asked by {event.by}")
    over = (job.spec.deadline_s or 0.0) <= state.now_s - state.skew_s
    spec = replace(
        job.spec,
        job=event.name,
        from_url=event.from_url,
        deadline_s=None if over else job.spec.deadline_s,
    )
    on_submitted(state, out, JobSubmitted(at_s=event.at_s, spec=spec))
    begun = state.jobs.get(event.name)
    if begun is not None and begun.status == "PENDING":
        why = f"step {event.step} of {job.id} is kept until the turn of {event.name} comes"
        out.append(OpenJob(order=order_of(begun), because=why))


def on_changed(state: State, out: list[AnyAction], event: JobChanged) -> None:
    """Give a job other bounds, unless they are over already; an ended job may be resumed then."""
    job = state.jobs.get(event.job)
    if job is None:
        return
    budget_usd = job.spec.budget_usd if event.budget_usd == "kept" else event.budget_usd
    deadline_s = job.spec.deadline_s if event.deadline_s == "kept" else event.deadline_s
    owed_usd = ledger.spent_usd(job.account, state.now_s)
    owed_usd += ledger.committed_usd(job.account, state.now_s)
    if isinstance(event.budget_usd, int | float) and event.budget_usd < owed_usd:
        note(
            out,
            job.id,
            f"its budget stays as it was: {usd_enough(owed_usd)} are spent or reserved, more than the "
            f"{usd(event.budget_usd)} that {event.by} asked for",
        )
        return
    wall_s = state.now_s - state.skew_s
    if isinstance(event.deadline_s, int | float) and event.deadline_s <= wall_s:
        too = "" if event.budget_usd == "kept" else "; its budget is not changed, either"
        note(out, job.id, f"its deadline stays as it was: that of {event.by} has passed{too}")
        return
    job.spec = replace(job.spec, budget_usd=budget_usd, deadline_s=deadline_s)
    job.account.cap_usd = budget_usd
    budget = "no budget" if budget_usd is None else f"a budget of {usd(budget_usd)}"
    left_s = None if deadline_s is None else deadline_s - wall_s
    deadline = "no deadline" if left_s is None else f"a deadline in {duration(left_s)}"
    ends = "; it ends all the same: resume it then" if job.status == "DRAINING" else ""
    note(out, job.id, f"has {budget} and {deadline} from now on, set by {event.by}{ends}")
    if not job.ended:
        check_budgets(state, out)
        consider(state, job)


def check_budgets(state: State, out: list[AnyAction]) -> None:
    """Drain the jobs whose budget runs out, while the reserve still pays for stopping.

    After a time that no machine outlives, the first lists are awaited, because what is charged
    until then is too much.
    """
    if state.away is not None and state.now_s < state.away[1] + LISTED_S:
        return
    dry = ledger.runs_out(state, state.account)
    for job in [state.jobs[j] for j in state.live_jobs]:
        if not job.leases:
            _give_up_if_poor(state, out, job)
            continue
        if dry or ledger.runs_out(state, job.account):
            account = state.account if dry else job.account
            spent = ledger.spent_usd(account, state.now_s)
            why = (
                f"budget: ${spent:.4f} of ${account.cap_usd or 0.0:.4f} are spent and the rest is needed "
                f"to give the machines back; {RESUME}"
            )
            drain(state, out, job, "FAILED", why)


def _give_up_if_poor(state: State, out: list[AnyAction], job: Job) -> None:
    """Fail a job that holds no machine and cannot buy one any more, since waiting is useless."""
    refusal = _refusal(state, job) if job.active else None
    if refusal is not None:
        why = f"{refusal}; {RESUME}"
        finish(state, out, job, "FAILED", why)


def shut_down(state: State, out: list[AnyAction], by: str) -> None:
    state.stopping = True
    for job in [state.jobs[j] for j in state.live_jobs]:
        why = f"shut down by {by}; {RESUME}"
        drain(state, out, job, "CANCELLED", why)
    for provider in state.places.values():
        provider.listing_wanted = True
        provider.clean_at_s = -1.0


# --- what the keeper says ------------------------------------------------------------------------


def on_backup_held(state: State, event: BackupHeld) -> None:
    job = state.jobs.get(event.job)
    if job is not None:
        job.progress.backup_step = max(job.progress.backup_step, event.step)


def on_logged(state: State, event: Logged) -> None:
    """Keep the logged numbers of the newest report; a repeated step replaces the earlier one."""
    job = state.jobs.get(event.job)
    if job is not None:
        job.progress.logged, job.progress.logged_step = event.numbers, event.step


def on_state_seen(state: State, event: StateSeen) -> None:
    """Keep what a script keeps, in words, as it was told last; also after the job's end."""
    job = state.jobs.get(event.job)
    if job is not None:
        progress = job.progress
        progress.state, progress.state_count = event.entries, event.count
        progress.state_step = event.step


def on_tables_served(state: State, event: TablesServed) -> None:
    """Keep who serves and computes in a job of served tables, as it was told last."""
    job = state.jobs.get(event.job)
    if job is not None:
        job.layouts.tables = Tables(
            stage=event.stage, partitions=event.partitions, nodes=event.nodes
        )


def on_output_kept(state: State, event: OutputKept) -> None:
    """Record which output files are kept, also after the job's end, when the last may arrive."""
    job = state.jobs.get(event.job)
    if job is not None:
        job.progress.output, job.progress.output_files = event.newest, event.files
        job.progress.output_bytes = event.total_bytes


def on_sums_kept(state: State, out: list[AnyAction], event: SumsKept) -> None:
    job = state.jobs.get(event.job)
    if job is None or job.ended:
        return
    progress = job.progress
    if (progress.sums_kept, progress.state_stored) == (event.kept, event.stored):
        return
    if not progress.sums_kept:
        progress.unkept_step = progress.step
    progress.sums_kept, progress.state_stored = event.kept, event.stored
    if event.stored:
        note(
            out,
            job.id,
            "the state goes straight from the workers to storage.checkpoint_url, because on its way through the manager's "
            "machine it would hold steps up: if all machines go at once, about "
            f"{duration(job.spec.max_replay_s)} at most are trained again (job.max_replay_s)",
        )
        return
    if event.kept:
        few = ("no machine that stays has the model", "one machine has the model")
        why = few[event.copies] if event.copies < len(few) else "their size is not known yet"
        note(out, job.id, f"gradients go to the manager's machine with every step again: {why}")
        return
    lone = event.copies == 1
    why = memory(event.sum_bytes) if lone or job.spec.sums != "never" else 'job.sums = "never"'
    those = "its machine is lost" if lone else f"all {event.copies} machines go at once"
    note(
        out,
        job.id,
        f"steps do not wait any more until their gradients are on the manager's machine ({why}): the state goes there "
        f"beside the training, and if {those} the steps since are trained again",
    )


def on_checkpoint_written(state: State, out: list[AnyAction], event: CheckpointWritten) -> None:
    job = state.jobs.get(event.job)
    if job is None:
        return
    job.progress.checkpoint_step = max(job.progress.checkpoint_step, event.step)
    if job.ended or job.status == "DRAINING":  # steps went on until the keeper closed it
        job.progress.step = max(job.progress.step, event.step)
    if (
        job.status == "DRAINING"
        and job.ending is not None
        and event.step >= job.progress.drained_from
        and event.at_s + state.skew_s >= job.history[-1].at_s
    ):
        finish(state, out, job, *job.ending)


def on_checkpoint_failed(state: State, out: list[AnyAction], event: CheckpointFailed) -> None:
    job = state.jobs.get(event.job)
    if job is None:
        return
    if job.active and 0 < job.progress.steps_total <= event.step:
        _unstored(state, out, job, event.error)
        return
    note(
        out, job.id, f"the checkpoint of step {event.step} failed: {event.error}; training goes on"
    )


def _unstored(state: State, out: list[AnyAction], job: Job, error: str) -> None:
    """Keep trying to store the finished model, and fail the job if that does not work in time.

    Nothing is left to compute, and the result must not be lost, so the keeper still holds it after
    the job has ended.
    """
    what = f"all of {plural(job.progress.steps_total, 'step')} are done, but the trained model cannot be stored: {error}"
    if job.trouble.unstored_at_s is None:
        job.trouble.unstored_at_s = state.now_s
        job.because = f"{what}; it is tried again for {STORED_S / 60:.0f} min"
        note(out, job.id, job.because)
    elif state.now_s >= job.trouble.unstored_at_s + STORED_S:
        kept = "its last state stays in the memory of the manager's machine"
        finish(state, out, job, "FAILED", f"{what}; {kept}: see that it can be stored, then resume")


def on_copied(state: State, out: list[AnyAction], event: CheckpointCopied) -> None:
    _say(state, out, event.job, f"step {event.step} was copied to {event.uri}")


def on_copy_failed(state: State, out: list[AnyAction], event: CopyFailed) -> None:
    goes_on = "" if (job := state.jobs.get(event.job)) and job.ended else "training goes on, "
    where = f"it is {'' if event.on_disk else 'not '}on this machine's disk, {goes_on}"
    why = f"the copy of step {event.step} failed: {event.error}; {where}and the copy is tried again"
    _say(state, out, event.job, why)


def on_recalled(state: State, out: list[AnyAction], event: Recalled) -> None:
    _say(state, out, event.job, f"goes on from {event.because}")
    _set_unread(state, event.job, "")
    if (job := state.jobs.get(event.job)) and job.spec.from_url and not job.progress.step:
        job.progress.begun_step = event.step


def on_recall_failed(state: State, out: list[AnyAction], event: RecallFailed) -> None:
    why = f"what is stored of the job cannot be read: {event.error}"
    _say(state, out, event.job, f"{why}; it is tried again")
    _set_unread(state, event.job, why)


def _set_unread(state: State, job_id: str, why: str) -> None:
    if job := state.jobs.get(job_id):
        job.trouble.unread = why


def on_records_damaged(state: State, out: list[AnyAction], event: RecordsDamaged) -> None:
    """Fail the job because its records are damaged, going back to the last checkpoint.

    A person must resume it, because the job may otherwise pay again for steps that were done.
    """
    job = state.jobs.get(event.job)
    if job is None or job.ended:
        return
    saved = job.progress.checkpoint_step
    where = f"the checkpoint of step {saved}" if saved else "step 0, as there is no checkpoint yet"
    job.progress.steps_lost += max(0, job.progress.step - saved)
    job.progress.step, job.progress.backup_step = (
        min(job.progress.step, saved),
        min(job.progress.backup_step, saved),
    )
    finish(state, out, job, "FAILED", DAMAGED.format(event.error, where))


def _say(state: State, out: list[AnyAction], job_id: str, why: str) -> None:
    """Note a sentence about a job, unless the job has been forgotten."""
    if job_id in state.jobs:
        note(out, job_id, why)


def on_rewound(state: State, out: list[AnyAction], event: Rewound) -> None:
    """Go back to `to_step`, the only way a job loses steps; late reports are fenced off.

    A report that comes twice counts once, and one that the job has overtaken does not count. If
    there were checkpoints and none is left (the folder may not be mounted), the job fails, so that
    a person decides whether to pay for all steps again.
    """
    job = state.jobs.get(event.job)
    mark = (event.at_s, event.from_step, event.to_step)
    if job is None or job.ended or mark in job.progress.rewound or event.to_step >= event.from_step:
        return
    if job.progress.step > event.from_step or job.progress.heard_at_s > event.at_s:
        return
    job.progress.rewound.append(mark)
    del job.progress.rewound[:-REWINDS_KEPT]
    lost, saved = event.from_step - event.to_step, job.progress.checkpoint_step
    job.progress.steps_lost += lost
    job.progress.step = min(job.progress.step, event.to_step)
    job.progress.backup_step = min(job.progress.backup_step, event.to_step)
    job.progress.checkpoint_step = min(job.progress.checkpoint_step, event.to_step)
    job.progress.drained_from = min(job.progress.drained_from, event.to_step)
    job.progress.fence_generation = job.layouts.generation
    if job.layouts.unlike_step is not None:  # what it does again is done by other machines
        job.layouts.unlike_step = min(job.layouts.unlike_step, event.to_step)
    job.layouts.urgent = job.layouts.urgent or bool(job.layouts.serving)
    kept = "what the keeper had in memory or on its disk"
    lost_with = kept if job.progress.sums_kept else "all machines that had the model"
    note(
        out,
        job.id,
        f"{plural(lost, 'step')} lost with {lost_with}: back to step {event.to_step}",
    )
    if saved and not event.to_step:
        finish(state, out, job, "FAILED", GONE.format(saved))
    else:
        want_layout(state, job)


def _forget_old_jobs(state: State) -> None:
    """Forget the oldest ended jobs beyond `JOBS_MAX`; their cost stays in the whole account."""
    if len(state.jobs) <= JOBS_MAX:
        return
    old = [j for j, job in state.jobs.items() if job.ended and not job.leases]
    old.sort(key=lambda j: state.jobs[j].ended_at_s or 0.0)
    for job_id in old[: len(state.jobs) - JOBS_MAX]:
        del state.jobs[job_id]
