"""Accounts: every lease is charged to its job and to the whole, as straight lines in time.

    spent(t)     = spent + usd_per_h · (t - at) / 3600
    committed(t) = committed - draining_usd_per_h · (t - at) / 3600
    committed    = Σ over leases: ceiling · reserve_s / 3600, used up as time passes while the
                   machine is given back, and the egress of leases that are no machines yet

    usd_per_h includes what the steps of running layouts are about to send between zones; each report
    of committed steps replaces that by what they sent

A lease costs its machine's price and its disk per hour, and egress once, when it is a machine. Its
ceiling is the most that it may cost per hour, so the reserve covers the time between the decision
to give a machine back and its end. Nothing is bought unless spent + committed + its reserve <= cap.
On demand the ceiling is the price; on spot it is `SPOT_RISE` times the price, but no more than on
demand. A price above the ceiling raises it if there is money for that; else the machine is given
back at once, and its reserve is used up at that price. If whole hours are billed, one whole hour is
reserved as well.

What a machine cost is a function of the best evidence of when it began, at which prices it ran, when
it was gone and by whom. Evidence that has a date of the cloud's own comes before what we concluded
from one list having a machine and the next one not, and until a cloud says that it took a machine,
nothing is refunded. Better evidence corrects the charge whenever it comes, also after the lease and
its job have ended; and with it what the same time costs on demand.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from bidding.markets.billing import LOCAL, RULES, cost_usd, price_at, rule_of
from bidding.markets.history import USD_PER_H_MAX
from cloud.clock import HOUR_S
from cloud.model import EndedBy, InstanceType, Market, Pool
from orchestrator.settings import Settings
from orchestrator.state import Account, Job, Lease, State, set_alarm

PRICES_MAX = 512
SPOT_RISE = 1.5  # of 12,590 recorded quotes of 2020 none was more than 1.05 of the one before
CENT_FRACTION = 1e-9  # below this a difference of dollars is rounding
Purses = Sequence[tuple[float, float]]  # of each cap: what is left, and what others may cost


def credible(price_usd_per_h: float) -> bool:
    """Return whether a price can be true; one that is 0, less, or absurdly high is a fault."""
    return 0 < price_usd_per_h < USD_PER_H_MAX


def settle(account: Account, at_s: float) -> None:
    """Advance the account's lines to a moment."""
    hours = max(0.0, at_s - account.at_s) / HOUR_S
    account.spent_usd += account.usd_per_h * hours
    account.on_demand_usd += account.on_demand_usd_per_h * hours
    account.manager_usd += account.manager_usd_per_h * hours
    account.traffic_usd += account.traffic_usd_per_h * hours
    account.committed_usd -= account.draining_usd_per_h * hours
    account.at_s = max(account.at_s, at_s)


def spent_usd(account: Account, at_s: float) -> float:
    return account.spent_usd + account.usd_per_h * max(0.0, at_s - account.at_s) / HOUR_S


def on_demand_usd(account: Account, at_s: float) -> float:
    return (
        account.on_demand_usd + account.on_demand_usd_per_h * max(0.0, at_s - account.at_s) / HOUR_S
    )


def manager_usd(account: Account, at_s: float) -> float:
    """Return the part of the spent money that the manager's own machine cost."""
    return account.manager_usd + account.manager_usd_per_h * max(0.0, at_s - account.at_s) / HOUR_S


def traffic_usd(account: Account, at_s: float) -> float:
    """Return the part of the spent money that traffic between zones cost."""
    return account.traffic_usd + account.traffic_usd_per_h * max(0.0, at_s - account.at_s) / HOUR_S


def committed_usd(account: Account, at_s: float) -> float:
    if not account.leases:
        return 0.0
    drained = account.draining_usd_per_h * max(0.0, at_s - account.at_s) / HOUR_S
    return account.committed_usd - drained


def left_usd(account: Account, at_s: float) -> float | None:
    """Return what may still be promised; `None` without a cap."""
    if account.cap_usd is None:
        return None
    return account.cap_usd - spent_usd(account, at_s) - committed_usd(account, at_s)


