"""Which workers of a job are in its layout, and when the layout changes.

The loss of a worker asks at once for a layout without it. A joining worker waits for a step
boundary; workers that arrive shortly after each other join together. Generations only grow.
"""

from contextlib import suppress
from statistics import median

import msgspec

from agent.layout import Layout
from agent.messages import (
    UNRECORDED,
    LossCause,
    Progress,
    Regrouped,
    When,
    WorkerLost,
    WorkerProving,
    WorkerReady,
)
from cloud.clock import HOUR_S
from cloud.model import InstanceType, Pool
from orchestrator.actions import AnyAction, Regroup, StopWorker
from orchestrator.brain.handlers import jobs
from orchestrator.brain.holdings import alike, leases, ledger, staffing
from orchestrator.brain.layouts import forecast, layout_choice, speeds, stragglers
from orchestrator.brain.layouts.layout_choice import Choice, Question, Seat
from orchestrator.formatting import plural
from orchestrator.planner import transition
from orchestrator.planner.errors import MorphError
from orchestrator.planner.plans import LayoutPlan
from orchestrator.planner.transition import Situation
from orchestrator.state import (
    Job,
    State,
    Worker,
    consider,
    finished_computing,
    leases_of,
    move_job,
    move_lease,
    newcomer,
    note,
    set_alarm,
    set_stall_alarm,
    want_layout,
)

SETTLED_STEPS = 10  # after a change: by then nine tenths of the average are of the new layout
DEATHS_MAX = 4
BACKOFF_S = 1.0
BACKOFF_DOUBLINGS_MAX = 6
STALLS_MAX = 3  # then all workers are restarted, and get twice as long
FRESH_MAX = 4  # restarts of all workers without a step
WORN_MAX = 3
WORN_S = 300.0  # a network that is cut kills workers as well, and recovers
WORN_UNTRIED_MAX = 2  # before a script's first step: one worn machine may be the machine's fault
CRASHES = ("connection", "exited")  # a network that is cut leads to other causes as well
READY_S_MAX = 3600.0
RECOVERIES_MAX = 200
PAUSES_MAX = 32
GAIN_MIN = 1.03  # predictions are not more exact than that
RETHINK_S = 15.0  # until a refused change is considered again
STEPPING = ("RUNNING", "DRAINING")  # the statuses of a job whose steps may be sending

# --- workers that come and go -----------------------------------------------------------------


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
    job.layouts.exact = event.exact
    if alike.hear(state, out, worker, event.hardware):
        return
    known = (event.uncuttable, event.stages_max)
    told = event.uncuttable != UNRECORDED and known != (
        job.layouts.uncuttable,
        job.layouts.stages_max,
    )
    if told and not (job.layouts.taken_back and not event.uncuttable):
        job.layouts.uncuttable, job.layouts.stages_max = known
        if (
            job.layouts.uncuttable
            and job.layouts.current is not None
            and job.layouts.current.depth > 1
        ):
            _uncut(state, out, job)
        else:
            newcomer(state, job)  # the model may be cut now, and only this event says so
    if worker.ready or not job.active:
        return
    worker.ready = True
    first = not job.progress.steps_total
    job.layouts.microbatches = event.microbatches
    job.progress.steps_total = event.steps_total
    if first and job.workers_min < job.spec.slots_min:
        note(out, job.id, _too_many(job))
    job.layouts.state_bytes, job.layouts.unbuilt = event.state_bytes, event.unbuilt
    job.layouts.exchange = event.exchange
    newcomer(state, job)
    if not job.layouts.serving:
        want_layout(state, job)


def on_worker_proving(state: State, out: list[AnyAction], event: WorkerProving) -> None:
    """Note that the worker reached its loop in time, so its start alarm no longer applies.

    How long its proof takes depends on the job's steps.
    """
    worker = state.workers.get(event.worker)
    if worker is not None and not alike.hear(state, out, worker, event.hardware):
        worker.proving = True


def _uncut(state: State, out: list[AnyAction], job: Job) -> None:
    """Ask at once for a layout of depth 1, because the model cannot be cut any more.

    The recorded graph does not match the step in flight, so no worker can run that step in stages,
    and all workers wait.
    """
    job.layouts.taken_back = True
    if job.status == "RUNNING":
        move_job(state, out, job, "RECOVERING", f"it is cut no more: {job.layouts.uncuttable}")
    job.layouts.urgent = True
    want_layout(state, job)


