"""From what the manager knows to a question for the bidder, and from its answer to actions."""

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from bidding import acquire
from bidding.billing import BillingRule, rule_of
from bidding.model import Acquire, Bid, Demand, Holding, Limits, Offer, Purchase
from bidding.risk import HAZARD_PRIOR
from cloud.model import InstanceType, Market
from orchestrator.actions import AnyAction, KeepQuotes
from orchestrator.brain import crews, forecast, leases, ledger
from orchestrator.events import CatalogueSeen, QuotesKept, QuotesSeen
from orchestrator.state import Job, Lease, PoolState, State, leases_of, note, want_layout
from orchestrator.validity import is_time

LAUNCHES_PER_PERIOD_MAX = 64
KEEP_QUOTES_S = 300.0  # the whole history is written each time
UNKEPT_MAX = 20_000
HOLD_OUT_S = 120.0
LOST_MAX = 0.999999  # what is lost for sure is lost within seconds, not at once
ROUNDING_USD = 1e-12
MARKETS: tuple[Market, ...] = ("spot", "on_demand")


class SlotSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Work per second as long as there is no profile: the sum of the slots' speeds.

    `work_per_slot_s` is measured when it can be.
    """

    types: dict[str, InstanceType]
    slots_max: int
    work_per_slot_s: float = 1.0

    def work_per_s(self, counts: Mapping[str, int]) -> float:
        slots = sum(n * self.types[name].slots for name, n in counts.items())
        speed = sum(
            n * self.types[name].slots * self.types[name].speed for name, n in counts.items()
        )
        share = min(1.0, self.slots_max / slots) if slots else 0.0
        return speed * share * self.work_per_slot_s


def on_catalogue(state: State, event: CatalogueSeen) -> None:
    """What is sold now. A pool that is not in it any more is not bought from; what is held there stays."""
    leases.provider_of(state, event.provider)
    for kind in event.types:
        state.types[kind.name] = kind
    ours = [pool for pool in event.pools if pool.cloud == event.provider]
    sold = {pool for pool in ours if pool.type in state.types}
    for pool in sorted(sold):
        leases.pool_of(state, pool).sold = True
    for known in state.pools.values():
        if known.pool.cloud == event.provider and known.pool not in sold:
            known.sold = False


def on_quotes(state: State, out: list[AnyAction], event: QuotesSeen) -> None:
    """The newest quote of each pool holds; running spot machines are charged the new price.

    Quotes are dated by the cloud, and no date is later than now: after one that is, or after a clock that was
    set back, older prices would hold for as long as it takes to be that late again.
    """
    provider = leases.provider_of(state, event.provider)
    provider.quoted_at_s, provider.stale = state.now_s, False
    for quote in event.quotes:
        known = state.pools.get(quote.pool.key)
        price, at_s = quote.price_usd_per_h, min(quote.at_s + state.skew_s, state.now_s)
        if known is None or at_s < known.quoted_at_s or not ledger.credible(price):
            continue
        if not is_time(quote.at_s):
            continue
        known.quoted_at_s = at_s
        state.unkept.append(quote)
        if known.spot_usd_per_h == price:
            continue
        known.spot_usd_per_h = price
        for lease in [state.leases[token] for token in known.leases]:
            if lease.request.market == "spot":
                leases.reprice(state, out, lease, price)
    leases.keep_within_hour(state, out)
    del state.unkept[:-UNKEPT_MAX]


def keep_quotes(state: State, out: list[AnyAction]) -> None:
    """Now and then what was seen goes into the history; where markets ask for bids, it says what they mean."""
    due_s = -math.inf if state.kept_at_s is None else state.kept_at_s + KEEP_QUOTES_S
    if not state.unkept or state.now_s < due_s:
        return
    names = sorted({quote.pool.type for quote in state.unkept})
    out.append(
        KeepQuotes(
            quotes=tuple(state.unkept),
            types=tuple(state.types[name] for name in names if name in state.types),
            bids=any(_rule(state, name, "spot").bid == "required" for name in state.providers),
            because="prices are kept beside the state",
        )
    )
    state.unkept, state.kept_at_s = [], state.now_s


def on_quotes_kept(state: State, out: list[AnyAction], event: QuotesKept) -> None:
    """What is not known any more stays as it was; a history that cannot be kept is said and done without."""
    for key, odds in event.odds.items():
        if key in state.pools:
            state.pools[key].odds = odds
    if event.error:
        note(out, "quotes", event.error)


def buy_if_due(state: State, out: list[AnyAction]) -> None:
    """Ask the bidder for every job that lacked something, and now and then for the others.

    A price that arrives is only stored: it is looked at here, once in a period.
    """
    _doubt_old_quotes(state, out)
    for job in [state.jobs[j] for j in state.live_jobs]:
        if state.now_s >= job.think_at_s:
            _buy(state, out, job)


def buy_for_considered(state: State, out: list[AnyAction]) -> None:
    """At the end of every event: for the jobs for which it made that necessary."""
    considered, state.considered = state.considered, {}
    for job in [state.jobs[job_id] for job_id in considered if job_id in state.jobs]:
        _buy(state, out, job)


def _buy(state: State, out: list[AnyAction], job: Job) -> None:
    if not job.active or state.stopping:
        return
    job.think_at_s = state.now_s + state.settings.rethink_s
    _think_again(state, job)
    _carry_out(state, out, job, think(state, job))


def _think_again(state: State, job: Job) -> None:
    """What shall leave once it is replaced may stay after all: its replacement may have been refused."""
    for lease in leases_of(state, job):
        if lease.leaving and lease.state == "working" and not lease.doomed:
            lease.leaving = ""


def _doubt_old_quotes(state: State, out: list[AnyAction]) -> None:
    """A provider that has said nothing about prices for too long is not bought spot from; said once."""
    most_s = state.settings.quote_max_age_s
    for provider in state.providers.values():
        since_s = provider.quoted_at_s
        if most_s is None or since_s is None or provider.stale or state.now_s - since_s <= most_s:
            continue
        provider.stale = True
        why = f"its prices are {state.now_s - since_s:.0f} s old: no spot machine is bought at them"
        note(out, provider.name, why)


def think(state: State, job: Job) -> Purchase:
    """What the bidder says about this job now."""
    speed = forecast.speed_of(state, job) or SlotSpeed(
        types=state.types, slots_max=job.workers_max, work_per_slot_s=_pace(job)
    )
    steps_left = job.steps_total - job.step if job.steps_total else None
    settings, deadline_s = state.settings, job.spec.deadline_s
    start_s = job.times.typical_s("start_s", settings.start_s)
    recovery_s = job.times.typical_s("recovery_s", settings.recovery_s)
    sharers = sum(state.jobs[j].active for j in state.live_jobs)
    demand = Demand(
        work_left=None if steps_left is None or not job.step_s else float(steps_left),
        start_s=start_s,
        morph_s=job.times.typical_s("morph_s", settings.morph_s),
        recovery_s=recovery_s,
        recovery_all_s=recovery_s + start_s,  # nobody works until a machine has started
        manager_usd_per_h=settings.manager_usd_per_h / max(1, sharers),
    )
    limits = Limits(
        slots_min=_slots_least(job),
        slots_max=_slots_most(state, job),
        budget_left_usd=_budget_left_usd(state, job),
        usd_per_h_max=_usd_per_h_left(state, job),
        finish_by_s=None if deadline_s is None else deadline_s + state.skew_s,
        on_demand_allowed=settings.on_demand_allowed,
        haste=job.spec.haste,
        regions=settings.regions or None,
    )
    return acquire.decide(
        offers(state, job), holdings(state, job), demand, limits, speed, state.now_s
    )


def _slots_least(job: Job) -> int:
    """Fewer would cost money and could not train."""
    least = max(job.workers_min, min(job.spec.depth or 1, job.stages_max))
    return min(least, job.workers_max)


def _slots_most(state: State, job: Job) -> int:
    """As many as it has use for; near its end, those of the machines that work."""
    most = job.workers_max
    if crews.settled(state, job):
        most = min(most, crews.slots_serving(state, job))
    return max(most, _slots_least(job))


def offers(state: State, job: Job) -> list[Offer]:
    """What is sold at a price that can be trusted, less what the job could not pay the reserve of."""
    found: list[Offer] = []
    home = leases.home_of(state, job)
    for known in state.pools.values():
        provider = state.providers[known.pool.cloud]
        waits = state.now_s < max(known.blocked_until_s, provider.slow_until_s)
        shut = state.now_s < known.blocked_until_s
        why = known.blocked_because if shut else provider.slow_because if waits else ""
        if not known.sold:
            continue
        hazard_per_h = known.record.hazard_per_h(state.now_s)
        return_per_h = known.record.return_per_h(state.now_s)
        losses_seen = _losses_seen(state, known)
        for market in MARKETS:
            price = _price_usd_per_h(state, known, market)
            if price is None:
                continue
            found.append(
                Offer(
                    pool=known.pool,
                    type=state.types[known.pool.type],
                    market=market,
                    price_usd_per_h=price,
                    blocked=waits,
                    blocked_because=why,
                    hazard_per_h=hazard_per_h,
                    bids=_bids(state, known, market),
                    losses_seen=losses_seen,
                    return_per_h=return_per_h,
                    billing=state.settings.billing,
                    egress_usd=leases.egress_usd(state, job, known.pool, home),
                    disk_usd_per_h=state.settings.disk_usd_per_h,
                )
            )
    purses = ledger.purses(state, job)
    return [o for o in found if ledger.pays(purses, _needed_usd(state, o))] if purses else found


def _needed_usd(state: State, offer: Offer) -> float:
    """The least that must be there to buy one machine of it."""
    ceiling = _ceiling_usd_per_h(state, offer)
    return ledger.needed_usd(state.settings, ceiling) + offer.egress_usd


def _price_usd_per_h(state: State, known: PoolState, market: Market) -> float | None:
    """What it costs there now; None where it is not sold so, not allowed, or not known well enough."""
    if market == "on_demand":
        kind = state.types[known.pool.type]
        return kind.on_demand_usd_per_h if state.settings.on_demand_allowed else None
    return None if state.providers[known.pool.cloud].stale else known.spot_usd_per_h


def _rule(state: State, cloud: str, market: Market) -> BillingRule:
    return rule_of(state.settings.billing, cloud, market)


def _bids(state: State, known: PoolState, market: Market) -> tuple[Bid, ...]:
    """What may be bid there, and what each bid means. Before that is known, the on-demand price is bid.

    Where a bid may be left out, it is: what a price limit ends, we end ourselves, and at the same price.
    """
    price = known.spot_usd_per_h
    if price is None or _rule(state, known.pool.cloud, market).bid != "required":
        return ()
    if not known.odds:
        most = max(price, state.types[known.pool.type].on_demand_usd_per_h)
        lost = -math.expm1(-known.record.hazard_per_h(state.now_s))
        return (Bid(bid_usd_per_h=most, evicted_in_1h=lost),)
    return tuple(
        Bid(bid_usd_per_h=price + odds.above_usd_per_h, evicted_in_1h=odds.evicted_in_1h)
        for odds in known.odds
    )


def _losses_seen(state: State, known: PoolState) -> bool:
    """Whether its hazard rests more on what was seen there lately than on what is assumed of all."""
    return known.record.losses_at(state.now_s) > HAZARD_PRIOR.events


def _hazard_per_h(state: State, lease: Lease) -> float:
    """How fast a held machine is lost: with a bid, by how far the price is below it; else by the pool's record."""
    known, bid = state.pools[lease.pool.key], lease.request.bid_usd_per_h
    if bid is None or not known.odds:
        return known.record.hazard_per_h(state.now_s)
    price = lease.price_usd_per_h if known.spot_usd_per_h is None else known.spot_usd_per_h
    above = bid - price
    within = [odds for odds in known.odds if odds.above_usd_per_h <= above + ROUNDING_USD]
    return -math.log1p(-min(within[-1].evicted_in_1h if within else 1.0, LOST_MAX))


