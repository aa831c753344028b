"""Machines as we mean them to be: what one costs, the intent to buy one, and giving back.

What is heard of them is in `machines`. A launch is an intent in the journal before it is a call.
"""

import re
from collections import Counter
from hashlib import blake2b

from bidding.markets.billing import HOUR_S
from bidding.model import Acquire
from cloud.model import DEPLOYMENT_TAG, EndedBy, LaunchRequest, Market, Pool
from orchestrator.actions import AnyAction, Launch, Terminate
from orchestrator.brain import ledger, staffing
from orchestrator.state import (
    Job,
    Lease,
    Moved,
    PoolState,
    ProviderState,
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
        return state.types[pool.type].on_demand_usd_per_h
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
    kind, known = state.types[pool.type], state.pools[pool.key]
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
    )
    lease = Lease(
        token=token,
        provider=pool.cloud,
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
        billing=settings.billing,
    )
    state.leases[token] = lease
    job.leases[token] = None
    known.leases[token] = None
    ledger.open_lease(state, lease, job)
    out.append(Launch(provider=pool.cloud, request=request, because=because))


def penalise(state: State, out: list[AnyAction], pool: Pool, why: str) -> None:
    """Leave a pool alone for a while, longer each time; a machine that joins forgives it."""
    known = state.pools[pool.key]
    if known.blocked_until_s > state.now_s:
        return
    penalty_s = state.settings.penalty_s * 2 ** min(known.strikes, PENALTY_DOUBLINGS_MAX)
    known.strikes += 1
    known.blocked_until_s, known.blocked_because = state.now_s + penalty_s, why
    note(out, pool.key, f"left alone for {penalty_s:.0f} s: {why}")


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
    out.append(Terminate(provider=lease.provider, machine_id=lease.machine_id, because=because))
    patience_s = state.settings.drain_s / 4 * 2 ** min(lease.terminations, RETRY_DOUBLINGS_MAX)
    lease.terminations += 1
    provider_of(state, lease.provider).listing_wanted = True
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


def provider_of(state: State, name: str) -> ProviderState:
    return state.providers.setdefault(name, ProviderState(name=name))


def pool_of(state: State, pool: Pool) -> PoolState:
    return state.pools.setdefault(pool.key, PoolState(pool=pool))
