"""What to buy and what to give back in one control period: the decision that runs in production.

Every machine, held or on offer, has an outlook over the horizon (`bidding.expected`): what it costs
per hour and which share of that hour it works, evictions, refunds and start-up counted. Then

    price of work    w_i = c_i / (s_i · slots_i · speed_i)
    cost             C   = sum_i c_i                                    dollars per hour
    work             W   = rate(counts) · s · (1 - sum_pools h · recovery)
    cost per work    E   = C / W                                        (4.4), with phi replaced by
                                                                        the planner's rate(counts)
Machines are taken in the order of w_i; every prefix of that order is a footprint. The cheapest E
wins, then it grows while the next machine's own cost per work stays within `haste` of it.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec

from bidding.billing import HOUR_S, rule_of
from bidding.deadline import Mode, best_mode
from bidding.expected import Outlook, outlook
from bidding.model import Acquire, Demand, Holding, Limits, Offer, Purchase, Release, Throughput
from bidding.risk import HAZARD_PRIOR, RETURN_PRIOR, all_gone
from cloud.model import InstanceType, Market, Pool

HORIZON_H = 4.0  # how far ahead a machine is weighed
KEEP_MARGIN = 0.05  # a held machine goes only for one this much cheaper: no flapping
RESERVE_S = 120.0  # a footprint must be payable this long, else it is not held
CONTROL_S = 300.0  # with a deadline, no more than this passes between two decisions
USD_PER_H_MAX = 1_000.0


class _Unit(msgspec.Struct, frozen=True, kw_only=True):
    """A lease, or up to `count` machines of an offer, with their outlook."""

    pool: Pool
    market: Market
    type: InstanceType
    price_usd_per_h: float
    hazard_per_h: float
    outlook: Outlook
    usd_per_work: float
    count: int = 1
    bid_usd_per_h: float | None = None
    lease: str = ""
    bound: bool = False  # reliable: stays whatever it costs


class _Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """The first `taken` machines of the order; E and the last machine's own cost per work."""

    taken: int
    usd_per_h: float
    work_per_s: float
    usd_per_work: float
    last_usd_per_work: float


def decide(
    offers: Sequence[Offer],
    holdings: Sequence[Holding],
    demand: Demand,
    limits: Limits,
    throughput: Throughput,
    at_s: float,
) -> Purchase:
    """The footprint with the lowest expected cost per work within the limits, as a difference."""
    offers = [o for o in offers if _sane(o, limits)]
    units = sorted(_units(offers, holdings, demand, limits, at_s), key=_order)
    bound = [u for u in units if u.bound]
    free = [u for u in units if not u.bound]
    mode, why = _mode(free, offers, holdings, demand, limits, throughput, at_s)
    if mode is not None:
        wanted = {"spot": "spot", "on_demand": "on_demand"}.get(mode)
        free = [u for u in free if u.market == wanted]
        limits = msgspec.structs.replace(limits, haste=math.inf)
    elif _not_worth_it(free, offers, limits):
        free, why = [], _waiting(offers)
    order = list(_walk(free, bound, limits))
    tried = _footprints(order, bound, demand, limits, throughput)
    best, runner_up = _choose(tried, demand, limits)
    return _difference(order[: best.taken] if best else [], best, runner_up, holdings, why)


def _sane(o: Offer, limits: Limits) -> bool:
    """Offers outside the allowed regions or with an absurd price do not exist for us."""
    return (
        0 < o.price_usd_per_h < USD_PER_H_MAX
        and (o.market == "spot" or limits.on_demand_allowed)
        and (limits.regions is None or o.pool.region in limits.regions)
    )


def _order(u: _Unit) -> tuple[float, bool, str, Pool, str]:
    """Cheapest work first; ties by name, so that the order of the arguments never matters."""
    return (u.usd_per_work, not u.lease, u.market, u.pool, u.lease)


