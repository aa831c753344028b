"""News of machines: from launches, from providers' lists, and from machines themselves.

A launch is an intent in the journal before it is a call. Its outcome comes with `Launched`, or is
found in the provider's list: a machine whose token we intended is adopted, an intent that is not
listed after the grace is dropped, and a machine of ours that no lease claims is terminated.
"""

import math

from agent.messages import AgentJoined, AgentLost, NoticeSeen
from cloud.model import DEPLOYMENT_TAG, Leftover, Listing, Machine, Ref, Refusal
from orchestrator.actions import AnyAction, ListMachines, Terminate
from orchestrator.brain.handlers import jobs
from orchestrator.brain.holdings import leases, ledger, staffing
from orchestrator.events import (
    BootSeen,
    EndFailed,
    Launched,
    LaunchFailed,
    Listed,
    ListFailed,
    Terminated,
)
from orchestrator.formatting import plural
from orchestrator.state import (
    Job,
    Lease,
    PlaceState,
    State,
    claimed,
    consider,
    move_lease,
    newcomer,
    note,
    set_alarm,
    settled,
    want_layout,
)

STRANGERS_MAX = 1000
NAMESAKES_MAX = 100
LAUNCHING_S_MAX = 60.0  # how long the call of a manager that is gone may be on its way
SAME_NOTICE_S = 5.0  # between the deadlines of one notice that comes by two ways
LIST_AGAIN_S_MAX = 60.0  # between two lists of a place that does not answer
FAILURES_MAX = 8
ENDS_FAILED_MAX = 4  # without a refusal, before a person is shown why
OWING_S_MAX = 3600.0  # how long a list is asked for only because it may correct a bill

# --- the outcome of a launch -----------------------------------------------------------------


def on_launched(state: State, out: list[AnyAction], event: Launched) -> None:
    lease = claimed(state, event.token, event.machine.index)
    if lease is None:
        why = f"{event.machine.id} was started for the launch {event.token} that was given up"
        _correct(state, event.machine, state.now_s)
        _end_orphan(state, out, event.machine, why)
    elif lease.state == "intended" and (event.machine.state == "failed" or event.machine.gone):
        _settle_listed(state, out, lease, event.machine)
    elif lease.state == "intended":
        adopt(state, out, lease, leases.by_our_clock(state, lease, event.machine))
        leases.keep_within_hour(state, out)


def launched_by(state: State, token: str) -> list[Lease]:
    """Return the leases of one launch."""
    first = state.leases.get(token)
    if first is not None:
        return [first]
    return [lease for lease in state.leases.values() if lease.request.token == token]


def adopt(state: State, out: list[AnyAction], lease: Lease, machine: Machine) -> None:
    """Attach the machine to its lease; give it back at once if it is not needed or too costly."""
    _begin(state, out, lease, machine)
    if not state.jobs[lease.job].active or state.stopping:
        lease.released = lease.released or "nobody needs it any more"
    if lease.released:
        leases.give_back(state, out, lease, lease.released)
        return
    if not ledger.covered(state, lease):
        leases.give_back(state, out, lease, "it started at a price that the budget has no room for")
        return
    set_alarm(state, state.now_s + leases.boot_s(state, lease.pool.place), "boot", lease.token)
    stranger = state.strangers.pop(machine.id, None)
    if stranger is not None:
        _join(state, out, lease, stranger[1])


def _begin(state: State, out: list[AnyAction], lease: Lease, machine: Machine) -> None:
    """Record the machine in its lease, charge for it, and note that its pool sold one."""
    price = leases.cost_now_usd_per_h(state, lease.pool, lease.request.market)
    why = f"{machine.id} started in {lease.pool.key} at ${price:.4f}/h"
    lease.machine_id, lease.known_at_s = machine.id, state.now_s
    lease.identity, lease.address = machine.identity, machine.address
    state.machines[machine.id] = lease.token
    move_lease(lease, "pending", state.now_s, why)
    note(out, machine.id, why)
    ledger.start_charging(state, lease, price, machine.launched_at_s)
    if machine.state == "pending" and _pending_is_free(state, lease):
        lease.pending_at_s = machine.launched_at_s
    if lease.request.market == "spot":
        known = state.pools[lease.pool.key]
        known.record = known.record.sold(state.now_s)


