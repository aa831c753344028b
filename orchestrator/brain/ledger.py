"""Who owes what: every lease is charged to its job and to the whole, as straight lines in time.

    spent(t)     = spent + usd_per_h · (t - at) / 3600
    committed(t) = committed - draining_usd_per_h · (t - at) / 3600
    committed    = Σ over leases: ceiling · reserve_s / 3600, used up as time passes while it is given back,
                   and what bringing the state to those that are no machines yet will cost

A lease costs its machine's price and its disk per hour, and egress once, when it is a machine. Its ceiling is
the most that it may cost per hour, so that what was reserved covers what comes
between the decision to give a machine back and its end. Nothing is bought unless
spent + committed + its own reserve <= cap. On demand the ceiling is the price; on spot it is
`SPOT_RISE` times the price, but no more than on demand. A price that passes it raises it while there
is money for that; else the machine is given back at once, and its reserve is used up at that price.
Where hours are paid as a whole, a whole one is reserved for as well.
"""

from collections.abc import Sequence

from bidding.billing import HOUR_S, RULES, cost_usd, rule_of
from bidding.history import USD_PER_H_MAX
from cloud.model import EndedBy, InstanceType, Market
from orchestrator.settings import Settings
from orchestrator.state import Account, Job, Lease, State, set_alarm

PRICES_MAX = 512
SPOT_RISE = 1.5  # of 12,590 recorded quotes of 2020 none was more than 1.05 of the one before
CENT_FRACTION = 1e-9  # below this a difference of dollars is rounding


def credible(price_usd_per_h: float) -> bool:
    """Nobody gives machines away, and none costs so much: such a price is a fault of who says it."""
    return 0 < price_usd_per_h < USD_PER_H_MAX


def settle(account: Account, at_s: float) -> None:
    """Bring the lines up to a moment."""
    hours = max(0.0, at_s - account.at_s) / HOUR_S
    account.spent_usd += account.usd_per_h * hours
    account.on_demand_usd += account.on_demand_usd_per_h * hours
    account.manager_usd += account.manager_usd_per_h * hours
    account.committed_usd -= account.draining_usd_per_h * hours
    account.at_s = max(account.at_s, at_s)


def spent_usd(account: Account, at_s: float) -> float:
    return account.spent_usd + account.usd_per_h * max(0.0, at_s - account.at_s) / HOUR_S


def on_demand_usd(account: Account, at_s: float) -> float:
    return (
        account.on_demand_usd + account.on_demand_usd_per_h * max(0.0, at_s - account.at_s) / HOUR_S
    )


def manager_usd(account: Account, at_s: float) -> float:
    """The part of what was spent that the manager's own machine cost."""
    return account.manager_usd + account.manager_usd_per_h * max(0.0, at_s - account.at_s) / HOUR_S


def committed_usd(account: Account, at_s: float) -> float:
    if not account.leases:
        return 0.0
    drained = account.draining_usd_per_h * max(0.0, at_s - account.at_s) / HOUR_S
    return account.committed_usd - drained


def left_usd(account: Account, at_s: float) -> float | None:
    """What may still be promised; None without a cap."""
    if account.cap_usd is None:
        return None
    return account.cap_usd - spent_usd(account, at_s) - committed_usd(account, at_s)


def runs_out(account: Account, settings: Settings, at_s: float) -> bool:
    """Would spent + committed pass the cap before we look again?

    A launch may have been a machine for a while when we learn of it, and owes that at once.
    """
    left = left_usd(account, at_s)
    period_s = settings.control_period_s
    growth = (account.usd_per_h - account.draining_usd_per_h) * period_s / HOUR_S
    growth += account.intended_usd_per_h * (settings.launch_grace_s + period_s) / HOUR_S
    return left is not None and growth > left - CENT_FRACTION and account.leases > 0


def ceiling_usd_per_h(
    kind: InstanceType,
    market: Market,
    spot_usd_per_h: float | None,
    disk_usd_per_h: float,
    bid_usd_per_h: float | None = None,
) -> float:
    """The most that a machine may cost per hour, its disk included, before we think again.

    Above its bid it costs nothing any more: the cloud takes it.
    """
    most = kind.on_demand_usd_per_h
    if market == "spot" and spot_usd_per_h is not None:
        most = min(SPOT_RISE * spot_usd_per_h, max(most, spot_usd_per_h))
    if bid_usd_per_h is not None:
        most = min(most, bid_usd_per_h)
    return most + disk_usd_per_h


def reserve_usd(settings: Settings, ceiling_usd_per_h: float) -> float:
    return ceiling_usd_per_h * (settings.reserve_s + _owed_s(settings)) / HOUR_S


