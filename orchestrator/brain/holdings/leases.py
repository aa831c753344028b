"""Machines as we mean them to be: what one costs, the intent to buy one, and giving back.

What is heard of them is in `handlers.inventory`. A launch is an intent in the journal before it is
a call.
"""

import math
import re
from collections import Counter
from hashlib import blake2b

from msgspec.structs import replace

from bidding.model import Acquire
from cloud.model import (
    DEPLOYMENT_TAG,
    LaunchRequest,
    Machine,
    Market,
    Place,
    Pool,
    Refusal,
    Scope,
    Traits,
)
from orchestrator.actions import AnyAction, Launch, Terminate
from orchestrator.brain.holdings import ledger, staffing
from orchestrator.formatting import duration, usd
from orchestrator.state import (
    Block,
    Job,
    Lease,
    Moved,
    PlaceState,
    PoolState,
    State,
    consider,
    keys_of,
    move_lease,
    next_serial,
    note,
    set_alarm,
)

PENALTY_DOUBLINGS_MAX = 4
ENDED_LEASES_MAX = 1000
DROPPED_LEASES_MAX = 100
RETRY_DOUBLINGS_MAX = 4
UNSAFE_S = 60.0  # a place that could not list or end is looked at again by then
READABLE_MAX = 12  # characters of the deployment's name in a launch token
UNFIT = re.compile(r"[^a-z0-9]+")
LIFE = re.compile(r"(?:.*-)?([0-9a-f]{12})-\d+-\d+(?:-\d+)?")
LIVES_MAX = 1000
ROUNDING = 1e-9
LAST_WORD_S = 30.0  # how much later than it should a machine ends that no manager speaks to

# --- what one costs ------------------------------------------------------------------------------------


def cost_now_usd_per_h(state: State, pool: Pool, market: Market) -> float:
    """What a machine costs there now; as on demand while no other price is known."""
    spot = state.pools[pool.key].spot_usd_per_h
    if market == "on_demand" or spot is None:
        return state.pools[pool.key].kind.on_demand_usd_per_h
    return spot


def traits_of(state: State, place: Place) -> Traits:
    """What is true of a cloud; by the settings alone while it has not said so itself."""
    known = state.places.get(place.key)
    if known is None or known.traits is None:
        return Traits(billing=state.settings.billing)
    return known.traits


def usd_per_gb(state: State, sender: Pool, receiver: Pool) -> float:
    """What a gigabyte costs that a machine sends to another one."""
    if (sender.place, sender.zone) == (receiver.place, receiver.zone):
        return 0.0
    traits = traits_of(state, sender.place)
    near = sender.place == receiver.place
    return traits.zone_usd_per_gb if near else traits.region_usd_per_gb


def home_of(state: State, job: Job) -> Place | None:
    """The place that holds the job's state: where most of its machines work."""
    regions = Counter(
        lease.pool.place
        for token in job.leases
        if (lease := state.leases[token]).state in ("working", "noticed", "leaving")
    )
    return min(regions, key=lambda r: (-regions[r], r)) if regions else None


def free_to_bring(state: State, job: Job, pool: Pool) -> bool:
    """Whether the job's state gets to a machine there without being paid for."""
    return egress_usd(state, job, pool, home_of(state, job)) == 0


def egress_usd(state: State, job: Job, pool: Pool, home: Place | None) -> float:
    """What bringing the job's state to a machine there costs, by the settings or its cloud."""
    if home is None or pool.place == home:
        return 0.0
    gb = job.layouts.state_bytes / 1e9
    return (state.settings.egress_usd_per_gb or traits_of(state, home).region_usd_per_gb) * gb


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
    parts = readable, life_now(state), state.epoch, next_serial(state)
    return "-".join(str(part) for part in parts if part != "")


def life_now(state: State) -> str:
    """Name this life of the manager: no other manager, of whatever journal, has this name."""
    named = f"{state.settings.deployment}/{state.salt}"
    return blake2b(named.encode(), digest_size=6).hexdigest()


def life_of(token: str) -> str:
    """Return the life that a launch token names; empty if no manager made the token."""
    found = LIFE.fullmatch(token)
    return "" if found is None else found[1]


def begin_life(state: State) -> None:
    """Note under which name this life launches, and that no place has been heard in it."""
    state.lives.pop(life_now(state), None)
    state.lives[life_now(state)] = None
    while len(state.lives) > LIVES_MAX:
        del state.lives[next(iter(state.lives))]
    for place in state.places.values():
        place.heard_at_s = None