def _too_many(job: Job) -> str:
    return (
        f"slots_min is {job.spec.slots_min}, but a step has {job.layouts.microbatches} microbatch{'es' * (job.layouts.microbatches != 1)}, "
        f"so no more than {plural(job.workers_max, 'worker')} can compute: it trains with so many; "
        "lower slots_min, or cut the batch into more microbatches"
    )


def on_settle_alarm(state: State, job_id: str) -> None:
    job = state.jobs.get(job_id)
    if (
        job is not None
        and job.layouts.settle_at_s is not None
        and state.now_s >= job.layouts.settle_at_s
    ):
        job.layouts.settle_at_s = None
        want_layout(state, job)


def on_worker_alarm(state: State, out: list[AnyAction], worker_id: str) -> None:
    """Give up a worker that is not ready in time; its successor gets more time.

    The job fails if a worker had the longest possible time and no step was ever made.
    """
    worker = state.workers.get(worker_id)
    if worker is not None and not worker.ready and not worker.proving:
        job, had_s = state.jobs[worker.job], state.now_s - worker.started_at_s
        job.trouble.ready_s = min(max(staffing.ready_s(state, job), 2 * had_s), READY_S_MAX)
        why = f"not ready after {had_s:.0f} s: its script has not come to session.steps"
        if had_s >= READY_S_MAX and not job.progress.step:
            what = f"{worker.id} was {why}; it hangs, or has to load for longer than that"
            jobs.finish(state, out, job, "FAILED", f"{what}: try it alone")
        else:
            _lose_worker(state, out, worker, why)


def on_worker_lost(state: State, out: list[AnyAction], event: WorkerLost) -> None:
    worker, job = state.workers.get(event.worker), state.jobs.get(event.job)
    if job is not None and event.signal:
        _on_crash(state, out, event)
    elif job is not None and (worker is not None or event.owed_state):
        _on_loss(state, out, event, job)


def _on_crash(state: State, out: list[AnyAction], event: WorkerLost) -> None:
    """Remove the crashed worker, if the job still has it, and count the crash.

    Its connection may have broken earlier; then the job already continues without it.
    """
    worker, job = state.workers.get(event.worker), state.jobs[event.job]
    if worker is not None:
        _lose_worker(state, out, worker, f"crashed with {event.signal}", event.cause)
        want_layout(state, job)
    jobs.on_crash(state, out, event)


def _on_loss(state: State, out: list[AnyAction], event: WorkerLost, job: Job) -> None:
    worker = state.workers.get(event.worker)
    if worker is not None:
        detail = f": {event.detail}" if event.detail else ""
        _lose_worker(state, out, worker, f"lost ({event.cause}{detail})", event.cause)
    if event.owed_state and job.layouts.serving:
        job.layouts.urgent = True  # only a new layout wakes the workers that wait in this one
    want_layout(state, job)


def _lose_worker(
    state: State, out: list[AnyAction], worker: Worker, because: str, cause: LossCause | None = None
) -> None:
    """Remove a lost worker and start a fresh one in its slot, since its machine may well live.

    A machine on which workers keep dying is given back instead. Workers that lived at the same time
    count as one death.
    """
    lease, job = state.leases[worker.token], state.jobs[worker.job]
    why = f"{worker.id} on {lease.machine_id} {because}"
    worked = lease.state == "working" and job.progress.step > lease.died_step
    staffing.stop(state, out, worker, because)
    if not (job.active and lease.usable) or finished_computing(job):
        return
    if job.layouts.urgent and job.status == "RUNNING":
        move_job(state, out, job, "RECOVERING", why)
    if worked or worker.started_at_s >= lease.died_at_s:
        earlier = (0, 0) if worked else (lease.deaths, lease.crashes)
        lease.deaths, lease.crashes = earlier[0] + 1, earlier[1] + (cause in CRASHES)
        lease.died_at_s = state.now_s
    lease.died_step = job.progress.step
    backoff_s = BACKOFF_S * 2 ** min(lease.deaths - 1, BACKOFF_DOUBLINGS_MAX)
    lease.slot_free_at_s[worker.slot] = state.now_s + backoff_s
    if lease.deaths >= DEATHS_MAX:
        worn = f"workers keep dying on {lease.machine_id}"
        leases.penalise(state, out, lease, "WornOut", worn)
        leases.give_back(state, out, lease, f"workers keep dying there: {why}")
        job.trouble.worn += cause != "machine"
        _wear(state, out, job, why, crashed=lease.crashes == lease.deaths)
        return
    note(out, lease.machine_id, f"{why}; a fresh one starts in {backoff_s:.0f} s")
    set_alarm(state, lease.slot_free_at_s[worker.slot], "staff", lease.token)


