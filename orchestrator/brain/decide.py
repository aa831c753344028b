"""decide(state, event) -> (state, actions): the whole manager.

Events carry the time. Alarms that are due at that time ring first, then the event is handled. What
events do to jobs, machines and layouts is in `handlers`; what is held and what it costs in
`holdings`; the choice of a layout in `layouts`; the market in `purchases`.
"""

from heapq import heappop
from typing import assert_never

from agent.messages import (
    AgentJoined,
    AgentLost,
    AnyReport,
    BackupHeld,
    CheckpointCopied,
    CheckpointFailed,
    CheckpointWritten,
    CopyFailed,
    JobCompleted,
    JobProfiled,
    Logged,
    NoticeSeen,
    OutputKept,
    Paced,
    Progress,
    Recalled,
    RecallFailed,
    RecordsDamaged,
    Regrouped,
    Report,
    Rewound,
    StateSeen,
    SumsKept,
    TablesServed,
    WorkerFailed,
    WorkerLost,
    WorkerProving,
    WorkerReady,
)
from orchestrator.actions import AnyAction, CloseJob, OpenJob, Stop, WriteCheckpoint
from orchestrator.brain.handlers import inventory, jobs, layout_changes
from orchestrator.brain.holdings import leases, ledger, staffing
from orchestrator.brain.layouts import stragglers
from orchestrator.brain.purchases import buying
from orchestrator.brain.sentences import remember
from orchestrator.events import (
    AnyEvent,
    BootSeen,
    CatalogueSeen,
    EndFailed,
    EventSetAside,
    JobBranched,
    JobCancelled,
    JobChanged,
    JobResumed,
    JobSubmitted,
    Launched,
    LaunchFailed,
    Listed,
    ListFailed,
    ManagerStarted,
    PartSetAside,
    PlaceClosed,
    QuotesKept,
    QuotesSeen,
    ShutdownAsked,
    Terminated,
    Tick,
)
from orchestrator.state import Alarm, State, leases_of, note, set_alarm

ROUNDING_S = 1e-3

CLOSED_AGAIN_S = 600.0
LATE_S = 5.0  # a manager that is woken so late stood still
ENDING_S = 2.0  # between two looks of a manager that gives everything back
HEARS_S = 10.0  # how long it then hears what waited before it gives up what was silent
PATIENT: tuple[Alarm, ...] = ("boot", "worker", "stall", "drain")


def decide(state: State, event: AnyEvent) -> tuple[State, list[AnyAction]]:
    """Change the state in place and return it with the actions that answer the event."""
    out: list[AnyAction] = []
    if isinstance(event, ManagerStarted):
        state.skew_s = max(0.0, state.now_s - event.at_s)
        _note_away(state, event)
    _move_time(state, event)
    _note_standstill(state, event)
    if isinstance(event, PartSetAside):
        jobs.set_aside(state, out, event)  # before an alarm that is due meets it
    while state.alarms and state.alarms[0][0] <= state.now_s:
        _, alarm, key = heappop(state.alarms)
        if alarm in PATIENT and state.now_s < state.hears_until_s:
            set_alarm(state, state.hears_until_s, "again", f"{alarm} {key}")
        else:
            _ring(state, out, alarm, key)
    _handle(state, out, event)
    layout_changes.regroup(state, out)
    buying.buy_for_considered(state, out)
    layout_changes.regroup(state, out)  # purchases may make other machines leave
    state.wake_at_s = (state.alarms[0][0] if state.alarms else state.now_s) - state.skew_s
    remember(state, out)
    return state, out


def _move_time(state: State, event: AnyEvent) -> None:
    """Move the state's time forward to the event's; time never goes back.

    A manager that starts with a clock earlier than the journal adds the difference to its clock.
    Only the manager's own clock moves time past the moment at which the next `Tick` is due, because
    instances have wrong clocks, and a person's request may have waited while our clock was set.
    """
    at_s = event.at_s if isinstance(event, Report) else event.at_s + state.skew_s
    due_s = state.alarms[0][0] if state.alarms else at_s
    if isinstance(event, Tick):  # the world received the due time less the skew, which may round
        at_s = due_s if at_s < due_s < at_s + ROUNDING_S else at_s
    elif not isinstance(event, ManagerStarted):
        at_s = min(at_s, due_s)
    state.now_s = max(state.now_s, at_s)


def _note_away(state: State, event: ManagerStarted) -> None:
    """Note when there was no manager for so long that every machine must have ended itself."""
    most_s = state.settings.silent_after_s
    if state.epoch and most_s is not None and event.at_s > state.now_s + most_s:
        state.away = (state.now_s, event.at_s)


def _note_standstill(state: State, event: AnyEvent) -> None:
    """Note until when to give nothing up, if the manager stood still or has just started.

    Its alarms ring before what waited meanwhile is heard, so a machine, a worker or a job that has
    long spoken would count as silent. Each alarm is put off only once, so a manager that is always
    late gives up what is silent all the same.
    """
    due_s = state.alarms[0][0] if state.alarms else state.now_s
    if isinstance(event, ManagerStarted) or state.now_s > due_s + LATE_S:
        state.hears_until_s = state.now_s + HEARS_S