def payable(
    state: State, purses: ledger.Purses, part: Acquire, egress_usd: float
) -> tuple[int, ledger.Purses]:
    """Return how many machines of a part can be paid from these purses, and what that leaves."""
    known, market = state.pools[part.pool.key], part.market
    price = cost_now_usd_per_h(state, part.pool, market)
    disk_usd_per_h = state.settings.disk_usd_per_h
    unbid = ledger.ceiling_usd_per_h(known.kind, market, known.spot_usd_per_h, disk_usd_per_h)
    terms = terms_of(state, part.pool.place)
    return ledger.payable(state, purses, terms, (unbid, price), egress_usd, part.count)


def intend(
    state: State,
    out: list[AnyAction],
    job: Job,
    part: Acquire,
    because: str,
    egress_usd: float,
) -> int:
    """Write down that we want the machines of one call, made once this is in the journal.

    They are as many as one call of the cloud may start, all or none, and as the budgets can pay.
    Each has a lease from now on. Return how many they are.
    """
    pool, market = part.pool, part.market
    known, place = state.pools[pool.key], place_of(state, pool.place)
    kind = known.kind
    price = cost_now_usd_per_h(state, pool, market)
    bid = part.bid_usd_per_h if market == "spot" else None
    because = f"at ${price:.4f}/h{f', bidding ${bid:.4f}/h' if bid is not None else ''}: {because}"
    settings = state.settings
    billing = traits_of(state, pool.place).billing
    ceiling = ledger.ceiling_usd_per_h(
        kind, market, known.spot_usd_per_h, settings.disk_usd_per_h, bid
    )
    most = min(part.count, traits_of(state, pool.place).launch_max)
    asked = replace(part, count=most)
    count, _ = payable(state, ledger.purses(state, job), asked, egress_usd)
    if count == 0:
        return 0
    request = LaunchRequest(
        token=new_token(state),
        pool=pool,
        market=market,
        bid_usd_per_h=bid,
        tags={DEPLOYMENT_TAG: settings.deployment, "job": job.id},
        count=count,
        recipe=place.recipe,
    )
    for token in keys_of(request):
        lease = Lease(
            token=token,
            request=request,
            type=kind,
            job=job.id,
            state="intended",
            history=[Moved(state.now_s, "intended", because)],
            intended_at_s=state.now_s,
            price_usd_per_h=price,
            ceiling_usd_per_h=ceiling,
            why_bought=because,
            disk_usd_per_h=settings.disk_usd_per_h,
            egress_usd=egress_usd,
            billing=billing,
        )
        state.leases[token] = lease
        job.leases[token] = None
        known.leases[token] = None
        ledger.open_lease(state, lease, job)
    out.append(Launch(request=request, because=because))
    return count


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
    place = state.places.get(known.pool.place.key)
    if place is not None and (why := place.unsafe):
        return Block(until_s=state.now_s + UNSAFE_S, because=why)
    if not state.blocks:
        return None
    found = [state.blocks[k] for k in reach_of(known, market).values() if k in state.blocks]
    now_s = state.now_s
    return max((one for one in found if one.until_s > now_s), key=_hardness, default=None)


def _hardness(block: Block) -> tuple[bool, float]:
    return not block.room, block.until_s


def askable(state: State, known: PoolState, market: Market, *, trials: bool = True) -> int | None:
    """Return how many machines may be asked for now; None where no refusal bounds them.

    It is the room that a refusal left, and after a refusal of all one machine, until one has joined;
    without `trials` nothing bounds them then. Who is asked for one machine a call refuses each by
    itself, so there is no bound.
    """
    if traits_of(state, known.pool.place).launch_max == 1 or not state.blocks:
        return None
    key = reach_of(known, market)["pool"]
    block = block_of(state, known, market) or state.blocks.get(key)
    if block is None:
        return None
    over_s = state.now_s - block.until_s
    most = block.room if over_s < 0 else min(block.strikes, 1)
    if not most or (over_s >= 0 and not trials):
        return None
    held = [state.leases[token] for token in known.leases]
    asked = [e for e in held if e.request.market == market and e.agent == "awaited"]
    return max(0, most - sum(over_s >= 0 or e.state == "intended" for e in asked))


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
    if before is not None and before.until_s > state.now_s and not before.room:
        return
    strikes = 0 if before is None else before.strikes
    room = _room_left(request, refusal, strikes)
    if room:
        again = 0 if before is None else before.again + (before.until_s <= state.now_s)
        until_s = state.now_s + state.settings.penalty_s * 2 ** min(again, PENALTY_DOUBLINGS_MAX)
        state.blocks[key] = Block(
            until_s=until_s, because=why, strikes=strikes, room=room, again=again
        )
        note(out, key, f"{room} of {request.count} machines may be had there: {why}")
        return
    wide = refusal.scope in ("place", "cloud")
    penalty_s = state.settings.penalty_s / (10 if wide else 1)
    for_s = penalty_s * 2 ** min(strikes, PENALTY_DOUBLINGS_MAX)
    for_s = for_s if refusal.retry_s is None else max(0.0, refusal.retry_s)
    state.blocks[key] = Block(until_s=state.now_s + for_s, because=why, strikes=strikes + 1)
    note(out, key, f"left alone for {for_s:.0f} s: {why}")