def _wear(state: State, out: list[AnyAction], job: Job, why: str, *, crashed: bool) -> None:
    """Count a machine whose workers kept dying, and fail the job after too many of them.

    If every death was that of the process itself and no step was ever made, the script is at fault,
    so the job fails earlier.
    """
    if job.trouble.worn <= 1:
        job.trouble.worn_at_s = state.now_s
    if job.progress.step == 0 and crashed and job.trouble.worn >= WORN_UNTRIED_MAX:
        many = f"its processes died {DEATHS_MAX} times on each of {job.trouble.worn} machines before the first step"
        hint = "the script crashes, ends itself, or needs more memory than there is"
        jobs.finish(state, out, job, "FAILED", f"{many}, the last: {why}; {hint}: try it alone")
    elif job.trouble.worn >= WORN_MAX and state.now_s >= job.trouble.worn_at_s + WORN_S:
        many = f"workers kept dying on {job.trouble.worn} machines without a step between"
        jobs.finish(state, out, job, "FAILED", f"{many}, the last: {why}; {jobs.RESUME}")


# --- layouts -------------------------------------------------------------------------------------


def regroup(state: State, out: list[AnyAction]) -> None:
    """Reconsider the layouts of all jobs that want it; called at the end of every event."""
    unsettled, state.unsettled = state.unsettled, {}
    for job in [state.jobs[job_id] for job_id in unsettled if job_id in state.jobs]:
        _regroup(state, out, job)
    _stop_traffic(state)


def _stop_traffic(state: State) -> None:
    """Expect no traffic of jobs that wait for a layout, because nothing steps meanwhile."""
    for job in [state.jobs[job_id] for job_id in state.live_jobs]:
        if job.account.traffic_usd_per_h and job.status not in STEPPING:
            ledger.charge_traffic(state, job, 0.0, 0.0)


def _regroup(state: State, out: list[AnyAction], job: Job) -> None:
    """Ask for the best layout of the present workers, if it differs from the current one.

    A change that is not forced waits until its gain repays its pause.
    """
    if not job.active or finished_computing(job):
        return
    if job.layouts.urgent:
        _keep_the_leaving(state, job)
    alike.settle(state, out, job)
    seats = _seats(state, job)
    if job.layouts.urgent and job.status == "RUNNING":
        move_job(state, out, job, "RECOVERING", "a worker of the running step is gone")
    if len(seats) < job.workers_min:
        return
    able = {seat.worker for seat in seats}
    current = job.layouts.current.workers if job.layouts.current is not None else ()
    forced = job.layouts.urgent or not job.layouts.serving or any(w not in able for w in current)
    forced = forced or any(_was_waiting(state, job, w) for w in able if w not in current)
    asked = question_of(state, job, seats)
    try:
        choice = layout_choice.choose(asked)
    except MorphError as error:
        found = _without_a_plan(job, asked, str(error))
        if found is None:
            _say_unfit(state, out, job, str(error), forced=forced)
            return
        choice = found
        if str(error) not in job.layouts.chosen:
            note(out, job.id, str(error))
    job.layouts.unfit = ""
    if (
        not job.layouts.urgent
        and job.layouts.current is not None
        and _same(job.layouts.current, asked, choice)
    ):
        job.layouts.plan, job.layouts.chosen, job.layouts.refused = choice.plan, choice.because, ""
        return
    if not forced and not _pays(state, out, job, choice, seats):
        job.layouts.plan = job.layouts.plan or _explained(asked, job)
        return
    _ask_for(state, out, job, asked, choice)


def _was_waiting(state: State, job: Job, worker_id: str) -> bool:
    """Return whether the worker was there when the job began, and only its proof made it late."""
    worker, begun_at_s = state.workers[worker_id], job.layouts.begun_at_s
    return worker.proving and begun_at_s is not None and worker.started_at_s <= begun_at_s