def _pending_is_free(state: State, lease: Lease) -> bool:
    traits = leases.place_of(state, lease.pool.place).traits
    return traits is not None and traits.pending_is_free


def on_launch_failed(state: State, out: list[AnyAction], event: LaunchFailed) -> None:
    asked = [lease for lease in launched_by(state, event.token) if lease.state == "intended"]
    if not asked:
        return
    why, lease = f"{event.code}: {event.error}", asked[0]
    if event.refusal is not None:
        leases.refuse(state, out, lease.request, event.refusal, why)
        for lease in asked:
            leases.drop(state, out, lease, why)
        return
    place = lease.pool.place
    leases.place_of(state, place).listing_wanted = True
    unsure = f"it is not known whether the last launch succeeded ({why})"
    leases.pause(state, place, state.settings.control_period_s, unsure)
    note(out, event.token, f"it is not known whether a machine started ({why}): the list will tell")


def _never_ran(
    state: State, out: list[AnyAction], lease: Lease, machine: Machine, at_s: float
) -> None:
    """End the lease of a launch that failed after its answer: a refusal, and no preemption.

    What was made of the machine is ended, too, because it may cost.
    """
    state.strangers.pop(machine.id, None)
    refusal = machine.refusal
    if refusal is None:
        said = f"{machine.id} ended before it was seen to run"
        refusal = Refusal(scope="pool", code="NeverRan", said=said)
    why = f"{refusal.code}: {refusal.said}"
    leases.refuse(state, out, lease.request, refusal, why)
    staffing.abandon(state, out, lease, why)  # a list may be wrong about a machine that works
    if lease.state == "intended" and machine.state == "failed":
        leases.drop(state, out, lease, why)
    else:
        if lease.state == "intended":
            _begin(state, out, lease, machine)
        record = state.pools[lease.pool.key].record
        if lease.pending_at_s is not None:
            lease.pending_at_s = at_s
        leases.end(state, out, lease, _ended(machine, at_s), why)
        state.pools[lease.pool.key].record = record  # it refused, and took nothing that worked
    if not machine.gone:
        _end_orphan(state, out, machine, why)
    job = state.jobs[lease.job]
    if job.active:
        consider(state, job)
        want_layout(state, job)


def _ended(machine: Machine, at_s: float) -> ledger.Ended:
    """Return how a list says that a machine ended; by its cloud if it does not say by whom."""
    return ledger.Ended(machine.ended_by or "provider", at_s, machine.ended_at_s is not None)


def lose(
    state: State, out: list[AnyAction], lease: Lease, ended: ledger.Ended, because: str
) -> None:
    """End the lease of a machine that is gone, and count a preemption of its job if it was taken.

    One that a person has ended, or that has ended itself, was not; but where it never joined, the
    next one there may do the same.
    """
    job, taken = state.jobs[lease.job], ended.by != "user"
    if not taken and lease.agent == "awaited":
        leases.penalise(state, out, lease, "NeverJoined", because)
    staffing.abandon(state, out, lease, because)
    leases.end(state, out, lease, ended._replace(lost=taken), because)
    if taken and job.active:
        _count_preemption(state, out, job)
    if job.active:
        consider(state, job)
        want_layout(state, job)


def _count_preemption(state: State, out: list[AnyAction], job: Job) -> None:
    job.market.preemptions += 1
    most, found = job.spec.max_preemptions, job.market.preemptions - job.market.forgiven
    if most is not None and found > most:
        were = "was" if found == 1 else "were"
        why = f"{plural(found, 'machine')} {were} taken away and max_preemptions is {most}"
        jobs.finish(state, out, job, "FAILED", f"preempted: {why}")


# --- the provider's list ---------------------------------------------------------------------