def _units(
    offers: Sequence[Offer],
    holdings: Sequence[Holding],
    demand: Demand,
    limits: Limits,
    at_s: float,
) -> Iterator[_Unit]:
    horizon_h = HORIZON_H
    if limits.finish_by_s is not None:
        left_h = (limits.finish_by_s - at_s) / HOUR_S
        horizon_h = min(HORIZON_H, max(left_h, 2 * demand.start_s / HOUR_S + 0.01))
    start_h = (demand.start_s + demand.morph_s) / HOUR_S
    for h in holdings:
        if h.reliable or not h.noticed:
            yield _held(h, demand, at_s, horizon_h)
    for o in offers:
        if not o.blocked:
            yield from _offered(o, limits.slots_max, start_h, demand.recovery_s / HOUR_S, horizon_h)


def _held(h: Holding, demand: Demand, at_s: float, horizon_h: float) -> _Unit:
    hazard = _hazard(h.market, h.hazard_per_h)
    age_s = max(0.0, at_s - h.started_at_s)
    start_h = max(0.0, demand.start_s - age_s) / HOUR_S
    rule = rule_of(h.billing, h.pool.cloud, h.market)
    seen = outlook(rule, h.price_usd_per_h, hazard, age_s / HOUR_S, start_h, horizon_h)
    per_work = seen.usd_per_work_h / (h.type.slots * h.type.speed)
    return _Unit(
        pool=h.pool, market=h.market, type=h.type, price_usd_per_h=h.price_usd_per_h,
        hazard_per_h=hazard, outlook=seen, usd_per_work=per_work - abs(per_work) * KEEP_MARGIN,
        bid_usd_per_h=h.bid_usd_per_h, lease=h.lease, bound=h.reliable,
    )  # fmt: skip


def _offered(
    o: Offer, slots_max: int, start_h: float, recovery_h: float, horizon_h: float
) -> Iterator[_Unit]:
    """One unit per offer; where bids evict, with the bid that makes its work cheapest."""
    rule = rule_of(o.billing, o.pool.cloud, o.market)
    choices: list[tuple[float | None, float]] = [(None, _hazard(o.market, o.hazard_per_h))]
    if o.bids and o.market == "spot":
        choices = [(b.bid_usd_per_h, -math.log1p(-min(b.evicted_in_1h, 0.999999))) for b in o.bids]
    weighed = []
    for bid, hazard in choices:
        seen = outlook(rule, o.price_usd_per_h, hazard, 0.0, start_h, horizon_h)
        share = seen.work_share - min(hazard, 60.0) * recovery_h
        cost = seen.usd_per_h + o.egress_usd / horizon_h
        if share > 0:
            weighed.append((cost / share, hazard, bid, seen))
    if not weighed:
        return
    usd_per_work_h, hazard, bid, seen = min(weighed, key=lambda x: x[:2])
    if o.egress_usd:
        seen = Outlook(
            usd_per_h=seen.usd_per_h + o.egress_usd / horizon_h, work_share=seen.work_share
        )
    yield _Unit(
        pool=o.pool, market=o.market, type=o.type, price_usd_per_h=o.price_usd_per_h,
        hazard_per_h=hazard, outlook=seen, bid_usd_per_h=bid,
        usd_per_work=usd_per_work_h / (o.type.slots * o.type.speed),
        count=slots_max // o.type.slots,
    )  # fmt: skip


def _hazard(market: Market, known_per_h: float | None) -> float:
    if market == "on_demand":
        return 0.0
    return HAZARD_PRIOR.per_h if known_per_h is None else known_per_h


def _not_worth_it(free: Sequence[_Unit], offers: Sequence[Offer], limits: Limits) -> bool:
    """Waiting is better when a pool that refused a moment ago sells far cheaper work."""
    blocked = [
        o.price_usd_per_h / (o.type.slots * o.type.speed)
        for o in offers
        if o.blocked and o.market == "spot"
    ]
    if not free or not blocked:
        return False
    return free[0].usd_per_work > (1 + limits.haste) * min(blocked)


def _waiting(offers: Sequence[Offer]) -> str:
    cheapest = min(
        (o for o in offers if o.blocked), key=lambda o: (o.price_usd_per_h, o.pool), default=None
    )
    if cheapest is None:
        return "waiting: no offer fits the limits"
    return f"waiting for {cheapest.pool.key}, which refused a moment ago, at ${cheapest.price_usd_per_h:.4f}/h"