def _without_a_plan(job: Job, asked: Question, why: str) -> Choice | None:
    """Return a choice made without the profile, for a job that has already run without a plan.

    That it has run shows that the profile is wrong about what fits.
    """
    if not job.progress.step or job.layouts.plan is not None or job.layouts.profile is None:
        return None
    try:
        choice = layout_choice.choose(msgspec.structs.replace(asked, profile=None))
    except MorphError:
        return None
    return msgspec.structs.replace(choice, because=f"{choice.because}; no plan: {why}")


def _explained(asked: Question, job: Job) -> LayoutPlan | None:
    """Return the plan of a running layout that began before anything was measured.

    The gain of more machines is predicted from it; without a plan they count in full.
    """
    assert job.layouts.current is not None
    with suppress(MorphError):
        return layout_choice.plan_of(asked, job.layouts.current)
    return None


def _ask_for(state: State, out: list[AnyAction], job: Job, asked: Question, choice: Choice) -> None:
    current = job.layouts.current.workers if job.layouts.current is not None else ()
    workers = [worker for replica in choice.replicas for worker in replica.workers]
    lost = sum(w not in job.workers for w in current)
    joined = sum(w not in current for w in workers)
    when: When = "now" if job.layouts.urgent or not job.layouts.serving else "boundary"
    moving = f"; {choice.moving}" if current else ""
    because = f"{choice.because}; {joined} new, {lost} lost, step {job.progress.step}{moving}"
    job.layouts.generation += 1
    if job.layouts.begun_at_s is None:
        job.layouts.begun_at_s = state.now_s
    for seat in asked.seats:
        state.workers[seat.worker].proving = False
    if job.status == "RECOVERING" and job.layouts.urgent:
        job.layouts.mending = [*job.layouts.mending[1 - RECOVERIES_MAX :], job.layouts.generation]
    job.layouts.current = layout_choice.laid_out(job.layouts.generation, asked, choice)
    job.layouts.plan, job.layouts.chosen, job.layouts.refused = choice.plan, choice.because, ""
    job.layouts.steps_usd[job.layouts.generation] = choice.traffic_usd
    ledger.charge_traffic(state, job, 0.0, _traffic_usd_per_h(job, choice.step_s))
    serving = dict.fromkeys(workers)
    job.layouts.serving = serving if when == "now" else job.layouts.serving | serving
    job.layouts.urgent = False
    job.progress.at_s = state.now_s
    if job.status == "PROVISIONING":
        job.because = f"layout {job.layouts.current.describe()} begins its first step"
    out.append(Regroup(job=job.id, layout=job.layouts.current, when=when, because=because))
    stragglers.laid_out(state, out, job, choice.left_out)


def _traffic_usd_per_h(job: Job, step_s: float | None = None) -> float:
    """Return what the newest layout is about to send between zones, in dollars per hour.

    It is nothing until the layout works, because a layout that never begins sends nothing.
    """
    if job.status not in STEPPING:
        return 0.0
    step_s = step_s or job.progress.step_s
    return job.layouts.step_usd / step_s * HOUR_S if step_s else 0.0


def _keep_the_leaving(state: State, job: Job) -> None:
    """Keep the machines that were making way for others, because a worker is lost.

    The layout needs every worker that can still compute. The bidder decides later whether these
    machines leave after all.
    """
    for lease in leases_of(state, job):
        if lease.state == "leaving" and not lease.announced:
            move_lease(
                lease, "working", state.now_s, "a worker is lost, and this machine can compute"
            )
            lease.released = ""


def _same(layout: Layout, asked: Question, choice: Choice) -> bool:
    return layout_choice.laid_out(layout.generation, asked, choice) == layout


def question_of(state: State, job: Job, seats: tuple[Seat, ...]) -> Question:
    return Question(
        microbatches=job.layouts.microbatches,
        seats=seats,
        workers_max=job.workers_max,
        seats_min=job.workers_min,
        profile=job.layouts.profile,
        depth=job.spec.depth,
        stages_max=job.layouts.stages_max,
        uncuttable=job.layouts.uncuttable,
        state_bytes=job.layouts.state_bytes,
        training_bytes=0.0 if job.layouts.unbuilt is None else job.layouts.unbuilt.training_bytes,
        room_bytes=_room_bytes(state, job, seats),
        before=job.layouts.current,
        before_plan=job.layouts.plan,
        morph_s=_pause_s(state, job),
        gradient_bytes=forecast.gradient_bytes(job),
        slot_step_s=job.progress.slot_step_s,
        haste=job.spec.haste,
    )


