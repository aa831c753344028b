"""What must hold for every decision, whatever is on offer."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bidding import core
from bidding.acquire import _Footprint, _other, decide
from bidding.errors import ConstraintError
from bidding.model import Bid, Climate, Demand, HeldMachine, Limits, Offer
from cloud.model import InstanceType, Pool

H = 3600.0
KINDS = {
    n: InstanceType(
        name=f"kind.{n}", cloud="aws", slots=n, memory_bytes=1, on_demand_usd_per_h=1.0 * n
    )
    for n in (1, 2, 4)
}
DEMAND = Demand(work_left=None, start_s=60.0, morph_s=1.0, recovery_s=5.0)


class Linear:
    """Work as the sum of the slots."""

    def work_per_s(self, counts):
        return float(sum(n * int(name.split(".")[1]) for name, n in counts.items()))


prices = st.one_of(st.sampled_from([0.2, 0.4]), st.floats(0.05, 1.5))  # now and then the same


@st.composite
def offer(draw):
    n = draw(st.sampled_from([1, 2, 4]))
    zone = draw(st.sampled_from("abcdef"))
    return Offer(
        pool=Pool("aws", "r", zone, f"kind.{n}"),
        type=KINDS[n],
        market="spot",
        price_usd_per_h=draw(prices) * n,
        hazard_per_h=draw(st.sampled_from([0.0, 0.01, 0.2, 2.0])),
        blocked=draw(st.booleans()),
    )


offers = st.lists(offer(), max_size=8, unique_by=lambda o: o.pool)


@st.composite
def holding(draw):
    n = draw(st.sampled_from([1, 2]))
    return HeldMachine(
        lease=str(draw(st.integers(0, 10**6))),
        pool=Pool("aws", "r", draw(st.sampled_from("xyz")), f"kind.{n}"),
        type=KINDS[n],
        market="spot",
        price_usd_per_h=draw(prices) * n,
        bid_usd_per_h=None,
        started_at_s=draw(st.floats(0, 2 * H)),
        noticed=draw(st.booleans()),
        hazard_per_h=draw(st.sampled_from([None, 0.0, 0.5])),
    )


holdings = st.lists(holding(), max_size=5, unique_by=lambda h: h.lease)


@settings(max_examples=60)
@given(offers, holdings, st.sampled_from([2, 6, 12]))
def test_no_more_than_a_part_is_exchanged_at_once(on_offer, held, most):
    """Of the slots that are held next, newcomers replace a quarter at most, in whole machines."""
    held = [h for h in held if not h.noticed]
    said = decide(on_offer, held, DEMAND, Limits(slots_max=most), Linear(), 2 * H)
    gone = {r.lease for r in said.release}
    new = [int(a.pool.type.split(".")[1]) for a in said.acquire for _ in range(a.count)]
    leaving = sum(h.type.slots for h in held if h.lease in gone)
    next_slots = sum(h.type.slots for h in held) - leaving + sum(new)
    old = [h.type.slots for h in held if h.lease in gone]
    part = max(math.ceil(core.EXCHANGED * next_slots), *new, *old, 0)
    assert min(sum(new), leaving) < part + max(old, default=1)


def test_a_refund_is_hoped_for_only_where_machines_were_seen_to_go():
    """An hour-old machine makes way for a new one that may be refunded, but not on a mere assumption."""
    held = [lease("x", "a", 0.3, hazard_per_h=0.125, billing="aws_today")]
    again = [one("a", 0.3, hazard_per_h=0.125, billing="aws_today")]

    def said(seen):
        old = [msgspec.structs.replace(h, losses_seen=seen) for h in held]
        new = [msgspec.structs.replace(o, losses_seen=seen) for o in again]
        return decide(new, old, DEMAND, Limits(slots_max=1), Linear(), 2 * H)

    assert said(seen=False).release == ()
    assert [r.lease for r in said(seen=True).release] == ["x"]


def test_what_a_limit_does_not_allow_to_stay_leaves_before_anything_is_bought():
    """Above the limit per hour nothing comes on top: all that is too dear leaves, then others are bought."""
    held = [lease(str(i), "a", 0.6, hazard_per_h=0.0) for i in range(4)]
    said = decide(
        [one("b", 0.1, hazard_per_h=0.0)],
        held,
        DEMAND,
        Limits(slots_max=4, usd_per_h_max=0.5),
        Linear(),
        2 * H,
    )
    assert (len(said.release), said.acquire) == (4, ())
    said = decide(
        [one("b", 0.1, hazard_per_h=0.0)],
        [],
        DEMAND,
        Limits(slots_max=4, usd_per_h_max=0.5),
        Linear(),
        2 * H,
    )
    assert sum(a.count for a in said.acquire) == 4


@settings(max_examples=60)
@given(offers, st.floats(1.01, 3.0))
def test_a_dominated_lease_never_improves_cost_per_work(on_offer, worse):
    """One more offer of the same kind and risk at a higher price leaves the best E as it was."""
    alone = decide(on_offer, [], DEMAND, Limits(slots_max=4, haste=0.0), Linear(), 0.0)
    there = [o for o in on_offer if not o.blocked]
    if not there:
        return
    cheapest = min(there, key=lambda o: o.price_usd_per_h / o.type.slots)
    dominated = msgspec.structs.replace(
        cheapest,
        pool=Pool("aws", "r", "zz", cheapest.pool.type),
        price_usd_per_h=cheapest.price_usd_per_h * worse,
    )
    both = decide([*on_offer, dominated], [], DEMAND, Limits(slots_max=4, haste=0.0), Linear(), 0.0)
    if alone.cost_usd_per_work is not None and both.cost_usd_per_work is not None:
        assert both.cost_usd_per_work >= alone.cost_usd_per_work * (1 - 1e-9)


def one(zone, price, market="spot", **more):
    return Offer(
        pool=Pool("aws", "r", zone, "kind.1"),
        type=KINDS[1],
        market=market,
        price_usd_per_h=price,
        **more,
    )


def lease(name, zone, price, **more):
    return HeldMachine(
        lease=name,
        pool=Pool("aws", "r", zone, "kind.1"),
        type=KINDS[1],
        market="spot",
        price_usd_per_h=price,
        bid_usd_per_h=None,
        **{"started_at_s": 0.0, **more},
    )


def test_a_limit_below_the_reliable_machines_is_said():
    """Nothing is bought when what must stay is above the limit, and none of it is given back, whatever it costs."""
    reliable, limit = lease("m", "a", 2.0, reliable=True), Limits(usd_per_h_max=1.0)

    def said(limits):
        return decide([one("b", 0.1)], [reliable], DEMAND, limits, Linear(), 0.0)

    assert said(Limits()).release == ()
    for limits in (Limits(budget_left_usd=1e-6), limit):
        assert (said(limits).acquire, said(limits).release) == ((), ())
    assert "reliable machines alone cost $2.0000/h" in said(limit).because


def test_a_pool_that_vanishes_and_a_clock_that_jumps_back_change_nothing():
    """A lease whose pool is no longer offered is kept, and so is one that begins in the future."""
    held = [lease(str(i), "gone", 0.2, started_at_s=5000.0) for i in range(4)]
    said = decide([one("b", 0.3)], held, DEMAND, Limits(slots_max=4), Linear(), 100.0)
    assert (said.acquire, said.release) == ((), ())


def test_contradictions_are_refused():
    """Limits that contradict each other, negative rates, and what is no number say what is wrong."""
    with pytest.raises(ConstraintError, match="slots_min=5"):
        Limits(slots_min=5, slots_max=4)
    with pytest.raises(ConstraintError, match="haste"):
        Limits(haste=-1.0)
    with pytest.raises(ConstraintError, match="haste=nan"):
        Limits(haste=math.nan)
    for name in ("budget_left_usd", "usd_per_h_max", "finish_by_s"):
        with pytest.raises(ConstraintError, match=name):
            Limits(**{name: math.nan})
    for value in (-1.0, math.nan, math.inf):
        with pytest.raises(ConstraintError, match="morph_s"):
            msgspec.structs.replace(DEMAND, morph_s=value)
    with pytest.raises(ConstraintError, match="work_left"):
        msgspec.structs.replace(DEMAND, work_left=math.nan)
    with pytest.raises(ConstraintError, match="negative"):
        Climate(lost_young=-1.0)
    with pytest.raises(ConstraintError, match="billing rule"):
        decide([one("a", 0.1, billing="aws_1999")], [], DEMAND, Limits(), Linear(), 0.0)


def test_a_machine_whose_refund_is_worth_more_than_it_costs_is_held():
    """Nearly an hour old, in a pool that takes all within minutes: its work costs less than nothing."""
    held = [lease("m", "a", 0.3, hazard_per_h=20.0, billing="aws_today", started_at_s=0.0)]
    said = decide([], held, DEMAND, Limits(slots_max=2), Linear(), 0.95 * H)
    assert said.release == ()
    assert said.cost_usd_per_work < 0


def test_a_machine_that_is_too_large_hides_no_pool_that_is_worth_waiting_for():
    """It cannot be bought, so its price says nothing about what is sold meanwhile."""
    large = Offer(
        pool=Pool("aws", "r", "z", "kind.2"), type=KINDS[2], market="spot", price_usd_per_h=0.1
    )
    away = one("a", 0.2, blocked=True)
    for dear in ([], [one("b", 0.9)]):
        said = decide([away, large, *dear], [], DEMAND, Limits(slots_max=1), Linear(), 0.0)
        assert not said.acquire
        assert said.because == "waiting for aws/a/kind.1 at $0.2000/h"


def test_egress_is_paid_from_the_budget_beside_the_runway():
    """What bringing the data costs, for every machine, has to be there at once; else the dearer machines at home are taken."""
    offers = [one("a", 0.2, egress_usd=0.3), one("b", 0.3)]
    demand = msgspec.structs.replace(DEMAND, work_left=100 * H)
    for left_usd, zone in ((0.25, "b"), (50.0, "a")):
        limits = Limits(slots_max=1, budget_left_usd=left_usd)
        (bought,) = decide(offers, [], demand, limits, Linear(), 0.0).acquire
        assert bought.pool.zone == zone


def test_regions_quota_and_egress_count():
    """Another region is not bought, a quota is not passed, and moving bytes is part of the price."""
    there = Offer(
        pool=Pool("aws", "far", "far-a", "kind.1"),
        type=KINDS[1],
        market="spot",
        price_usd_per_h=0.1,
    )
    said = decide(
        [there, one("a", 0.3)], [], DEMAND, Limits(slots_max=2, regions=("r",)), Linear(), 0.0
    )
    assert {a.pool.region for a in said.acquire} == {"r"}
    few = [one("a", 0.2, machines_max=1), one("b", 0.22)]
    said = decide(few, [], DEMAND, Limits(slots_max=3), Linear(), 0.0)
    assert {a.pool.zone: a.count for a in said.acquire} == {"a": 1, "b": 2}
    moved = [one("a", 0.2, egress_usd=5.0), one("b", 0.3)]
    said = decide(moved, [], DEMAND, Limits(slots_max=1), Linear(), 0.0)
    assert said.acquire[0].pool.zone == "b"


def test_a_risky_pool_is_left_where_losing_it_hurts():
    """A cheaper pool that loses its machines is bought while a recovery is quick, and not where it is slow."""
    costly = msgspec.structs.replace(DEMAND, recovery_s=600.0)
    risky = one("a", 0.20, hazard_per_h=2.0, billing="azure")
    calm = one("b", 0.21, hazard_per_h=0.02, billing="azure")
    said = decide([risky, calm], [], costly, Limits(slots_max=4), Linear(), 0.0)
    assert {a.pool.zone for a in said.acquire} == {"b"}
    quick = decide([risky, calm], [], DEMAND, Limits(slots_max=4), Linear(), 0.0)
    assert {a.pool.zone for a in quick.acquire} == {"a"}


def test_the_bid_with_the_cheapest_work_is_chosen():
    """Where bids evict, a low bid with refunds beats a safe one, until evictions cost too much."""
    bids = (Bid(bid_usd_per_h=0.21, evicted_in_1h=0.5), Bid(bid_usd_per_h=1.00, evicted_in_1h=0.01))
    auction = one("a", 0.2, billing="aws_2016", bids=bids)
    said = decide([auction], [], DEMAND, Limits(slots_max=1), Linear(), 0.0)
    assert said.acquire[0].bid_usd_per_h == 0.21
    slow = msgspec.structs.replace(DEMAND, recovery_s=2400.0)
    said = decide([auction], [], slow, Limits(slots_max=1), Linear(), 0.0)
    assert said.acquire[0].bid_usd_per_h == 1.00


def test_a_paid_hour_is_used_up():
    """By the hour a machine is kept while its hour is paid, and weighed shortly before it ends."""
    cheaper = one("b", 0.1, billing="aws_2016", hazard_per_h=0.0)
    held = lease("x", "a", 0.5, billing="aws_2016", hazard_per_h=0.0)
    paid = decide([cheaper], [held], DEMAND, Limits(slots_max=1), Linear(), 1800.0)
    assert (paid.acquire, paid.release) == ((), ())
    ending = decide([cheaper], [held], DEMAND, Limits(slots_max=1), Linear(), 3500.0)
    assert [r.lease for r in ending.release] == ["x"]


def test_a_budget_buys_speed_only_as_far_as_it_finishes():
    """Fastest finish within a budget: dearer machines join only while the whole job stays payable."""
    fast = Limits(slots_max=4, haste=math.inf, budget_left_usd=10.0)
    mixed = [one("a", 0.2, machines_max=1, hazard_per_h=0.0), one("b", 0.9, hazard_per_h=0.0)]
    rich = msgspec.structs.replace(DEMAND, work_left=4 * H)
    poor = msgspec.structs.replace(DEMAND, work_left=25 * H)
    assert sum(a.count for a in decide(mixed, [], rich, fast, Linear(), 0.0).acquire) == 4
    assert sum(a.count for a in decide(mixed, [], poor, fast, Linear(), 0.0).acquire) < 4


def test_a_deadline_turns_to_on_demand_in_time():
    """With time to spare spot is taken, waiting is possible, and at the last moment on demand is bought."""
    market = [one("a", 0.3, hazard_per_h=0.2), one("a", 1.0, market="on_demand")]
    away = [one("a", 0.3, hazard_per_h=0.2, return_per_h=2.0, blocked=True), market[1]]
    demand = msgspec.structs.replace(DEMAND, work_left=10 * H)

    def said(on_offer, finish_h):
        limits = Limits(slots_min=1, slots_max=1, finish_by_s=finish_h * H)
        return decide(on_offer, [], demand, limits, Linear(), 0.0)

    assert said(market, 20.0).acquire[0].market == "spot"
    assert said(away, 40.0).acquire == ()
    assert "finish" in said(away, 40.0).because
    assert said(market, 10.05).acquire[0].market == "on_demand"
    assert said(away, 10.05).acquire[0].market == "on_demand"
    assert "on-demand now" in said(market, 10.05).because


def test_little_time_to_spare_forbids_a_move():
    """With a tight deadline a held spot machine is not swapped for a cheaper one."""
    market = [one("b", 0.1, hazard_per_h=0.1), one("a", 1.0, market="on_demand")]
    held = [lease("x", "a", 0.3, hazard_per_h=0.1)]
    demand = msgspec.structs.replace(DEMAND, work_left=10 * H)
    spare = (DEMAND.start_s + DEMAND.morph_s) * 1.5 + DEMAND.recovery_s + 300.0
    tight = Limits(slots_max=1, finish_by_s=10 * H + spare + 7200.0)
    said = decide(market, held, demand, tight, Linear(), 7200.0)
    assert said.release == ()
    loose = Limits(slots_max=1, finish_by_s=30 * H)
    assert decide(market, held, demand, loose, Linear(), 7200.0).release != ()


def test_a_machine_that_may_live_a_day_is_replaced_before():
    """Under the rule with a limit of 24 h a machine of 23.95 h makes way, one of 20 h stays."""
    again = one("b", 0.3, billing="fixed_discount")
    held = lease("x", "a", 0.3, billing="fixed_discount")
    day = 24 * H
    stays = decide([again], [held], DEMAND, Limits(slots_max=1), Linear(), day - 4 * H)
    assert (stays.acquire, stays.release) == ((), ())
    ends = decide([again], [held], DEMAND, Limits(slots_max=1), Linear(), day - 180.0)
    assert ends.acquire[0].count == 1
    assert [r.lease for r in ends.release] == ["x"]


def test_a_loss_that_pools_of_a_region_share_counts_once():
    """Two pools of one region stall a job less often than two of different regions, and more than one pool."""
    bounds = core.Bounds(1, 4, math.inf, math.inf, 0.0, math.inf, 0.0, 0.1, 0.0, 0.0)

    def share(regions):
        losses = core.Losses(np.full(2, -1.0), np.full(2, -1.0), np.zeros(2))
        for pool, region in enumerate(regions):
            core.add_hazard(losses, pool, region, 0.5)
        return core.stalled(losses, bounds)

    assert share([0]) == pytest.approx(0.05)
    assert share([0, 0]) == pytest.approx(0.05 * (2 - core.SHARED))
    assert share([0, 1]) == pytest.approx(0.10)


def test_nearly_done_is_no_time_to_move():
    """A cheaper pool is worth a start while there are hours to go, and not for the last minutes."""
    held = [lease("x", "a", 0.30, hazard_per_h=0.0, billing="azure")]
    cheaper = [one("b", 0.28, hazard_per_h=0.0, billing="azure")]

    def said(work_left):
        demand = msgspec.structs.replace(DEMAND, work_left=work_left)
        return decide(cheaper, held, demand, Limits(slots_max=1), Linear(), 2 * H)

    assert said(20 * H).release != ()
    assert said(0.2 * H).release == ()


def test_disks_egress_and_the_manager_are_part_of_the_cost():
    """Each adds to the cost per work, and a pool with dear disks is left for one without."""
    plain, disks = one("a", 0.2), one("b", 0.19, disk_usd_per_h=0.05)
    said = decide([plain, disks], [], DEMAND, Limits(slots_max=1), Linear(), 0.0)
    assert [a.pool.zone for a in said.acquire] == ["a"]
    managed = msgspec.structs.replace(DEMAND, manager_usd_per_h=0.1)
    more = decide([plain], [], managed, Limits(slots_max=1), Linear(), 0.0)
    assert more.cost_usd_per_work > said.cost_usd_per_work * 1.4
    moved = decide([one("a", 0.2, egress_usd=1.0)], [], DEMAND, Limits(slots_max=1), Linear(), 0.0)
    assert moved.cost_usd_per_work > said.cost_usd_per_work


@pytest.mark.parametrize("morph_s", [1.0, 20.0, 45.0, 300.0])
def test_near_the_end_of_a_job_what_it_cannot_do_without_is_still_bought(morph_s):
    """One of four slots is lost, a minute is left: however long a change stalls, a newcomer is worth it."""
    held = [lease(str(i), "a", 0.1, hazard_per_h=0.0) for i in range(3)]
    demand = Demand(work_left=4 * 60.0, start_s=2.0, morph_s=morph_s, recovery_s=1.0)
    said = decide(
        [one("a", 0.1, hazard_per_h=0.0)],
        held,
        demand,
        Limits(slots_min=4, slots_max=4),
        Linear(),
        2 * H,
    )
    assert (sum(a.count for a in said.acquire), said.release) == (1, ())


RULES = st.sampled_from([None, "aws_today", "aws_2016", "azure", "fixed_discount", "local"])


@st.composite
def any_offer(draw):
    """Everything that an offer can carry, absurd prices too."""
    n, market = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from(["spot", "on_demand"]))
    region = draw(st.sampled_from(["near", "far"]))
    price = n * draw(st.one_of(prices, st.sampled_from([0.0, -1.0, 1e9, math.inf, math.nan])))
    bids = [
        Bid(bid_usd_per_h=price + d, evicted_in_1h=e)
        for d, e in ((0.01, draw(st.floats(0.0, 1.0))), (0.5, 0.0))
    ]
    return Offer(
        pool=Pool("aws", region, f"{region}-{draw(st.sampled_from('abc'))}", f"kind.{n}"),
        type=KINDS[n],
        market=market,
        price_usd_per_h=price,
        blocked=draw(st.booleans()),
        billing=draw(RULES),
        hazard_per_h=draw(st.sampled_from([None, 0.0, 0.2, 50.0])),
        losses_seen=draw(st.booleans()),
        bids=tuple(bids) if draw(st.booleans()) else (),
        egress_usd=draw(st.sampled_from([0.0, 0.3])),
        disk_usd_per_h=draw(st.sampled_from([0.0, 0.05])),
        machines_max=draw(st.sampled_from([None, 0, 1, 2])),
    )


@st.composite
def any_limits(draw):
    least = draw(st.sampled_from([0, 1, 3]))
    return Limits(
        slots_min=least,
        slots_max=least + draw(st.sampled_from([0, 1, 5])),
        budget_left_usd=draw(st.sampled_from([None, -1.0, 0.0, 0.02, 5.0])),
        usd_per_h_max=draw(st.sampled_from([None, 0.0, 0.5, 2.0])),
        finish_by_s=draw(st.sampled_from([None, -5.0, 2 * H, 4 * H, 40 * H])),
        on_demand_allowed=draw(st.booleans()),
        haste=draw(st.sampled_from([0.0, 0.5, math.inf])),
        regions=draw(st.sampled_from([None, (), ("near",)])),
    )


@settings(max_examples=150)
@given(
    st.lists(any_offer(), max_size=7, unique_by=lambda o: (o.pool, o.market)),
    holdings,
    any_limits(),
    st.sampled_from([None, 0.0, 3600.0, 1e6]),
    st.sampled_from([-1e6, 0.0, 2 * H, 30 * H]),
    st.randoms(),
)
def test_any_market_under_any_limits(on_offer, held, limits, left, at_s, rng):
    """Deadlines, bids, quotas, egress, absurd prices and any clock: limits hold, and order never matters."""
    demand = msgspec.structs.replace(DEMAND, work_left=left)
    said = decide(on_offer, held, demand, limits, Linear(), at_s)
    rng.shuffle(on_offer)
    rng.shuffle(held)
    assert decide(on_offer, held, demand, limits, Linear(), at_s) == said
    sold = {(o.pool, o.market): o for o in on_offer}
    gone = {r.lease for r in said.release}
    assert gone <= {h.lease for h in held if not h.noticed}
    kept = [h for h in held if h.lease not in gone and not h.noticed]
    usd_per_h = sum(h.price_usd_per_h for h in kept)
    for a in said.acquire:
        o = sold[a.pool, a.market]
        assert 0 < o.price_usd_per_h < 1000
        assert not o.blocked
        assert a.market == "spot" or limits.on_demand_allowed
        assert limits.regions is None or a.pool.region in limits.regions
        assert a.count <= (math.inf if o.machines_max is None else o.machines_max)
        assert a.bid_usd_per_h in {None, *(b.bid_usd_per_h for b in o.bids)}
        usd_per_h += a.count * (o.price_usd_per_h + o.disk_usd_per_h)
    slots = sum(h.type.slots for h in kept) + sum(
        a.count * sold[a.pool, a.market].type.slots for a in said.acquire
    )
    assert slots <= limits.slots_max
    assert usd_per_h <= (math.inf if limits.usd_per_h_max is None else limits.usd_per_h_max + 1e-9)
    if limits.budget_left_usd is not None and usd_per_h > 0:
        assert usd_per_h * 120 / H <= limits.budget_left_usd + 1e-9


def test_runner_up_has_its_price_per_as_much_work_as_the_chosen():
    """$0.9413 per 1,000,000 beside $0.0010 per 1,000 cannot be compared at a glance."""
    chosen = _Footprint(taken=1, usd_per_h=0.057, work_per_s=17.7, usd_per_work=0.94e-6)
    dearer = _Footprint(taken=2, usd_per_h=0.114, work_per_s=32.3, usd_per_work=1.04e-6)
    assert _other(chosen, dearer).endswith("32.3 work/s, $1.0400 per 1,000,000 work")
    assert "$0.0009 per 1,000 work" in _other(dearer, chosen)


def test_a_runner_up_that_is_no_dearer_says_what_speaks_against_it():
    """The same price twice, or a lower one behind "next best", would look like a mistake."""
    chosen = _Footprint(taken=2, usd_per_h=0.114, work_per_s=4.0, usd_per_work=7.9e-6)
    one = msgspec.structs.replace(chosen, taken=1, usd_per_h=0.057, work_per_s=2.0)
    assert _other(chosen, one).endswith("per 1,000 work: as cheap, but slower")
    cheap = msgspec.structs.replace(one, usd_per_work=7.0e-6)
    assert _other(chosen, cheap).endswith("per 1,000 work: cheaper, but slower")
    dear = msgspec.structs.replace(one, usd_per_work=9.0e-6)
    assert _other(chosen, dear).endswith("per 1,000 work")


@given(offers)
@settings(max_examples=60)
def test_what_is_bought_is_what_the_prices_of_work_put_first(offers):
    """People see the very figures that offers were put in order by: the first that is free is taken first."""
    said = decide(offers, (), DEMAND, Limits(slots_max=4), Linear(), 0.0)
    prices = [one.usd_per_slot_h for one in said.priced]
    assert prices == sorted(prices)
    assert len({one.pool for one in said.priced}) == len(prices) <= len(offers)
    blocked = {o.pool for o in offers if o.blocked}
    if said.acquire:
        first = next(one.pool for one in said.priced if one.pool not in blocked)
        assert first in {part.pool for part in said.acquire}


def test_the_price_of_work_counts_evictions_and_starts():
    """Without either it is the price of a slot; with them, and no refund to hope for, it is more."""
    calm = Offer(
        pool=Pool("aws", "r", "a", "kind.2"),
        type=KINDS[2],
        market="spot",
        price_usd_per_h=0.4,
        hazard_per_h=0.0,
    )
    wild = msgspec.structs.replace(
        calm, pool=Pool("aws", "r", "b", "kind.2"), hazard_per_h=2.0, losses_seen=False
    )
    at_once = Demand(work_left=None, start_s=0.0, morph_s=0.0, recovery_s=0.0)
    (one,) = decide([calm], (), at_once, Limits(), Linear(), 0.0).priced
    assert one.usd_per_slot_h == pytest.approx(0.2)
    first, second = decide([wild, calm], (), DEMAND, Limits(), Linear(), 0.0).priced
    assert (first.pool, second.pool) == (calm.pool, wild.pool)
    assert 0.2 < first.usd_per_slot_h < second.usd_per_slot_h


@pytest.mark.parametrize("bound", ["limit", "room"])
def test_a_deadline_is_kept_with_the_machines_that_the_limits_allow(bound):
    """Eight slots would do the work in an hour, and only two may be held: they begin four hours before the end,
    as long as spot machines are away.
    """
    pool = Pool("aws", "r", "a", "kind.1")
    spot = Offer(pool=pool, type=KINDS[1], market="spot", price_usd_per_h=0.3, blocked=True)
    room = 2 if bound == "room" else None
    sure = msgspec.structs.replace(
        spot, market="on_demand", price_usd_per_h=1.0, blocked=False, machines_max=room
    )
    demand = msgspec.structs.replace(DEMAND, work_left=8 * H)
    limits = Limits(slots_max=8, usd_per_h_max=None if room else 2.1)

    def bought(left_h):
        soon = msgspec.structs.replace(limits, finish_by_s=left_h * H)
        made = decide([spot, sure], [], demand, soon, Linear(), 0.0)
        return [(part.market, part.count) for part in made.acquire]

    assert bought(left_h=6.0) == []
    assert bought(left_h=4.05) == [("on_demand", 2)]


def test_a_number_of_slots_that_no_machines_add_up_to_is_said():
    """Machines of two slots, and three slots are wanted: no price is named, as no money would help."""
    pool = Pool("aws", "r", "a", "kind.2")
    two = Offer(pool=pool, type=KINDS[2], market="spot", price_usd_per_h=0.3)
    made = decide([two], [], DEMAND, Limits(slots_min=3, slots_max=3), Linear(), 0.0)
    assert not made.acquire
    assert "no number of equal machines has 3 to 3 slots; the fewest above have 4" in made.because


# --- what is bought and given back in one period -------------------------------------------------

QUICK = msgspec.structs.replace(DEMAND, recovery_s=1.0)


def test_the_cheapest_pool_is_filled_to_the_limit():
    """With linear work the cheapest pool is bought up to the slots allowed, and the reason is given."""
    got = decide([one("a", 0.3), one("b", 0.2)], [], QUICK, Limits(), Linear(), 0.0)
    assert [(a.pool.zone, a.count) for a in got.acquire] == [("b", 4)]
    assert "4 machines for $0.8000/h do " in got.because
    assert got.runner_up


def test_the_price_of_work_is_read_as_money():
    """In cents, of as much work as costs them, and not in powers of ten."""
    said = [
        decide([one("a", price)], [], QUICK, Limits(), Linear(), 0.0).because
        for price in (900.0, 0.036)
    ]
    assert said == [
        "4 machines for $3600.0000/h do 4 work/s, $0.2390 per work",
        "4 machines for $0.1440/h do 4 work/s, $0.0096 per 1,000 work",
    ]


def test_a_little_cheaper_is_not_worth_a_move():
    """Prices that wobble by a few percent change nothing; a price that triples moves one machine in four."""
    held = [lease(str(i), "a", 0.205) for i in range(4)]
    still = decide([one("b", 0.2)], held, QUICK, Limits(), Linear(), 0.0)
    assert (still.acquire, still.release) == ((), ())
    held = [msgspec.structs.replace(h, price_usd_per_h=0.6) for h in held]
    moved = decide([one("b", 0.2)], held, QUICK, Limits(), Linear(), 0.0)
    assert len(moved.release) == 1
    assert moved.acquire[0].count == 1
    assert "a part is exchanged at a time" in moved.because
    begun = [*held, msgspec.structs.replace(lease("new", "b", 0.2), started_at_s=-1.0)]
    meanwhile = decide([one("b", 0.2)], begun, QUICK, Limits(), Linear(), 0.0)
    assert (meanwhile.acquire, [r.lease for r in meanwhile.release]) == ((), ["3"])


def test_no_offer_means_waiting_with_a_sentence():
    """When every pool refuses, the decision says so and buys nothing."""
    got = decide([one("a", 0.2, blocked=True)], [], QUICK, Limits(), Linear(), 0.0)
    assert got.acquire == ()
    assert "waiting" in got.because
    why = {"blocked": True, "blocked_because": "workers keep dying on i-7"}
    got = decide([one("a", 0.2, **why)], [], QUICK, Limits(), Linear(), 0.0)
    assert "(left alone for now: workers keep dying on i-7)" in got.because


def test_a_job_that_is_nearly_done_does_not_wait_for_a_pool_that_would_have_to_start_as_well():
    """For the last seconds a start weighs heavily here, and no less where there is nothing to be had now."""
    demand = msgspec.structs.replace(QUICK, work_left=20.0)
    there = [one("a", 0.2), one("b", 0.19, blocked=True)]
    assert decide(there, [], demand, Limits(), Linear(), 0.0).acquire
    dear = [one("a", 0.9), one("b", 0.19, blocked=True)]
    assert not decide(dear, [], demand, Limits(), Linear(), 0.0).acquire


def test_a_machine_that_starts_is_not_given_back_for_one_that_would_have_to_start_as_well():
    """Four percent cheaper moves a machine that works; one that still starts goes for a quarter. What is dearer
    and starts does not take the place of what works for that.
    """

    def moved(price, *held):
        got = decide([one("b", price)], held, QUICK, Limits(slots_max=1), Linear(), 10.0)
        return (sum(a.count for a in got.acquire), [r.lease for r in got.release])

    works, starts = lease("1", "a", 0.2), lease("2", "a", 0.2, doing="starts")
    assert moved(0.192, works) == (1, ["1"])
    assert moved(0.192, starts) == (0, [])
    assert moved(0.192, works, starts) == (0, ["2"])
    assert moved(0.14, starts) == (1, ["2"])
    dearer = msgspec.structs.replace(starts, price_usd_per_h=0.21)
    assert moved(0.3, works, dearer) == (0, ["2"])
    assert moved(0.3, msgspec.structs.replace(works, lease="3"), starts) == (0, ["2"])


def test_one_of_many_that_starts_does_not_hold_up_what_all_would_save():
    """The price of a start that is paid is its own: of twenty machines that work it keeps none."""
    works = [lease(str(n), "a", 0.2) for n in range(20)]
    starts = lease("20", "a", 0.2, doing="starts")
    got = decide([one("b", 0.18)], [*works, starts], QUICK, Limits(slots_max=21), Linear(), 10.0)
    assert got.release


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (Limits(budget_left_usd=0.0), ""),
        (Limits(budget_left_usd=-5.0), ""),
        (Limits(budget_left_usd=0.001), "$0.0010 of the budget are left"),
        (Limits(usd_per_h_max=0.0), ""),
        (Limits(usd_per_h_max=0.1), "1 x aws/a/kind.1 for $0.3000/h, above the limit of $0.1000/h"),
        (Limits(slots_min=4, usd_per_h_max=1.0), "4 x aws/a/kind.1 for $1.2000/h, above the limit"),
        (Limits(regions=("mars",)), "nothing is sold in mars"),
    ],
)
def test_the_limit_that_nothing_fits_is_named(limits, says):
    """Waiting for ever is said with the reason that a person can change."""
    said = decide([one("a", 0.3), one("b", 0.4)], [], QUICK, limits, Linear(), 0.0)
    assert said.acquire == ()
    assert "waiting: no offer fits the limits" in said.because
    assert says in said.because


def test_a_deadline_that_has_passed_or_cannot_be_met_runs_on_demand():
    """Whatever comes too late is bought as fast as it can be had, and the sentence says which it is."""
    market = [one("a", 0.3), one("a", 1.0, market="on_demand")]
    demand = msgspec.structs.replace(DEMAND, work_left=H)
    for finish_by_s, words in (
        (-100.0, "the deadline has passed"),
        (0.0, "the deadline has passed"),
        (600.0, "s too near: on-demand now"),
    ):
        limits = Limits(slots_max=1, finish_by_s=finish_by_s)
        said = decide(market, [], demand, limits, Linear(), 0.0)
        assert [a.market for a in said.acquire] == ["on_demand"]
        assert words in said.because


@pytest.mark.parametrize(
    ("work_left", "finish_by_s", "buys"),
    [
        (50.0, 100.0, []),  # an on-demand machine would begin to work when all is done
        (50.0, 1_030.0, []),
        (70.0, 100.0, ["on_demand"]),  # its start is shorter than the rest
        (50.0, 1_120.0, ["on_demand"]),  # started now, it keeps the deadline if spot is lost
    ],
)
def test_late_job_that_ends_before_a_start_buys_nothing(work_left, finish_by_s, buys):
    """A start takes 61 s, and it is 1,000 s now; what works is kept, because nothing is faster."""
    market = [one("a", 0.3), one("a", 1.0, market="on_demand")]
    demand = msgspec.structs.replace(DEMAND, work_left=work_left)
    limits = Limits(slots_max=1, finish_by_s=finish_by_s)
    said = decide(market, [lease("0", "a", 0.3)], demand, limits, Linear(), 1_000.0)
    assert [a.market for a in said.acquire] == buys
    assert bool(said.release) == bool(buys)


def test_what_works_is_kept_while_the_cheap_pool_is_away():
    """One machine is held, four are wanted: three are bought. Who holds none waits for the cheap pool."""
    market = [
        one("a", 0.6, hazard_per_h=0.1, billing="azure"),
        one("b", 0.2, hazard_per_h=0.1, billing="azure", blocked=True),
        one("a", 3.0, market="on_demand", billing="azure"),
    ]
    demand = Demand(work_left=80 * H, start_s=120.0, morph_s=2.0, recovery_s=5.0)
    limits = Limits(slots_min=1, slots_max=4)
    working = lease("0", "a", 0.6, hazard_per_h=0.1, billing="azure", losses_seen=True)
    kept = decide(market, [working], demand, limits, Linear(), 6000.0)
    assert ([(a.pool.zone, a.count) for a in kept.acquire], kept.release) == ([("a", 3)], ())
    assert decide(market, [], demand, limits, Linear(), 6000.0).acquire == ()
