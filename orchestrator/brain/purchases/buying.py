"""When the bidder is asked for a job, and what becomes of its answer. What it is asked is in `situation`."""

import math

from msgspec.structs import replace

from bidding import acquire
from bidding.model import Purchase, Release
from orchestrator.actions import AnyAction, KeepQuotes
from orchestrator.brain.handlers import layout_changes
from orchestrator.brain.holdings import alike, leases, ledger
from orchestrator.brain.purchases import situation
from orchestrator.events import CatalogueSeen, PlaceClosed, QuotesKept, QuotesSeen
from orchestrator.formatting import plural
from orchestrator.state import (
    Job,
    Kind,
    Lease,
    PoolState,
    State,
    Thought,
    finished_computing,
    leases_of,
    move_lease,
    note,
    want_layout,
)

LAUNCHES_PER_PERIOD_MAX = 64
KEEP_QUOTES_S = 300.0  # the whole history is written each time
UNKEPT_MAX = 20_000
HOLD_OUT_S = 120.0
PRICED_KEPT_MAX = 400
STARTING = ("pending", "booting", "ready")


def on_catalogue(state: State, event: CatalogueSeen) -> None:
    """What is sold now. A pool that is not in it any more is not bought from; what is held there stays."""
    place, digest = leases.place_of(state, event.place), event.sold.recipe.digest
    if place.recipe not in ("", digest):
        leases.forgive(state, event.place)
    place.recipe, place.closed = digest, ""
    place.traits, place.pace = event.traits or place.traits, event.pace or place.pace
    place.rooms, place.rooms_at_s = event.sold.rooms, state.now_s
    kinds = {kind.name: kind for kind in event.sold.types}
    state.types.update(kinds)
    sold = {p for p in event.sold.pools if p.place == event.place and p.type in kinds}
    for pool in sorted(sold):
        known = state.pools.setdefault(pool.key, PoolState(pool=pool, kind=kinds[pool.type]))
        known.kind, known.sold = kinds[pool.type], True
    for known in state.pools.values():
        if known.pool.place == event.place and known.pool not in sold:
            known.sold = False


def on_place_closed(state: State, out: list[AnyAction], event: PlaceClosed) -> None:
    """Say once why a place cannot be used; what is known of it stays."""
    closed = event.closed
    place = leases.place_of(state, closed.place)
    if place.closed != closed.because:
        place.closed = closed.because
        note(out, closed.place.key, f"closed: {closed.because}")


def on_quotes(state: State, out: list[AnyAction], event: QuotesSeen) -> None:
    """The newest quote of each pool holds; spot machines are charged the new price since its date.

    Quotes are dated by the cloud, and no date is later than now: after one that is, or after a clock that was
    set back, older prices would hold for as long as it takes to be that late again.
    """
    provider = leases.place_of(state, event.place)
    provider.quoted_at_s, provider.stale = state.now_s, False
    for quote in event.quotes:
        known = state.pools.get(quote.pool.key)
        price, at_s = quote.price_usd_per_h, min(quote.at_s + state.skew_s, state.now_s)
        if known is None or at_s < known.quoted_at_s or not ledger.credible(price):
            continue
        if known.pool.place != event.place:
            continue
        if quote.market == "on_demand":
            known.kind = replace(known.kind, on_demand_usd_per_h=price)
            continue
        known.quoted_at_s = at_s
        state.unkept.append(quote)
        if known.spot_usd_per_h == price:
            continue
        known.spot_usd_per_h = price
        for lease in [state.leases[token] for token in known.leases]:
            if lease.request.market == "spot":
                leases.reprice(state, out, lease, price, at_s)
        ledger.change_past_price(state, known.pool, price, at_s)
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
            bids=any(
                situation.rule_at(state, p.place, "spot").bid == "required"
                for p in state.places.values()
            ),
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
        if state.now_s >= job.market.think_at_s:
            _buy(state, out, job)


def buy_for_considered(state: State, out: list[AnyAction]) -> None:
    """At the end of every event: for the jobs for which it made that necessary."""
    considered, state.considered = state.considered, {}
    for job in [state.jobs[job_id] for job_id in considered if job_id in state.jobs]:
        job.market.think_at_s = state.now_s
        _buy(state, out, job)