def on_terminated(state: State, out: list[AnyAction], event: Terminated) -> None:
    lease = leases.lease_of(state, event.ref.id)
    if lease is not None and lease.state == "ending":
        ended = ledger.Ended("user", state.now_s)
        leases.end(state, out, lease, ended, "the provider says it has ended")
    leases.place_of(state, event.ref.place).orphans.pop(event.ref.id, None)


def on_end_failed(state: State, out: list[AnyAction], event: EndFailed) -> None:
    """Say why something that costs money cannot be ended; nothing is bought there until it can.

    What failed without a refusal may have been done, so it is only said once it has failed often.
    """
    lease, place = leases.lease_of(state, event.ref.id), leases.place_of(state, event.ref.place)
    if not event.refused and (lease is None or lease.terminations < ENDS_FAILED_MAX):
        return
    place.listing_wanted = True  # the one that no longer shows it may have come before
    if place.cannot_end != event.error:
        place.cannot_end = event.error
        what = f"{event.ref.id} cannot be ended, and goes on costing"
        note(out, place.key, f"{what}: {event.error}; nothing is bought there until it can")


def ask_for_lists(state: State, out: list[AnyAction]) -> None:
    """Ask every place for its list once per period, while a list could tell us anything."""
    held = {lease.pool.place.key for lease in state.leases.values()}
    ended = (state.ended_leases[token] for token in state.owing)
    since_s = state.now_s - OWING_S_MAX
    held |= {lease.pool.place.key for lease in ended if (lease.ended_at_s or 0.0) > since_s}
    for key, place in sorted(state.places.items()):
        period_s = state.settings.listing_period_s
        period_s = period_s if place.pace is None else max(period_s, place.pace.list_s)
        if place.failures:  # lists may be what it is asked too many of, so that ends get no turn
            longer_s = period_s * 2 ** min(place.failures, FAILURES_MAX)
            period_s = min(longer_s, max(period_s, LIST_AGAIN_S_MAX))
        overdue = state.now_s >= place.listing_asked_at_s + leases.grace_s(state, place.place)
        early = state.now_s < place.listing_asked_at_s + period_s
        if early or (place.listing_out and not overdue):
            continue
        if not (place.listing_wanted or key in held or place.orphans or state.stopping):
            continue
        ask_for_list(state, out, place, "compare what it lists with what we intended")


def ask_for_list(state: State, out: list[AnyAction], place: PlaceState, because: str) -> None:
    if not place.place.region:
        return  # a cloud that is closed as a whole lists nothing
    place.listing_wanted, place.listing_out = False, True
    place.listing_asked_at_s = state.now_s
    out.append(ListMachines(place=place.place, because=because))


def on_list_failed(state: State, out: list[AnyAction], event: ListFailed) -> None:
    """Wait: a place that does not answer says nothing about its machines."""
    place = leases.place_of(state, event.place)
    place.listing_out, place.listing_wanted = False, True
    place.failures, place.error = place.failures + 1, event.error
    place.left_out = event.left_out
    if place.failures == 1:
        note(out, place.key, f"does not answer: {event.error}; asking again, less and less often")


def on_listed(state: State, out: list[AnyAction], event: Listed) -> None:
    """Settle the differences between what exists in a place and what we intend there."""
    listing = event.listing
    place = leases.place_of(state, listing.place)
    place.listing_out, place.left_out, place.failures, place.error = False, False, 0, ""
    asked_at_s = event.asked_at_s + state.skew_s
    if asked_at_s < place.listed_at_s:
        return
    place.listed_at_s = asked_at_s
    place.heard_at_s = asked_at_s if place.heard_at_s is None else place.heard_at_s
    there: dict[str, None] = {}
    for machine in listing.machines:
        ours = machine.tags.get(DEPLOYMENT_TAG) == state.settings.deployment
        if not ours or machine.pool.place != listing.place:
            continue
        lease = claimed(state, machine.token, machine.index)
        if lease is None and _of_a_namesake(state, out, place, machine, machine.launched_at_s):
            continue
        if not machine.gone:
            there[machine.id] = None
        if lease is not None and lease.machine_id in ("", machine.id):
            _settle_listed(state, out, lease, machine)
            continue
        _correct(state, machine, asked_at_s)
        if machine.state not in ("stopping", "terminated") and not machine.gone:
            why = f"{machine.id} carries our tag but no lease claims it"
            _end_orphan(state, out, machine, why)
    _sweep(state, out, listing, there)
    for one in [one for one in place.orphans if one not in there]:
        del place.orphans[one]
    _settle_missing(state, out, place, there)
    _settle_owing(state, place, there)
    leases.keep_within_hour(state, out)
    if not (place.orphans or _going(state, place)):
        place.cannot_end = ""
    if not there:
        place.clean_at_s = asked_at_s


