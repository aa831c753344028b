"""Machines as we mean them to be: what one costs, the intent to buy one, and giving back.

What is heard of them is in `machines`. A launch is an intent in the journal before it is a call.
"""

import re
from collections import Counter
from hashlib import blake2b

from bidding.markets.billing import HOUR_S
from bidding.model import Acquire
from cloud.model import DEPLOYMENT_TAG, EndedBy, LaunchRequest, Market, Place, Pool, Refusal, Scope
from orchestrator.actions import AnyAction, Launch, Terminate
from orchestrator.brain import ledger, staffing
from orchestrator.state import (
    Block,
    Job,
    Lease,
    Moved,
    PlaceState,
    PoolState,
    State,
    consider,
    move_lease,
    next_serial,
    note,
    set_alarm,
)

PENALTY_DOUBLINGS_MAX = 4
ENDED_LEASES_MAX = 500
RETRY_DOUBLINGS_MAX = 4
READABLE_MAX = 12  # characters of the deployment's name in a launch token
UNFIT = re.compile(r"[^a-z0-9]+")
ROUNDING = 1e-9

# --- what one costs ------------------------------------------------------------------------------------


def cost_now_usd_per_h(state: State, pool: Pool, market: Market) -> float:
    """What a machine costs there now; as on demand while no other price is known."""
    spot = state.pools[pool.key].spot_usd_per_h
    if market == "on_demand" or spot is None:
        return state.pools[pool.key].kind.on_demand_usd_per_h
    return spot


def home_of(state: State, job: Job) -> str | None:
    """The region that holds the job's state: where most of its machines work."""
    regions = Counter(
        lease.pool.region
        for token in job.leases
        if (lease := state.leases[token]).state in ("working", "noticed", "leaving")
    )
    return min(regions, key=lambda r: (-regions[r], r)) if regions else None


def free_to_bring(state: State, job: Job, pool: Pool) -> bool:
    """Whether the job's state gets to a machine there without being paid for."""
    return egress_usd(state, job, pool, home_of(state, job)) == 0


def egress_usd(state: State, job: Job, pool: Pool, home: str | None) -> float:
    """What bringing the job's state to a machine there costs."""
    if home is None or pool.region == home:
        return 0.0
    return state.settings.egress_usd_per_gb * job.layouts.state_bytes / 1e9


# --- buying --------------------------------------------------------------------------------------------


def new_token(state: State) -> str:
    """Name a launch as no launch was ever named.

    Epoch and serial are unique within one journal. They come again when the journal was emptied, or
    an old copy was put in its place, so each life of a manager adds a random salt. A token is also
    the name of a virtual machine, so it holds of a deployment's name what such a name may hold, and
    a digest of the whole.
    """
    deployment = state.settings.deployment
    readable = UNFIT.sub("-", deployment.lower())[:READABLE_MAX].strip("-")
    whole = blake2b(f"{deployment}/{state.salt}".encode(), digest_size=6).hexdigest()
    parts = readable, whole, state.epoch, next_serial(state)
    return "-".join(str(part) for part in parts if part != "")


def intend(
    state: State, out: list[AnyAction], job: Job, part: Acquire, because: str, egress_usd: float
) -> None:
    """Write down that we want one machine; the call is made once this is in the journal."""
    pool, market = part.pool, part.market
    known, place = state.pools[pool.key], place_of(state, pool.place)
    kind = known.kind
    price = cost_now_usd_per_h(state, pool, market)
    bid = part.bid_usd_per_h if market == "spot" else None
    because = f"at ${price:.4f}/h{f', bidding ${bid:.4f}/h' if bid is not None else ''}: {because}"
    settings = state.settings
    token = new_token(state)
    request = LaunchRequest(
        token=token,
        pool=pool,
        market=market,
        bid_usd_per_h=bid,
        tags={DEPLOYMENT_TAG: settings.deployment, "job": job.id},
        recipe=place.recipe,
    )
    lease = Lease(
        token=token,
        request=request,
        type=kind,
        job=job.id,
        state="intended",
        history=[Moved(state.now_s, "intended", because)],
        intended_at_s=state.now_s,
        price_usd_per_h=price,
        ceiling_usd_per_h=ledger.ceiling_usd_per_h(
            kind, market, known.spot_usd_per_h, settings.disk_usd_per_h, bid
        ),
        why_bought=because,
        disk_usd_per_h=settings.disk_usd_per_h,
        egress_usd=egress_usd,
        billing=billing_at(state, pool.place),
    )
    state.leases[token] = lease
    job.leases[token] = None
    known.leases[token] = None
    ledger.open_lease(state, lease, job)
    out.append(Launch(request=request, because=because))


