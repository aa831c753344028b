"""The measured pace of workers and steps: stragglers, drifted predictions, and patience.

A worker that takes longer for a microbatch than its peers at the same stage first gets fewer
microbatches. At a later change of the layout it may be left out, if the others are faster without
it. A left-out worker is taken back in from time to time, to see whether it has recovered. A
deviation counts only after it has lasted a while, and the pace that layouts use moves in coarse
steps, so noise changes nothing. The step time also determines how long silence is tolerated.
"""

from math import log
from statistics import median_low

import msgspec

from agent.layout import Layout
from agent.messages import JobProfiled, Paced, Progress
from agent.profile import Link, Network, Profile
from cloud.model import InstanceType
from orchestrator.actions import AnyAction
from orchestrator.brain.layouts import forecast, layout_choice, speeds
from orchestrator.formatting import pause, plural
from orchestrator.planner import drift
from orchestrator.state import Job, State, Worker, newcomer, note, set_alarm, want_layout

MICROBATCH_S_MIN = 1e-9  # nothing is computed in less, whatever a worker says
SLOW_MAX = 1000.0  # times as long as its peers: who takes longer counts as this slow
THRESHOLD = 1.3
STEP = 1.25  # the pace that layouts use is a power of it
PROBE_DOUBLINGS_MAX = 6
PATIENCE_DOUBLINGS_MAX = 6
REFIT_S = 60.0


def on_profiled(state: State, out: list[AnyAction], event: JobProfiled) -> None:
    """Adopt a measured profile, so that layouts are compared by prediction from now on."""
    job = state.jobs.get(event.job)
    if job is None or job.ended:
        return
    profile, before, told = event.profile, job.layouts.profile, job.layouts.told
    worker = state.workers.get(event.worker)
    if before is not None and profile.key and profile.key == before.key:
        # Compare with the network as reported: the one in use may since have been scaled to drift.
        if profile.network == (job.layouts.told or before.network):
            return
        job.layouts.told = profile.network
        job.layouts.profile = msgspec.structs.replace(
            before, network=profile.network, network_from=profile.network_from
        )
    else:
        believe(job, profile, None if worker is None else state.leases[worker.token].type)
    assert job.layouts.profile is not None
    job.layouts.watch = drift.DriftWatch()
    note(out, job.id, _measured(job.layouts.profile, before, told, event.worker))
    newcomer(state, job)


def believe(job: Job, profile: Profile, kind: InstanceType | None) -> None:
    """Adopt a profile, completed with the instance type, which the worker does not know.

    A CPU worker's room is the smaller of what was seen and what the type is sold with. If nothing
    fits there although more was seen, the measured room counts, because the type's figure is wrong.
    """
    seen_bytes, slots = profile.memory_bytes, 1
    if kind is not None:
        room, slots = seen_bytes, kind.slots
        if kind.accelerator == "cpu":  # each worker sees the whole memory of its machine
            seen_bytes /= slots
            room = min(room, kind.memory_bytes / slots)
        profile = msgspec.structs.replace(profile, instance_type=kind.name, memory_bytes=room)
    job.layouts.profile, job.layouts.told = profile, profile.network
    if seen_bytes > profile.memory_bytes and not forecast.fits(job, slots):
        job.layouts.profile = msgspec.structs.replace(profile, memory_bytes=seen_bytes)


def _measured(profile: Profile, before: Profile | None, told: Network | None, worker: str) -> str:
    """Say what is new in a profile; a link that was reported before is not repeated."""
    network, seen = profile.network, profile.network_from
    same = before is not None and before.key == profile.key
    known = told if same else None
    links = []
    if seen in ("between", "measured") and (known is None or network.inter != known.inter):
        links.append(f"{_link(network.inter)} between machines")
    if seen in ("within", "measured") and (known is None or network.intra != known.intra):
        links.append(f"{_link(network.intra)} within one")
    said = f"measured by {worker}: {plural(len(profile.sections), 'section')}"
    if same:
        said = f"the network was measured by {worker}"
    elif before is not None:
        said = f"again {said}"
    return ", ".join([said, *links])


def _link(link: Link) -> str:
    return f"{link.bandwidth_bytes_per_s / 1e9:.2g} GB/s after {link.latency_s * 1e6:.0f} us"


# --- stragglers ----------------------------------------------------------------------------------