def _going(state: State, place: PlaceState) -> bool:
    """Return whether a machine there is still to be ended."""
    going = (lease for lease in state.leases.values() if lease.state == "ending")
    return any(lease.pool.place == place.place for lease in going)


def _sweep(state: State, out: list[AnyAction], listing: Listing, there: dict[str, None]) -> None:
    """End what launches left over, once no lease can still be about to use it."""
    patience_s = leases.grace_s(state, listing.place)
    for left in listing.leftovers:
        if left.tags.get(DEPLOYMENT_TAG) != state.settings.deployment:
            continue
        place = leases.place_of(state, listing.place)
        ours = _may_use(state, left.token)
        if not ours and _of_a_namesake(state, out, place, left, left.created_at_s):
            continue
        there[left.ref.id] = None
        _charge_disk(state, left)
        if not ours and state.now_s >= left.created_at_s + patience_s:
            _end_unclaimed(state, out, left.ref, f"{left.kind} {left.ref.id} is left over")


def _of_a_namesake(
    state: State,
    out: list[AnyAction],
    place: PlaceState,
    found: Machine | Leftover,
    made_at_s: float | None,
) -> bool:
    """Return whether another manager that uses our deployment's name has launched this just now.

    A manager made its token, in no life of this journal, and it was made after this life first
    heard the place, so it is not left from a journal that was lost either. It is never touched.
    Where a cloud does not say when something was made, it is what its life is: left over if
    anything of that life was there at first.
    """
    life = leases.life_of(found.token)
    if not life or life in state.lives or (not made_at_s and life in place.inherited):
        return False
    if life in state.namesakes and life not in place.inherited:
        return True
    heard_at_s = place.listed_at_s if place.heard_at_s is None else place.heard_at_s
    until_s = heard_at_s + leases.grace_s(state, place.place) + LAUNCHING_S_MAX
    if (made_at_s or place.listed_at_s) <= until_s:
        place.inherited[life] = None
        while len(place.inherited) > STRANGERS_MAX:
            del place.inherited[next(iter(place.inherited))]
        return False
    if life in state.namesakes:
        return True
    state.namesakes[life] = None
    while len(state.namesakes) > NAMESAKES_MAX:
        del state.namesakes[next(iter(state.namesakes))]
    name = state.settings.deployment
    why = f"{found.ref.id} was launched by another manager that is named {name} as well"
    note(
        out, place.key, f"{why}: it is not touched; set another manager.deployment for one of them"
    )
    return True


def _may_use(state: State, token: str) -> bool:
    """Return whether a machine of the launch may use what is left over, or is about to.

    The machines of a gang end one by one, so only those that have yet to run count there.
    """
    return any(
        lease.request.count == 1 or lease.state in ("intended", "pending")
        for lease in launched_by(state, token)
    )


