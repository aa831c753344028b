"""Making the view from the manager's state; its lists are bounded, but for that of live jobs."""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from math import expm1

from agent.messages import TablesNode
from cloud.model import Market
from orchestrator.brain.holdings import alike, leases, ledger
from orchestrator.brain.purchases import situation
from orchestrator.formatting import duration
from orchestrator.state import Job, Lease, PoolState, State, Thought, finished_computing
from orchestrator.view import (
    CostView,
    JobView,
    MachineView,
    PoolView,
    SeatView,
    ServerView,
    ThoughtView,
    Unlisted,
    View,
)

MACHINES_SHOWN_MAX = 200
ENDED_SHOWN_MAX = 50
JOBS_SHOWN_MAX = 100
POOLS_SHOWN_MAX = 200
SENTENCES_SHOWN_MAX = 100
CHAINS_SHOWN_MAX = 64
GONE = "gone"


def view_of(state: State, at_s: float) -> View:
    """Return the view at a moment, with money extrapolated to it."""
    at_s = max(at_s, state.now_s)
    bought, thought = situation.vcpus_bought(state), _thought(state)
    prices = thought.usd_per_slot_h if thought is not None else {}
    return View(
        at_s=at_s,
        epoch=state.epoch,
        deployment=state.settings.deployment,
        jobs=tuple(job_view(state, job, at_s) for job in _jobs_shown(state)),
        machines=tuple(machine_view(lease, at_s) for lease in _leases_shown(state)),
        pools=tuple(
            pool_view(state, known, at_s, bought, prices)
            for known in list(state.pools.values())[:POOLS_SHOWN_MAX]
        ),
        cost=cost_view(state, at_s),
        events=tuple(state.sentences[-SENTENCES_SHOWN_MAX:]),
        thought=thought_view(thought) if thought is not None else None,
        unlisted=tuple(_unlisted(state)),
        costly=tuple(_costly(state)),
        ending=state.stopping,
    )


def _thought(state: State) -> Thought | None:
    """Return what was thought last, as long as its job may hold machines."""
    job = state.jobs.get(state.thought.job) if state.thought is not None else None
    return state.thought if job is not None and job.active else None


def thought_view(thought: Thought) -> ThoughtView:
    return ThoughtView(job=thought.job, at_s=thought.at_s, because=thought.because)


def _jobs_shown(state: State) -> list[Job]:
    """Return every live job, then those of the others that ended last.

    People and programs find a job here, so one that may cost money is never left out.
    """
    live = [state.jobs[job_id] for job_id in state.live_jobs]
    ended = [job for job in reversed(state.jobs.values()) if job.id not in state.live_jobs]
    count = max(ENDED_SHOWN_MAX, JOBS_SHOWN_MAX - len(live))
    return [*live, *heapq.nlargest(count, ended, key=lambda job: job.ended_at_s or 0.0)]


def _leases_shown(state: State) -> Iterator[Lease]:
    """Yield the live leases, then the newest of the others."""
    yield from list(state.leases.values())[:MACHINES_SHOWN_MAX]
    yield from islice(reversed(state.ended_leases.values()), ENDED_SHOWN_MAX)


def _unlisted(state: State) -> Iterator[Unlisted]:
    others = islice(state.leases.values(), MACHINES_SHOWN_MAX, None)
    counts = Counter((one.pool.key, one.request.market, one.state) for one in others)
    for (pool, market, at), count in sorted(counts.items()):
        yield Unlisted(pool=pool, market=market, state=at, count=count)


def _costly(state: State) -> Iterator[str]:
    for _, place in sorted(state.places.items()):
        held = (lease.pool.place == place.place for lease in state.leases.values())
        if place.costly and (place.orphans or any(held)):
            yield place.costly


def _held(state: State, tokens: Iterable[str]) -> int:
    """Count the leases that cost something; a launch without a machine costs nothing yet."""
    return sum(bool(state.leases[token].prices) for token in tokens)