def _buy(state: State, out: list[AnyAction], job: Job) -> None:
    if not job.active or state.stopping:
        return
    job.market.think_at_s = state.now_s + state.settings.rethink_s
    if finished_computing(job):
        return  # others would only wait for its end
    _think_again(state, job)
    alike.look(state, out, job)
    purchase = _of_another_kind(state, out, job) or think(state, job)
    purchase = _enough_or_nothing(state, job, purchase)
    active = (j for j in reversed(state.live_jobs) if state.jobs[j].active)
    if job.id == next(active, ""):
        state.thought = _thought(state, job, purchase)
    _carry_out(state, out, job, purchase)


def _think_again(state: State, job: Job) -> None:
    """What shall leave once it is replaced may stay after all: its replacement may have been refused."""
    for lease in leases_of(state, job):
        if lease.state in (*STARTING, "working"):
            lease.released = ""


def _doubt_old_quotes(state: State, out: list[AnyAction]) -> None:
    """A provider that has said nothing about prices for too long is not bought spot from; said once."""
    most_s = state.settings.quote_max_age_s
    for provider in state.places.values():
        since_s = provider.quoted_at_s
        if most_s is None or since_s is None or provider.stale or state.now_s - since_s <= most_s:
            continue
        provider.stale = True
        why = f"its prices are {state.now_s - since_s:.0f} s old: no spot machine is bought at them"
        note(out, provider.key, why)


def think(state: State, job: Job) -> Purchase:
    """What the bidder says about this job now."""
    kinds = [] if alike.kind_of(state, job) else alike.sold_kinds(state, job)
    if len(kinds) > 1:
        return min((_think(state, job, kind) for kind in kinds), key=_dearness)
    return _think(state, job)


def _dearness(purchase: Purchase) -> float:
    cost = purchase.cost_usd_per_work
    return math.inf if cost is None else cost


def _of_another_kind(state: State, out: list[AnyAction], job: Job) -> Purchase | None:
    """Return what an exact job buys instead, if no machines of its kind could be had for long."""
    kind = job.layouts.kind if job.exact and alike.has_kind(state, job) else None
    if kind is None or job.status == "RUNNING" or alike.has_its_own(state, job):
        alike.lacks_nothing(job)
        return None
    if not alike.lacks_its_own(state, job):
        return None
    if not job.market.sought and think(state, job).acquire:
        job.market.sought = True
        return None
    going = [e for e in leases_of(state, job) if e.state != "ending"]
    if _only_on(state, job, going):
        return None
    found = {each: _think(state, job, each) for each in alike.other_kinds(state, job, kind)}
    enough = {each: p for each, p in found.items() if _slots(state, p) >= job.workers_min}
    if not enough:
        return None
    own = job.layouts.trained
    best = own if own in enough else min(enough, key=lambda each: _dearness(enough[each]))
    alike.change(state, out, job, best)
    return enough[best]


def _slots(state: State, purchase: Purchase) -> int:
    return sum(part.count * state.types[part.pool.type].slots for part in purchase.acquire)


def _decided(
    state: State, job: Job, kind: Kind | None, *, trials: bool
) -> tuple[Purchase, situation.Situation]:
    asked = situation.situation_of(state, job, kind, trials=trials)
    return acquire.decide(
        asked.offers, asked.holdings, asked.demand, asked.limits, asked.speed, asked.at_s
    ), asked


def _think(state: State, job: Job, kind: Kind | None = None) -> Purchase:
    purchase, asked = _decided(state, job, kind, trials=True)
    tried = any(block.strikes for block in state.blocks.values())
    if tried and purchase.cost_usd_per_work is None and not any(o.blocked for o in asked.offers):
        # One machine of each pool that has refused all is too few, and so none would ever be asked.
        purchase, _ = _decided(state, job, kind, trials=False)
    unit = "step" if job.progress.step_s else "slot-second"

    def counted(said: str) -> str:
        """Write what people count for work."""
        said = said.replace(" work/s", f" {unit}s/s").replace("000 work", f"000 {unit}s")
        return said.replace(" per work", f" per {unit}")

    return replace(
        purchase,
        release=tuple(replace(one, because=counted(one.because)) for one in purchase.release),
        because=counted(purchase.because),
        runner_up=counted(purchase.runner_up),
    )