def _handle(state: State, out: list[AnyAction], event: AnyEvent) -> None:  # noqa: PLR0912
    match event:
        case Tick() | PartSetAside():
            pass  # only its time matters: the due alarms have rung
        case EventSetAside():
            what = f"{event.kind} {event.entry}".strip()
            note(out, "manager", f"{what} is set aside, and nothing of it is used: {event.why}")
        case ManagerStarted():
            _take_over(state, out, event)
        case CatalogueSeen():
            buying.on_catalogue(state, event)
            jobs.admit(state, out)
        case PlaceClosed():
            buying.on_place_closed(state, out, event)
        case QuotesSeen():
            buying.on_quotes(state, out, event)
            jobs.check_budgets(state, out)
        case QuotesKept():
            buying.on_quotes_kept(state, out, event)
        case Listed():
            inventory.on_listed(state, out, event)
            _stop_if_done(state, out)
        case ListFailed():
            inventory.on_list_failed(state, out, event)
            _stop_if_done(state, out)
        case Launched():
            inventory.on_launched(state, out, event)
        case LaunchFailed():
            inventory.on_launch_failed(state, out, event)
        case Terminated():
            inventory.on_terminated(state, out, event)
        case EndFailed():
            inventory.on_end_failed(state, out, event)
        case BootSeen():
            inventory.on_boot_seen(state, out, event)
        case JobSubmitted():
            jobs.on_submitted(state, out, event)
        case JobCancelled():
            jobs.on_cancelled(state, out, event)
        case JobResumed():
            jobs.on_resumed(state, out, event)
        case JobBranched():
            jobs.on_branched(state, out, event)
        case JobChanged():
            jobs.on_changed(state, out, event)
        case ShutdownAsked():
            _shut_down(state, out, event)
        case _:
            _hear(state, out, event)


def _hear(state: State, out: list[AnyAction], event: AnyReport) -> None:  # noqa: PLR0912, PLR0915
    """Handle a report from a machine, a worker or the keeper."""
    match event:
        case AgentJoined():
            inventory.on_agent_joined(state, out, event)
        case AgentLost():
            inventory.on_agent_lost(state, out, event)
        case NoticeSeen():
            inventory.on_notice(state, out, event)
        case WorkerProving():
            layout_changes.on_worker_proving(state, out, event)
        case WorkerReady():
            layout_changes.on_worker_ready(state, out, event)
        case WorkerLost():
            layout_changes.on_worker_lost(state, out, event)
        case WorkerFailed():
            jobs.on_worker_failed(state, out, event)
        case Progress():
            layout_changes.on_progress(state, out, event)
        case Regrouped():
            layout_changes.on_regrouped(state, out, event)
        case JobProfiled():
            stragglers.on_profiled(state, out, event)
        case Paced():
            stragglers.on_paced(state, out, event)
        case BackupHeld():
            jobs.on_backup_held(state, event)
        case Logged():
            jobs.on_logged(state, event)
        case StateSeen():
            jobs.on_state_seen(state, event)
        case TablesServed():
            jobs.on_tables_served(state, event)
        case OutputKept():
            jobs.on_output_kept(state, event)
        case SumsKept():
            jobs.on_sums_kept(state, out, event)
        case CheckpointWritten():
            jobs.on_checkpoint_written(state, out, event)
        case CheckpointFailed():
            jobs.on_checkpoint_failed(state, out, event)
        case CheckpointCopied():
            jobs.on_copied(state, out, event)
        case CopyFailed():
            jobs.on_copy_failed(state, out, event)
        case Recalled():
            jobs.on_recalled(state, out, event)
        case RecallFailed():
            jobs.on_recall_failed(state, out, event)
        case RecordsDamaged():
            jobs.on_records_damaged(state, out, event)
        case Rewound():
            jobs.on_rewound(state, out, event)
        case JobCompleted():
            jobs.on_completed(state, out, event)
        case _:
            assert_never(event)


def _ring(state: State, out: list[AnyAction], alarm: Alarm, key: str) -> None:  # noqa: PLR0912
    match alarm:
        case "control":
            _control(state, out)
        case "boot":
            inventory.on_boot_alarm(state, out, key)
        case "worker":
            layout_changes.on_worker_alarm(state, out, key)
        case "staff":
            staffing.on_staff_alarm(state, out, key)
        case "settle":
            layout_changes.on_settle_alarm(state, key)
        case "pace":
            stragglers.on_pace_alarm(state, out, key)
        case "probe":
            stragglers.on_probe_alarm(state, out, key)
        case "notice":
            inventory.on_notice_alarm(state, out, key)
        case "ending":
            leases.on_ending_alarm(state, out, key)
        case "dry":
            ledger.on_dry_alarm(state, key)
        case "drain":
            jobs.on_drain_alarm(state, out, key)
        case "stall":
            layout_changes.on_stall_alarm(state, out, key)
        case "again":
            _ring_again(state, out, key)
        case _:
            assert_never(alarm)