def _after_loop(job: Job) -> str:
    """Say what is waited for, and how long at most, when all steps are done and machines still cost."""
    if job.ended or not finished_computing(job):
        return ""
    tail = duration(job.spec.tail_s)
    return f"all steps are done: what its script does after its loop may take {tail} (job.tail_s)"


def job_view(state: State, job: Job, at_s: float) -> JobView:
    layout, account = job.layouts.current, job.account
    tables = None if job.ended else job.layouts.tables
    left = job.progress.steps_total - job.progress.step
    spent, on_demand = ledger.spent_usd(account, at_s), ledger.on_demand_usd(account, at_s)
    return JobView(
        id=job.id,
        script=job.spec.script,
        script_sha=job.spec.script_sha,
        argv=job.spec.argv,
        status=job.status,
        because="; ".join(
            why
            for why in (
                _after_loop(job),
                job.because,
                job.market.waiting,
                job.layouts.unfit,
                job.trouble.unread,
            )
            if why
        ),
        step=job.progress.step,
        steps_total=job.progress.steps_total,
        loss=job.progress.loss,
        step_s=job.progress.step_s,
        slot_step_s=job.progress.slot_step_s,
        layout=layout.describe() if layout is not None else "",
        generation=job.layouts.generation,
        workers=sum(worker in state.workers for worker in layout.workers) if layout else 0,
        preemptions=job.market.preemptions,
        failures=job.trouble.failures,
        steps_lost=job.progress.steps_lost,
        machines=_held(state, job.leases),
        spent_usd=spent,
        reserved_usd=ledger.committed_usd(account, at_s),
        budget_usd=account.cap_usd,
        deadline_s=job.spec.deadline_s,
        now_usd_per_h=account.usd_per_h,
        on_demand_usd=on_demand,
        saved_usd=on_demand - spent,
        traffic_usd=ledger.traffic_usd(account, at_s),
        submitted_at_s=job.submitted_at_s,
        ended_at_s=job.ended_at_s,
        took_s=(job.ended_at_s or at_s) - job.submitted_at_s - job.lain_s,
        eta_s=left * job.progress.step_s
        if job.status == "RUNNING" and job.progress.step_s
        else None,
        recoveries_s=tuple(job.layouts.recoveries_s),
        backup_step=job.progress.backup_step,
        sums_kept=job.progress.sums_kept,
        exact=job.exact,
        unlike_step=job.layouts.unlike_step,
        bits=alike.bits_of(job),
        checkpoint_step=job.progress.checkpoint_step,
        export_uri=job.progress.export_uri,
        microbatches=job.layouts.microbatches,
        stages_max=job.layouts.stages_max,
        uncuttable=job.layouts.uncuttable,
        chains=chains_of(state, job),
        given=job.progress.given,
        computed=job.progress.computed,
        tables_stage=tables.stage if tables is not None else 0,
        partitions=tables.partitions if tables is not None else 0,
        servers=tuple(_server(state, node) for node in tables.nodes) if tables is not None else (),
        logged=job.progress.logged,
        logged_step=job.progress.logged_step,
        state=job.progress.state,
        state_count=job.progress.state_count,
        state_step=job.progress.state_step,
        output=job.progress.output,
        output_files=job.progress.output_files,
        output_bytes=job.progress.output_bytes,
        begun_step=job.progress.begun_step,
    )


def chains_of(state: State, job: Job) -> tuple[tuple[SeatView, ...], ...]:
    """Return who computes which stage; a worker that is gone has no machine any more."""
    layout = job.layouts.current
    if layout is None or job.ended:
        return ()
    return tuple(
        tuple(_seat(state, worker) for worker in replica.workers)
        for replica in layout.replicas[:CHAINS_SHOWN_MAX]
    )


def _seat(state: State, name: str) -> SeatView:
    worker = state.workers.get(name)
    if worker is None:
        return SeatView(machine="", slot=0, microbatch_s=0.0, slow=1.0)
    lease = state.leases.get(worker.token)
    return SeatView(
        machine=(lease.machine_id or lease.token) if lease is not None else "",
        slot=worker.slot,
        microbatch_s=worker.microbatch_s,
        slow=worker.slow,
    )