def _ceiling_usd_per_h(state: State, offer: Offer | Acquire) -> float:
    """The most that a machine of the offer may cost before we think again."""
    known = state.pools[offer.pool.key]
    return ledger.ceiling_usd_per_h(
        state.types[offer.pool.type],
        offer.market,
        known.spot_usd_per_h,
        state.settings.disk_usd_per_h,
    )


def holdings(state: State, job: Job) -> list[Holding]:
    """What the job holds and keeps. What is about to go counts as noticed: it is replaced now."""
    return [
        Holding(
            lease=token,
            pool=lease.pool,
            type=lease.type,
            market=lease.request.market,
            price_usd_per_h=lease.price_usd_per_h,
            bid_usd_per_h=lease.request.bid_usd_per_h,
            started_at_s=lease.intended_at_s,
            noticed=lease.state == "noticed" or lease.lost_at_s is not None,
            doing=_doing(state, job, lease),
            hazard_per_h=_hazard_per_h(state, lease),
            losses_seen=_losses_seen(state, state.pools[lease.pool.key]),
            billing=lease.billing,
            disk_usd_per_h=lease.disk_usd_per_h,
        )
        for token in job.leases
        if not (lease := state.leases[token]).leaving and lease.state != "ending"
    ]


def _doing(state: State, job: Job, lease: Lease) -> Literal["starts", "works", "idles"]:
    """Where nothing has trained yet, all start. Who does not work by the time that a start may take is left out."""
    if any(worker in job.serving for worker in lease.workers.values()):
        return "works"
    since_s = lease.intended_at_s
    if job.trained_from_s is None:
        since_s = max(since_s, job.history[-1].at_s)
    elif lease.worked_at_s is not None:
        return "idles"
    patience_s = state.settings.boot_timeout_s + state.settings.worker_timeout_s
    return "starts" if state.now_s <= since_s + patience_s else "idles"


