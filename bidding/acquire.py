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
so nothing that is worth having is lost by looking at prefixes alone.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import msgspec
import numpy as np

from bidding.compiled import Flags, Floats, Ints
from bidding.core import Best, Bounds, Units, code_of, works_price
from bidding.deadline import MODES, SPOT, Mode, book, guarded, phase_of
from bidding.decision import (
    ABOVE_LIMIT,
    ANY_MODE,
    FITS,
    LOST_MAX,
    RENEW_H,
    ROUNDING,
    Choice,
    Machines,
    Need,
    Walks,
    chosen,
    planned,
    price_of_work,
    weighed,
)
from bidding.markets.billing import rule_of
from bidding.markets.history import USD_PER_H_MAX
from bidding.model import (
    Acquire,
    Climate,
    Demand,
    HeldMachine,
    Limits,
    Offer,
    Priced,
    Purchase,
    Release,
    Throughput,
)
from bidding.risk import HAZARD_PRIOR, RETURN_PRIOR, all_gone
from bidding.traffic import Exchange
from cloud.clock import HOUR_S
from cloud.model import Market

# What is left must pay a footprint this long; what ending it takes, the ledger reserves apart.
RUNWAY_S = 120.0
CONTROL_S = 300.0  # with a deadline, no more than this passes between two decisions
NOTHING_FITS = "waiting: no offer fits the limits"