def _settle_listed(state: State, out: list[AnyAction], lease: Lease, machine: Machine) -> None:
    """Record what changed about a listed machine that a lease claims."""
    machine = leases.by_our_clock(state, lease, machine)
    _note_seen(state, lease, machine)
    at_s = state.now_s if machine.ended_at_s is None else machine.ended_at_s
    given_back = lease.state == "ending" and machine.ended_by != "provider"
    if machine.state == "failed" and not given_back:
        if lease.state in ("intended", "pending"):
            _never_ran(state, out, lease, machine, machine.launched_at_s)
            return
        # It ran, so it has cost, whatever its cloud says of its launch now: AWS dates the end then.
        at_s = state.now_s if _has_run(state, lease, machine) else at_s
        lose(state, out, lease, _ended(machine, at_s), f"{machine.id} is listed as failed")
        if not machine.gone:
            _end_orphan(state, out, machine, f"{machine.id} is listed as failed")
        return
    if lease.state == "intended":
        if machine.gone:
            _settle_unheard(state, out, lease, machine)
            return
        adopt(state, out, lease, machine)
    lease.identity = machine.identity or lease.identity
    lease.address = machine.address or lease.address
    if machine.gone and given_back:
        ended = _ended(machine, at_s)._replace(by=machine.ended_by or "user")
        leases.end(state, out, lease, ended, "the provider lists it as ended")
    elif machine.gone and lease.state == "pending":
        _never_ran(state, out, lease, machine, at_s)
    elif machine.gone:
        strange = "was ended, and neither by us nor by the provider"
        how = strange if machine.ended_by == "user" else "was taken by the provider"
        lose(state, out, lease, _ended(machine, at_s), f"{machine.id} {how}")
    elif machine.state == "stopped" and lease.state != "ending":
        leases.give_back(state, out, lease, f"{machine.id} has stopped, and still costs")
    elif machine.state == "running" and lease.state == "pending":
        why = f"{lease.machine_id} runs; its agent has yet to join"
        move_lease(lease, "booting", state.now_s, why)
        note(out, lease.machine_id, why)


def _note_seen(state: State, lease: Lease, machine: Machine) -> None:
    """Note that a list has this machine, and whether it is still on its way to run."""
    asked_at_s = leases.place_of(state, lease.pool.place).listed_at_s
    lease.seen_at_s, lease.missed_at_s = asked_at_s, None
    if machine.began_at_s is not None and lease.prices:
        ledger.began(state, lease, machine.began_at_s)
    elif machine.state in ("pending", "stopping") and lease.pending_at_s is not None:
        # What is on its way out and was never seen to run does not come to run any more.
        lease.pending_at_s = max(lease.pending_at_s, asked_at_s)
    elif machine.state == "running":
        ledger.runs(state, lease)


def _settle_unheard(state: State, out: list[AnyAction], lease: Lease, machine: Machine) -> None:
    """Charge for a machine that started and ended before we learned of it.

    It is charged until the end that the list states, or until now if the list states none.
    """
    state.strangers.pop(machine.id, None)
    _begin(state, out, lease, machine)
    why = f"{machine.id} started and ended before we learned of it"
    at_s = machine.ended_at_s
    if at_s is None:
        why += "; charged until now, because the list does not say when it ended"
        at_s = state.now_s
    if machine.ended_by == "user":
        leases.end(state, out, lease, _ended(machine, at_s), why)
    elif machine.refusal is not None:
        _never_ran(state, out, lease, machine, at_s)
    else:
        lose(state, out, lease, _ended(machine, at_s), why)


def _settle_missing(
    state: State, out: list[AnyAction], place: PlaceState, there: dict[str, None]
) -> None:
    """Settle leases that the list does not show, except young ones, because a list may lag.

    The list of one place says nothing about the machines of others.
    """
    grace_s = leases.grace_s(state, place.place)
    missing = [
        lease
        for lease in state.leases.values()
        if lease.pool.place == place.place and lease.machine_id not in there
    ]
    for lease in missing:
        if lease.state == "intended":
            if place.listed_at_s >= lease.intended_at_s + grace_s:
                leases.drop(state, out, lease, "the provider does not list it: it never started")
            continue
        if lease.seen_at_s is not None and lease.missed_at_s is None:
            lease.missed_at_s = place.listed_at_s
        # A young machine may be missing from a list that lags, but not from the one after it was in
        # one, if we gave it back or it is silent as well.
        awaited = lease.state == "ending" or lease.agent == "silent"
        certain = lease.missed_at_s is not None and awaited
        if not certain and place.listed_at_s < lease.known_at_s + grace_s:
            continue
        alone_until_s = leases.alone_until_s(state, lease)
        gone_at_s = min(leases.gone_at_s(state, lease), alone_until_s)
        bought_now = place.heard_at_s is not None and lease.known_at_s >= place.heard_at_s
        if lease.state == "ending":
            ended = ledger.Ended("user", gone_at_s)
            leases.end(state, out, lease, ended, "the provider lists it no more")
        else:
            how = "vanished from the list"
            if alone := alone_until_s < math.inf:
                how += ": it ends itself if there is no manager for long"
            elif lease.agent == "awaited" and not lease.announced and bought_now:
                # It was taken, or could not join and ended itself: the next one may as well.
                leases.penalise(state, out, lease, "NeverJoined", f"{lease.machine_id} {how}")
            ended = ledger.Ended("user" if alone else "provider", gone_at_s)
            lose(state, out, lease, ended, f"{lease.machine_id} {how}")