def _room_bytes(state: State, job: Job, seats: tuple[Seat, ...]) -> float:
    """Return the memory of the worker with the least, by what its instance type is sold with.

    If that is too little for the model, return what was seen on the machine instead.
    """
    if job.layouts.unbuilt is None:
        return 0.0
    sold, seen = [], []
    for kind in (state.leases[state.workers[seat.worker].token].type for seat in seats):
        shared = kind.accelerator == "cpu"  # each worker sees the whole memory of its machine
        seen.append(job.layouts.unbuilt.room_bytes / (kind.slots if shared else 1))
        sold.append(min(seen[-1], kind.memory_bytes / kind.slots) if shared else seen[-1])
    enough = (
        min(sold) * job.workers_max >= layout_choice.UNEVEN * job.layouts.unbuilt.training_bytes
    )
    return min(sold) if enough else min(seen)


def questions(state: State) -> tuple[Question, ...]:
    """Return the present question to the planner for every job that has a profile and workers."""
    found = []
    for job in state.jobs.values():
        if job.active and job.layouts.profile is not None and job.layouts.microbatches:
            seats = _seats(state, job)
            if seats:
                found.append(question_of(state, job, seats))
    return tuple(found)


def _seats(state: State, job: Job) -> tuple[Seat, ...]:
    """Return the seats of all workers that can be in the layout.

    Workers of the current layout keep their order; newcomers follow, zone by zone.
    """
    able = {
        worker_id: None
        for worker_id in job.workers
        if state.workers[worker_id].ready and not _excluded(state, job, state.workers[worker_id])
    }
    staying = (
        [] if job.layouts.current is None else [w for w in job.layouts.current.workers if w in able]
    )
    for worker_id in staying:
        del able[worker_id]
    coming = [_seat(state, job, state.workers[worker_id]) for worker_id in able]
    coming.sort(key=lambda seat: seat.zone)
    seats = [*(_seat(state, job, state.workers[w]) for w in staying), *coming]
    return tuple(seats[: job.workers_max])


def _seat(state: State, job: Job, worker: Worker) -> Seat:
    lease = state.leases[worker.token]
    seat = seat_in(state, job, lease.pool, lease.type, lease.usd_per_h)
    return msgspec.structs.replace(
        seat,
        worker=worker.id,
        machine=lease.machine_id,
        pace=worker.slow * seat.pace,
        eased=worker.eased > 0 and worker.slow > 1,
    )


def seat_in(state: State, job: Job, pool: Pool, kind: InstanceType, usd_per_h: float) -> Seat:
    """Return a seat on a machine of a pool at this price, before a worker has it."""
    traits = leases.traits_of(state, pool.place)
    dear = traits.zone_usd_per_gb > 0 or traits.region_usd_per_gb > 0
    return Seat(
        worker="",
        machine="",
        zone=pool.zone,
        region=pool.place.key,
        zone_usd_per_gb=traits.zone_usd_per_gb,
        region_usd_per_gb=traits.region_usd_per_gb,
        usd_per_h=usd_per_h / kind.slots if dear else 0.0,
        slots=kind.slots,
        pace=forecast.pace_for(state, job, kind),
    )


def _excluded(state: State, job: Job, worker: Worker) -> bool:
    lease = state.leases[worker.token]
    return lease.state == "leaving" or not lease.joined or not alike.may_join(state, job, worker)


def on_regrouped(state: State, out: list[AnyAction], event: Regrouped) -> None:
    job = state.jobs.get(event.job)
    if job is None or job.ended or not _is_current(job, event.generation):
        return
    mended = [generation for generation in job.layouts.mending if generation <= event.generation]
    del job.layouts.mending[: len(mended)]
    if event.generation > job.layouts.acknowledged and job.status in ("RUNNING", "RECOVERING"):
        idle_s = max(0.0, event.pause_s - job.progress.step_s)  # the pause includes one step
        job.market.times = job.market.times.saw("recovery_s" if mended else "morph_s", idle_s)
    if mended:
        job.layouts.recoveries_s.append(event.pause_s)
        del job.layouts.recoveries_s[:-RECOVERIES_MAX]
    elif event.generation > job.layouts.acknowledged and job.progress.step_s:
        job.layouts.morph_pauses_s.append(
            max(event.pause_s - job.progress.step_s, 0.0)
        )  # the pause includes one step
        del job.layouts.morph_pauses_s[:-PAUSES_MAX]
    job.progress.heard_at_s = max(job.progress.heard_at_s, event.at_s)
    _acknowledge(state, out, job, event.generation, event.step)