class _Scene(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one decision knows."""

    offers: Sequence[Offer]
    holdings: Sequence[HeldMachine]
    demand: Demand
    limits: Limits
    throughput: Throughput
    at_s: float


class _Taken(msgspec.Struct, frozen=True):
    """A machine that is held next, with its bid."""

    what: Offer | HeldMachine
    bid_usd_per_h: float | None


class _Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """The first `taken` machines of the walk, for people."""

    taken: int
    usd_per_h: float
    work_per_s: float
    usd_per_work: float


def decide(
    offers: Sequence[Offer],
    holdings: Sequence[HeldMachine],
    demand: Demand,
    limits: Limits,
    throughput: Throughput,
    at_s: float,
) -> Purchase:
    """The footprint with the lowest expected cost per work within the limits, as a difference."""
    sane = [o for o in offers if _sane(o, limits)]
    scene = _Scene(
        offers=sane,
        holdings=holdings,
        demand=demand,
        limits=limits,
        throughput=throughput,
        at_s=at_s,
    )
    rows = sorted(_rows(scene), key=_name)
    machines, bids = _columns(rows, scene)
    known = weighed(machines, _need(scene))
    mode, why, tight = _mode(scene, rows, machines, known.units)
    if mode is not None:
        limits = msgspec.structs.replace(limits, haste=math.inf)
    bounds = _bounds(machines, known.units, demand, limits)
    code = ANY_MODE if mode is None else MODES.index(mode)
    walks = planned(machines, known, bounds, code, tight, len(rows))
    if mode is None:
        why = _refused(scene, walks.refusal, bounds, walks.units, offers)
    choice = chosen(
        walks,
        _rates(rows, walks.steps, throughput),
        _home_rates(rows, walks, throughput),
        bounds,
        len(rows),
    )
    why = "; ".join(filter(None, (why, _of_zones(choice, known.units))))
    if choice.unfinished:
        why = "; ".join(filter(None, (why, "a part is exchanged at a time")))
    taken = [_Taken(rows[i], bids[known.choice[i]]) for i in choice.rows]
    if not (taken or why):
        why = f"{NOTHING_FITS}: {_unfit(scene, offers)}"
    told = _told(choice.best, choice.steps, walks.units, choice.rates_per_h, bounds)
    purchase = msgspec.structs.replace(
        _difference(scene, taken, told, why),
        priced=tuple(_priced(rows, works_price(known.units, bounds.recovery_h))),
    )
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


def _sane(o: Offer, limits: Limits) -> bool:
    """Offers outside the allowed regions or with an absurd price do not exist for us."""
    return (
        0 < o.price_usd_per_h < USD_PER_H_MAX
        and (o.market == "spot" or limits.on_demand_allowed)
        and (limits.regions is None or o.pool.region in limits.regions)
    )


def _name(what: Offer | HeldMachine) -> tuple[int, str, tuple[str, str, str, str], str]:
    """Leases that work, other leases, offers, each by name: the order of the arguments never matters."""
    pool = what.pool
    place = (pool.cloud, pool.region, pool.zone, pool.type)
    if isinstance(what, HeldMachine):
        return int(what.doing != "works"), what.market, place, what.lease
    return 2, what.market, place, ""


def _rows(scene: _Scene) -> Iterator[Offer | HeldMachine]:
    """What may be held next: leases that are not about to go, and offers."""
    for h in scene.holdings:
        if h.reliable or not (h.noticed or _expires(h, scene)):
            yield h
    yield from scene.offers


def _need(scene: _Scene) -> Need:
    demand = scene.demand
    return Need(
        start_h=demand.start_s / HOUR_S,
        morph_h=demand.morph_s / HOUR_S,
        recovery_h=demand.recovery_s / HOUR_S,
        left_h=_left_h(scene),
        slots_max=scene.limits.slots_max,
        some_held=bool(scene.holdings),
    )


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


def _expires(h: HeldMachine, scene: _Scene) -> bool:
    """Some rules end every machine after a day: its successor must start before."""
    life_s = rule_of(h.billing, h.pool.cloud, h.market).life_max_s
    age_s = scene.at_s - h.started_at_s
    return life_s is not None and age_s >= life_s - scene.demand.start_s - RENEW_H * HOUR_S


def _hazard(market: Market, known_per_h: float | None) -> float:
    if market == "on_demand":
        return 0.0
    return HAZARD_PRIOR.per_h if known_per_h is None else known_per_h


def _usd_per_h(what: Offer | HeldMachine) -> float:
    """What it costs per hour now, disks included."""
    return what.price_usd_per_h + what.disk_usd_per_h


def _columns(
    rows: Sequence[Offer | HeldMachine], scene: _Scene
) -> tuple[Machines, Sequence[float | None]]:
    """The rows as the decision reads them, and the bid of every choice.

    Machines of one pool and market share a number, because they are lost together.
    """
    pools: dict[object, int] = {}
    regions: dict[object, int] = {}
    zones: dict[object, int] = {}
    rules = {key: rule_of(*key) for key in {(r.billing, r.pool.cloud, r.market) for r in rows}}
    codes = {key: code_of(rule) for key, rule in rules.items()}
    keys = [(r.billing, r.pool.cloud, r.market) for r in rows]
    bids: list[float | None] = []
    hazards: list[float] = []
    first = [0]
    for r in rows:
        for bid, hazard in _choices(r):
            bids.append(bid)
            hazards.append(hazard)
        first.append(len(bids))
    leases = [r if isinstance(r, HeldMachine) else None for r in rows]
    offers = [r if isinstance(r, Offer) else None for r in rows]

    def floats(values: Iterable[float]) -> Floats:
        return np.array(list(values), dtype=np.float64)

    def ints(values: Iterable[int]) -> Ints:
        return np.array(list(values), dtype=np.int64)

    def flags(values: Iterable[object]) -> Flags:
        return np.array([bool(v) for v in values], dtype=np.bool_)

    return Machines(
        rule=ints(codes[key] for key in keys),
        losses_seen=flags(r.losses_seen for r in rows),
        price_usd_per_h=floats(r.price_usd_per_h for r in rows),
        disk_usd_per_h=floats(r.disk_usd_per_h for r in rows),
        egress_usd=floats(o.egress_usd if o else 0.0 for o in offers),
        paid_ahead_h=floats(rules[key].quantum_s / HOUR_S for key in keys),
        age_h=floats(max(0.0, scene.at_s - h.started_at_s) / HOUR_S if h else 0.0 for h in leases),
        slots=ints(r.type.slots for r in rows),
        speed=floats(r.type.speed for r in rows),
        machines=ints(_count(o, scene.limits) if o else 1 for o in offers),
        pool=ints(pools.setdefault((r.pool, r.market), len(pools)) for r in rows),
        region=ints(regions.setdefault((r.pool.cloud, r.pool.region), len(regions)) for r in rows),
        zone=ints(zones.setdefault(_zone(r), len(zones)) for r in rows),
        zone_usd_per_gb=floats(r.zone_usd_per_gb for r in rows),
        region_usd_per_gb=floats(r.region_usd_per_gb for r in rows),
        held=flags(leases),
        starts=flags(h and h.doing == "starts" for h in leases),
        fixed=flags(h and h.reliable for h in leases),
        blocked=flags(o and o.blocked for o in offers),
        on_demand=flags(r.market == "on_demand" for r in rows),
        first=ints(first),
        hazard_per_h=floats(hazards),
    ), bids


def _zone(what: Offer | HeldMachine) -> tuple[str, str, str]:
    return what.pool.cloud, what.pool.region, what.pool.zone


def _choices(what: Offer | HeldMachine) -> Iterator[tuple[float | None, float]]:
    """(bid, hazard): one per bid that may be made, the bid of a lease, or none."""
    if isinstance(what, HeldMachine):
        yield what.bid_usd_per_h, _hazard(what.market, what.hazard_per_h)
    elif what.bids and what.market == "spot":
        for b in what.bids:
            yield b.bid_usd_per_h, -math.log1p(-min(b.evicted_in_1h, LOST_MAX))
    else:
        yield None, _hazard(what.market, what.hazard_per_h)


def _count(o: Offer, limits: Limits) -> int:
    most = limits.slots_max // o.type.slots
    return most if o.machines_max is None else min(most, o.machines_max)


def _bounds(machines: Machines, units: Units, demand: Demand, limits: Limits) -> Bounds:
    def most(x: float | None) -> float:
        return math.inf if x is None else float(x)

    fixed = machines.fixed
    return Bounds(
        slots_min=limits.slots_min,
        slots_max=limits.slots_max,
        usd_per_h_max=most(limits.usd_per_h_max),
        budget_left_usd=most(limits.budget_left_usd),
        runway_h=RUNWAY_S / HOUR_S,
        work_left=most(demand.work_left),
        haste=float(limits.haste),
        recovery_h=demand.recovery_s / HOUR_S,
        bound_usd_per_h=float(units.usd_per_h[fixed].sum()),
        bound_expected_usd_per_h=demand.manager_usd_per_h
        + float(units.expected_usd_per_h[fixed].sum()),
        exchange=Exchange(
            float(demand.exchange_gb_per_work), demand.depth, float(demand.boundary_gb_per_work)
        ),
    )


def _rates(rows: Sequence[Offer | HeldMachine], steps: Ints, throughput: Throughput) -> Floats:
    """The planner's work per hour after each machine of the walk."""
    counts: Counter[str] = Counter()
    rates = np.empty(len(steps))
    for j, i in enumerate(steps.tolist()):
        counts[rows[i].type.name] += 1
        rates[j] = throughput.work_per_s(counts) * HOUR_S
    return rates


def _home_rates(
    rows: Sequence[Offer | HeldMachine], walks: Walks, throughput: Throughput
) -> Floats:
    """The same for the walk of each zone; footprints of the same types are asked about once."""
    told: dict[frozenset[tuple[str, int]], float] = {}
    rates = np.zeros(walks.homes.shape)
    for k, length in enumerate(walks.lengths.tolist()):
        counts: Counter[str] = Counter()
        for j, i in enumerate(walks.homes[k, :length].tolist()):
            counts[rows[i].type.name] += 1
            key = frozenset(counts.items())
            if key not in told:
                told[key] = throughput.work_per_s(counts) * HOUR_S
            rates[k, j] = told[key]
    return rates


def _priced(rows: Sequence[Offer | HeldMachine], prices: Floats) -> Iterator[Priced]:
    """What the work of each offer costs, blocked ones too, the cheapest first."""
    for i in np.argsort(prices, kind="stable").tolist():
        what, price = rows[i], float(prices[i])
        if isinstance(what, Offer) and math.isfinite(price):
            yield Priced(pool=what.pool, market=what.market, usd_per_slot_h=price)


def _of_zones(choice: Choice, units: Units) -> str:
    """What traffic between zones has to do with it; empty where it costs nothing."""
    taken = choice.steps[: choice.best.taken]
    if choice.best.traffic_usd_per_work > 0:
        zones = len({int(units.zone[i]) for i in taken})
        paid = _price(choice.best.traffic_usd_per_work)
        return f"{zones} zones, though their traffic costs {paid}"
    if choice.apart_usd_per_work > 0 and choice.best.taken > 0:
        return f"in one zone, as traffic between several would cost {_price(choice.apart_usd_per_work)}"
    return ""


def _refused(
    scene: _Scene, refusal: int, bounds: Bounds, units: Units, asked: Sequence[Offer]
) -> str:
    """Why nothing is held now; empty where something may be."""
    if refusal == ABOVE_LIMIT:
        return (
            f"the reliable machines alone cost ${bounds.bound_usd_per_h:.4f}/h, above the limit of "
            f"${bounds.usd_per_h_max:.4f}/h: nothing else is bought; raise the limit"
        )
    if refusal != FITS or not (units.share > 0).any():
        return _waiting(scene, asked)
    return ""


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
    return _beyond(small, limits)


def _beyond(small: Sequence[Offer], limits: Limits) -> str:
    """Which limit the cheapest of these offers passes, as many as are needed at least."""
    needed = [(o, -(-limits.slots_min // o.type.slots)) for o in small]
    least = min(count * o.type.slots for o, count in needed)
    if least > limits.slots_max:
        return (
            f"no number of equal machines has {limits.slots_min} to {limits.slots_max} slots; the fewest above have "
            f"{least}: set slots_max to that, or slots_min lower"
        )
    usd_per_h, count, cheapest = min(
        (
            (count * _usd_per_h(o), count, o)
            for o, count in needed
            if count * o.type.slots <= limits.slots_max
        ),
        key=lambda x: (x[0], x[2].pool, x[2].market),
    )
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


def _mode(
    scene: _Scene, rows: Sequence[Offer | HeldMachine], machines: Machines, units: Units
) -> tuple[Mode | None, str, bool]:
    """With a deadline: spot, on-demand or idle, and why, and whether time is tight.

    `None` when nothing forces a mode.
    """
    demand, limits = scene.demand, scene.limits
    if limits.finish_by_s is None or demand.work_left is None:
        return None, "", False
    on_demand, spot = (_cheapest(machines, units, reliable) for reliable in (True, False))
    if on_demand is None:
        return None, "", False
    rate = scene.throughput.work_per_s(_most_on_demand(scene, rows, machines, units))
    if rate <= 0:
        return None, "", False
    need_s, left_s = demand.work_left / rate, limits.finish_by_s - scene.at_s
    held = {h.market for h in scene.holdings if not h.noticed and not h.reliable}
    now: Mode = "on_demand" if "on_demand" in held else "spot" if "spot" in held else "idle"
    overhead_s = demand.start_s + demand.morph_s
    margin_s = overhead_s + demand.recovery_s + CONTROL_S
    price = 1 / 3
    if spot is not None:
        price = price_of_work(units, spot) / price_of_work(units, on_demand)
    climate = demand.climate or _climate(scene.offers)
    table = book(climate, max(left_s, 1.0) / HOUR_S, price, overhead_s / HOUR_S)
    chosen = guarded(
        table,
        (left_s / HOUR_S, need_s / HOUR_S, _rest_s(scene) / HOUR_S),
        (margin_s / HOUR_S, overhead_s / HOUR_S),
        phase_of(climate, spot is not None),
        MODES.index(now),
    )
    if chosen == SPOT and spot is None:
        chosen = MODES.index("idle")
    mode, spare_s = MODES[chosen], left_s - need_s - margin_s
    if spare_s <= 0:
        why = f"{_leaves(left_s, need_s)}: {mode.replace('_', '-')} now"
    else:
        why = (
            f"{mode.replace('_', '-')} is the cheapest way to finish with {spare_s:.0f} s to spare"
        )
    return mode, why, spare_s <= overhead_s


def _rest_s(scene: _Scene) -> float:
    """Return in how many seconds what works now does the rest."""
    works = Counter(h.type.name for h in scene.holdings if h.doing == "works" and not h.noticed)
    rate = scene.throughput.work_per_s(works) if works else 0.0
    return (scene.demand.work_left or 0.0) / rate if rate > 0 else math.inf


def _leaves(left_s: float, need_s: float) -> str:
    """What a deadline leaves that is near, passed, or too near for the work."""
    if left_s <= 0:
        return "the deadline has passed"
    if left_s < need_s:
        return f"the deadline is {need_s - left_s:.0f} s too near"
    return f"the deadline leaves {left_s - need_s:.0f} s to spare"


def _most_on_demand(
    scene: _Scene, rows: Sequence[Offer | HeldMachine], machines: Machines, units: Units
) -> Counter[str]:
    """The on-demand machines that the limits allow, as counts by type: with these a deadline is kept."""
    limits, counts = scene.limits, Counter[str]()
    most = math.inf if limits.usd_per_h_max is None else limits.usd_per_h_max * (1.0 + ROUNDING)
    left_usd = most - float(units.usd_per_h[machines.fixed].sum())
    slots = limits.slots_max
    for i in sorted(_fine(machines, units, on_demand=True), key=lambda i: price_of_work(units, i)):
        kind, usd_per_h = rows[i].type, float(units.usd_per_h[i])
        count = min(int(machines.machines[i]), max(slots // kind.slots, int(not counts)))
        if count * usd_per_h > left_usd:
            count = max(0, int(left_usd / usd_per_h))
        counts[kind.name] += count
        slots, left_usd = slots - count * kind.slots, left_usd - count * usd_per_h
    return +counts


def _cheapest(machines: Machines, units: Units, on_demand: bool) -> int | None:
    """The row of that market that sells the cheapest work, the first of equals."""
    some = _fine(machines, units, on_demand=on_demand)
    return min(some, key=lambda i: price_of_work(units, i), default=None)


def _fine(machines: Machines, units: Units, *, on_demand: bool) -> list[int]:
    """The rows of that market that could be held and would work."""
    fine = (machines.on_demand == on_demand) & ~machines.blocked & ~machines.fixed
    return np.flatnonzero(fine & (units.share > 0) & (units.machines > 0)).tolist()


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
    best: Best, steps: Ints, units: Units, rates_per_h: Floats, bounds: Bounds
) -> tuple[_Footprint | None, _Footprint | None]:
    """The chosen footprint and the runner-up, in figures."""

    def footprint(taken: int, usd_per_work: float) -> _Footprint | None:
        if taken == 0:
            return None
        usd_per_h = bounds.bound_usd_per_h + float(np.sum(units.usd_per_h[steps[:taken]]))
        return _Footprint(
            taken=taken,
            usd_per_h=usd_per_h,
            work_per_s=float(rates_per_h[taken - 1]) / HOUR_S,
            usd_per_work=usd_per_work,
        )

    return (
        footprint(best.taken, best.usd_per_work),
        footprint(best.other_taken, best.other_usd_per_work),
    )


def _difference(
    scene: _Scene,
    taken: Sequence[_Taken],
    told: tuple[_Footprint | None, _Footprint | None],
    why: str,
) -> Purchase:
    best, runner_up = told
    because = "; ".join(filter(None, (why, _sentence(best) if best or not why else "")))
    kept = {x.what.lease for x in taken if isinstance(x.what, HeldMachine)}
    new = sorted(
        (x for x in taken if isinstance(x.what, Offer)),
        key=lambda x: (x.what.pool, x.what.market),
    )
    return Purchase(
        acquire=tuple(_bought(new, because)),
        release=tuple(
            Release(
                lease=h.lease,
                because=f"{h.pool.key} at ${h.price_usd_per_h:.4f}/h {'is no longer worth it' if h.doing == 'works' or not taken else 'adds no work that is worth its price'}: {because}",
            )
            for h in sorted(scene.holdings, key=lambda h: h.lease)
            if not h.reliable and not h.noticed and h.lease not in kept
        ),
        because=because,
        runner_up=_other(best, runner_up),
        cost_usd_per_work=best.usd_per_work if best else None,
    )


def _bought(new: Sequence[_Taken], because: str) -> Iterator[Acquire]:
    for (pool, market), group in groupby(new, key=lambda r: (r.what.pool, r.what.market)):
        same = list(group)
        first = same[0]
        price = first.what.price_usd_per_h
        why = f"{len(same)} x {pool.key} at ${price:.4f}/h ({market}): {because}"
        yield Acquire(
            pool=pool,
            market=market,
            bid_usd_per_h=first.bid_usd_per_h,
            count=len(same),
            because=why,
        )


def _sentence(f: _Footprint | None, beside: _Footprint | None = None) -> str:
    if f is None:
        return NOTHING_FITS
    price = _price(f.usd_per_work, (beside or f).usd_per_work)
    machines, do = ("1 machine", "does") if f.taken == 1 else (f"{f.taken} machines", "do")
    return f"{machines} for ${f.usd_per_h:.4f}/h {do} {f.work_per_s:.4g} work/s, {price}"


def _other(best: _Footprint | None, other: _Footprint | None) -> str:
    """The runner-up; one that is no dearer would make people wonder, so what speaks against it is said."""
    if other is None:
        return "nothing else was possible"
    said = _sentence(other, best)
    if best is None or other.work_per_s >= best.work_per_s:
        return said
    if _price(other.usd_per_work, best.usd_per_work) == _price(best.usd_per_work):
        return f"{said}: as cheap, but slower"
    return f"{said}: cheaper, but slower" if other.usd_per_work < best.usd_per_work else said


def _price(usd_per_work: float, beside: float | None = None) -> str:
    """As money is read: in cents and parts of them, of as much work as costs so much.

    Of as much as in the price `beside` it, which it is compared with.
    """
    known = usd_per_work if beside is None else beside
    much = next((n for n in (1, 1_000, 1_000_000) if known * n >= 0.001), 1_000_000_000)
    return f"${usd_per_work * much:.4f} per {f'{much:,} ' * (much > 1)}work"