def _server(state: State, node: TablesNode) -> ServerView:
    seat = None if node.reliable else _seat(state, node.worker)
    return ServerView(
        machine="" if seat is None else seat.machine or GONE,
        slot=0 if seat is None else seat.slot,
        serves=node.serves,
        copies=node.copies,
        blocks=node.blocks,
    )


def machine_view(lease: Lease, at_s: float) -> MachineView:
    """Return the view of a lease; a launch without a machine is shown under its token."""
    return MachineView(
        id=lease.machine_id or lease.token,
        token=lease.token,
        job=lease.job,
        pool=lease.pool.key,
        market=lease.request.market,
        state="silent" if (lease.state, lease.agent) == ("booting", "silent") else lease.state,
        price_usd_per_h=lease.price_usd_per_h,
        on_demand_usd_per_h=lease.type.on_demand_usd_per_h,
        cost_usd=ledger.cost_so_far_usd(lease, at_s),
        launched_at_s=lease.prices[0][0] if lease.prices else lease.intended_at_s,
        ended_at_s=lease.ended_at_s,
        why_bought=lease.why_bought,
        why_ended=lease.why_ended,
        disk_usd=ledger.disk_so_far_usd(lease, at_s),
        egress_usd=lease.egress_usd if lease.prices else 0.0,
        bid_usd_per_h=lease.request.bid_usd_per_h,
        boot=lease.boot,
    )


def pool_view(
    state: State,
    known: PoolState,
    at_s: float,
    bought: situation.Bought,
    prices: Mapping[str, Mapping[str, float]],
) -> PoolView:
    """Return the view of a pool; `prices` are those of a job's last thought, by market and pool."""
    kind, key = known.kind, known.pool.key
    until_s, because = _blocked(state, known, "spot", at_s)
    dear_until_s, dear_because = _blocked(state, known, "on_demand", at_s)
    return PoolView(
        pool=key,
        slots=kind.slots,
        spot_usd_per_h=known.spot_usd_per_h,
        on_demand_usd_per_h=kind.on_demand_usd_per_h,
        held=_held(state, known.leases),
        blocked_until_s=until_s,
        blocked_because=because,
        evicted_in_1h=-expm1(-known.record.hazard_per_h(at_s)),
        spot_usd_per_slot_h=prices.get("spot", {}).get(key),
        on_demand_usd_per_slot_h=prices.get("on_demand", {}).get(key),
        spot_room=situation.room_left(state, known, "spot", bought),
        on_demand_room=situation.room_left(state, known, "on_demand", bought),
        on_demand_blocked_until_s=dear_until_s,
        on_demand_blocked_because=dear_because,
    )


def _blocked(
    state: State, known: PoolState, market: Market, at_s: float
) -> tuple[float | None, str]:
    """Return until when a market of a pool is left alone, and why; (None, "") if it is not."""
    block = leases.block_of(state, known, market)
    if block is None or block.until_s <= at_s:
        return None, ""
    return block.until_s, block.because


def cost_view(state: State, at_s: float) -> CostView:
    """Return the costs of everything.

    The saving is the machine time at on-demand prices minus its cost; the manager's machine is left
    out.
    """
    account = state.account
    spent = ledger.spent_usd(account, at_s)
    manager = ledger.manager_usd(account, at_s)
    on_demand = ledger.on_demand_usd(account, at_s)
    return CostView(
        spent_usd=spent,
        reserved_usd=ledger.committed_usd(account, at_s),
        budget_usd=account.cap_usd,
        now_usd_per_h=account.usd_per_h,
        on_demand_usd=on_demand,
        saved_usd=on_demand - (spent - manager),
        manager_usd=manager,
        traffic_usd=ledger.traffic_usd(account, at_s),
        machines=_held(state, state.leases),
    )