# --- what lists say of machines whose leases have ended ----------------------------------------


def _correct(state: State, machine: Machine, asked_at_s: float) -> None:
    """Charge by what a list says of a machine whose lease has ended, because it may know better.

    It is there and costs, until a list says when it ended, or has it no more.
    """
    lease = settled(state, machine.token, machine.index)
    if lease is None or lease.dated or lease.machine_id not in ("", machine.id):
        return
    machine = leases.by_our_clock(state, lease, machine)
    if state.dropped.pop(lease.token, None) is not None:
        lease.machine_id = machine.id
        lease.disk_from_s = max(lease.intended_at_s, min(machine.launched_at_s, state.now_s))
        leases.keep_ended(state, lease)
    ran = _has_run(state, lease, machine)
    if ran and not lease.prices:
        price = leases.cost_now_usd_per_h(state, lease.pool, lease.request.market)
        lease.price_usd_per_h, lease.prices = price, [(lease.disk_from_s, price)]
    if ran:
        ledger.runs(state, lease)
    if lease.prices and machine.began_at_s is not None:
        ledger.began(state, lease, machine.began_at_s)
    if not machine.gone:
        lease.lingers = "machine" if ran else "disk"
        _charge_until(state, lease, asked_at_s)
        state.owing[lease.token] = None
    elif machine.ended_at_s is not None:
        lease.disk_gone_at_s = max(lease.disk_from_s, min(machine.ended_at_s, state.now_s))
        if ran and machine.state != "failed":  # as that is dated at the launch
            lease.gone_at_s = lease.disk_gone_at_s
        lease.ended_by, lease.dated, lease.lingers = machine.ended_by, True, ""
        state.owing.pop(lease.token, None)
        ledger.recharge(state, lease)


def _has_run(state: State, lease: Lease, machine: Machine) -> bool:
    """Return whether a machine has cost more than its disk, as far as is known."""
    if machine.began_at_s is not None or (lease.prices and lease.pending_at_s is None):
        return True
    if machine.state == "pending":
        return not _pending_is_free(state, lease)
    return machine.state in ("running", "stopped")


def _settle_owing(state: State, place: PlaceState, there: dict[str, None]) -> None:
    """End what was charged on for machines that this list has no more; in time it is final."""
    for token in list(state.owing):
        lease = state.ended_leases[token]
        if lease.pool.place != place.place or lease.machine_id in there:
            continue
        if lease.lingers:
            _charge_until(state, lease, place.listed_at_s)
            lease.lingers = ""
        if place.listed_at_s >= (lease.ended_at_s or 0.0) + leases.grace_s(state, place.place):
            del state.owing[token]


def _charge_until(state: State, lease: Lease, at_s: float) -> None:
    """Charge for what a list shows of an ended lease until this moment."""
    lease.disk_gone_at_s = max(lease.disk_gone_at_s, at_s)
    if lease.lingers == "machine":
        lease.gone_at_s = max(lease.gone_at_s, at_s)
    ledger.recharge(state, lease)


def _charge_disk(state: State, left: Leftover) -> None:
    """Charge a disk that outlived its machine, for as long as it is listed."""
    lease = settled(state, left.token, 0)
    if left.kind == "disk" and lease is not None and lease.request.count == 1:
        lease.disk_from_s = lease.disk_from_s or max(lease.intended_at_s, left.created_at_s)
        lease.disk_gone_at_s = leases.place_of(state, left.ref.place).listed_at_s
        ledger.recharge(state, lease)