class Ended(NamedTuple):
    """When a machine was gone and by whom; `dated` if its cloud says so itself.

    `lost` tells whether it counts against its pool.
    """

    by: EndedBy | None
    at_s: float
    dated: bool = False
    lost: bool = False


class Terms(NamedTuple):
    """What a place adds to the cost of a machine that is not seen: its rule, and how long that is."""

    billing: str
    grace_s: float


def runs_out(state: State, account: Account) -> bool:
    """Return whether spent + committed would pass the cap before the next check.

    A launch counts from its start, because we may learn of its machine late and then owe all of it.
    """
    left = left_usd(account, state.now_s)
    if left is None or account.leases == 0:
        return False
    period_s = state.settings.control_period_s
    growth = (account.usd_per_h - account.draining_usd_per_h) * period_s / HOUR_S
    growth += account.intended_usd_per_h * (_longest_grace_s(state) + period_s) / HOUR_S
    return growth > left - CENT_FRACTION


def _longest_grace_s(state: State) -> float:
    """Return how long the list of any place may miss a machine that was launched."""
    paces = (place.pace for place in state.places.values())
    graces = (pace.grace_s for pace in paces if pace is not None)
    return max(state.settings.launch_grace_s, max(graces, default=0.0))


def ceiling_usd_per_h(
    kind: InstanceType,
    market: Market,
    spot_usd_per_h: float | None,
    disk_usd_per_h: float,
    bid_usd_per_h: float | None = None,
) -> float:
    """Return the most that a machine may cost per hour, with its disk, before a new decision.

    It is never above the bid, because at a higher price the cloud takes the machine.
    """
    most = kind.on_demand_usd_per_h
    if market == "spot" and spot_usd_per_h is not None:
        most = min(SPOT_RISE * spot_usd_per_h, max(most, spot_usd_per_h))
    if bid_usd_per_h is not None:
        most = min(most, bid_usd_per_h)
    return most + disk_usd_per_h


def reserve_usd(settings: Settings, billing: str, ceiling_usd_per_h: float) -> float:
    return ceiling_usd_per_h * (settings.reserve_s + _owed_s(billing)) / HOUR_S


def _owed_s(billing: str) -> float:
    """Return an hour if whole hours are billed, since the rest of a begun hour is owed."""
    quantum_s = RULES[billing].quantum_s
    return quantum_s if quantum_s >= HOUR_S else 0.0


def affordable(state: State, job: Job, terms: Terms, ceiling_usd_per_h: float) -> bool:
    """Return whether one more machine can be reserved for, without giving back others at once."""
    return pays(purses(state, job), needed_usd(state.settings, terms, ceiling_usd_per_h))


def payable(
    state: State,
    found: Purses,
    terms: Terms,
    usd_per_h: tuple[float, float],
    egress_usd: float,
    most: int,
) -> tuple[int, Purses]:
    """Return how many machines with this ceiling and price can be reserved for at once, of `most`.

    Each that is asked for makes the next one dearer, as it costs from its start, unseen. What these
    leave in the purses comes with it.
    """
    ceiling, price = usd_per_h
    settings = state.settings
    one_usd = needed_usd(settings, terms, ceiling) + egress_usd
    reserved_usd = reserve_usd(settings, terms.billing, ceiling) + egress_usd
    unseen_s = _unseen_s(settings, _longest_grace_s(state))
    unseen_usd = (price + settings.disk_usd_per_h) * unseen_s / HOUR_S
    count = 0
    while count < most and pays(found, one_usd):
        found = [(left - reserved_usd, others + unseen_usd) for left, others in found]
        count += 1
    return count, found


def pays(purses: Purses, needed_usd: float) -> bool:
    return all(needed_usd + others <= left for left, others in purses)


def purses(state: State, job: Job) -> Purses:
    """Return for each cap what is left, and what others may cost before the next check."""
    settings = state.settings
    found: list[tuple[float, float]] = []
    for account in (state.account, job.account):
        left = left_usd(account, state.now_s)
        if left is not None:
            others = account.usd_per_h * 2 * settings.control_period_s / HOUR_S
            unseen_s = _unseen_s(settings, _longest_grace_s(state))
            others += account.intended_usd_per_h * unseen_s / HOUR_S
            found.append((left, others))
    return found