# --- what is left alone ----------------------------------------------------------------------


def reach_of(known: PoolState, market: Market) -> dict[Scope, str]:
    """Name everything that a refusal of this market of a pool can reach, narrowest first."""
    pool, place = known.pool, known.pool.place.key
    return {
        "pool": f"{pool.key} {market}",
        "family": f"{place} {known.kind.family or pool.type} {market}",
        "market": f"{place} {market}",
        "zone": f"{place} {pool.zone}",
        "place": place,
        "cloud": pool.cloud,
    }


def block_of(state: State, known: PoolState, market: Market) -> Block | None:
    """Return what keeps this market of a pool from being bought from, the longest if several do."""
    if not state.blocks:
        return None
    found = [state.blocks[k] for k in reach_of(known, market).values() if k in state.blocks]
    now_s = state.now_s
    return max((one for one in found if one.until_s > now_s), key=_until_s, default=None)


def _until_s(block: Block) -> float:
    return block.until_s


def refuse(
    state: State, out: list[AnyAction], request: LaunchRequest, refusal: Refusal, why: str
) -> None:
    """Leave alone what a refusal reaches, longer each time if the cloud does not say how long.

    A machine that joins forgives its pool. New settings, or a new recipe, forgive a place.
    """
    known = state.pools[request.pool.key]
    if refusal.scope == "pool" and request.market == "spot":
        known.record = known.record.refused(state.now_s)
    if refusal.scope == "request":
        return
    key = reach_of(known, request.market)[refusal.scope]
    before = state.blocks.get(key)
    if before is not None and before.until_s > state.now_s:
        return
    strikes = 0 if before is None else before.strikes
    wide = refusal.scope in ("place", "cloud")
    penalty_s = state.settings.penalty_s / (10 if wide else 1)
    for_s = penalty_s * 2 ** min(strikes, PENALTY_DOUBLINGS_MAX)
    for_s = for_s if refusal.retry_s is None else max(0.0, refusal.retry_s)
    state.blocks[key] = Block(until_s=state.now_s + for_s, because=why, strikes=strikes + 1)
    note(out, key, f"left alone for {for_s:.0f} s: {why}")


def penalise(state: State, out: list[AnyAction], lease: Lease, code: str, why: str) -> None:
    """Leave the market of a pool alone, because a machine of it proved to be of no use."""
    refusal = Refusal(scope="pool", code=code, said=why)
    record = state.pools[lease.pool.key].record
    refuse(state, out, lease.request, refusal, why)
    state.pools[lease.pool.key].record = record  # it did sell


def pause(state: State, place: Place, for_s: float, why: str) -> None:
    """Buy nothing in a place for a moment; nobody refused, so it is no strike."""
    before = state.blocks.get(place.key)
    until_s = state.now_s + for_s
    if before is None or before.until_s < until_s:
        strikes = 0 if before is None else before.strikes
        state.blocks[place.key] = Block(until_s=until_s, because=why, strikes=strikes)


def forgive(state: State, place: Place) -> None:
    """Ask a place again, and its cloud, because what is asked for is not the same any more."""
    state.blocks.pop(place.key, None)
    state.blocks.pop(place.cloud, None)


# --- giving back ---------------------------------------------------------------------------------------


def reprice(state: State, out: list[AnyAction], lease: Lease, price_usd_per_h: float) -> None:
    """The price moved. A machine that may cost more than can be reserved for is given back at once."""
    if not ledger.credible(price_usd_per_h):
        return
    if not ledger.change_price(state, lease, price_usd_per_h):
        why = f"its price rose to ${price_usd_per_h:.4f}/h, and the budget has no room for that"
        give_back(state, out, lease, why)


def keep_within_hour(state: State, out: list[AnyAction]) -> None:
    """Prices rose, or machines started at other prices: what passes the limit per hour goes at once, the
    dearest work first. What it bought is thought about anew.
    """
    most = state.settings.usd_per_h_max
    if most is None or state.account.usd_per_h <= most * (1 + ROUNDING):
        return
    going = sum(lease.usd_per_h for lease in state.leases.values() if lease.state == "ending")
    more_usd = state.account.usd_per_h - going - most * (1 + ROUNDING)
    for lease in sorted(state.leases.values(), key=_dearness, reverse=True):
        if more_usd <= 0:
            return
        if lease.state in ("intended", "ending"):
            continue
        more_usd -= lease.usd_per_h
        consider(state, state.jobs[lease.job])
        why = f"all machines cost ${state.account.usd_per_h:.4f}/h now, above the limit of ${most:.4f}/h"
        give_back(state, out, lease, why)