def on_paced(state: State, out: list[AnyAction], event: Paced) -> None:
    job = state.jobs.get(event.job)
    if job is None or not job.active or event.generation != job.layouts.acknowledged:
        return
    for worker_id, microbatch_s in event.microbatch_s.items():
        if worker_id in job.workers and microbatch_s >= MICROBATCH_S_MIN:
            state.workers[worker_id].microbatch_s = microbatch_s
    if _look(state, out, job):
        want_layout(state, job)


def on_pace_alarm(state: State, out: list[AnyAction], job_id: str) -> None:
    """Reconsider the layout: a deviation has lasted, or an eased worker's time is over."""
    job = state.jobs.get(job_id)
    if job is not None and job.active:
        _look(state, out, job)
        want_layout(state, job)


def _look(state: State, out: list[AnyAction], job: Job) -> bool:
    """Compare every worker with its peers at the same stage; return whether any pace changed."""
    if job.layouts.current is None or job.layouts.acknowledged != job.layouts.generation:
        return False
    if job.layouts.tables is not None:
        return False  # its workers help each other, and shares are no business of a layout
    changed = False
    for stage in range(job.layouts.current.depth):
        peers = [
            state.workers[replica.workers[stage]]
            for replica in job.layouts.current.replicas
            if replica.workers[stage] in job.workers
        ]
        each = {w.id: w.microbatch_s * _speed(state, job, w) for w in peers if w.microbatch_s > 0}
        if len(each) < 2:
            continue
        usual = median_low(each.values())
        for worker in peers:
            if worker.id in each:
                slow = min(max(each[worker.id] / usual, 1 / SLOW_MAX), SLOW_MAX)
                changed |= _judge(state, out, job, worker, slow)
    return changed


def _judge(state: State, out: list[AnyAction], job: Job, worker: Worker, slow: float) -> bool:
    """Return whether the worker's pace has differed from its recorded one for long enough.

    If so, the new pace is recorded.
    """
    if abs(log(slow / worker.slow)) <= log(THRESHOLD):
        worker.doubted_at_s = None
        since_s = worker.probed_at_s
        if (
            since_s is not None
            and worker.slow <= 1
            and state.now_s >= since_s + state.settings.doubt_s
        ):
            worker.probed_at_s, worker.eased = None, 0
            note(out, job.id, f"{worker.id} is as fast as its peers again")
        return False
    if worker.doubted_at_s is None:
        worker.doubted_at_s = state.now_s
        set_alarm(state, state.now_s + state.settings.doubt_s, "pace", job.id)
        return False
    if state.now_s < worker.doubted_at_s + state.settings.doubt_s:
        return False
    worker.slow, worker.doubted_at_s = _coarse(slow), None
    if worker.slow > 1:
        why = f"takes {slow:.1f} times as long for a microbatch as its peers: it gets fewer"
    else:
        why = f"takes {slow:.1f} times as long for a microbatch as its peers: it gets its share"
        worker.eased, worker.probes, worker.probed_at_s = 0, 0, None
    note(out, job.id, f"{worker.id} {why}")
    return True


def _coarse(slow: float) -> float:
    return float(STEP ** round(log(slow) / log(STEP)))


def _speed(state: State, job: Job, worker: Worker) -> float:
    return speeds.kind_for(state, job, state.leases[worker.token].type).speed


def laid_out(state: State, out: list[AnyAction], job: Job, left_out: tuple[str, ...]) -> None:
    """Record which workers got fewer microbatches or were left out, and when to retry them."""
    assert job.layouts.current is not None
    for worker_id in job.layouts.current.workers:
        worker = state.workers[worker_id]
        worker.benched_at_s = None
        if worker.slow > 1 and not worker.eased:
            worker.eased = job.layouts.current.generation
            set_alarm(state, state.now_s + state.settings.ease_s, "pace", job.id)
    for worker_id in left_out:
        worker = state.workers[worker_id]
        if worker.benched_at_s is None:
            worker.benched_at_s = state.now_s
            wait_s = state.settings.probe_s * 2 ** min(worker.probes, PROBE_DOUBLINGS_MAX)
            set_alarm(state, state.now_s + wait_s, "probe", worker.id)
            why = (
                f"left out, it takes {worker.slow:.1f} times as long for a microbatch as its peers"
            )
            note(out, job.id, f"{worker.id} is {why}; it is tried again in {wait_s:.0f} s")