def _is_current(job: Job, generation: int) -> bool:
    """Return whether the layout was asked for, and after the last rewind."""
    return job.progress.fence_generation < generation <= job.layouts.generation


def on_progress(state: State, out: list[AnyAction], event: Progress) -> None:
    job = state.jobs.get(event.job)
    if job is None or job.ended or not _is_current(job, event.generation):
        return
    if event.step < job.progress.step:
        return
    job.progress.loss, job.progress.step_s = (
        event.loss,
        event.step_s or _reckoned_s(job, event.generation),
    )
    job.progress.given, job.progress.computed = event.given, event.computed
    if (
        job.layouts.current is not None
        and event.generation == job.layouts.current.generation
        and event.step_s
    ):
        _learn(state, out, job, event)
    job.progress.heard_at_s = max(job.progress.heard_at_s, event.at_s)
    job.progress.steps_total = event.steps_total
    _acknowledge(state, out, job, event.generation, event.step)
    stragglers.observe(state, out, job, event)


def _learn(state: State, out: list[AnyAction], job: Job, event: Progress) -> None:
    """Note what a step takes at this size, and how fast machines are, once a layout has settled."""
    layouts, size = job.layouts, speeds.together(state, job)
    if size is None:
        return
    job.progress.slot_step_s = event.step_s * size
    settled = event.step >= layouts.acknowledged_step + SETTLED_STEPS
    if layouts.acknowledged == event.generation and settled:
        job.market.scaling = job.market.scaling.saw(size, event.step_s)
        speeds.learn(state, out, job)


def _reckoned_s(job: Job, generation: int) -> float:
    """Return the predicted step time of a layout of which no whole step has been seen."""
    if job.layouts.plan is None or generation != job.layouts.generation:
        return job.progress.step_s
    return job.layouts.plan.step_s


def _acknowledge(state: State, out: list[AnyAction], job: Job, generation: int, step: int) -> None:
    """Record that a step was committed under this generation; the first confirms the layout."""
    if step > job.progress.step:
        before = job.progress.step
        sent_usd = _sent_usd(job, generation, step)
        ledger.charge_traffic(state, job, sent_usd, _traffic_usd_per_h(job))
        job.progress.step, job.trouble.stalls, job.trouble.worn, job.trouble.unread = step, 0, 0, ""
        job.progress.at_s = state.now_s
        alike.step(out, job, before)
    if (
        generation <= job.layouts.acknowledged
        or generation < job.layouts.generation
        or job.layouts.current is None
    ):
        return
    job.layouts.acknowledged, job.layouts.acknowledged_step = generation, step
    if job.progress.trained_from_s is None:
        job.progress.trained_from_s = state.now_s
    job.layouts.serving = dict.fromkeys(w for w in job.layouts.current.workers if w in job.workers)
    works = f"layout {job.layouts.chosen or job.layouts.current.describe()}; it works at step {job.progress.step}"
    if job.status in ("PROVISIONING", "RECOVERING") and not job.layouts.urgent:
        move_job(state, out, job, "RUNNING", works)
        step_s = _reckoned_s(job, generation)
        ledger.charge_traffic(state, job, 0.0, _traffic_usd_per_h(job, step_s))
    elif job.status == "RUNNING":
        job.because = works  # the change of layout was noted before
    _mark_working(state, job)
    _release_the_leaving(state, out, job)
    _send_home(state, out, job)


def _sent_usd(job: Job, generation: int, step: int) -> float:
    """Return what the steps since the last report have sent between zones.

    Each costs by its own layout. The first step of a layout is reported as such, so those before it
    were the last one's.
    """
    known = job.layouts
    first = known.worked < generation
    before = (step - job.progress.step - first) * known.steps_usd.get(known.worked, 0.0)
    known.worked = max(known.worked, generation)
    known.steps_usd = {g: usd for g, usd in known.steps_usd.items() if g >= known.worked}
    return before + first * known.steps_usd.get(generation, 0.0)


def _mark_working(state: State, job: Job) -> None:
    assert job.layouts.current is not None
    inside = dict.fromkeys(job.layouts.current.workers)
    for token in job.leases:
        lease = state.leases[token]
        busy = any(w in inside for w in lease.workers.values())
        if busy and lease.state == "ready":
            move_lease(lease, "working", state.now_s, "its workers are in the layout")
            if lease.worked_at_s is None:
                lease.worked_at_s = state.now_s
                job.market.times = job.market.times.saw(
                    "start_s", state.now_s - lease.intended_at_s
                )
        elif not busy and lease.state == "working":
            move_lease(lease, "ready", state.now_s, "its workers are not in the layout")