def _mode(
    free: Sequence[_Unit],
    offers: Sequence[Offer],
    holdings: Sequence[Holding],
    demand: Demand,
    limits: Limits,
    throughput: Throughput,
    at_s: float,
) -> tuple[Mode | None, str]:
    """With a deadline: spot, on-demand or idle, and why; `None` when nothing forces a mode."""
    on_demand = next((u for u in free if u.market == "on_demand"), None)
    if limits.finish_by_s is None or demand.work_left is None or on_demand is None:
        return None, ""
    count = max(1, limits.slots_max // on_demand.type.slots)
    rate = throughput.work_per_s({on_demand.type.name: count})
    if rate <= 0:
        return None, ""
    need_s, left_s = demand.work_left / rate, limits.finish_by_s - at_s
    held = {h.market for h in holdings if not h.noticed and not h.reliable}
    now: Mode = "on_demand" if "on_demand" in held else "spot" if "spot" in held else "idle"
    overhead_s = demand.start_s + demand.morph_s
    running_s = 0.0 if now == "on_demand" else overhead_s + demand.recovery_s + CONTROL_S
    spare_s = left_s - need_s - running_s
    if spare_s <= 0:
        return (
            "on_demand",
            f"the deadline leaves {max(0.0, left_s - need_s):.0f} s to spare: on-demand now",
        )
    spot = next((u for u in free if u.market == "spot"), None)
    price = None if spot is None else spot.usd_per_work / on_demand.usd_per_work
    mode = best_mode(
        (need_s + running_s) / HOUR_S, left_s / HOUR_S, price, _rates(offers), overhead_s / HOUR_S, now
    )  # fmt: skip
    return (
        mode,
        f"{mode.replace('_', '-')} is the cheapest way to finish with {spare_s:.0f} s to spare",
    )


def _rates(offers: Sequence[Offer]) -> tuple[float, float]:
    """How fast the last spot capacity is lost, and how fast some comes back."""
    spot = [o for o in offers if o.market == "spot"]
    if not spot:
        return HAZARD_PRIOR.per_h, RETURN_PRIOR.per_h
    return all_gone(
        [_hazard("spot", o.hazard_per_h) for o in spot],
        [RETURN_PRIOR.per_h if o.return_per_h is None else o.return_per_h for o in spot],
    )


def _walk(free: Sequence[_Unit], bound: Sequence[_Unit], limits: Limits) -> Iterator[_Unit]:
    """Machines one by one in the order of their price of work, as long as the limits allow."""
    slots = 0
    usd_per_h = sum(u.price_usd_per_h for u in bound)
    committed = 0.0
    for unit in free:
        for _ in range(unit.count):
            more_usd_per_h = usd_per_h + unit.price_usd_per_h
            rule = rule_of(None, unit.pool.cloud, unit.market)
            now_usd = 0.0 if unit.lease else unit.price_usd_per_h * rule.quantum_s / HOUR_S
            if slots + unit.type.slots > limits.slots_max or not _payable(
                more_usd_per_h, committed + now_usd, limits
            ):
                break
            slots, usd_per_h, committed = (
                slots + unit.type.slots, more_usd_per_h, committed + now_usd,
            )  # fmt: skip
            yield unit


def _payable(usd_per_h: float, committed_usd: float, limits: Limits) -> bool:
    if limits.usd_per_h_max is not None and usd_per_h > limits.usd_per_h_max:
        return False
    left = limits.budget_left_usd
    return left is None or max(committed_usd, usd_per_h * RESERVE_S / HOUR_S) <= left


def _footprints(
    order: Sequence[_Unit],
    bound: Sequence[_Unit],
    demand: Demand,
    limits: Limits,
    throughput: Throughput,
) -> list[_Footprint]:
    """Every prefix of the order that is large enough, with its E."""
    cost = sum(u.outlook.usd_per_h for u in bound)
    usd_per_h = sum(u.price_usd_per_h for u in bound)
    counts: Counter[str] = Counter()
    pools: dict[Pool, float] = {}
    power = useful = losses = 0.0
    slots, before = 0, (cost, 0.0)
    footprints = []
    for i, u in enumerate(order):
        cost += u.outlook.usd_per_h
        usd_per_h += u.price_usd_per_h
        counts[u.type.name] += 1
        slots += u.type.slots
        power += u.type.slots * u.type.speed
        useful += u.type.slots * u.type.speed * u.outlook.work_share
        losses += max(0.0, u.hazard_per_h - pools.get(u.pool, 0.0)) * demand.recovery_s / HOUR_S
        pools[u.pool] = max(u.hazard_per_h, pools.get(u.pool, 0.0))
        rate = throughput.work_per_s(counts) if slots >= limits.slots_min else 0.0
        work = rate * HOUR_S * useful / power * max(0.0, 1 - losses)
        if work > 0:
            more = (cost - before[0]) / (work - before[1]) if work > before[1] else math.inf
            footprints.append(
                _Footprint(taken=i + 1, usd_per_h=usd_per_h, work_per_s=rate,
                           usd_per_work=cost / work, last_usd_per_work=more)
            )  # fmt: skip
            before = (cost, work)
    return footprints


def _choose(
    tried: Sequence[_Footprint], demand: Demand, limits: Limits
) -> tuple[_Footprint | None, _Footprint | None]:
    """The cheapest per work, grown within `haste`; with a budget, as far as the budget finishes."""
    if not tried:
        return None, None
    lowest = min(tried, key=lambda f: (f.usd_per_work, f.taken))
    best = lowest
    allowed = (1 + limits.haste) * abs(lowest.usd_per_work)
    for f in tried:
        if f.taken <= lowest.taken:
            continue
        if f.last_usd_per_work > allowed or not _affords(f, demand, limits):
            break
        best = f
    others = [f for f in tried if f is not best]
    return best, min(others, key=lambda f: (f.usd_per_work, f.taken), default=None)


def _affords(f: _Footprint, demand: Demand, limits: Limits) -> bool:
    """Speed is bought only while the budget still pays for the rest of the work at this price."""
    if limits.budget_left_usd is None or demand.work_left is None:
        return True
    return f.usd_per_work * demand.work_left <= limits.budget_left_usd


def _difference(
    chosen: Sequence[_Unit],
    best: _Footprint | None,
    runner_up: _Footprint | None,
    holdings: Sequence[Holding],
    why: str,
) -> Purchase:
    because = "; ".join(filter(None, (why, _sentence(best) if best or not why else "")))
    kept = {u.lease for u in chosen if u.lease}
    new = sorted((u for u in chosen if not u.lease), key=lambda u: (u.pool, u.market))
    return Purchase(
        acquire=tuple(_bought(new, because)),
        release=tuple(
            Release(
                lease=h.lease,
                because=f"{h.pool.key} at ${h.price_usd_per_h:.4f}/h is no longer worth it: {because}",
            )
            for h in sorted(holdings, key=lambda h: h.lease)
            if not h.reliable and not h.noticed and h.lease not in kept
        ),
        because=because,
        runner_up=_sentence(runner_up) if runner_up else "nothing else was possible",
        cost_usd_per_work=best.usd_per_work if best else None,
    )


def _bought(new: Sequence[_Unit], because: str) -> Iterator[Acquire]:
    for (pool, market), group in groupby(new, key=lambda u: (u.pool, u.market)):
        same = list(group)
        first = same[0]
        why = f"{len(same)} x {pool.key} at ${first.price_usd_per_h:.4f}/h ({market}): {because}"
        yield Acquire(pool=pool, market=market, bid_usd_per_h=first.bid_usd_per_h,
                      count=len(same), because=why)  # fmt: skip


def _sentence(f: _Footprint | None) -> str:
    if f is None:
        return "waiting: no offer fits the limits"
    machines = f"{f.taken} machine{'s' * (f.taken != 1)}"
    return (
        f"{machines} for ${f.usd_per_h:.4f}/h do {f.work_per_s:.4g} work/s, "
        f"${f.usd_per_work:.4g} per work"
    )