def _end_orphan(state: State, out: list[AnyAction], machine: Machine, because: str) -> None:
    """Terminate a machine of ours that no lease claims, since every machine costs money."""
    _end_unclaimed(state, out, machine.ref, because)


def _end_unclaimed(state: State, out: list[AnyAction], ref: Ref, because: str) -> None:
    place = leases.place_of(state, ref.place)
    asked_at_s = place.orphans.get(ref.id)
    if asked_at_s is None or state.now_s >= asked_at_s + state.settings.drain_s / 4:
        place.orphans[ref.id] = state.now_s
        place.listing_wanted = True
        out.append(Terminate(ref=ref, because=because))


# --- reports of the machine itself -----------------------------------------------------------


def on_boot_seen(state: State, out: list[AnyAction], event: BootSeen) -> None:
    """Record how far a machine's first boot is; it runs, whatever the list says yet."""
    lease = leases.lease_of(state, event.machine_id)
    if lease is None or event.phase in lease.boot:
        return
    if event.phase == "unlike":
        leases.end_unlike(state, out, lease, event.why)
        return
    lease.boot = {**lease.boot, event.phase: event.took_s}
    what = "proved who it is" if event.phase == "admitted" else "is a node of the cluster"
    why = f"{event.machine_id} {what}, {event.took_s:.1f} s after its first boot began"
    ledger.runs(state, lease, state.now_s - event.took_s)
    if lease.state == "pending":
        move_lease(lease, "booting", state.now_s, why)
    note(out, event.machine_id, why)


def on_agent_joined(state: State, out: list[AnyAction], event: AgentJoined) -> None:
    lease = leases.lease_of(state, event.machine_id)
    if lease is None:
        state.strangers[event.machine_id] = (event.address, event.slots)
        while len(state.strangers) > STRANGERS_MAX:
            del state.strangers[next(iter(state.strangers))]
        for provider in state.places.values():
            provider.listing_wanted = True
    elif not lease.joined and lease.state in ("pending", "booting", "noticed", "leaving"):
        _join(state, out, lease, event.slots)


def _join(state: State, out: list[AnyAction], lease: Lease, slots: int) -> None:
    lease.agent, lease.silent_at_s = "there", None
    ledger.runs(state, lease)
    if not lease.announced:
        lease.goes_at_s = None
        took_s = state.now_s - lease.intended_at_s
        why = f"{lease.machine_id} joined with {plural(slots, 'slot')} {took_s:.0f} s after it was asked for"
        move_lease(lease, "ready", state.now_s, why)
        note(out, lease.machine_id, why)
        if slots < lease.type.slots:
            note(out, lease.machine_id, _too_few(lease, slots))
    known = state.pools[lease.pool.key]
    state.blocks.pop(leases.reach_of(known, lease.request.market)["pool"], None)
    staffing.staff(state, out, lease)


def _too_few(lease: Lease, slots: int) -> str:
    """Say what a machine lacks of what is paid for, and what mends it."""
    kind = lease.type
    said = f"{kind.name} is sold with {plural(kind.slots, 'slot')}, and it has {slots}"
    mend = f"without nvidia-smi in its image no {kind.accelerator} is found; put the driver into it"
    return f"{said}: {mend}" if kind.accelerators else said


def on_agent_lost(state: State, out: list[AnyAction], event: AgentLost) -> None:
    """Continue without a machine whose agent is gone, before the list shows if the machine is.

    The machine has a while to come back.
    """
    lease = leases.lease_of(state, event.machine_id)
    if lease is None:
        state.strangers.pop(event.machine_id, None)
        return
    if not lease.joined or lease.state == "ending":
        return
    leases.place_of(state, lease.pool.place).listing_wanted = True
    if lease.announced and state.now_s >= (lease.goes_at_s or 0.0):
        ended = ledger.Ended("provider", state.now_s)
        lose(state, out, lease, ended, f"{lease.machine_id} was taken as announced")
        return
    why = f"{lease.machine_id} is silent: {event.why}"
    waits_until_s, announced = state.now_s + state.settings.rejoin_s, lease.announced
    lease.agent, lease.silent_at_s = "silent", state.now_s
    lease.goes_at_s = min(waits_until_s, lease.goes_at_s or waits_until_s)
    staffing.abandon(state, out, lease, why)
    if lease.state in ("ready", "working") or (lease.state == "leaving" and not announced):
        move_lease(lease, "booting", state.now_s, why)
    note(out, lease.machine_id, why)
    set_alarm(state, waits_until_s, "boot", lease.token)
    job = state.jobs[lease.job]
    consider(state, job)
    want_layout(state, job)