def on_probe_alarm(state: State, out: list[AnyAction], worker_id: str) -> None:
    """Take a left-out worker back in as if it had recovered; its pace will show if it has."""
    worker = state.workers.get(worker_id)
    if worker is None or worker.benched_at_s is None:
        return
    job = state.jobs[worker.job]
    worker.slow, worker.microbatch_s, worker.doubted_at_s = 1.0, 0.0, None
    worker.benched_at_s, worker.probed_at_s = None, state.now_s
    worker.probes += 1
    set_alarm(state, state.now_s + 2 * state.settings.doubt_s, "pace", job.id)
    note(out, job.id, f"{worker.id} is tried again: it may have recovered")
    want_layout(state, job)


# --- drift ---------------------------------------------------------------------------------------


def is_planned_for(state: State, job: Job) -> bool:
    """Return whether the running layout was chosen with the paces that its workers have now."""
    assert job.layouts.current is not None
    inside = [state.workers[w] for w in job.layouts.current.workers if w in job.workers]
    return not any(
        worker.doubted_at_s is not None or (worker.slow > 1 and not worker.eased)
        for worker in inside
    )


def observe(state: State, out: list[AnyAction], job: Job, event: Progress) -> None:
    """Compare a committed step with its prediction; refit the profile and the plan on drift."""
    plan, layout = job.layouts.plan, job.layouts.current
    if plan is None or layout is None or job.layouts.profile is None or event.step_s <= 0:
        return
    if (
        event.generation != job.layouts.generation
        or job.layouts.acknowledged != job.layouts.generation
    ):
        return
    if not is_planned_for(state, job):
        return  # the deviation is a worker's, not the profile's
    job.layouts.watch = drift.observe(job.layouts.watch, plan, event.step_s)
    verdict = drift.judge(job.layouts.watch)
    if verdict.advice == "keep":
        return
    if state.now_s < job.layouts.refitted_at_s + REFIT_S:
        return
    because = verdict.because
    if verdict.advice == "refit":
        busy_s = _busy_s(state, layout)
        found = drift.apart(plan, job.layouts.profile.overhead_s, verdict.factor, busy_s)
        job.layouts.profile = drift.refit(job.layouts.profile, *found)
        job.layouts.plan = drift.believed(plan, verdict.factor, found[0])
        if found[0] != verdict.factor:
            because = _besides(verdict.factor, *found)
    else:
        job.layouts.profile = drift.refit_ring(job.layouts.profile, plan, job.layouts.watch.wide)
        job.layouts.plan = drift.believed(plan, job.layouts.watch.wide, 1.0, ring=True)
    # The running layout may stay even if a different one is better now, so its plan is refitted too;
    # otherwise the same drift would be found again.
    job.layouts.watch, job.layouts.refitted_at_s = drift.DriftWatch(), state.now_s
    note(out, job.id, because)
    # The layout is chosen a moment later, so that the world can make the new book beside the loop.
    newcomer(state, job)


def _busy_s(state: State, layout: Layout) -> float:
    """Return how long the busiest worker of a layout computes in a step, or 0.

    It is 0 unless every worker has reported its time per microbatch.
    """
    each = [
        replica.count * state.workers[worker].microbatch_s if worker in state.workers else 0.0
        for replica in layout.replicas
        for worker in replica.workers
    ]
    return max(each) if min(each, default=0.0) > 0 else 0.0


def _besides(factor: float, computing: float, overhead_s: float) -> str:
    return (
        f"steps take {factor:.2f} times what was predicted, and microbatches {computing:.2f} times: computing is "
        f"scaled by that, and every step is reckoned to take {pause(overhead_s)} besides"
    )


def stall_s(state: State, job: Job) -> float:
    """Return how long silence is tolerated: a multiple of the step time, or the setting.

    The time to send the state to all workers, at worst over one link, is added, because a transfer
    that is broken off would begin again. Each restart of all workers doubles the sum.
    """
    patience_s = max(state.settings.stall_s, 20 * job.progress.step_s) + _sending_s(job)
    return patience_s * 2.0 ** min(job.trouble.refreshed, PATIENCE_DOUBLINGS_MAX)


def _sending_s(job: Job) -> float:
    layout = job.layouts.current
    if layout is None:
        return 0.0
    copies = layout.width if layout.owned else len(layout.workers)
    return copies * job.layouts.state_bytes / layout_choice.bandwidth(job.layouts.profile)