def needed_usd(settings: Settings, terms: Terms, ceiling_usd_per_h: float) -> float:
    """Return the least money needed to buy a machine.

    It is the machine's reserve and what the machine may cost before the next check.
    """
    unseen_usd = ceiling_usd_per_h * _unseen_s(settings, terms.grace_s) / HOUR_S
    return reserve_usd(settings, terms.billing, ceiling_usd_per_h) + unseen_usd


def _unseen_s(settings: Settings, grace_s: float) -> float:
    return grace_s + 2 * settings.control_period_s


def open_lease(state: State, lease: Lease, job: Job) -> None:
    """Reserve money for a lease whose launch is about to be requested."""
    for account in (state.account, job.account):
        settle(account, state.now_s)
        account.leases += 1
        account.committed_usd += _whole_usd(state, lease, lease.ceiling_usd_per_h)
        account.committed_usd += lease.egress_usd
    lease.reserve_usd = _whole_usd(state, lease, lease.ceiling_usd_per_h)
    _intend_rate(state, lease, 1)


def _whole_usd(state: State, lease: Lease, ceiling_usd_per_h: float) -> float:
    """Return the reserve of a lease by the rule under which it began."""
    billing = lease.billing or state.settings.billing
    return reserve_usd(state.settings, billing, ceiling_usd_per_h)


def start_charging(state: State, lease: Lease, price_usd_per_h: float, from_s: float) -> None:
    """Charge for a machine from now on, and at once for the time before we knew of it."""
    from_s = max(lease.intended_at_s, min(from_s, state.now_s))
    _intend_rate(state, lease, -1)
    lease.price_usd_per_h = price_usd_per_h
    lease.prices = [(from_s, price_usd_per_h)]
    lease.accrued_at_s = lease.disk_from_s = from_s
    _accrue(state, lease)
    _change_rate(state, lease, lease.usd_per_h, lease.on_demand_usd_per_h)
    for account in accounts(state, lease):
        account.spent_usd += lease.accrued_usd + lease.egress_usd
        account.committed_usd -= lease.egress_usd
        account.on_demand_usd += lease.on_demand_usd_per_h * (state.now_s - from_s) / HOUR_S
    if lease.draining_since_s is not None:
        lease.draining_since_s = state.now_s
        _drain(state, lease)


def runs(state: State, lease: Lease, by_s: float | None = None) -> None:
    """Charge from when the machine was last known to be pending, if that was free until then.

    Until a machine is known to run it is charged from its launch, so that no budget is overrun.
    `by_s` is when it ran at the latest: what a list says may be older than that.
    """
    if lease.pending_at_s is not None and lease.prices:
        pending_s = lease.pending_at_s
        began(state, lease, pending_s if by_s is None else min(pending_s, by_s))


def began(state: State, lease: Lease, at_s: float) -> None:
    """Charge for the machine from this moment on, and for its disk from the launch on."""
    lease.pending_at_s = None
    before_s = lease.prices[0][0]
    from_s = max(lease.disk_from_s, min(at_s, state.now_s))
    if from_s == before_s:
        return
    lease.prices = _from(lease.prices, from_s)
    if lease.ended_at_s is not None:
        recharge(state, lease)
        return
    _accrue(state, lease)
    owed_usd = cost_usd(LOCAL, from_s, state.now_s, lease.prices, None)
    owed_usd += lease.disk_usd_per_h * (state.now_s - lease.disk_from_s) / HOUR_S
    _charge_held(state, lease, owed_usd - lease.accrued_usd)
    for account in accounts(state, lease):
        settle(account, state.now_s)
        account.on_demand_usd -= lease.on_demand_usd_per_h * (from_s - before_s) / HOUR_S


def _from(prices: list[tuple[float, float]], from_s: float) -> list[tuple[float, float]]:
    """Return the same prices, beginning at this moment."""
    return [(from_s, price_at(prices, from_s)), *(price for price in prices if price[0] > from_s)]