def _owed_s(settings: Settings) -> float:
    """The rest of a begun hour is owed by whoever gives a machine back in it."""
    quantum_s = RULES[settings.billing].quantum_s
    return quantum_s if quantum_s >= HOUR_S else 0.0


def affordable(state: State, job: Job, ceiling_usd_per_h: float, egress_usd: float = 0.0) -> bool:
    """One more machine can be reserved for, and nothing has to be given back at once for it."""
    needed = needed_usd(state.settings, ceiling_usd_per_h) + egress_usd
    return pays(purses(state, job), needed)


def pays(purses: Sequence[tuple[float, float]], needed_usd: float) -> bool:
    return all(needed_usd + others <= left for left, others in purses)


def purses(state: State, job: Job) -> list[tuple[float, float]]:
    """What is left under each cap, and what others may come to cost before we look."""
    settings, found = state.settings, []
    for account in (state.account, job.account):
        left = left_usd(account, state.now_s)
        if left is not None:
            others = account.usd_per_h * 2 * settings.control_period_s / HOUR_S
            others += account.intended_usd_per_h * _unseen_s(settings) / HOUR_S
            found.append((left, others))
    return found


def needed_usd(settings: Settings, ceiling_usd_per_h: float) -> float:
    """The least that must be there to buy a machine: its reserve, and what it costs before we look."""
    unseen_usd = ceiling_usd_per_h * _unseen_s(settings) / HOUR_S
    return reserve_usd(settings, ceiling_usd_per_h) + unseen_usd


def _unseen_s(settings: Settings) -> float:
    return settings.launch_grace_s + 2 * settings.control_period_s


def open_lease(state: State, lease: Lease, job: Job) -> None:
    """Reserve for a lease that is about to be asked for."""
    for account in (state.account, job.account):
        settle(account, state.now_s)
        account.leases += 1
        account.committed_usd += reserve_usd(state.settings, lease.ceiling_usd_per_h)
        account.committed_usd += lease.egress_usd
    lease.reserve_usd = reserve_usd(state.settings, lease.ceiling_usd_per_h)
    _intend_rate(state, lease, 1)


def start_charging(state: State, lease: Lease, price_usd_per_h: float, from_s: float) -> None:
    """The machine exists: it costs from now on, and what it cost before we knew is owed at once."""
    from_s = max(lease.intended_at_s, min(from_s, state.now_s))
    _intend_rate(state, lease, -1)
    lease.price_usd_per_h = price_usd_per_h
    lease.prices = [(from_s, price_usd_per_h)]
    lease.accrued_at_s = from_s
    _accrue(state, lease)
    _change_rate(state, lease, lease.usd_per_h, lease.on_demand_usd_per_h)
    for account in accounts(state, lease):
        account.spent_usd += lease.accrued_usd + lease.egress_usd
        account.committed_usd -= lease.egress_usd
        account.on_demand_usd += lease.on_demand_usd_per_h * (state.now_s - from_s) / HOUR_S
    if lease.draining_since_s is not None:
        lease.draining_since_s = state.now_s
        _drain(state, lease)


def change_price(state: State, lease: Lease, price_usd_per_h: float) -> bool:
    """A new price holds from now on; the interval before is charged at the old one. Above a bid nothing is
    charged: the cloud takes the machine, and gives back what its rule says.

    False when it is above what is reserved for, and there is no money to reserve for more.
    """
    bid = lease.request.bid_usd_per_h
    price_usd_per_h = price_usd_per_h if bid is None else min(price_usd_per_h, bid)
    if not lease.prices or price_usd_per_h == lease.price_usd_per_h:
        return True
    _accrue(state, lease)
    _change_rate(state, lease, price_usd_per_h - lease.price_usd_per_h, 0.0)
    lease.price_usd_per_h = price_usd_per_h
    lease.prices.append((state.now_s, price_usd_per_h))
    if len(lease.prices) > PRICES_MAX:
        lease.prices = _thinned(lease.prices)
    if lease.draining_since_s is not None:
        _drain(state, lease)
    return covered(state, lease)


def covered(state: State, lease: Lease) -> bool:
    """Is what it costs now reserved for, or can it be?"""
    if lease.draining_since_s is not None or lease.usd_per_h <= lease.ceiling_usd_per_h:
        return True
    return _raise_ceiling(state, lease)


def start_draining(state: State, lease: Lease) -> None:
    """It is being given back: what was reserved for that is used up as time passes."""
    if lease.draining_since_s is not None:
        return
    lease.draining_since_s = state.now_s
    if lease.prices:
        _drain(state, lease)