def _release_the_leaving(state: State, out: list[AnyAction], job: Job) -> None:
    """Give back the leaving machines that have no worker in the layout that works now."""
    inside = dict.fromkeys(job.layouts.current.workers if job.layouts.current else ())
    for lease in leases_of(state, job):
        busy = any(w in inside for w in lease.workers.values())
        if lease.state == "leaving" and not lease.announced and not busy:
            leases.give_back(state, out, lease, lease.released)


# --- is a change worth it? -----------------------------------------------------------------------


def _pays(
    state: State, out: list[AnyAction], job: Job, choice: Choice, seats: tuple[Seat, ...]
) -> bool:
    """Return whether Rubick's gate admits a change that is not forced.

    A refused change is considered again later.
    """
    assert job.layouts.current is not None
    newcomers = any(
        w not in job.layouts.current.workers for r in choice.replicas for w in r.workers
    )
    wished = (
        job.spec.depth is not None and len(choice.replicas[0].workers) != job.layouts.current.depth
    )
    if wished or (choice.plan is None and newcomers):
        return True
    if not job.progress.step_s or job.progress.trained_from_s is None:
        return True
    # What a straggler adds is in the steps' drift too, until a layout is chosen for it.
    if choice.step_s is None or not stragglers.is_planned_for(state, job):
        shorter = layout_choice.drawn_out(choice.replicas, seats)
        shorter /= layout_choice.drawn_out(job.layouts.current.replicas, seats)
        step_s = job.progress.step_s * shorter
    else:
        step_s = choice.step_s * (
            job.layouts.watch.narrow if job.layouts.current.width == 1 else job.layouts.watch.wide
        )
    verdict = transition.worthwhile(
        Situation(
            steps_per_s=1 / job.progress.step_s,
            steps_per_s_after=1 / step_s / GAIN_MIN,
            pause_s=choice.pause_s,
            calm_s=_calm_s(state, job),
            trained_s=state.now_s - job.progress.trained_from_s,
            morphs=job.layouts.morphs,
        )
    )
    if verdict.go:
        job.layouts.morphs += 1
        return True
    if job.layouts.settle_at_s is None:
        job.layouts.settle_at_s = state.now_s + RETHINK_S
        set_alarm(state, job.layouts.settle_at_s, "settle", job.id)
    shape = f"{len(choice.replicas[0].workers)}x{len(choice.replicas)}"
    if shape != job.layouts.refused:
        spare = sum(lease.state == "ready" and lease.stays for lease in leases_of(state, job))
        idle = f"; {plural(spare, 'machine')} {'has' if spare == 1 else 'have'} nothing to do until then"
        why = f"{verdict.because}{idle if verdict.later and spare else ''}"
        note(out, job.id, f"stays as it is instead of {shape}: {why}")
    job.layouts.refused = shape
    return False


def settled(state: State, job: Job) -> bool:
    """Return whether the job ends before the gate would admit a worker outside the layout.

    In the first seconds the answer is no, because the job's pace is not believed yet.
    """
    layout, since_s = job.layouts.current, job.progress.trained_from_s
    if layout is None or since_s is None or job.status != "RUNNING" or job.layouts.profile is None:
        return False
    if (
        job.layouts.acknowledged != job.layouts.generation
        or not job.progress.step_s
        or not job.progress.steps_total
    ):
        return False
    if job.layouts.urgent or job.spec.depth not in (None, layout.depth):
        return False
    trained_s, left_s = (
        state.now_s - since_s,
        (job.progress.steps_total - job.progress.step) * job.progress.step_s,
    )
    opens_s = transition.opens_s(job.layouts.morphs, _pause_s(state, job))
    return trained_s >= state.settings.doubt_s and trained_s + left_s <= opens_s


def slots_serving(state: State, job: Job) -> int:
    """Return the number of slots of the machines that have a worker in the layout."""
    inside = [
        lease.type.slots
        for lease in leases_of(state, job)
        if any(w in job.layouts.serving for w in lease.workers.values())
    ]
    return sum(inside)