def _enough_or_nothing(state: State, job: Job, purchase: Purchase) -> Purchase:
    """Hold nothing where all that can be paid is too little to train: it would only cost.

    The bidder knows of each machine that it can be paid, and not of all of them together.
    """
    going = {release.lease for release in purchase.release}
    kept = [e for e in leases_of(state, job) if e.stays and e.token not in going]
    slots, room = sum(e.type.slots for e in kept), _room_for(state, job) - len(kept)
    purses, home = ledger.purses(state, job), leases.home_of(state, job)
    wanted = slots + _slots(state, purchase)
    for part in purchase.acquire:
        asked = replace(part, count=max(0, min(part.count, room)))
        egress_usd = leases.egress_usd(state, job, part.pool, home)
        count, purses = leases.payable(state, purses, asked, egress_usd)
        slots, room = slots + count * state.types[part.pool.type].slots, room - count
    least = job.workers_min
    if not purchase.acquire or not slots < least <= wanted:
        return purchase
    bound = f"machines_max is {state.settings.machines_max}"
    if room > 0:
        bound = "the budget has no room for the reserves of more"
    why = f"waiting: no more than {plural(slots, 'slot')} of {least} can be had: {bound}"
    return replace(
        purchase,
        acquire=(),
        release=tuple(Release(lease=e.token, because=why) for e in leases_of(state, job)),
        because=why,
        cost_usd_per_work=None,
    )


def _room_for(state: State, job: Job) -> int:
    """Return how many machines the job may hold beside those that other jobs keep."""
    others = (e.stays for e in state.leases.values() if e.job != job.id)
    return state.settings.machines_max - sum(others)


def _carry_out(state: State, out: list[AnyAction], job: Job, purchase: Purchase) -> None:
    room = min(LAUNCHES_PER_PERIOD_MAX, state.settings.machines_max - len(state.leases))
    bought = 0
    worth, home = _worth(purchase), leases.home_of(state, job)
    for part in purchase.acquire:
        egress_usd = leases.egress_usd(state, job, part.pool, home)
        wanted = min(part.count, room - bought)
        while wanted > 0:
            asked = replace(part, count=wanted)
            count = leases.intend(state, out, job, asked, worth, egress_usd)
            if count == 0:
                break
            wanted, bought = wanted - count, bought + count
    if not (_has_newest(state, out, job, purchase) or _holds_out(state, out, job, purchase)):
        ends = (
            "the job ends before its layout may change; "
            if layout_changes.settled(state, job)
            else ""
        )
        for release in purchase.release:
            state.leases[release.lease].released = f"{ends}{release.because}"
    if bought < sum(part.count for part in purchase.acquire):
        job.market.think_at_s = state.now_s
    let_go(state, out, job)
    _say_if_waiting(state, out, job, purchase)


def _has_newest(state: State, out: list[AnyAction], job: Job, purchase: Purchase) -> bool:
    """Nothing shall be held, but only these machines have the newest steps: they stay for a while."""
    going = {release.lease for release in purchase.release}
    held = [e for e in leases_of(state, job) if e.stays and e.goes_at_s is None]
    last = going and not purchase.acquire and all(e.token in going for e in held)
    if not last or not _only_on(state, job, held):
        return False
    if not job.market.waiting:
        job.market.waiting = (
            f"{purchase.because}; what it holds stays until its newest steps are safe, and no longer "
            "than doing them again would take"
        )
        note(out, job.id, job.market.waiting)
    return True


def _only_on(state: State, job: Job, held: list[Lease]) -> bool:
    """Return whether the newest steps would go with these machines, and are worth waiting for.

    They are until they are safe, but no longer than it would take to do them again.
    """
    progress = job.progress
    unkept = min(progress.step, progress.unkept_step) if progress.sums_kept else progress.step
    unsafe = unkept - max(progress.backup_step, progress.checkpoint_step)
    if state.now_s >= progress.at_s + unsafe * progress.step_s:
        return False
    return any(w in job.layouts.serving for e in held for w in e.workers.values())