def on_dry_alarm(state: State, token: str) -> None:
    """Giving it back takes longer than was reserved for: a reserve ends at zero."""
    lease = state.leases.get(token)
    if lease is None or lease.draining_since_s is None or lease.drained or not lease.prices:
        return
    reserved_usd = _reserved_usd(state, lease)
    if reserved_usd > CENT_FRACTION:
        return  # it is used up more slowly since; another alarm is set
    lease.drained = True
    _change_draining(state, lease, -lease.draining_usd_per_h)
    lease.draining_usd_per_h = 0.0
    for account in accounts(state, lease):
        account.committed_usd -= reserved_usd


def close_lease(state: State, lease: Lease, ended_by: EndedBy | None, ended_at_s: float) -> None:
    """The machine is gone (or never was): stop charging, and charge what the billing rule says."""
    if lease.prices:
        _accrue(state, lease)
        _change_rate(state, lease, -lease.usd_per_h, -lease.on_demand_usd_per_h)
        started_s = lease.prices[0][0]
        ended_at_s = max(started_s, min(ended_at_s, state.now_s))
        rule = rule_of(lease.billing, lease.pool.cloud, lease.request.market)
        machine_usd = cost_usd(rule, started_s, ended_at_s, lease.prices, ended_by)
        lease.disk_usd = disk_so_far_usd(lease, ended_at_s)
        lease.cost_usd = machine_usd + lease.disk_usd + lease.egress_usd
        unheard_h = (state.now_s - ended_at_s) / HOUR_S  # it was gone before we learned of it
        for account in accounts(state, lease):
            account.spent_usd += lease.cost_usd - lease.accrued_usd - lease.egress_usd
            account.on_demand_usd -= lease.on_demand_usd_per_h * unheard_h
    else:
        _intend_rate(state, lease, -1)
        for account in accounts(state, lease):
            account.committed_usd -= lease.egress_usd
    for account in accounts(state, lease):
        settle(account, state.now_s)
        account.leases -= 1
        account.committed_usd -= _reserved_usd(state, lease)
        account.draining_usd_per_h -= lease.draining_usd_per_h
        if account.leases == 0:  # rounding ends here
            account.committed_usd = account.draining_usd_per_h = 0.0
            account.on_demand_usd_per_h = account.intended_usd_per_h = 0.0
            account.usd_per_h = account.manager_usd_per_h


def hand_over(state: State, lease: Lease, to: Job) -> None:
    """From now on the lease is charged to another job."""
    _accrue(state, lease)
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
    """The part of what a machine has cost that its disk did. No rule refunds it."""
    if lease.ended_at_s is not None or not lease.prices:
        return lease.disk_usd
    return lease.disk_usd_per_h * max(0.0, at_s - lease.prices[0][0]) / HOUR_S


def _accrue(state: State, lease: Lease) -> None:
    """Close the interval since the last look."""
    hours = max(0.0, state.now_s - lease.accrued_at_s) / HOUR_S
    lease.accrued_usd += lease.usd_per_h * hours
    lease.accrued_at_s = max(lease.accrued_at_s, state.now_s)


def _intend_rate(state: State, lease: Lease, sign: int) -> None:
    """What launches that are not known to be machines yet will cost per hour."""
    for account in accounts(state, lease):
        account.intended_usd_per_h += sign * lease.usd_per_h


def _drain(state: State, lease: Lease) -> None:
    """From now on what is reserved is used up as fast as it costs, or may cost."""
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
    """What is still reserved for it now."""
    if lease.drained:
        return 0.0
    if lease.draining_since_s is None or not lease.prices:
        return lease.reserve_usd
    hours = (state.now_s - lease.draining_since_s) / HOUR_S
    return lease.reserve_usd - lease.draining_usd_per_h * hours


def _raise_ceiling(state: State, lease: Lease) -> bool:
    """Reserve for a higher price, if every account can pay for it."""
    market, price = lease.request.market, lease.price_usd_per_h
    bid = lease.request.bid_usd_per_h
    ceiling = ceiling_usd_per_h(lease.type, market, price, lease.disk_usd_per_h, bid)
    whole = reserve_usd(state.settings, ceiling)
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
    """Half as many points with the same integral: neighbours become their time-weighted mean."""
    thin = []
    for (a_s, a), (b_s, b), (c_s, _) in zip(
        prices[0:-2:2], prices[1:-1:2], prices[2::2], strict=False
    ):
        thin.append((a_s, (a * (b_s - a_s) + b * (c_s - b_s)) / (c_s - a_s) if c_s > a_s else b))
    return [*thin, *prices[2 * len(thin) :]]