def _pace(job: Job) -> float:
    """Steps per second and slot: on the layout that runs, or as last measured; one until they were."""
    if job.step_s and job.layout is not None:
        return 1.0 / (job.step_s * len(job.layout.workers))
    return 1.0 / job.slot_step_s if job.slot_step_s else 1.0


def _budget_left_usd(state: State, job: Job) -> float | None:
    lefts = [
        account.cap_usd - ledger.spent_usd(account, state.now_s)
        for account in (state.account, job.account)
        if account.cap_usd is not None
    ]
    return min(lefts, default=None)


def _usd_per_h_left(state: State, job: Job) -> float | None:
    """What this job may cost per hour: the limit less what others, the manager and its own that go cost."""
    most = state.settings.usd_per_h_max
    if most is None:
        return None
    everything, own = state.account, job.account
    others = everything.usd_per_h - own.usd_per_h
    others += everything.intended_usd_per_h - own.intended_usd_per_h
    own_leases = leases_of(state, job)
    others += sum(
        lease.usd_per_h for lease in own_leases if lease.lost_at_s is not None or not lease.stays
    )
    return max(0.0, most - others)


def _carry_out(state: State, out: list[AnyAction], job: Job, purchase: Purchase) -> None:
    room = min(LAUNCHES_PER_PERIOD_MAX, state.settings.machines_max - len(state.leases))
    bought = 0
    worth, home = _worth(job, purchase), leases.home_of(state, job)
    for part in purchase.acquire:
        ceiling = _ceiling_usd_per_h(state, part)
        egress_usd = leases.egress_usd(state, job, part.pool, home)
        for _ in range(min(part.count, room - bought)):
            if not ledger.affordable(state, job, ceiling, egress_usd):
                break
            leases.intend(state, out, job, part, worth, egress_usd)
            bought += 1
    if not _holds_out(state, out, job, purchase):
        ends = "the job ends before its layout may change; " if crews.settled(state, job) else ""
        for release in purchase.release:
            state.leases[release.lease].leaving = f"{ends}{release.because}"
    if bought < sum(part.count for part in purchase.acquire):
        job.think_at_s = state.now_s
    let_go(state, out, job)
    _say_if_waiting(state, out, job, purchase)