def _holds_out(state: State, out: list[AnyAction], job: Job, purchase: Purchase) -> bool:
    """What is left after a loss is kept while its replacement is refused: starting anew would take longer."""
    if not purchase.for_now:
        job.market.short_since_s = None
        return False
    patience_s = max(HOLD_OUT_S, job.market.times.typical_s("start_s", state.settings.start_s))
    if job.market.short_since_s is None:
        job.market.short_since_s = state.now_s
        note(out, job.id, f"keeps what it holds for up to {patience_s:.0f} s: {purchase.because}")
    if state.now_s >= job.market.short_since_s + patience_s:
        return False
    job.market.think_at_s = state.now_s
    return True


def _worth(purchase: Purchase) -> str:
    """What the work costs with it, and what the next best would: the reason that people read."""
    if purchase.cost_usd_per_work is None:
        return purchase.because
    return f"with it {_chosen(purchase)}"


def _chosen(purchase: Purchase) -> str:
    return f"{purchase.because}; next best: {purchase.runner_up}"


def _thought(state: State, job: Job, purchase: Purchase) -> Thought:
    """Keep of the decision what people want to know of it."""
    prices: dict[str, dict[str, float]] = {market: {} for market in situation.MARKETS}
    for one in purchase.priced[:PRICED_KEPT_MAX]:
        prices[one.market][one.pool.key] = one.usd_per_slot_h
    fits = purchase.cost_usd_per_work is not None
    because = _chosen(purchase) if fits else purchase.because
    return Thought(job=job.id, at_s=state.now_s, because=because, usd_per_slot_h=prices)


def let_go(state: State, out: list[AnyAction], job: Job) -> None:
    """Machines that shall leave do so when those that replace them can work.

    Those that idle go as soon as nothing is asked for any more, as that may yet be refused.
    """
    held = leases_of(state, job)
    staying = [lease for lease in held if lease.stays]
    going = [e for e in held if e.released and not e.announced and e.state != "ending"]
    changed, asked = False, any(lease.state == "intended" for lease in staying)
    for lease in going:
        idles = lease.state in STARTING or not alike.serves(job, lease)
        if not staying or (idles and not asked):
            leases.give_back(state, out, lease, lease.released)
    able = sum(_able(state, job, lease) for lease in staying)
    spare = able - sum(
        w in job.layouts.serving for lease in staying for w in lease.workers.values()
    )
    coming = any(_able(state, job, e) < len(e.workers) or not e.workers for e in staying)
    left = able + sum(_able(state, job, e) for e in going if e.state == "working")
    idle = [e for e in staying if not any(w in job.layouts.serving for w in e.workers.values())]
    for lease in going:
        slots = _able(state, job, lease)
        if lease.state != "working" or left - slots < job.workers_min:
            continue
        apart = idle and all(leases.usd_per_gb(state, e.pool, lease.pool) > 0 for e in idle)
        if coming and (spare < slots or apart):
            continue  # who replaces it cannot work yet, or not together with those that stay
        move_lease(lease, "leaving", state.now_s, lease.released)
        changed = True
        left, spare = left - slots, spare - slots
    if changed:
        want_layout(state, job)


def _able(state: State, job: Job, lease: Lease) -> int:
    """Workers of this machine that are in a layout or could be."""
    return sum(w in job.workers and state.workers[w].ready for w in lease.workers.values())


def _say_if_waiting(state: State, out: list[AnyAction], job: Job, purchase: Purchase) -> None:
    """No capacity, or nothing that may be bought: noted once, and looked at every period.

    The job's line has the present reason, as what it waited for first may be there by now.
    """
    held = leases_of(state, job)
    if sum(e.type.slots for e in held if e.state != "intended") >= job.workers_min:
        job.market.waiting = ""
    elif not held:
        noted = bool(job.market.waiting)
        job.market.waiting = f"{purchase.because}; it looks again every period"
        if not noted:
            note(out, job.id, job.market.waiting)