def change_price(state: State, lease: Lease, price_usd_per_h: float, since_s: float) -> bool:
    """Charge a new price since its date; return whether the reserve covers it or can be raised.

    No more than the bid is charged, because at a higher price the cloud takes the machine and
    refunds what its rule says.
    """
    bid = lease.request.bid_usd_per_h
    price_usd_per_h = price_usd_per_h if bid is None else min(price_usd_per_h, bid)
    if not lease.prices or price_usd_per_h == lease.price_usd_per_h:
        return True
    _accrue(state, lease)
    more_usd_per_h = price_usd_per_h - lease.price_usd_per_h
    _change_rate(state, lease, more_usd_per_h, 0.0)
    known_h = (state.now_s - max(since_s, lease.prices[-1][0])) / HOUR_S
    _charge_held(state, lease, more_usd_per_h * known_h)
    lease.price_usd_per_h = price_usd_per_h
    lease.prices = _repriced(lease.prices, price_usd_per_h, since_s)
    if lease.draining_since_s is not None:
        _drain(state, lease)
    return covered(state, lease)


def change_past_price(state: State, pool: Pool, price_usd_per_h: float, since_s: float) -> None:
    """Charge a new price for machines that ended between its date and now."""
    for lease in reversed(state.ended_leases.values()):
        if (lease.ended_at_s or 0.0) <= since_s:
            continue  # they are in the order in which they were last heard of
        if lease.pool != pool or lease.request.market != "spot" or not lease.prices:
            continue
        bid = lease.request.bid_usd_per_h
        price = price_usd_per_h if bid is None else min(price_usd_per_h, bid)
        lease.prices = _repriced(lease.prices, price, since_s)
        recharge(state, lease)


def _repriced(
    prices: list[tuple[float, float]], price_usd_per_h: float, since_s: float
) -> list[tuple[float, float]]:
    """Return prices of which the last one holds since this moment."""
    last = (max(since_s, prices[0][0]), price_usd_per_h)
    changed = [*(price for price in prices if price[0] < last[0]), last]
    return _thinned(changed) if len(changed) > PRICES_MAX else changed


def covered(state: State, lease: Lease) -> bool:
    """Return whether the machine's present cost is reserved for, or can be."""
    if lease.draining_since_s is not None or lease.usd_per_h <= lease.ceiling_usd_per_h:
        return True
    return _raise_ceiling(state, lease)


def start_draining(state: State, lease: Lease) -> None:
    """Begin to use up the reserve, as the machine is being given back."""
    if lease.draining_since_s is not None:
        return
    lease.draining_since_s = state.now_s
    if lease.prices:
        _drain(state, lease)


def on_dry_alarm(state: State, token: str) -> None:
    """End the reserve at zero if giving back takes longer than was reserved for."""
    lease = state.leases.get(token)
    if lease is None or lease.draining_since_s is None or lease.drained or not lease.prices:
        return
    reserved_usd = _reserved_usd(state, lease)
    if reserved_usd > CENT_FRACTION:
        return  # the reserve is used up more slowly now, and a later alarm is set
    lease.drained = True
    _change_draining(state, lease, -lease.draining_usd_per_h)
    lease.draining_usd_per_h = 0.0
    for account in accounts(state, lease):
        account.committed_usd -= reserved_usd


def charge_traffic(state: State, job: Job, usd: float, usd_per_h: float) -> None:
    """Charge what committed steps sent between zones, and from now on what is expected per hour."""
    own = job.account
    if not (usd or usd_per_h or own.traffic_usd_per_h or own.traffic_usd):
        return
    job.layouts.sent_usd += usd
    for account in (state.account, own):
        settle(account, state.now_s)
    more_usd, more_usd_per_h = (
        job.layouts.sent_usd - own.traffic_usd,
        usd_per_h - own.traffic_usd_per_h,
    )
    for account in (state.account, own):
        account.spent_usd += more_usd
        account.traffic_usd += more_usd
        account.usd_per_h += more_usd_per_h
        account.traffic_usd_per_h += more_usd_per_h