def _dearness(lease: Lease) -> tuple[bool, float, str]:
    """What shall leave goes first, then what pays most for its work."""
    power = lease.type.slots * lease.type.speed
    return bool(lease.released) or lease.announced, lease.usd_per_h / power, lease.token


def give_back(state: State, out: list[AnyAction], lease: Lease, because: str) -> None:
    """Terminate a machine. An intent without a machine yet is given back as soon as it is one."""
    ledger.start_draining(state, lease)
    if lease.state == "intended":
        lease.released = because
        return
    if lease.state == "ending":
        return
    move_lease(lease, "ending", state.now_s, because)
    lease.why_ended = because
    staffing.abandon(state, out, lease, "machine given back")
    _terminate(state, out, lease, because)


def _terminate(state: State, out: list[AnyAction], lease: Lease, because: str) -> None:
    out.append(Terminate(ref=lease.ref, because=because))
    patience_s = state.settings.drain_s / 4 * 2 ** min(lease.terminations, RETRY_DOUBLINGS_MAX)
    lease.terminations += 1
    place_of(state, lease.pool.place).listing_wanted = True
    set_alarm(state, state.now_s + patience_s, "ending", lease.token)


def on_ending_alarm(state: State, out: list[AnyAction], token: str) -> None:
    lease = state.leases.get(token)
    if lease is not None and lease.state == "ending":
        _terminate(state, out, lease, f"it is still there: {lease.why_ended}")


def drop(state: State, out: list[AnyAction], lease: Lease, because: str) -> None:
    """The intent came to nothing: no machine, no cost, and the token is never used again."""
    end(state, out, lease, None, state.now_s, because)


def _record_end(state: State, known: PoolState, *, lost: bool) -> None:
    """What the pool is known for: a loss counts against it, a machine given back only ends the watch."""
    others = any(
        state.leases[token].machine_id and state.leases[token].request.market == "spot"
        for token in known.leases
    )
    if lost:
        known.record = known.record.lost(state.now_s, others)
    elif not others:
        known.record = known.record.left(state.now_s)


def end(
    state: State,
    out: list[AnyAction],
    lease: Lease,
    ended_by: EndedBy | None,
    ended_at_s: float,
    because: str,
) -> None:
    move_lease(lease, "ended", state.now_s, because)
    lease.why_ended = lease.why_ended or because
    ledger.close_lease(state, lease, ended_by, ended_at_s)
    lease.ended_at_s = state.now_s
    if lease.machine_id:
        started_s = lease.prices[0][0]
        held_h = max(0.0, min(ended_at_s, state.now_s) - started_s) / HOUR_S
        note(out, lease.machine_id, f"{because}; held {held_h:.2f} h for ${lease.cost_usd:.4f}")
    else:
        note(out, lease.token, f"not bought: {because}")
    job = state.jobs[lease.job]
    job.market.think_at_s = (
        state.now_s
    )  # with the next look at the market; a loss is answered at once
    del state.leases[lease.token]
    del job.leases[lease.token]
    known = state.pools[lease.pool.key]
    del known.leases[lease.token]
    if lease.machine_id and lease.request.market == "spot":
        _record_end(state, known, lost=ended_by == "provider")
    state.machines.pop(lease.machine_id, None)
    if lease.machine_id:
        state.ended_leases.append(lease)
        if len(state.ended_leases) > 2 * ENDED_LEASES_MAX:
            del state.ended_leases[:-ENDED_LEASES_MAX]


# --- small readings ------------------------------------------------------------------------------------


def lease_of(state: State, machine_id: str) -> Lease | None:
    token = state.machines.get(machine_id)
    return None if token is None else state.leases[token]


def place_of(state: State, place: Place) -> PlaceState:
    return state.places.setdefault(place.key, PlaceState(place=place))


def billing_at(state: State, place: Place) -> str:
    """Return the name of the rule by which a place bills: what its cloud says, else the settings'."""
    traits = place_of(state, place).traits
    return state.settings.billing if traits is None else traits.billing


def grace_s(state: State, place: Place) -> float:
    """Return how long a list may miss a machine of this place before that means something."""
    pace = place_of(state, place).pace
    return max(state.settings.launch_grace_s, pace.grace_s if pace is not None else 0.0)


def boot_s(state: State, place: Place) -> float:
    """Return how long a machine of this place may take to join."""
    pace = place_of(state, place).pace
    return max(state.settings.boot_timeout_s, pace.boot_s if pace is not None else 0.0)