def _room_left(request: LaunchRequest, refusal: Refusal, strikes: int) -> int:
    """Return how many of several refused machines to ask for at once; 0 for none.

    Where the cloud does not say, half of them; but not again after the last one was refused, too.
    """
    if request.count == 1:
        return 0
    if refusal.room is not None:
        return min(refusal.room, request.count - 1)
    return 0 if strikes or refusal.scope not in ("pool", "family") else request.count // 2


def penalise(
    state: State,
    out: list[AnyAction],
    lease: Lease,
    code: str,
    why: str,
    scope: Scope = "pool",
) -> None:
    """Leave the market of a pool alone, or more, because a machine of it proved to be of no use."""
    refusal = Refusal(scope=scope, code=code, said=why, room=0)
    record = state.pools[lease.pool.key].record
    refuse(state, out, lease.request, refusal, why)
    state.pools[lease.pool.key].record = record  # it did sell


def end_unlike(state: State, out: list[AnyAction], lease: Lease, why: str) -> None:
    """Give back a machine whose image does not fit; all machines there have that image.

    An image without a driver fits those without accelerators.
    """
    if lease.joined or lease.state not in ("pending", "booting"):
        return
    said = f"{lease.machine_id} cannot join: {why}"
    scope: Scope = "family" if lease.type.accelerators else "place"
    penalise(state, out, lease, "NeverJoined", said, scope=scope)
    give_back(state, out, lease, said)


def pause(state: State, place: Place, for_s: float, why: str) -> None:
    """Buy nothing in a place for a moment; nobody refused, so it is no strike.

    Room that a refusal left there is forgotten, because a block with room does not stop buying.
    """
    before = state.blocks.get(place.key)
    until_s = state.now_s + for_s
    if before is None or before.room or before.until_s < until_s:
        strikes = 0 if before is None else before.strikes
        state.blocks[place.key] = Block(until_s=until_s, because=why, strikes=strikes)


def forgive(state: State, place: Place) -> None:
    """Ask a place again, and its cloud, because what is asked for is not the same any more."""
    state.blocks.pop(place.key, None)
    state.blocks.pop(place.cloud, None)


# --- giving back ---------------------------------------------------------------------------------------


def reprice(
    state: State, out: list[AnyAction], lease: Lease, price_usd_per_h: float, since_s: float
) -> None:
    """The price moved. A machine that may cost more than can be reserved for is given back at once."""
    if not ledger.credible(price_usd_per_h):
        return
    if not ledger.change_price(state, lease, price_usd_per_h, since_s):
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


def end_now(state: State) -> None:
    """Ask for each end again, and soon: what hindered the last life may have been mended."""
    state.alarms = [alarm for alarm in state.alarms if alarm[1] != "ending"]
    state.alarms.sort()
    for lease in state.leases.values():
        if lease.state == "ending":
            lease.terminations = 0
            set_alarm(state, state.now_s, "ending", lease.token)


def on_ending_alarm(state: State, out: list[AnyAction], token: str) -> None:
    lease = state.leases.get(token)
    if lease is not None and lease.state == "ending":
        _terminate(state, out, lease, f"it is still there: {lease.why_ended}")


def disown(state: State, out: list[AnyAction], lease: Lease, because: str) -> None:
    """Give a machine back without its lease, whose values cannot be used any more.

    An intent without a machine is left to the list, which shows what no lease claims.
    """
    del state.leases[lease.token]
    state.pools[lease.pool.key].leases.pop(lease.token, None)
    place = place_of(state, lease.pool.place)
    place.listing_wanted = True
    state.machines.pop(lease.machine_id, None)
    if lease.machine_id:
        place.orphans[lease.machine_id] = state.now_s
        out.append(Terminate(ref=lease.ref, because=because))
    else:
        note(out, lease.token, because)