def close_lease(state: State, lease: Lease, ended: Ended) -> None:
    """Stop charging for a machine that is gone or never was; settle it by its billing rule."""
    job = state.jobs[lease.job]
    if job.account.leases == 1:
        charge_traffic(state, job, 0.0, 0.0)
    if lease.prices:
        _accrue(state, lease)
        _change_rate(state, lease, -lease.usd_per_h, -lease.on_demand_usd_per_h)
        lease.on_demand_usd = _on_demand_usd(lease, state.now_s)
        if lease.pending_at_s is not None:  # it may have run since, and is not known to
            pending_s = max(lease.prices[0][0], min(lease.pending_at_s, ended.at_s))
            lease.prices = _from(lease.prices, pending_s)
        lease.cost_usd = lease.accrued_usd + lease.egress_usd  # as charged so far
        lease.gone_at_s = max(lease.prices[0][0], min(ended.at_s, state.now_s))
        lease.ended_by, lease.dated = ended.by, ended.dated
        recharge(state, lease)
    else:
        _intend_rate(state, lease, -1)
        for account in accounts(state, lease):
            account.committed_usd -= lease.egress_usd
        lease.egress_usd = lease.on_demand_usd = 0.0
    for account in accounts(state, lease):
        settle(account, state.now_s)
        account.leases -= 1
        account.committed_usd -= _reserved_usd(state, lease)
        account.draining_usd_per_h -= lease.draining_usd_per_h
        if account.leases == 0:  # rounding ends here
            account.committed_usd = account.draining_usd_per_h = 0.0
            account.on_demand_usd_per_h = account.intended_usd_per_h = 0.0
            account.usd_per_h, account.traffic_usd_per_h = account.manager_usd_per_h, 0.0


def _on_demand_usd(lease: Lease, until_s: float) -> float:
    """Return what a machine's time up to a moment costs on demand."""
    return lease.on_demand_usd_per_h * (until_s - lease.prices[0][0]) / HOUR_S


def recharge(state: State, lease: Lease) -> None:
    """Charge an ended lease, and correct its accounts, by what is known of its machine now."""
    lease.disk_usd = _disk_usd(lease, max(lease.gone_at_s, lease.disk_gone_at_s))
    cost, on_demand = lease.disk_usd + lease.egress_usd, 0.0
    if lease.prices:
        rule = rule_of(lease.billing, lease.pool.cloud, lease.request.market)
        if lease.pending_at_s is not None:
            rule = replace(rule, minimum_s=0.0)  # no list had it running
        began_s, by = lease.prices[0][0], lease.ended_by if lease.dated else None
        gone_s = max(began_s, lease.gone_at_s)
        cost += cost_usd(rule, began_s, gone_s, lease.prices, by)
        on_demand = _on_demand_usd(lease, gone_s)
    _charge(state, lease, lease.cost_usd, cost)
    lease.cost_usd = cost
    known = on_demand if lease.on_demand_usd is None else lease.on_demand_usd
    more_on_demand_usd, lease.on_demand_usd = on_demand - known, on_demand
    job = state.jobs.get(lease.job)
    for account in (state.account, *(() if job is None else (job.account,))):
        account.on_demand_usd += more_on_demand_usd


def _charge_held(state: State, lease: Lease, more_usd: float) -> None:
    """Correct what a machine has cost so far; what it costs from now on is its present job's."""
    before_usd = lease.accrued_usd + lease.egress_usd
    _charge(state, lease, before_usd, before_usd + more_usd)
    lease.accrued_usd += more_usd
    if lease.paid_usd:
        lease.paid_usd = _shares_usd(lease, before_usd + more_usd)


def _charge(state: State, lease: Lease, before_usd: float, usd: float) -> None:
    """Correct what a machine has cost; a refund goes to all jobs that have paid for it."""
    state.account.spent_usd += usd - before_usd
    before, now = _shares_usd(lease, before_usd), _shares_usd(lease, usd)
    for job_id in now:
        if job_id in state.jobs:
            state.jobs[job_id].account.spent_usd += now[job_id] - before[job_id]