def _calm_s(state: State, job: Job) -> float:
    """Return the seconds until the cloud is expected to take a machine, or the work is done."""
    hazard_per_h = sum(
        state.pools[lease.pool.key].record.hazard_per_h(state.now_s)
        for token in job.leases
        if (lease := state.leases[token]).request.market == "spot"
    )
    left_s = (job.progress.steps_total - job.progress.step) * job.progress.step_s
    return min(left_s, HOUR_S / hazard_per_h) if hazard_per_h > 0 else left_s


def _pause_s(state: State, job: Job) -> float:
    """Return the fixed part of the pause of a change: the recent median, else the setting."""
    return (
        median(job.layouts.morph_pauses_s) if job.layouts.morph_pauses_s else state.settings.morph_s
    )


def _say_unfit(state: State, out: list[AnyAction], job: Job, why: str, *, forced: bool) -> None:
    """Note once why no layout fits. A running layout continues; else the job waits."""
    if forced:
        job.progress.at_s = state.now_s
        if why != job.layouts.unfit:
            consider(state, job)
    if why != job.layouts.unfit:
        note(out, job.id, why)
    job.layouts.unfit = why


def _send_home(state: State, out: list[AnyAction], job: Job) -> None:
    """Stop the workers outside the layout on machines that the cloud will soon take.

    They have nothing left to do there, so the machine may go early.
    """
    assert job.layouts.current is not None
    for lease in leases_of(state, job):
        if lease.state == "leaving" and lease.announced:
            for worker_id in [
                w for w in lease.workers.values() if w not in job.layouts.current.workers
            ]:
                worker = state.workers[worker_id]
                staffing.stop(
                    state, out, worker, "the layout works without it, and its machine will be taken"
                )


# --- silence -------------------------------------------------------------------------------------


def on_stall_alarm(state: State, out: list[AnyAction], job_id: str) -> None:
    """Ask for the layout again if nothing is committed; after some tries restart all workers."""
    job = state.jobs.get(job_id)
    if job is None or not job.active or state.now_s < job.stall_due_s:
        return
    patience_s = stragglers.stall_s(state, job)
    due_s = job.progress.at_s + patience_s
    early = state.now_s < due_s
    set_stall_alarm(state, job, due_s if early else state.now_s + patience_s)
    if job.layouts.current is None or not job.layouts.serving or early:
        return
    silent_s = state.now_s - job.progress.at_s
    if finished_computing(job) or (
        job.layouts.unfit
        and (job.layouts.urgent or job.layouts.acknowledged != job.layouts.generation)
    ):
        return
    job.layouts.urgent = True
    if any(worker not in job.workers for worker in job.layouts.current.workers):
        want_layout(state, job)  # the job waits for machines, and that is said elsewhere
        return
    note(out, job_id, f"nothing was committed for {silent_s:.0f} s")
    job.trouble.stalls += 1
    if job.trouble.stalls == STALLS_MAX * FRESH_MAX or (
        job.trouble.unread and not job.progress.step
    ):
        times = f"though its workers were started afresh {FRESH_MAX - 1} times"
        hangs = f"{times}: its script hangs, or a step takes longer than that"
        jobs.finish(
            state,
            out,
            job,
            "FAILED",
            f"nothing was committed for {silent_s:.0f} s, {job.trouble.unread or hangs}; {jobs.RESUME}",
        )
        return
    if job.trouble.stalls % STALLS_MAX == 0:
        job.trouble.refreshed += 1
        for worker in [] if job.trouble.unread else [state.workers[w] for w in job.workers]:
            staffing.stop(state, out, worker, "no step was committed for too long")
        for lease in leases_of(state, job):
            staffing.staff(state, out, lease)
    want_layout(state, job)


def repeat_orders(state: State, out: list[AnyAction], job: Job) -> None:
    """Repeat the orders that may not have been carried out before the manager's restart.

    Carrying out an order twice is harmless.
    """
    for worker_id in job.workers:
        worker = state.workers[worker_id]
        if not worker.ready:
            lease = state.leases[worker.token]
            out.append(
                staffing.start_order(
                    worker, lease, "the manager restarted: it may not have started"
                )
            )
    if (
        job.layouts.current is not None
        and job.layouts.serving
        and job.layouts.acknowledged < job.layouts.generation
    ):
        layout: Layout = job.layouts.current
        why = "the manager restarted: the workers may not know the layout"
        out.append(Regroup(job=job.id, layout=layout, when="now", because=why))
