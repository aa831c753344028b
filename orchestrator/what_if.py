"""What the manager would do under other terms: its own decision, on a copy of its state. Pure.

Nothing is bought, and the state that is given is changed: it has to be a copy.
"""

from collections import Counter

import msgspec

from cloud.clock import HOUR_S
from cloud.model import Market
from orchestrator.brain.holdings import ledger
from orchestrator.brain.holdings.leases import cost_now_usd_per_h
from orchestrator.brain.purchases.buying import think
from orchestrator.brain.purchases.situation import situation_of
from orchestrator.state import Job, State, leases_of


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a person changes; None leaves a thing as it is."""

    budget_usd: float | None = None
    deadline_s: float | None = None
    regions: tuple[str, ...] | None = None
    slots_max: int | None = None
    on_demand: bool | None = None


class Buys(msgspec.Struct, frozen=True, kw_only=True):
    pool: str
    market: Market
    count: int
    usd_per_h: float
    because: str


class GivesBack(msgspec.Struct, frozen=True, kw_only=True):
    machine: str
    pool: str
    because: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The next decision, and what would come of it if prices and machines stayed.

    A number is None where it is not known, as before the first step was timed.
    """

    because: str
    runner_up: str
    buys: tuple[Buys, ...] = ()
    gives_back: tuple[GivesBack, ...] = ()
    machines: int = 0  # held afterwards
    usd_per_h: float = 0.0
    steps_per_s: float | None = None
    finish_in_s: float | None = None
    final_usd: float | None = None  # what the job would have cost in the end
    over_budget: bool = False  # with what stays reserved until its machines are given back


def what_if(state: State, job_id: str, terms: Terms) -> Outcome:
    """Return what the manager would decide for a job now under these terms."""
    job = state.jobs[job_id]
    _agree(state, job, terms)
    if job.ended:
        return Outcome(because=f"{job.id} has ended: {job.status}", runner_up="")
    found = think(state, job)
    given_back = {release.lease for release in found.release}
    stays = [one for one in leases_of(state, job) if one.token not in given_back and one.stays]
    counts = Counter(lease.pool.type for lease in stays)
    usd_per_h = sum(lease.usd_per_h for lease in stays)
    buys = []
    for part in found.acquire:
        each_usd_per_h = cost_now_usd_per_h(state, part.pool, part.market)
        counts[part.pool.type] += part.count
        usd_per_h += part.count * (each_usd_per_h + state.settings.disk_usd_per_h)
        buys.append(
            Buys(
                pool=part.pool.key,
                market=part.market,
                count=part.count,
                usd_per_h=each_usd_per_h,
                because=part.because,
            )
        )
    outcome = Outcome(
        because=found.because,
        runner_up=found.runner_up,
        buys=tuple(buys),
        gives_back=tuple(
            GivesBack(
                machine=state.leases[one.lease].machine_id or one.lease,
                pool=state.leases[one.lease].pool.key,
                because=one.because,
            )
            for one in found.release
        ),
        machines=counts.total(),
        usd_per_h=usd_per_h,
    )
    return _foreseen(state, job, outcome, counts)


def _agree(state: State, job: Job, terms: Terms) -> None:
    """Put the terms into the copy of the state."""
    settings, spec = state.settings, job.spec
    if terms.budget_usd is not None:
        job.account.cap_usd = terms.budget_usd
        spec = msgspec.structs.replace(spec, budget_usd=terms.budget_usd)
    if terms.deadline_s is not None:
        spec = msgspec.structs.replace(spec, deadline_s=terms.deadline_s)
    if terms.slots_max is not None:
        least = min(spec.slots_min, terms.slots_max)
        spec = msgspec.structs.replace(spec, slots_max=terms.slots_max, slots_min=least)
    if terms.regions is not None:
        settings = msgspec.structs.replace(settings, regions=terms.regions)
    if terms.on_demand is not None:
        settings = msgspec.structs.replace(settings, on_demand_allowed=terms.on_demand)
    state.settings, job.spec = settings, spec


def _foreseen(state: State, job: Job, outcome: Outcome, counts: "Counter[str]") -> Outcome:
    """Add the end and the final cost, as far as the length of a step and their number are known."""
    left = job.progress.steps_total - job.progress.step
    if not (job.progress.steps_total and job.progress.step_s and counts.total()):
        return outcome
    per_s = situation_of(state, job).speed.work_per_s(counts)
    if per_s <= 0:
        return outcome
    start_s = job.market.times.typical_s("start_s", state.settings.start_s)
    took_s = left / per_s + (start_s if outcome.buys and not job.leases else 0.0)
    spent_usd = ledger.spent_usd(job.account, state.now_s)
    final_usd = spent_usd + outcome.usd_per_h * took_s / HOUR_S
    cap_usd = job.account.cap_usd
    held_usd = ledger.committed_usd(job.account, state.now_s)
    return msgspec.structs.replace(
        outcome,
        steps_per_s=per_s,
        finish_in_s=took_s,
        final_usd=final_usd,
        over_budget=cap_usd is not None and final_usd + held_usd > cap_usd,
    )
