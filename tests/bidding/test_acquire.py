"""What the bidder buys and gives back in one period."""

import msgspec

from bidding.acquire import decide
from bidding.model import Demand, HeldMachine, Limits, Offer
from cloud.model import InstanceType, Pool

SMALL = InstanceType(name="small", cloud="aws", slots=1, memory_bytes=1, on_demand_usd_per_h=1.0)
DEMAND = Demand(work_left=None, start_s=60.0, morph_s=1.0, recovery_s=1.0)


class Linear:
    """Work is proportional to the number of machines."""

    def work_per_s(self, counts):
        return float(sum(counts.values()))


def offer(zone, price, market="spot", **more):
    pool = Pool("aws", "r", zone, "small")
    return Offer(pool=pool, type=SMALL, market=market, price_usd_per_h=price, **more)


def holding(lease, zone, price, **more):
    pool = Pool("aws", "r", zone, "small")
    return HeldMachine(
        lease=lease,
        pool=pool,
        type=SMALL,
        market="spot",
        price_usd_per_h=price,
        bid_usd_per_h=None,
        started_at_s=0.0,
        **more,
    )


def test_the_cheapest_pool_is_filled_to_the_limit():
    """With linear work the cheapest pool is bought up to the slots allowed, and the reason is given."""
    got = decide([offer("a", 0.3), offer("b", 0.2)], [], DEMAND, Limits(), Linear(), 0.0)
    assert [(a.pool.zone, a.count) for a in got.acquire] == [("b", 4)]
    assert "4 machines for $0.8000/h do " in got.because
    assert got.runner_up


def test_the_price_of_work_is_read_as_money():
    """In cents, of as much work as costs them, and not in powers of ten."""
    said = [
        decide([offer("a", price)], [], DEMAND, Limits(), Linear(), 0.0).because
        for price in (900.0, 0.036)
    ]
    assert said == [
        "4 machines for $3600.0000/h do 4 work/s, $0.2390 per work",
        "4 machines for $0.1440/h do 4 work/s, $0.0096 per 1,000 work",
    ]


def test_a_reliable_machine_is_never_released():
    """Whatever it costs, the reliable tier stays."""
    held = [holding("m", "a", 100.0, reliable=True)]
    got = decide([offer("b", 0.2)], held, DEMAND, Limits(), Linear(), 0.0)
    assert got.release == ()


def test_a_little_cheaper_is_not_worth_a_move():
    """Prices that wobble by a few percent change nothing; a price that triples moves one machine in four."""
    held = [holding(str(i), "a", 0.205) for i in range(4)]
    still = decide([offer("b", 0.2)], held, DEMAND, Limits(), Linear(), 0.0)
    assert (still.acquire, still.release) == ((), ())
    held = [msgspec.structs.replace(h, price_usd_per_h=0.6) for h in held]
    moved = decide([offer("b", 0.2)], held, DEMAND, Limits(), Linear(), 0.0)
    assert len(moved.release) == 1
    assert moved.acquire[0].count == 1
    assert "a part is exchanged at a time" in moved.because
    begun = [*held, msgspec.structs.replace(holding("new", "b", 0.2), started_at_s=-1.0)]
    meanwhile = decide([offer("b", 0.2)], begun, DEMAND, Limits(), Linear(), 0.0)
    assert (meanwhile.acquire, [r.lease for r in meanwhile.release]) == ((), ["3"])


def test_no_offer_means_waiting_with_a_sentence():
    """When every pool refuses, the decision says so and buys nothing."""
    got = decide([offer("a", 0.2, blocked=True)], [], DEMAND, Limits(), Linear(), 0.0)
    assert got.acquire == ()
    assert "waiting" in got.because
    why = {"blocked": True, "blocked_because": "workers keep dying on i-7"}
    got = decide([offer("a", 0.2, **why)], [], DEMAND, Limits(), Linear(), 0.0)
    assert "(left alone for now: workers keep dying on i-7)" in got.because


def test_a_job_that_is_nearly_done_does_not_wait_for_a_pool_that_would_have_to_start_as_well():
    """For the last seconds a start weighs heavily here, and no less where there is nothing to be had now."""
    demand = msgspec.structs.replace(DEMAND, work_left=20.0)
    there = [offer("a", 0.2), offer("b", 0.19, blocked=True)]
    assert decide(there, [], demand, Limits(), Linear(), 0.0).acquire
    dear = [offer("a", 0.9), offer("b", 0.19, blocked=True)]
    assert not decide(dear, [], demand, Limits(), Linear(), 0.0).acquire


def test_a_machine_that_starts_is_not_given_back_for_one_that_would_have_to_start_as_well():
    """Four percent cheaper moves a machine that works; one that still starts goes for a quarter. What is dearer
    and starts does not take the place of what works for that.
    """

    def moved(price, *held):
        got = decide([offer("b", price)], held, DEMAND, Limits(slots_max=1), Linear(), 10.0)
        return (sum(a.count for a in got.acquire), [r.lease for r in got.release])

    works, starts = holding("1", "a", 0.2), holding("2", "a", 0.2, doing="starts")
    assert moved(0.192, works) == (1, ["1"])
    assert moved(0.192, starts) == (0, [])
    assert moved(0.192, works, starts) == (0, ["2"])
    assert moved(0.14, starts) == (1, ["2"])
    dearer = msgspec.structs.replace(starts, price_usd_per_h=0.21)
    assert moved(0.3, works, dearer) == (0, ["2"])
    assert moved(0.3, msgspec.structs.replace(works, lease="3"), starts) == (0, ["2"])


def test_one_of_many_that_starts_does_not_hold_up_what_all_would_save():
    """The price of a start that is paid is its own: of twenty machines that work it keeps none."""
    works = [holding(str(n), "a", 0.2) for n in range(20)]
    starts = holding("20", "a", 0.2, doing="starts")
    got = decide([offer("b", 0.18)], [*works, starts], DEMAND, Limits(slots_max=21), Linear(), 10.0)
    assert got.release