def _shares_usd(lease: Lease, usd: float) -> dict[str, float]:
    """Return what each job pays of a machine's cost: who had it before no more than it has paid."""
    shares: dict[str, float] = {}
    for job_id, paid_usd in lease.paid_usd.items():
        shares[job_id] = min(paid_usd, usd)
        usd -= shares[job_id]
    shares[lease.job] = shares.get(lease.job, 0.0) + usd
    return shares


def forget(state: State, job: Job, gone: Sequence[Lease]) -> float:
    """Take a job that cannot be computed with out of the sum of all; return what it has spent.

    The sum is made anew from the other jobs, as the job's values may have made it no number. What
    was reserved for its leases is charged now. So it covers the time until a machine has ended, the
    rest of a begun hour, and a machine that a launch may have started unseen.
    """
    whole, at_s = state.account, state.now_s
    others = [one.account for one in state.jobs.values() if one is not job]
    for account in others:
        settle(account, at_s)
    spent = spent_usd(whole, at_s)
    mine = _number(spent_usd(job.account, at_s))
    manager = _number(manager_usd(whole, at_s))
    if not math.isfinite(spent):
        spent = sum((account.spent_usd for account in others), 0.0) + mine + manager
    held_usd = sum((_owed_usd(state, lease) for lease in gone), 0.0)
    state.account = Account(
        cap_usd=whole.cap_usd,
        at_s=at_s,
        spent_usd=spent + held_usd,
        usd_per_h=whole.manager_usd_per_h + sum((a.usd_per_h for a in others), 0.0),
        on_demand_usd=_number(on_demand_usd(whole, at_s)),
        on_demand_usd_per_h=sum((a.on_demand_usd_per_h for a in others), 0.0),
        committed_usd=sum((a.committed_usd for a in others), 0.0),
        draining_usd_per_h=sum((a.draining_usd_per_h for a in others), 0.0),
        intended_usd_per_h=sum((a.intended_usd_per_h for a in others), 0.0),
        manager_usd=manager,
        manager_usd_per_h=whole.manager_usd_per_h,
        traffic_usd=_number(traffic_usd(whole, at_s)),
        traffic_usd_per_h=sum((a.traffic_usd_per_h for a in others), 0.0),
        leases=sum(a.leases for a in others),
    )
    return mine + held_usd


def _owed_usd(state: State, lease: Lease) -> float:
    """Return what a lease whose values cannot be trusted may still cost.

    It is its whole reserve, and if no list has shown its machine, also what that may cost unseen.
    """
    settings = state.settings
    rule = lease.billing if lease.billing in RULES else settings.billing
    rates = (lease.usd_per_h, lease.ceiling_usd_per_h)
    dearest = lease.type.on_demand_usd_per_h + settings.disk_usd_per_h
    rate = max((one for one in rates if credible(one)), default=dearest)
    if lease.machine_id:
        return reserve_usd(settings, rule, rate)
    return needed_usd(settings, Terms(rule, _longest_grace_s(state)), rate)