def on_boot_alarm(state: State, out: list[AnyAction], token: str) -> None:
    """Give back a machine that has not joined, or not come back, in time."""
    lease = state.leases.get(token)
    if lease is None or lease.joined or lease.state in ("intended", "ending"):
        return
    if lease.agent == "silent":
        if lease.goes_at_s is not None and state.now_s >= lease.goes_at_s:
            leases.give_back(state, out, lease, f"{lease.machine_id} did not come back")
    elif state.now_s >= lease.known_at_s + leases.boot_s(state, lease.pool.place):
        patience_s = leases.boot_s(state, lease.pool.place)
        why = f"{lease.machine_id} did not join within {patience_s:.0f} s"
        leases.penalise(state, out, lease, "NeverJoined", why)
        leases.give_back(state, out, lease, why)


def on_notice(state: State, out: list[AnyAction], event: NoticeSeen) -> None:
    """Record the notice, so that a replacement is bought at once; meanwhile the machine works."""
    notice = event.notice
    lease = leases.lease_of(state, notice.machine_id)
    if lease is None or lease.state in ("intended", "ending"):
        return
    if notice.kind == "rebalance":
        note(out, notice.machine_id, "the cloud says that it may be taken soon; it works on")
        return
    deadline_s = notice.deadline_s + (lease.clock_ahead_s or 0.0)
    if lease.announced and lease.goes_at_s is not None:
        later_s = deadline_s - lease.goes_at_s
        if -SAME_NOTICE_S <= later_s <= SAME_NOTICE_S:
            lease.goes_at_s += min(later_s, 0.0)  # it came by two ways: the earlier deadline holds
            return
    left_s = deadline_s - state.now_s
    why = f"{notice.machine_id} will be taken in {left_s:.0f} s"
    silent = lease.agent == "silent" and lease.goes_at_s is not None
    lease.goes_at_s = min(lease.goes_at_s or 0.0, deadline_s) if silent else deadline_s
    if lease.state not in ("noticed", "leaving"):
        move_lease(lease, "noticed", state.now_s, why)
    note(out, notice.machine_id, why)
    margin_s = state.settings.notice_margin_s + state.settings.morph_s
    set_alarm(state, deadline_s - margin_s, "notice", lease.token)
    consider(state, state.jobs[lease.job])


def on_notice_alarm(state: State, out: list[AnyAction], token: str) -> None:
    """Leave the machine out shortly before its deadline; take it back if it was not taken."""
    lease = state.leases.get(token)
    if lease is None or not lease.announced or lease.goes_at_s is None:
        return
    margin_s = state.settings.notice_margin_s + state.settings.morph_s
    if state.now_s < lease.goes_at_s - margin_s:
        return
    if state.now_s < lease.goes_at_s + state.settings.rejoin_s:
        set_alarm(state, lease.goes_at_s + state.settings.rejoin_s, "notice", token)
        if lease.state == "noticed":
            move_lease(lease, "leaving", state.now_s, "it will be taken in a moment")
            want_layout(state, state.jobs[lease.job])
        return
    lease.goes_at_s = None
    back: tuple[str, str] = ("ready", "its deadline has passed and it is still there")
    move_lease(lease, "ready" if lease.joined else "booting", state.now_s, back[1])
    note(out, lease.machine_id, back[1])
    if lease.joined:
        staffing.staff(state, out, lease)
        newcomer(state, state.jobs[lease.job])