def drop(state: State, out: list[AnyAction], lease: Lease, because: str) -> None:
    """The intent came to nothing: no machine, no cost, and the token is never used again.

    A machine that comes into a list all the same is charged to it.
    """
    end(state, out, lease, ledger.Ended(None, state.now_s), because)
    state.dropped[lease.token] = lease
    while len(state.dropped) > DROPPED_LEASES_MAX:
        del state.dropped[next(iter(state.dropped))]


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
    ended: ledger.Ended,
    because: str,
) -> None:
    move_lease(lease, "ended", state.now_s, because)
    lease.why_ended = lease.why_ended or because
    ledger.close_lease(state, lease, ended)
    lease.ended_at_s = state.now_s
    if lease.machine_id:
        held = duration(lease.gone_at_s - lease.prices[0][0])
        note(out, lease.machine_id, f"{because}; held {held} for {usd(lease.cost_usd)}")
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
        _record_end(state, known, lost=ended.lost)
    state.machines.pop(lease.machine_id, None)
    if lease.machine_id:
        keep_ended(state, lease)


def keep_ended(state: State, lease: Lease) -> None:
    """Keep an ended lease, and look for what lists say of its machine if that may change its bill."""
    state.ended_leases[lease.token] = lease
    if not lease.dated:
        state.owing[lease.token] = None
    while len(state.ended_leases) > ENDED_LEASES_MAX:
        oldest = next(iter(state.ended_leases))
        state.owing.pop(oldest, None)
        del state.ended_leases[oldest]


def by_our_clock(state: State, lease: Lease, machine: Machine) -> Machine:
    """Return the machine with its cloud's dates as our clock had them.

    Either clock may be wrong, and ours goes on from where it was after it was set back. A launch is
    between our intent and our hearing of it; by how much it has to be moved there, all dates of the
    machine are. So what lies between them stays as long as the cloud says.
    """
    if lease.clock_ahead_s is None and machine.launched_at_s:  # some first answers do not say
        launched_s = max(lease.intended_at_s, min(machine.launched_at_s, state.now_s))
        lease.clock_ahead_s = launched_s - machine.launched_at_s
    if not lease.clock_ahead_s:
        return machine
    began_s, ended_s = machine.began_at_s, machine.ended_at_s
    return replace(
        machine,
        launched_at_s=machine.launched_at_s + lease.clock_ahead_s,
        began_at_s=None if began_s is None else began_s + lease.clock_ahead_s,
        ended_at_s=None if ended_s is None else ended_s + lease.clock_ahead_s,
    )


# --- small readings ------------------------------------------------------------------------------------


def lease_of(state: State, machine_id: str) -> Lease | None:
    token = state.machines.get(machine_id)
    return None if token is None else state.leases[token]


def place_of(state: State, place: Place) -> PlaceState:
    return state.places.setdefault(place.key, PlaceState(place=place))


def terms_of(state: State, place: Place) -> ledger.Terms:
    return ledger.Terms(traits_of(state, place).billing, grace_s(state, place))


def grace_s(state: State, place: Place) -> float:
    """Return how long a list may miss a machine of this place before that means something."""
    pace = place_of(state, place).pace
    return max(state.settings.launch_grace_s, pace.grace_s if pace is not None else 0.0)


def boot_s(state: State, place: Place) -> float:
    """Return how long a machine of this place may take to join."""
    pace = place_of(state, place).pace
    return max(state.settings.boot_timeout_s, pace.boot_s if pace is not None else 0.0)


def gone_at_s(state: State, lease: Lease) -> float:
    """Return since when a machine has been gone that the list does not show.

    That is the first list without it; if it was taken, then rather when its cloud had announced it
    or when its agent was lost, where that was after the last list with it. If no list ever had it,
    its last sign of life was its agent's, because a machine that lived on would be in a list by now.
    """
    if lease.missed_at_s is not None:
        announced_s = lease.goes_at_s if lease.announced else None
        taken = lease.state != "ending"
        between = [
            at_s
            for at_s in (announced_s, lease.silent_at_s)
            if at_s is not None and (lease.seen_at_s or 0.0) < at_s < lease.missed_at_s
        ]
        return max(between, default=lease.missed_at_s) if taken else lease.missed_at_s
    return state.now_s if lease.silent_at_s is None else lease.silent_at_s


def alone_until_s(state: State, lease: Lease) -> float:
    """Return until when a machine can have lived, if no list has had it since it was left alone."""
    most_s, seen_s = state.settings.silent_after_s, lease.seen_at_s or lease.known_at_s
    if state.away is None or most_s is None or seen_s > state.away[0]:
        return math.inf
    return state.away[0] + most_s + LAST_WORD_S
