"""Everything that one purchase is decided on, gathered in one place: the question for the bidder."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import msgspec

from bidding.markets.billing import BillingRule, rule_of
from bidding.markets.observations import Scaling
from bidding.model import Acquire, Bid, Demand, HeldMachine, Limits, Offer, Throughput
from bidding.risk import HAZARD_PRIOR
from cloud.model import InstanceType, Market, Place
from orchestrator.brain.handlers import layout_changes
from orchestrator.brain.holdings import alike, leases, ledger
from orchestrator.brain.layouts import forecast, speeds
from orchestrator.state import Job, Kind, Lease, PoolState, State, leases_of

LOST_MAX = 0.999999  # what is lost for sure is lost within seconds, not at once
PRICES_S = 60.0  # how long a place's first prices are waited for
ROUNDING_USD, ROUNDING = 1e-12, 1e-9
MARKETS: tuple[Market, ...] = ("spot", "on_demand")
Bought = Counter[tuple[str, Market, str]]  # vCPUs by place, market and family


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What is sold, what the job holds, what it needs and what it may, and how fast machines are for it."""

    offers: list[Offer]
    holdings: list[HeldMachine]
    demand: Demand
    limits: Limits
    speed: Throughput
    at_s: float


class SlotSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Work per second as long as there is no profile, which a job of served tables never has.

    It is what steps took at other sizes, as soon as two were seen; before that it is the sum of the
    slots' speeds. `work_per_slot_s` is measured when it can be.
    """

    types: dict[str, InstanceType]
    slots_max: int
    work_per_slot_s: float = 1.0
    scaling: Scaling = Scaling()

    def work_per_s(self, counts: Mapping[str, int]) -> float:
        slots = sum(n * self.types[name].slots for name, n in counts.items())
        speed = sum(
            n * self.types[name].slots * self.types[name].speed for name, n in counts.items()
        )
        share = min(1.0, self.slots_max / slots) if slots else 0.0
        measured = self.scaling.work_per_s(speed * share)
        return speed * share * self.work_per_slot_s if measured is None else measured


def situation_of(
    state: State, job: Job, kind: Kind | None = None, *, trials: bool = True
) -> Situation:
    """As it is for this job now, with machines of this kind or else of the one that it keeps to.

    With `trials` a pool that has refused all is asked for one machine first.
    """
    kind = kind or alike.kind_of(state, job)
    speed = forecast.speed_of(state, job) or SlotSpeed(
        types=speeds.types_for(state, job),
        slots_max=job.workers_max,
        work_per_slot_s=_pace(state, job),
        scaling=job.market.scaling,
    )
    steps_left = job.progress.steps_total - job.progress.step if job.progress.steps_total else None
    settings, deadline_s = state.settings, job.spec.deadline_s
    start_s = job.market.times.typical_s("start_s", settings.start_s)
    recovery_s = job.market.times.typical_s("recovery_s", settings.recovery_s)
    exchange_gb, boundary_gb, depth = _sent(job)
    sharers = sum(state.jobs[j].active for j in state.live_jobs)
    demand = Demand(
        work_left=None if steps_left is None or not job.progress.step_s else float(steps_left),
        start_s=start_s,
        morph_s=job.market.times.typical_s("morph_s", settings.morph_s),
        recovery_s=recovery_s,
        manager_usd_per_h=settings.manager_usd_per_h / max(1, sharers),
        exchange_gb_per_work=exchange_gb,
        boundary_gb_per_work=boundary_gb,
        depth=depth,
    )
    limits = Limits(
        slots_min=job.workers_min,
        slots_max=_slots_most(state, job),
        budget_left_usd=_budget_left_usd(state, job),
        usd_per_h_max=_usd_per_h_left(state, job),
        finish_by_s=None if deadline_s is None else deadline_s + state.skew_s,
        on_demand_allowed=settings.on_demand_allowed,
        haste=job.spec.haste,
        regions=settings.regions or None,
    )
    return Situation(
        offers=offers(state, job, kind, trials=trials),
        holdings=holdings(state, job, kind),
        demand=demand,
        limits=limits,
        speed=speed,
        at_s=state.now_s,
    )


def _sent(job: Job) -> tuple[float, float, int]:
    """The gigabytes that a step sends: between replicas, and over each boundary of a chain; the depth.

    While no step was timed, a step counts as a slot-second.
    """
    depth = 1 if job.layouts.current is None else job.layouts.current.depth
    activations = 0.0
    if job.layouts.profile is not None and depth > 1:
        profile = job.layouts.profile
        activations = max(section.activation_bytes for section in profile.sections)
        activations *= 2 * profile.microbatch_sizes[0] * job.layouts.microbatches
    return 2 * forecast.gradient_bytes(job) / depth / 1e9, activations / 1e9, depth


def _slots_most(state: State, job: Job) -> int:
    """As many as it has use for; near its end, those of the machines that work."""
    most = job.workers_max
    if layout_changes.settled(state, job):
        most = min(most, layout_changes.slots_serving(state, job))
    return max(most, job.workers_min)


def offers(state: State, job: Job, kind: Kind | None = None, *, trials: bool = True) -> list[Offer]:
    """What is sold at a price that can be trusted, less what the job could not pay the reserve of."""
    found: list[Offer] = []
    home, bought = leases.home_of(state, job), vcpus_bought(state)
    view = speeds.view_of(state, job)
    for known in state.pools.values():
        if not known.sold or state.places[known.pool.place.key].closed:
            continue
        if not alike.may_buy(state, job, kind, known.kind, known.pool):
            continue
        hazard_per_h = known.record.hazard_per_h(state.now_s)
        return_per_h = known.record.return_per_h(state.now_s)
        traits = leases.traits_of(state, known.pool.place)
        losses_seen = _losses_seen(state, known)
        trial = alike.most(state, job, kind, known)
        for market in MARKETS:
            price = _price_usd_per_h(state, known, market)
            room = room_left(state, known, market, bought) if price is not None else 0
            few = leases.askable(state, known, market, trials=trials)
            room = min((n for n in (room, few, trial) if n is not None), default=None)
            if price is None or room == 0:
                continue
            block = leases.block_of(state, known, market)
            found.append(
                Offer(
                    pool=known.pool,
                    type=view(known.kind),
                    market=market,
                    price_usd_per_h=price,
                    blocked=block is not None and not block.room,
                    blocked_because="" if block is None else block.because,
                    machines_max=room,
                    hazard_per_h=hazard_per_h,
                    bids=_bids(state, known, market),
                    losses_seen=losses_seen,
                    return_per_h=return_per_h,
                    billing=leases.traits_of(state, known.pool.place).billing,
                    egress_usd=leases.egress_usd(state, job, known.pool, home),
                    disk_usd_per_h=state.settings.disk_usd_per_h,
                    zone_usd_per_gb=traits.zone_usd_per_gb,
                    region_usd_per_gb=traits.region_usd_per_gb,
                )
            )
    purses = ledger.purses(state, job)
    return [o for o in found if ledger.pays(purses, _needed_usd(state, o))] if purses else found


def _needed_usd(state: State, offer: Offer) -> float:
    """The least that must be there to buy one machine of it."""
    ceiling = ceiling_of(state, offer)
    terms = leases.terms_of(state, offer.pool.place)
    return ledger.needed_usd(state.settings, terms, ceiling) + offer.egress_usd


def _price_usd_per_h(state: State, known: PoolState, market: Market) -> float | None:
    """What it costs there now; None where it is not sold so, not allowed, or not known well enough.

    A catalogue has the prices on demand. Those on spot come after it, and are waited for.
    """
    place = state.places[known.pool.place.key]
    if place.quoted_at_s is None and state.now_s < place.rooms_at_s + PRICES_S:
        return None
    if market == "on_demand":
        return known.kind.on_demand_usd_per_h if state.settings.on_demand_allowed else None
    return None if place.stale else known.spot_usd_per_h


def vcpus_bought(state: State) -> Bought:
    """What was bought since the quotas of each place were read, by place, market and family; "" is all.

    What was there then, and has ended since, counts against it.
    """
    found: Bought = Counter()
    if not any(place.rooms for place in state.places.values()):
        return found
    for lease in (*state.leases.values(), *state.ended_leases.values()):
        place = state.places[lease.pool.place.key]
        if lease.ended_at_s is None:
            sign = int(lease.intended_at_s >= place.rooms_at_s)
        else:
            freed = lease.disk_from_s < place.rooms_at_s < lease.gone_at_s and not lease.lingers
            sign = -int(freed)
        if place.rooms and sign:
            for family in {lease.type.family, ""}:
                found[place.key, lease.request.market, family] += sign * lease.type.vcpus
    return found


def room_left(state: State, known: PoolState, market: Market, bought: Bought) -> int | None:
    """How many machines the quotas leave; None where none is known to bound them.

    What was bought since the quotas were read counts as well; what of ours has ended since comes back.
    """
    place, kind = state.places[known.pool.place.key], known.kind
    rooms = [
        room for room in place.rooms if room.market == market and room.family in ("", kind.family)
    ]
    if not rooms or kind.vcpus < 1:
        return None
    return min(
        max(0, room.vcpus_max - max(0, room.vcpus_used + bought[place.key, market, room.family]))
        // kind.vcpus
        for room in rooms
    )


def rule_at(state: State, place: Place, market: Market) -> BillingRule:
    return rule_of(leases.traits_of(state, place).billing, place.cloud, market)


def _bids(state: State, known: PoolState, market: Market) -> tuple[Bid, ...]:
    """What may be bid there, and what each bid means. Before that is known, the on-demand price is bid.

    Where a bid may be left out, it is: what a price limit ends, we end ourselves, and at the same price.
    """
    price = known.spot_usd_per_h
    if price is None or rule_at(state, known.pool.place, market).bid != "required":
        return ()
    if not known.odds:
        most = max(price, known.kind.on_demand_usd_per_h)
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


def ceiling_of(state: State, offer: Offer | Acquire) -> float:
    """The most that a machine of the offer may cost before we think again."""
    known = state.pools[offer.pool.key]
    return ledger.ceiling_usd_per_h(
        known.kind,
        offer.market,
        known.spot_usd_per_h,
        state.settings.disk_usd_per_h,
    )


def holdings(state: State, job: Job, kind: Kind | None) -> list[HeldMachine]:
    """What the job holds and keeps. What is about to go counts as noticed: it is replaced now.

    What is in the layout counts whatever its kind. To go on with another kind begins with nothing.
    """
    own, view = alike.kind_of(state, job), speeds.view_of(state, job)
    if own is not None and kind != own:
        return []
    return [
        HeldMachine(
            lease=token,
            pool=lease.pool,
            type=view(lease.type),
            market=lease.request.market,
            price_usd_per_h=lease.price_usd_per_h,
            bid_usd_per_h=lease.request.bid_usd_per_h,
            started_at_s=lease.intended_at_s,
            noticed=lease.state in ("noticed", "leaving") or lease.goes_at_s is not None,
            doing=_doing(state, job, lease),
            hazard_per_h=_hazard_per_h(state, lease),
            losses_seen=_losses_seen(state, state.pools[lease.pool.key]),
            billing=lease.billing,
            disk_usd_per_h=lease.disk_usd_per_h,
            zone_usd_per_gb=leases.traits_of(state, lease.pool.place).zone_usd_per_gb,
            region_usd_per_gb=leases.traits_of(state, lease.pool.place).region_usd_per_gb,
        )
        for token in job.leases
        if not (lease := state.leases[token]).released
        and lease.state != "ending"
        and (alike.may_hold(job, kind, lease) or alike.serves(job, lease))
    ]


def _doing(state: State, job: Job, lease: Lease) -> Literal["starts", "works", "idles"]:
    """Where nothing has trained yet, all start. Who does not work by the time that a start may take is left out."""
    if any(worker in job.layouts.serving for worker in lease.workers.values()):
        return "works"
    since_s = lease.intended_at_s
    if job.progress.trained_from_s is None:
        since_s = max(since_s, job.history[-1].at_s)
    elif lease.worked_at_s is not None:
        return "idles"
    patience_s = leases.boot_s(state, lease.pool.place) + state.settings.worker_timeout_s
    return "starts" if state.now_s <= since_s + patience_s else "idles"


def _pace(state: State, job: Job) -> float:
    """Steps per second of a slot of speed one: on the layout that runs, or as last measured; one until they were."""
    size = speeds.together(state, job)
    if job.progress.step_s and size is not None:
        return 1.0 / (job.progress.step_s * size)
    return 1.0 / job.progress.slot_step_s if job.progress.slot_step_s else 1.0


def _budget_left_usd(state: State, job: Job) -> float | None:
    lefts = [
        account.cap_usd - ledger.spent_usd(account, state.now_s)
        for account in (state.account, job.account)
        if account.cap_usd is not None
    ]
    return min(lefts, default=None)


def _usd_per_h_left(state: State, job: Job) -> float | None:
    """What this job may cost per hour: the limit less what others, the manager and its own that go cost.

    What stays may be kept even so, because giving it back makes no room before the others have gone.
    """
    most = state.settings.usd_per_h_max
    if most is None:
        return None
    everything, own = state.account, job.account
    others = everything.usd_per_h - own.usd_per_h
    others += everything.intended_usd_per_h - own.intended_usd_per_h
    stays_usd, goes_usd = 0.0, 0.0
    for lease in leases_of(state, job):
        if lease.goes_at_s is None and lease.stays:
            stays_usd += lease.usd_per_h
        else:
            goes_usd += lease.usd_per_h
    kept_usd = min(stays_usd * (1 + ROUNDING), most - others)
    return max(0.0, most - others - goes_usd, kept_usd)
