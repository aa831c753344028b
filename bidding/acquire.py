"""What to buy and what to give back in one control period: the decision that runs in production.

Every machine, held or on offer, has an outlook over the horizon (`bidding.core.outlook`): what it
costs per hour and which share of that hour it works, evictions, refunds and start-up counted. Then

    price of work    w_i = c_i / (s_i · (1 - h_i · recovery) · slots_i · speed_i)
    cost             C   = sum_i c_i                                    dollars per hour
    work             W   = rate(counts) · s · (1 - what evictions cost, see `core.stalled`)
    cost per work    E   = C / W                                        (4.4), with phi replaced by
                                                                        the planner's rate(counts)
Machines are taken in the order of w_i; every prefix of that order is a footprint. The cheapest E
wins, then it grows while the next machine's own cost per work stays within `haste` of it.
Where speeds add up and recoveries are short, the cheapest footprint of any size is such a prefix;
so nothing that is worth having is lost by looking at prefixes alone. Where losing all machines at
once costs more than losing some, a second walk puts at most half of the slots into any pool.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec
import numpy as np

from bidding.billing import HOUR_S, rule_of
from bidding.compiled import Floats, Ints
from bidding.core import (
    BY_SECOND,
    FIRST_HOUR,
    HOURLY,
    Best,
    Bounds,
    Units,
    best_prefix,
    differ,
    horizon,
    in_parts,
    margin_of,
    order_of,
    outlook,
    stalls_of,
    walk,
)
from bidding.deadline import MODES, SPOT, Mode, book, guarded, phase_of
from bidding.expected import code_of
from bidding.history import USD_PER_H_MAX
from bidding.model import (
    Acquire,
    Climate,
    Demand,
    Holding,
    Limits,
    Offer,
    Purchase,
    Release,
    Throughput,
)
from bidding.risk import HAZARD_PRIOR, RETURN_PRIOR, all_gone
from cloud.model import Market

# What is left must pay a footprint this long; what ending it takes, the ledger reserves apart.
RUNWAY_S = 120.0
CONTROL_S = 300.0  # with a deadline, no more than this passes between two decisions
RENEW_S = 300.0  # this shortly before a paid hour ends, the next one is weighed
NOTHING_FITS = "waiting: no offer fits the limits"
HAZARD_PER_H_MAX = 60.0
SUNK_MARGIN = 0.22  # the start of a machine is paid, another's is not: that is won back within four or five starts


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """A lease, or the machines of an offer, with their outlook: one row of `core.Units`."""

    what: Offer | Holding
    hazard_per_h: float
    expected_usd_per_h: float
    share: float
    machines: int = 1
    bid_usd_per_h: float | None = None
    pinned: bool = False
    margin: float = 0.0
    upfront_usd: float = 0.0

    @property
    def lease(self) -> str:
        return self.what.lease if isinstance(self.what, Holding) else ""

    @property
    def reliable(self) -> bool:
        return isinstance(self.what, Holding) and self.what.reliable


class _Scene(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one decision knows."""

    offers: Sequence[Offer]
    holdings: Sequence[Holding]
    demand: Demand
    limits: Limits
    throughput: Throughput
    at_s: float


class _Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """The first `taken` machines of the walk, for people."""

    taken: int
    usd_per_h: float
    work_per_s: float
    usd_per_work: float


def decide(
    offers: Sequence[Offer],
    holdings: Sequence[Holding],
    demand: Demand,
    limits: Limits,
    throughput: Throughput,
    at_s: float,
) -> Purchase:
    """The footprint with the lowest expected cost per work within the limits, as a difference."""
    sane = [o for o in offers if _sane(o, limits)]
    scene = _Scene(
        offers=sane, holdings=holdings, demand=demand, limits=limits, throughput=throughput, at_s=at_s
    )  # fmt: skip
    rows = sorted(_rows(scene), key=_name)
    bound, free = [r for r in rows if r.reliable], [r for r in rows if not r.reliable]
    mode, why, tight = _mode(scene, free)
    if mode is not None:
        free = _only(mode, free, limits, tight)
        limits = msgspec.structs.replace(limits, haste=math.inf)
    units = _columns(free)
    order = order_of(units, demand.recovery_s / HOUR_S)
    if mode is None:
        nothing, why = _refusal(scene, bound, units, order, offers)
        order = order[:0] if nothing else order
    bounds = _bounds(bound, demand, limits)
    best, steps, rates = _best(free, units, order, bounds, throughput)
    target = steps[: best.taken]
    parts = in_parts(units, order, target, bounds)
    if differ(parts, target):
        why = "; ".join(filter(None, (why, "a part is exchanged at a time")))
    taken = [free[i] for i in parts]
    if not (taken or why):
        why = f"{NOTHING_FITS}: {_unfit(scene, offers)}"
    purchase = _difference(scene, taken, _told(best, steps, units, rates, bounds), why)
    if purchase.release and not taken and mode != "idle":
        return msgspec.structs.replace(purchase, for_now=_fits_soon(scene))
    return purchase