def _number(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def hand_over(state: State, lease: Lease, to: Job) -> None:
    """Charge the lease to a different job from now on."""
    _accrue(state, lease)
    lease.paid_usd = _shares_usd(lease, lease.accrued_usd + lease.egress_usd)
    reserved = _reserved_usd(state, lease)
    old = state.jobs[lease.job].account
    for account, sign in ((old, -1), (to.account, 1)):
        settle(account, state.now_s)
        account.leases += sign
        account.committed_usd += sign * reserved
        account.usd_per_h += sign * lease.usd_per_h
        account.on_demand_usd_per_h += sign * lease.on_demand_usd_per_h
    lease.job = to.id


def accounts(state: State, lease: Lease) -> tuple[Account, Account]:
    return state.account, state.jobs[lease.job].account


def cost_so_far_usd(lease: Lease, at_s: float) -> float:
    if lease.ended_at_s is not None or not lease.prices:
        return lease.cost_usd
    since_usd = lease.usd_per_h * (at_s - lease.accrued_at_s) / HOUR_S
    return lease.accrued_usd + since_usd + lease.egress_usd


def disk_so_far_usd(lease: Lease, at_s: float) -> float:
    """Return the part of a machine's cost that is for its disk; no rule refunds it."""
    if lease.ended_at_s is not None or not lease.prices:
        return lease.disk_usd
    return _disk_usd(lease, at_s)


def _disk_usd(lease: Lease, until_s: float) -> float:
    if not (lease.prices or lease.disk_from_s):
        return 0.0  # no list had anything of it
    return lease.disk_usd_per_h * max(0.0, until_s - lease.disk_from_s) / HOUR_S


def _accrue(state: State, lease: Lease) -> None:
    """Add the cost of the interval since the last call to the lease."""
    hours = max(0.0, state.now_s - lease.accrued_at_s) / HOUR_S
    lease.accrued_usd += lease.usd_per_h * hours
    lease.accrued_at_s = max(lease.accrued_at_s, state.now_s)


def _intend_rate(state: State, lease: Lease, sign: int) -> None:
    """Add the lease to, or remove it from, the hourly cost of launches not yet machines."""
    for account in accounts(state, lease):
        account.intended_usd_per_h += sign * lease.usd_per_h


def _drain(state: State, lease: Lease) -> None:
    """Use up the reserve from now on at the machine's price or ceiling, whichever is higher."""
    if lease.drained:
        return
    lease.reserve_usd, lease.draining_since_s = _reserved_usd(state, lease), state.now_s
    rate = max(lease.ceiling_usd_per_h, lease.usd_per_h)
    _change_draining(state, lease, rate - lease.draining_usd_per_h)
    lease.draining_usd_per_h = rate
    dry_s = lease.reserve_usd / rate * HOUR_S if rate else 0.0
    set_alarm(state, state.now_s + dry_s, "dry", lease.token)


def _change_draining(state: State, lease: Lease, usd_per_h: float) -> None:
    for account in accounts(state, lease):
        settle(account, state.now_s)
        account.draining_usd_per_h += usd_per_h


def _change_rate(state: State, lease: Lease, usd_per_h: float, on_demand_usd_per_h: float) -> None:
    for account in accounts(state, lease):
        settle(account, state.now_s)
        account.usd_per_h += usd_per_h
        account.on_demand_usd_per_h += on_demand_usd_per_h


def _reserved_usd(state: State, lease: Lease) -> float:
    """Return what is still reserved for the lease now."""
    if lease.drained:
        return 0.0
    if lease.draining_since_s is None or not lease.prices:
        return lease.reserve_usd
    hours = (state.now_s - lease.draining_since_s) / HOUR_S
    return lease.reserve_usd - lease.draining_usd_per_h * hours


def _raise_ceiling(state: State, lease: Lease) -> bool:
    """Reserve for a higher price if every account can pay for it; return whether they can."""
    market, price = lease.request.market, lease.price_usd_per_h
    bid = lease.request.bid_usd_per_h
    ceiling = ceiling_usd_per_h(lease.type, market, price, lease.disk_usd_per_h, bid)
    whole = _whole_usd(state, lease, ceiling)
    both = accounts(state, lease)
    lefts = [left_usd(account, state.now_s) for account in both]
    if any(left is not None and whole - lease.reserve_usd > left for left in lefts):
        return False
    for account in both:
        settle(account, state.now_s)
        account.committed_usd += whole - lease.reserve_usd
    lease.ceiling_usd_per_h, lease.reserve_usd = ceiling, whole
    return True


def _thinned(prices: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return half as many points with the same integral: pairs become time-weighted means."""
    thin = []
    for (a_s, a), (b_s, b), (c_s, _) in zip(
        prices[0:-2:2], prices[1:-1:2], prices[2::2], strict=False
    ):
        thin.append((a_s, (a * (b_s - a_s) + b * (c_s - b_s)) / (c_s - a_s) if c_s > a_s else b))
    return [*thin, *prices[2 * len(thin) :]]