def _holds_out(state: State, out: list[AnyAction], job: Job, purchase: Purchase) -> bool:
    """What is left after a loss is kept while its replacement is refused: starting anew would take longer."""
    if not purchase.for_now:
        job.short_since_s = None
        return False
    patience_s = max(HOLD_OUT_S, job.times.typical_s("start_s", state.settings.start_s))
    if job.short_since_s is None:
        job.short_since_s = state.now_s
        note(out, job.id, f"keeps what it holds for up to {patience_s:.0f} s: {purchase.because}")
    if state.now_s >= job.short_since_s + patience_s:
        return False
    job.think_at_s = state.now_s
    return True


def _worth(job: Job, purchase: Purchase) -> str:
    """What the work costs with it, and what the next best would: the reason that people read, in what they count."""
    if purchase.cost_usd_per_work is None:
        return purchase.because
    unit = "step" if job.step_s else "slot-second"
    said = f"with it {purchase.because}; next best: {purchase.runner_up}"
    said = said.replace(" work/s", f" {unit}s/s").replace("000 work", f"000 {unit}s")
    return said.replace(" per work", f" per {unit}")


def let_go(state: State, out: list[AnyAction], job: Job) -> None:
    """Machines that shall leave do so when those that replace them can work, or at once if they idle."""
    held = leases_of(state, job)
    staying = [lease for lease in held if lease.stays]
    going = [lease for lease in held if lease.leaving and lease.state not in ("ending", "noticed")]
    changed = False
    for lease in going:
        if lease.state in ("pending", "booting", "ready") or (
            lease.state == "working" and not staying
        ):
            leases.give_back(state, out, lease, lease.leaving)
    able = sum(_able(state, job, lease) for lease in staying)
    spare = able - sum(w in job.serving for lease in staying for w in lease.workers.values())
    coming = any(_able(state, job, e) < len(e.workers) or not e.workers for e in staying)
    left = able + sum(_able(state, job, e) for e in going if e.state == "working" and not e.doomed)
    for lease in going:
        slots = _able(state, job, lease)
        if lease.state != "working" or lease.doomed or left - slots < _slots_least(job):
            continue
        if coming and spare < slots:
            continue  # who replaces it cannot work yet
        lease.doomed = changed = True
        left, spare = left - slots, spare - slots
    if changed:
        want_layout(state, job)


def _able(state: State, job: Job, lease: Lease) -> int:
    """Workers of this machine that are in a layout or could be."""
    return sum(w in job.workers and state.workers[w].ready for w in lease.workers.values())


def _say_if_waiting(state: State, out: list[AnyAction], job: Job, purchase: Purchase) -> None:
    """No capacity, or nothing that may be bought: said once, and looked at every period."""
    held = leases_of(state, job)
    if sum(e.type.slots for e in held if e.state != "intended") >= job.workers_min:
        job.waiting = ""
    elif not job.waiting and not held:
        job.waiting = f"{purchase.because}; it looks again every period"
        note(out, job.id, job.waiting)