def _fits_soon(scene: _Scene) -> bool:
    """Would anything be held if no offer were left alone?"""
    if not any(o.blocked for o in scene.offers):
        return False
    opened = [msgspec.structs.replace(o, blocked=False) for o in scene.offers]
    again = decide(opened, scene.holdings, scene.demand, scene.limits, scene.throughput, scene.at_s)
    return again.cost_usd_per_work is not None


def _best(
    free: Sequence[_Row], units: Units, order: Ints, bounds: Bounds, throughput: Throughput
) -> tuple[Best, Ints, Floats]:
    """The best footprint with the walk that it is a prefix of; spread out where that pays."""
    shares = [bounds.slots_max]
    if bounds.recovery_all_h > bounds.recovery_h and bounds.slots_max > 1:
        shares.append(-(-bounds.slots_max // 2))
    found = []
    for slots_per_pool in shares:
        steps = walk(units, order, bounds, len(free), slots_per_pool)
        rates = _rates(free, steps, throughput)
        best = best_prefix(units, steps, rates * HOUR_S, bounds, len(free))
        found.append((best, steps, rates))
    # Work is worth up to `haste` more than the cheapest, here as within a walk; else the smaller one would win by a hair.
    # Where refunds pay more than machines cost, the cheapest is below zero.
    lowest = min(best.usd_per_work for best, _, _ in found)
    more = bounds.haste * abs(lowest) if 0 < abs(lowest) < math.inf else 0.0
    fine = [f for f in found if f[0].usd_per_work <= lowest + more]
    return max(fine, key=lambda f: (_work(f[0], f[2]), -f[0].usd_per_work))


def _work(best: Best, rates: Floats) -> float:
    return float(rates[best.taken - 1]) if best.taken else 0.0


def _sane(o: Offer, limits: Limits) -> bool:
    """Offers outside the allowed regions or with an absurd price do not exist for us."""
    return (
        0 < o.price_usd_per_h < USD_PER_H_MAX
        and (o.market == "spot" or limits.on_demand_allowed)
        and (limits.regions is None or o.pool.region in limits.regions)
    )


def _name(row: _Row) -> tuple[int, str, tuple[str, str, str, str], str]:
    """Leases that work, other leases, offers, each by name: the order of the arguments never matters."""
    pool = row.what.pool
    return (
        2 if not isinstance(row.what, Holding) else int(row.what.doing != "works"),
        row.what.market,
        (pool.cloud, pool.region, pool.zone, pool.type),
        row.lease,
    )


def _rows(scene: _Scene) -> Iterator[_Row]:
    start_h = _start_h(scene)
    horizon_h = horizon(_left_h(scene), start_h)
    # For all that is held alike, so that of two that are held nothing changes: in a large footprint one always starts.
    doing = [h.doing for h in scene.holdings if not (h.noticed or h.reliable)]
    sunk = SUNK_MARGIN * doing.count("starts") / len(doing) if doing else 0.0
    for h in scene.holdings:
        if h.reliable or not (h.noticed or _expires(h, scene)):
            yield _held(h, scene, horizon_h, sunk)
    for o in scene.offers:
        if not o.blocked:
            yield from _offered(o, scene, start_h, horizon_h)


def _start_h(scene: _Scene) -> float:
    """What a newcomer does not work at first, and what its coming stalls."""
    stalls = stalls_of(scene.limits.slots_max, bool(scene.holdings))
    return (scene.demand.start_s + stalls * scene.demand.morph_s) / HOUR_S


def _left_h(scene: _Scene) -> float:
    """Hours that machines are needed for: to the deadline, or as long as the fastest take for the rest."""
    left_h = math.inf
    if scene.limits.finish_by_s is not None:
        left_h = (scene.limits.finish_by_s - scene.at_s) / HOUR_S
    if scene.demand.work_left is None:
        return left_h
    kinds = {o.type.name: o.type for o in scene.offers}
    kinds.update({h.type.name: h.type for h in scene.holdings})
    rates = [
        scene.throughput.work_per_s({name: scene.limits.slots_max // kind.slots})
        for name, kind in sorted(kinds.items())
        if kind.slots <= scene.limits.slots_max
    ]
    fastest = max(rates, default=0.0)
    return min(left_h, scene.demand.work_left / fastest / HOUR_S) if fastest > 0 else left_h


def _expires(h: Holding, scene: _Scene) -> bool:
    """Some rules end every machine after a day: its successor must start before."""
    life_s = rule_of(h.billing, h.pool.cloud, h.market).life_max_s
    age_s = scene.at_s - h.started_at_s
    return life_s is not None and age_s >= life_s - scene.demand.start_s - RENEW_S


def _held(h: Holding, scene: _Scene, horizon_h: float, sunk: float) -> _Row:
    hazard = _hazard(h.market, h.hazard_per_h)
    age_s = max(0.0, scene.at_s - h.started_at_s)
    start_h = max(0.0, scene.demand.start_s - age_s) / HOUR_S
    code = _code(h)
    left_s = -age_s % HOUR_S
    pinned = code >= HOURLY and left_s > RENEW_S
    age_h = (age_s + left_s if code >= HOURLY and not pinned else age_s) / HOUR_S
    price = (h.price_usd_per_h, 0.0)
    cost, share = outlook(code, price, hazard, age_h, start_h, horizon_h)
    cost += h.disk_usd_per_h
    return _Row(what=h, hazard_per_h=hazard, expected_usd_per_h=cost, margin=margin_of(age_s / HOUR_S) + sunk,
                share=max(share, 1e-6) if pinned else share, pinned=pinned,
                bid_usd_per_h=h.bid_usd_per_h)  # fmt: skip


def _offered(o: Offer, scene: _Scene, start_h: float, horizon_h: float) -> Iterator[_Row]:
    """One row per offer; where bids evict, with the bid that makes its work cheapest."""
    rule = rule_of(o.billing, o.pool.cloud, o.market)
    code, price = _code(o), (o.price_usd_per_h, o.egress_usd)
    recovery_h = scene.demand.recovery_s / HOUR_S
    choices: list[tuple[float | None, float]] = [(None, _hazard(o.market, o.hazard_per_h))]
    if o.bids and o.market == "spot":
        choices = [(b.bid_usd_per_h, -math.log1p(-min(b.evicted_in_1h, 0.999999))) for b in o.bids]
    weighed = []
    for bid, hazard in choices:
        cost, share = outlook(code, price, hazard, 0.0, start_h, horizon_h)
        cost += o.disk_usd_per_h
        net = share - min(hazard, HAZARD_PER_H_MAX) * recovery_h
        if net > 0:
            weighed.append((cost / net, hazard, bid, cost, share))
    machines = scene.limits.slots_max // o.type.slots
    if o.machines_max is not None:
        machines = min(machines, o.machines_max)
    if weighed and machines > 0:
        _, hazard, bid, cost, share = min(weighed, key=lambda x: x[:2])
        yield _Row(what=o, hazard_per_h=hazard, expected_usd_per_h=cost, share=share, machines=machines,
                   bid_usd_per_h=bid, upfront_usd=o.price_usd_per_h * rule.quantum_s / HOUR_S + o.egress_usd)  # fmt: skip


def _code(what: Offer | Holding) -> int:
    """The billing rule as the core knows it. A refund is hoped for only where machines were seen to go."""
    code = code_of(rule_of(what.billing, what.pool.cloud, what.market))
    return BY_SECOND if code == FIRST_HOUR and not what.losses_seen else code


def _hazard(market: Market, known_per_h: float | None) -> float:
    if market == "on_demand":
        return 0.0
    return HAZARD_PRIOR.per_h if known_per_h is None else known_per_h


def _usd_per_h(what: Offer | Holding) -> float:
    """What it costs per hour now, disks included."""
    return what.price_usd_per_h + what.disk_usd_per_h


def _columns(rows: Sequence[_Row]) -> Units:
    """The rows as the core reads them; machines of one pool share a number."""
    pools: dict[object, int] = {}
    regions: dict[object, int] = {}
    numbers = [pools.setdefault(r.what.pool, len(pools)) for r in rows]
    places = [(r.what.pool.cloud, r.what.pool.region) for r in rows]
    return Units(
        usd_per_h=np.array([_usd_per_h(r.what) for r in rows], dtype=np.float64),
        expected_usd_per_h=np.array([r.expected_usd_per_h for r in rows], dtype=np.float64),
        share=np.array([r.share for r in rows], dtype=np.float64),
        hazard_per_h=np.array([r.hazard_per_h for r in rows], dtype=np.float64),
        slots=np.array([r.what.type.slots for r in rows], dtype=np.int64),
        speed=np.array([r.what.type.speed for r in rows], dtype=np.float64),
        machines=np.array([r.machines for r in rows], dtype=np.int64),
        pool=np.array(numbers, dtype=np.int64),
        region=np.array([regions.setdefault(p, len(regions)) for p in places], dtype=np.int64),
        margin=np.array([r.margin for r in rows], dtype=np.float64),
        held=np.array([bool(r.lease) for r in rows], dtype=np.bool_),
        pinned=np.array([r.pinned for r in rows], dtype=np.bool_),
        upfront_usd=np.array([r.upfront_usd for r in rows], dtype=np.float64),
    )


def _bounds(bound: Sequence[_Row], demand: Demand, limits: Limits) -> Bounds:
    def most(x: float | None) -> float:
        return math.inf if x is None else float(x)

    return Bounds(
        slots_min=limits.slots_min,
        slots_max=limits.slots_max,
        usd_per_h_max=most(limits.usd_per_h_max),
        budget_left_usd=most(limits.budget_left_usd),
        runway_h=RUNWAY_S / HOUR_S,
        work_left=most(demand.work_left),
        haste=float(limits.haste),
        recovery_h=demand.recovery_s / HOUR_S,
        recovery_all_h=(demand.recovery_all_s or demand.recovery_s) / HOUR_S,
        bound_usd_per_h=float(sum(_usd_per_h(r.what) for r in bound)),
        bound_expected_usd_per_h=demand.manager_usd_per_h
        + float(sum(r.expected_usd_per_h for r in bound)),
    )


def _rates(free: Sequence[_Row], steps: Ints, throughput: Throughput) -> Floats:
    """The planner's work per second after each machine of the walk."""
    counts: Counter[str] = Counter()
    rates = np.empty(len(steps))
    for j, i in enumerate(steps):
        counts[free[i].what.type.name] += 1
        rates[j] = throughput.work_per_s(counts)
    return rates


def _refusal(
    scene: _Scene, bound: Sequence[_Row], units: Units, order: Ints, asked: Sequence[Offer]
) -> tuple[bool, str]:
    """Should nothing be held now, and why: what stays is unaffordable, or waiting is cheaper."""
    most = scene.limits.usd_per_h_max
    fixed = sum(_usd_per_h(r.what) for r in bound)
    if most is not None and fixed > most:
        return True, (
            f"the reliable machines alone cost ${fixed:.4f}/h, above the limit of ${most:.4f}/h: "
            "nothing else is bought; raise the limit"
        )
    away = [o for o in scene.offers if o.blocked and o.market == "spot"]
    if bool(units.held.any()):
        return False, ""  # what works already works on until something better is there
    if not away or not len(order):
        return False, _waiting(scene, asked) if not len(order) else ""
    start_h = _start_h(scene)
    horizon_h = horizon(_left_h(scene), start_h)
    # They would have to start as well: what is compared is the price of work, not that of machines.
    soon = [row for o in away for row in _offered(o, scene, start_h, horizon_h)]
    nearest = min(
        (r.expected_usd_per_h / (r.share * r.what.type.slots * r.what.type.speed) for r in soon),
        default=math.inf,
    )
    i = int(order[0])
    here = units.expected_usd_per_h[i] / (units.share[i] * units.slots[i] * units.speed[i])
    if here > (1 + scene.limits.haste) * nearest:
        return True, _waiting(scene, asked)
    return False, ""


def _unfit(scene: _Scene, asked: Sequence[Offer]) -> str:
    """Which limit it is that nothing fits."""
    limits = scene.limits
    if not asked:
        return "nothing is sold at a price that is known and could be paid"
    if limits.regions is not None and not any(o.pool.region in limits.regions for o in asked):
        return f"nothing is sold in {', '.join(limits.regions) or 'no region at all'}"
    small = [o for o in scene.offers if o.type.slots <= limits.slots_max]
    if not small:
        return "no price can be true, or every machine has more slots than are wanted"
    usd_per_h, count, cheapest = min(
        ((-(-limits.slots_min // o.type.slots) * _usd_per_h(o), -(-limits.slots_min // o.type.slots), o)
         for o in small), key=lambda x: (x[0], x[2].pool, x[2].market),
    )  # fmt: skip
    slots = f"{limits.slots_min} slot{'s' * (limits.slots_min != 1)}"
    way = f"the cheapest way to {slots} is {count} x {cheapest.pool.key} for ${usd_per_h:.4f}/h"
    if limits.usd_per_h_max is not None and usd_per_h > limits.usd_per_h_max:
        return f"{way}, above the limit of ${limits.usd_per_h_max:.4f}/h"
    if limits.budget_left_usd is not None:
        return f"{way}, and ${limits.budget_left_usd:.4f} of the budget are left"
    return way


def _waiting(scene: _Scene, asked: Sequence[Offer]) -> str:
    cheapest = min(
        (o for o in scene.offers if o.blocked),
        key=lambda o: (o.price_usd_per_h, o.pool),
        default=None,
    )
    if cheapest is None:
        return f"{NOTHING_FITS}: {_unfit(scene, asked)}"
    why = f" (left alone for now: {cheapest.blocked_because})" if cheapest.blocked_because else ""
    return f"waiting for {cheapest.pool.key} at ${cheapest.price_usd_per_h:.4f}/h{why}"


def _only(mode: Mode, free: Sequence[_Row], limits: Limits, tight: bool) -> list[_Row]:
    """What the mode allows; with little time to spare nothing moves to a cheaper pool."""
    wanted = {"spot": "spot", "on_demand": "on_demand"}.get(mode)
    rows = [r for r in free if r.what.market == wanted]
    held = [r for r in rows if r.lease]
    enough = sum(r.what.type.slots for r in held) >= limits.slots_max
    return held if tight and enough else rows


def _mode(scene: _Scene, free: Sequence[_Row]) -> tuple[Mode | None, str, bool]:
    """With a deadline: spot, on-demand or idle, and why, and whether time is tight.

    `None` when nothing forces a mode.
    """
    demand, limits = scene.demand, scene.limits
    on_demand = _cheapest(free, "on_demand")
    if limits.finish_by_s is None or demand.work_left is None or on_demand is None:
        return None, "", False
    count = max(1, limits.slots_max // on_demand.what.type.slots)
    rate = scene.throughput.work_per_s({on_demand.what.type.name: count})
    if rate <= 0:
        return None, "", False
    need_s, left_s = demand.work_left / rate, limits.finish_by_s - scene.at_s
    held = {h.market for h in scene.holdings if not h.noticed and not h.reliable}
    now: Mode = "on_demand" if "on_demand" in held else "spot" if "spot" in held else "idle"
    overhead_s = demand.start_s + demand.morph_s
    margin_s = overhead_s + demand.recovery_s + CONTROL_S
    spot = _cheapest(free, "spot")
    price = 1 / 3 if spot is None else _price_of_work(spot) / _price_of_work(on_demand)
    climate = demand.climate or _climate(scene.offers)
    table = book(climate, max(left_s, 1.0) / HOUR_S, price, overhead_s / HOUR_S)
    chosen = guarded(table, (left_s / HOUR_S, need_s / HOUR_S), (margin_s / HOUR_S, overhead_s / HOUR_S),
                     phase_of(climate, spot is not None), MODES.index(now))  # fmt: skip
    if chosen == SPOT and spot is None:
        chosen = MODES.index("idle")
    mode, spare_s = MODES[chosen], left_s - need_s - margin_s
    if spare_s <= 0:
        why = f"the deadline leaves {max(0.0, left_s - need_s):.0f} s to spare: {mode.replace('_', '-')} now"
    else:
        why = (
            f"{mode.replace('_', '-')} is the cheapest way to finish with {spare_s:.0f} s to spare"
        )
    return mode, why, spare_s <= overhead_s


def _price_of_work(row: _Row) -> float:
    return row.expected_usd_per_h / (row.share * row.what.type.slots * row.what.type.speed)


def _cheapest(free: Sequence[_Row], market: Market) -> _Row | None:
    some = [r for r in free if r.what.market == market and r.share > 0]
    return min(some, key=lambda r: (_price_of_work(r), _name(r)), default=None)


def _climate(offers: Sequence[Offer]) -> Climate:
    """How fast the last spot capacity is lost, and how fast some comes back, from what is known of the pools."""
    spot = [o for o in offers if o.market == "spot"]
    if not spot:
        return Climate()
    lost, back = all_gone(
        [_hazard("spot", o.hazard_per_h) for o in spot],
        [RETURN_PRIOR.per_h if o.return_per_h is None else o.return_per_h for o in spot],
    )
    return Climate(lost_young=lost, lost_old=lost, back_young=back, back_old=back)


def _told(
    best: Best, steps: Ints, units: Units, rates: Floats, bounds: Bounds
) -> tuple[_Footprint | None, _Footprint | None]:
    """The chosen footprint and the runner-up, in figures."""

    def footprint(taken: int, usd_per_work: float) -> _Footprint | None:
        if taken == 0:
            return None
        usd_per_h = bounds.bound_usd_per_h + float(np.sum(units.usd_per_h[steps[:taken]]))
        return _Footprint(taken=taken, usd_per_h=usd_per_h, work_per_s=float(rates[taken - 1]),
                          usd_per_work=usd_per_work)  # fmt: skip

    return (
        footprint(best.taken, best.usd_per_work),
        footprint(best.other_taken, best.other_usd_per_work),
    )


def _difference(
    scene: _Scene,
    chosen: Sequence[_Row],
    told: tuple[_Footprint | None, _Footprint | None],
    why: str,
) -> Purchase:
    best, runner_up = told
    because = "; ".join(filter(None, (why, _sentence(best) if best or not why else "")))
    kept = {r.lease for r in chosen if r.lease}
    new = sorted((r for r in chosen if not r.lease), key=lambda r: (r.what.pool, r.what.market))
    return Purchase(
        acquire=tuple(_bought(new, because)),
        release=tuple(
            Release(
                lease=h.lease,
                because=f"{h.pool.key} at ${h.price_usd_per_h:.4f}/h {'is no longer worth it' if h.doing == 'works' or not chosen else 'adds no work that is worth its price'}: {because}",
            )
            for h in sorted(scene.holdings, key=lambda h: h.lease)
            if not h.reliable and not h.noticed and h.lease not in kept
        ),
        because=because,
        runner_up=_other(best, runner_up),
        cost_usd_per_work=best.usd_per_work if best else None,
    )


def _bought(new: Sequence[_Row], because: str) -> Iterator[Acquire]:
    for (pool, market), group in groupby(new, key=lambda r: (r.what.pool, r.what.market)):
        same = list(group)
        first = same[0]
        price = first.what.price_usd_per_h
        why = f"{len(same)} x {pool.key} at ${price:.4f}/h ({market}): {because}"
        yield Acquire(pool=pool, market=market, bid_usd_per_h=first.bid_usd_per_h,
                      count=len(same), because=why)  # fmt: skip


def _sentence(f: _Footprint | None) -> str:
    if f is None:
        return NOTHING_FITS
    machines, do = ("1 machine", "does") if f.taken == 1 else (f"{f.taken} machines", "do")
    return f"{machines} for ${f.usd_per_h:.4f}/h {do} {f.work_per_s:.4g} work/s, {_price(f.usd_per_work)}"


def _other(best: _Footprint | None, other: _Footprint | None) -> str:
    """The runner-up; one that is no dearer would make people wonder, so what speaks against it is said."""
    if other is None:
        return "nothing else was possible"
    said = _sentence(other)
    if best is None or other.work_per_s >= best.work_per_s:
        return said
    if _price(other.usd_per_work) == _price(best.usd_per_work):
        return f"{said}: as cheap, but slower"
    return f"{said}: cheaper, but slower" if other.usd_per_work < best.usd_per_work else said


def _price(usd_per_work: float) -> str:
    """As money is read: in cents and parts of them, of as much work as costs so much."""
    much = next((n for n in (1, 1_000, 1_000_000) if usd_per_work * n >= 0.001), 1_000_000_000)
    return f"${usd_per_work * much:.4f} per {f'{much:,} ' * (much > 1)}work"