def _ring_again(state: State, out: list[AnyAction], put_off: str) -> None:
    """Ring an alarm that was put off until what had waited was heard."""
    name, _, key = put_off.partition(" ")
    for alarm in PATIENT:
        if alarm == name:
            _ring(state, out, alarm, key)


def _control(state: State, out: list[AnyAction]) -> None:
    """Check budgets, machines and the market, once per control period; more often before the end."""
    period_s = state.settings.control_period_s
    next_s = min(period_s, ENDING_S) if state.stopping else period_s
    set_alarm(state, state.now_s + next_s, "control")
    jobs.check_budgets(state, out)
    inventory.ask_for_lists(state, out)
    jobs.admit(state, out)
    for job_id in list(state.live_jobs):
        job = state.jobs[job_id]
        if job.active and staffing.staying(state, job) < job.workers_max:
            for lease in leases_of(state, job):
                staffing.staff(state, out, lease)
    buying.buy_if_due(state, out)
    buying.keep_quotes(state, out)


def _shut_down(state: State, out: list[AnyAction], event: ShutdownAsked) -> None:
    """Give everything back, unless an earlier house was asked and has ended before it read that."""
    if event.house not in ("", state.house):
        note(out, "manager", f"goes on: {event.by} has asked an earlier house to end")
        return
    jobs.shut_down(state, out, event.by)
    _control_now(state)  # a person waits for it, and machines cost money
    _stop_if_done(state, out)


def _control_now(state: State) -> None:
    """Begin a control period now."""
    state.alarms = [alarm for alarm in state.alarms if alarm[1] != "control"]
    state.alarms.sort()
    set_alarm(state, state.now_s, "control")


def _take_over(state: State, out: list[AnyAction], event: ManagerStarted) -> None:
    """Take over from an earlier manager: its decisions are known, so ask for their outcomes."""
    first = state.epoch == 0
    if event.settings != state.settings:
        state.blocks.clear()  # what was refused to the old settings is asked again
    state.epoch, state.salt, state.settings = event.epoch, event.salt, event.settings
    leases.begin_life(state)
    state.ledger = state.ledger or event.salt
    if first or state.stopped:
        state.account.at_s = state.now_s  # nothing ran, so nothing was paid
    ledger.settle(state.account, state.now_s)
    state.account.usd_per_h += event.settings.manager_usd_per_h - state.account.manager_usd_per_h
    state.account.manager_usd_per_h = event.settings.manager_usd_per_h
    state.account.cap_usd = event.settings.budget_usd
    note(out, "manager", f"started under epoch {event.epoch}")
    if event.house != state.house or (state.stopped and not event.house):
        state.house, state.stopping, state.stopped = event.house, False, False
    elif state.stopped:
        out.append(Stop(because="everything was given back before the manager restarted"))
    _control_now(state)
    leases.end_now(state)
    for _, provider in sorted(state.places.items()):
        inventory.ask_for_list(state, out, provider, "the manager restarted: what is there?")
    for job_id in state.live_jobs:
        job = state.jobs[job_id]
        job.progress.heard_at_s = min(
            job.progress.heard_at_s, event.at_s
        )  # the keeper's clock may be slow, too
        if job.active or job.status == "DRAINING":
            why = "the manager restarted: the keeper may not know it"
            out.append(OpenJob(order=jobs.order_of(job), because=why))
            layout_changes.repeat_orders(state, out, job)
        if job.status == "DRAINING":
            why = "the manager restarted: the keeper may not have been asked for it"
            out.append(WriteCheckpoint(job=job.id, because=why))
    for job in state.jobs.values():
        if job.ended_at_s is not None and state.now_s - job.ended_at_s < CLOSED_AGAIN_S:
            why = "the manager restarted: the keeper may not know that the job has ended"
            out.append(CloseJob(job=job.id, because=why))


def _stop_if_done(state: State, out: list[AnyAction]) -> None:
    """Stop if everything is given back and every provider's list confirms it."""
    if not state.stopping or state.stopped or state.leases or state.live_jobs:
        return
    newest_end_s = max((x.ended_at_s or 0.0 for x in state.ended_leases.values()), default=0.0)
    for provider in state.places.values():
        if provider.closed and provider.listed_at_s == 0.0:
            continue  # it was never open, so nothing of ours is there
        if provider.left_out and not provider.orphans:
            continue  # it cannot be asked, and nothing of ours is known there
        if provider.clean_at_s < newest_end_s or provider.orphans:
            return
    ledger.settle(state.account, state.now_s)
    state.stopped = True
    out.append(Stop(because="every machine is given back and no list shows one"))
