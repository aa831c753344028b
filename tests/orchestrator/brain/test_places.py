"""Two regions: each is listed, refused and judged by itself, and a failed launch is no preemption."""

from typing import Any

import pytest
from msgspec.structs import replace

from cloud.errors import Misconfigured, NotAllowed, Refused, Throttled, Unknown
from cloud.model import (
    DEPLOYMENT_TAG,
    Leftover,
    Listing,
    Pace,
    Place,
    Pool,
    Quote,
    Recipe,
    Ref,
    Refusal,
    Room,
    Traits,
)
from orchestrator.actions import Launch, ListMachines, Stop, Terminate
from orchestrator.brain.holdings import leases, ledger
from orchestrator.brain.purchases import situation
from orchestrator.events import (
    EndFailed,
    Listed,
    ListFailed,
    QuotesSeen,
    ShutdownAsked,
)
from orchestrator.state import Block
from orchestrator.view_builder import view_of

EAST, WEST = Place("local", "east"), Place("local", "west")
ABROAD = Pool(cloud="local", region="west", zone="west-a", type="small")


def sell_west(h: Any, **more: Any) -> None:
    h.catalogue(ABROAD, **more)
    h.quoted(ABROAD, 0.02)


def listed(h: Any, place: Place, *leftovers: Leftover) -> list[Any]:
    here = tuple(machine for machine in h.machines.values() if machine.pool.place == place)
    listing = Listing(place=place, machines=here, leftovers=leftovers)
    return h.see(Listed(at_s=h.at_s, asked_at_s=h.at_s, listing=listing))


def first_launch(h: Any, **spec: Any) -> Launch:
    h.start()
    h.submit(slots_max=1, **spec)
    return h.only(h.wait(2.0), Launch)[0]


def test_a_region_that_is_silent_for_ten_minutes_loses_nothing(hand):
    """Its machines work on: none is lost, ended or bought again, whatever other regions list."""
    h = hand(launch_grace_s=30.0)
    h.start()
    sell_west(h)
    h.submit(slots_max=3)
    h.served_after(2.0, times=3)
    held, said = {lease.token for lease in h.leases}, len(h.said)
    away = {lease.pool.place for lease in h.leases}
    assert WEST in away
    for _ in range(60):
        h.wait(10.0)
        listed(h, EAST)
        h.see(ListFailed(at_s=h.at_s, place=WEST, error="no answer"))
    assert view_of(h.state, h.at_s).costly == (f"{WEST.key} does not answer: no answer",)
    assert {lease.token for lease in h.leases} == held
    assert not h.only(h.said[said:], Terminate) + h.only(h.said[said:], Launch)
    assert h.job.market.preemptions == 0
    listed(h, WEST)
    assert {lease.token for lease in h.leases} == held
    assert view_of(h.state, h.at_s).costly == ()


def test_nothing_is_bought_where_what_is_held_is_not_known(hand):
    """A machine that is in no list could not be found again, were the answer to its launch lost."""
    h = hand()
    h.start()
    h.see(ListFailed(at_s=h.at_s, place=EAST, error="ec2:DescribeInstances is not allowed"))
    h.submit(slots_max=1)
    assert not h.only(h.wait(60.0), Launch)
    assert "it does not say what is held there" in h.job.market.waiting
    listed(h, EAST)
    assert h.only(h.wait(4.0), Launch)


@pytest.mark.parametrize("refused", [True, False])
def test_nothing_is_bought_where_nothing_can_be_ended(hand, refused):
    """A role that may buy and may not end is said with the cloud's word, until an end is seen."""
    h = hand()
    h.running(slots_max=1)
    (held,) = h.machines.values()
    h.cancel()
    why = "ec2:TerminateInstances is not allowed"
    failed = EndFailed(at_s=h.at_s, ref=held.ref, error=why, refused=refused)
    h.see(failed)
    assert (why in h.words(h.said)) == refused  # else it may have been ended all the same
    while len([x for x in h.only(h.said, Terminate) if x.ref == held.ref]) < 4:
        h.wait(1.0)
        h.see(failed)
    assert sum(why in line for line in h.words(h.said).splitlines()) == 1
    (shown,) = view_of(h.state, h.at_s).costly
    assert shown.endswith(f"cannot be ended: {why}")
    h.submit("next", slots_max=1)
    before = len(h.said)
    h.wait(60.0)
    assert not h.only(h.said[before:], Launch)
    del h.machines[held.id]
    h.at_s += 60.0
    h.listed()
    h.wait(5.0)
    assert h.only(h.said[before:], Launch)


def test_what_could_not_be_ended_is_ended_as_soon_as_the_next_manager_starts(hand):
    """A person has turned the cloud on again, or given the right; the pause had grown to four minutes."""
    h = hand()
    h.running(slots_max=1)
    (held,) = h.machines.values()
    h.cancel()
    for _ in range(6):
        h.see(EndFailed(at_s=h.at_s, ref=held.ref, error="aws is off", refused=True))
        h.wait(100.0)
    assert not h.only(h.wait(10.0), Terminate)
    h.start(epoch=2)
    assert [x.ref for x in h.only(h.wait(1.0), Terminate)] == [held.ref]
    assert not h.only(h.wait(10.0), Terminate)
    assert h.only(h.wait(10.0), Terminate)


@pytest.mark.parametrize("left", [False, True])
def test_a_place_that_the_settings_leave_out_holds_no_shutdown_up(hand, left):
    """As the local cloud of a person who has gone on to a real one; unless a machine is known there."""
    h = hand()
    h.start()
    sell_west(h)
    if left:
        stray = replace(h.stray("test", "lost-token"), pool=ABROAD)
        h.machines[stray.id] = stray
    listed(h, WEST)
    h.start(epoch=2)
    h.see(ShutdownAsked(at_s=h.at_s, by="ann"))
    for _ in range(9):
        listed(h, EAST)
        h.see(ListFailed(at_s=h.at_s, place=WEST, error="not among aws.regions", left_out=True))
        h.wait(2.0)
    assert bool(h.only(h.said, Stop)) is not left
    assert view_of(h.state, h.at_s).costly == (
        (f"{WEST.key} does not answer: not among aws.regions",) if left else ()
    )


def test_what_another_manager_of_our_name_launches_is_not_touched(hand):
    """Its tokens are of no life of ours; what was there before we looked is left from a lost journal."""
    h = hand(launch_grace_s=30.0)
    h.start()
    left = h.stray("test", "test-00000000000a-1-1")
    ours = h.stray("test", f"test-{leases.life_now(h.state)}-1-77")
    assert [x.ref for x in h.only(h.listed(left), Terminate)] == [left.ref]
    h.wait(100.0)
    assert not h.only(h.listed(), Terminate)
    theirs = h.stray("test", "test-00000000000b-1-1")
    out = h.listed(left, ours, theirs, h.stray("test", "by-hand"))
    ended = {x.ref.id for x in h.only(out, Terminate)}
    assert ended == {left.id, ours.id, "i-by-hand"}
    assert "launched by another manager that is named test" in h.words(out)
    h.start(epoch=2)
    h.wait(10.0)
    after = h.listed(theirs, h.stray("test", "test-00000000000b-1-2"))
    assert not h.only(after, Terminate)
    assert "another manager" not in h.words(after)


def test_every_place_is_asked_for_its_list_at_its_own_pace(hand):
    h = hand()
    h.start()
    sell_west(h)
    pace = Pace(list_s=60.0, offers_s=300.0, sold_s=3600.0, grace_s=120.0, boot_s=600.0)
    h.catalogue(ABROAD, pace=pace)
    h.state.stopping = True  # lists are wanted all the time
    asked = []
    for _ in range(60):
        for action in h.only(h.wait(2.0), ListMachines):
            asked.append(action.place)
            others = Listing(place=action.place, machines=(h.stray("ours", action.place.region),))
            h.see(Listed(at_s=h.at_s, asked_at_s=h.at_s, listing=others))
    assert asked.count(EAST) > 10 * asked.count(WEST) > 0
    assert leases.grace_s(h.state, WEST) == 120.0
    assert leases.boot_s(h.state, WEST) == 600.0


@pytest.mark.parametrize("ended", [True, False])
def test_an_end_that_was_refused_is_looked_at_in_a_list(hand, ended):
    """The refusal may come after the list that settled the machine, and there is no list else."""
    h = hand()
    h.running(slots_max=1)
    (held,) = h.machines.values()
    h.cancel()
    if ended:
        done = {"state": "terminated", "ended_by": "user", "ended_at_s": h.at_s}
        h.machines[held.id] = replace(held, **done)
        h.wait(2.0)
        h.listed()
        assert not h.leases
    h.see(EndFailed(at_s=h.at_s, ref=held.ref, error="not allowed", refused=True))
    h.submit("next", slots_max=1)
    before = len(h.said)
    for _ in range(30):
        h.wait(2.0)
        if h.only(h.said[before:], ListMachines):
            h.listed()
    assert bool(h.only(h.said[before:], Launch)) == ended


@pytest.mark.parametrize(
    ("error", "spot", "on_demand", "elsewhere"),
    [
        (Refused("request", "TokenSpent", "x"), False, False, False),
        (Refused("pool", "NoCapacity", "x"), True, False, False),
        (Refused("family", "QuotaExceeded", "x"), True, False, False),
        (Refused("market", "MaxSpot", "x"), True, False, False),
        (Refused("zone", "SubnetIsFull", "x"), True, True, False),
        (Throttled("x"), True, True, False),
        (NotAllowed("x"), True, True, False),
        (Misconfigured("x"), True, True, False),
        (Misconfigured("x", "cloud"), True, True, True),
    ],
)
def test_a_refusal_reaches_as_far_as_it_says(hand, error, spot, on_demand, elsewhere):
    """A spot refusal leaves the same pool on demand, which is when it is wanted."""
    h = hand()
    launch = first_launch(h)
    sell_west(h)
    h.refused(launch, error)
    found = {
        (offer.pool, offer.market): offer.blocked for offer in situation.offers(h.state, h.job)
    }
    assert found[launch.request.pool, "spot"] == spot
    assert found[launch.request.pool, "on_demand"] == on_demand
    assert found[ABROAD, "spot"] == elsewhere


@pytest.mark.parametrize("error", [NotAllowed("no key"), Misconfigured("no such image")])
def test_what_can_never_work_is_asked_once_in_ten_minutes(hand, error):
    """One call and one sentence; then new settings, a new recipe, or ten minutes."""
    h = hand()
    launch = first_launch(h)
    out = h.refused(launch, error)
    assert "left alone for 600 s" in h.words(out)
    assert not h.only(h.wait(590.0), Launch)
    assert h.only(h.wait(20.0), Launch)


def test_new_settings_and_a_new_recipe_are_tried_at_once(hand):
    h = hand()
    h.refused(first_launch(h), NotAllowed("no key"))
    h.settings = replace(h.settings, machines_max=7)
    h.start(epoch=2)
    (launch,) = h.only(h.wait(4.0), Launch)
    h.refused(launch, Misconfigured("no such image"))
    recipe = Recipe({"image": "ami-2"})
    h.catalogue(recipe=recipe)
    (launch,) = h.only(h.wait(4.0), Launch)
    assert launch.request.recipe == recipe.digest != Recipe({"image": "ami-1"}).digest


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("answered", [False, True])
def test_a_launch_that_failed_after_its_answer_is_a_refusal(hand, ended, answered):
    """No preemption, no cost; the pool is left alone, and what was made of it is ended."""
    h = hand()
    launch = first_launch(h, max_preemptions=0)
    token = launch.request.token
    if answered:
        h.launched(launch)
    else:
        h.refused(launch, Unknown("no answer"))
        h.machines["i"] = replace(h.stray("test", token), pool=launch.request.pool)
    (one,) = h.machines
    h.at_s += 20.0
    no = Refusal(scope="pool", code="AllocationFailed", said="none left")
    failed = {"state": "failed", "refusal": no, "ended_at_s": h.at_s if ended else None}
    h.becomes(one, **failed)
    out = h.listed()
    assert h.job.status == "PROVISIONING"
    assert h.job.market.preemptions == 0
    assert token not in h.state.leases
    assert h.job.account.spent_usd == pytest.approx(0.0, abs=1e-9)
    known = h.state.pools[launch.request.pool.key]
    assert leases.block_of(h.state, known, "spot").because == "AllocationFailed: none left"
    assert [e.ref.id for e in h.only(out, Terminate)] == ([] if ended else [h.machines[one].id])


def test_a_machine_that_ended_before_it_was_seen_to_run_is_no_preemption(hand):
    h = hand()
    launch = first_launch(h, max_preemptions=0)
    h.taken(h.launched(launch))
    assert h.job.status == "PROVISIONING"
    assert h.job.market.preemptions == 0


def test_a_stopped_machine_is_ended_because_it_still_costs(hand):
    h = hand().running(slots_max=1)
    (lease,) = h.leases
    h.becomes(lease.machine_id, state="stopped")
    (end,) = h.only(h.listed(), Terminate)
    assert end.ref == Ref(EAST, lease.machine_id)
    assert lease.state == "ending"


def test_leftovers_of_ours_are_swept_after_the_grace_and_no_others(hand):
    h = hand(launch_grace_s=30.0).running(slots_max=1)
    (lease,) = h.leases
    ours, theirs = {DEPLOYMENT_TAG: "test"}, {DEPLOYMENT_TAG: "theirs"}
    made = {"kind": "disk", "created_at_s": h.at_s}
    disks = (
        Leftover(ref=Ref(EAST, "of-ours"), token="gone", tags=ours, **made),
        Leftover(ref=Ref(EAST, "of-a-lease"), token=lease.token, tags=ours, **made),
        Leftover(ref=Ref(EAST, "of-others"), token="gone", tags=theirs, **made),
    )
    assert not h.only(listed(h, EAST, *disks), Terminate)
    h.wait(40.0)
    assert [e.ref.id for e in h.only(listed(h, EAST, *disks), Terminate)] == ["of-ours"]


def test_what_a_quota_does_not_leave_is_not_offered(hand):
    """What was bought since the quota was read counts as well."""
    h = hand()
    h.start()
    kinds = tuple(replace(k, vcpus=4 * k.slots, family="g") for k in h.state.types.values())
    room = Room(place=EAST, market="spot", family="g", vcpus_max=14, vcpus_used=4)
    h.catalogue(types=kinds, rooms=(room,))
    h.submit(slots_max=1)
    (launch,) = h.only(h.wait(2.0), Launch)
    most = {(o.type.name, o.market): o.machines_max for o in situation.offers(h.state, h.job)}
    assert launch.request.pool.type == "small"
    assert most["small", "spot"] == 1
    assert ("large", "spot") not in most
    assert most["large", "on_demand"] is None


@pytest.mark.parametrize("gone_before", [False, True])
def test_what_a_quota_counted_of_ours_comes_back_when_it_has_ended(hand, gone_before):
    """A machine that was in the reading is replaced at once; one that was gone by then freed nothing."""
    h = hand(on_demand_allowed=False)
    h.start()
    kinds = tuple(replace(k, vcpus=4 * k.slots, family="g") for k in h.state.types.values())

    def read(used: int) -> None:
        room = Room(place=EAST, market="spot", family="g", vcpus_max=4, vcpus_used=used)
        h.catalogue(types=kinds, rooms=(room,))

    read(0)
    h.submit(slots_max=1)
    h.served_after(2.0)
    (lease,) = h.leases
    h.wait(60.0)
    if gone_before:
        ended = {"state": "terminated", "ended_by": "provider", "ended_at_s": h.at_s - 1.0}
        h.becomes(lease.machine_id, **ended)
    read(4)
    assert not situation.offers(h.state, h.job)
    h.wait(2.0)
    before = len(h.said)
    if gone_before:
        h.listed()
    else:
        h.taken(lease.machine_id)
    h.wait(4.0)
    assert len(h.only(h.said[before:], Launch)) == (0 if gone_before else 1)
    if not gone_before:
        assert not situation.offers(h.state, h.job)


def test_people_see_the_quota_and_the_prices_of_work_that_the_decision_had(hand):
    """What the view says of a pool is what the bidder was given and what it found; of a job that ends, nothing."""
    h = hand()
    h.start()
    kinds = tuple(replace(k, vcpus=4 * k.slots, family="g") for k in h.state.types.values())
    pools = tuple(known.pool for known in h.state.pools.values())
    room = Room(place=EAST, market="spot", family="g", vcpus_max=14, vcpus_used=4)
    h.catalogue(types=kinds, rooms=(room,))
    small = next(pool.key for pool in pools if pool.type == "small")
    before = view_of(h.state, h.at_s)
    shown = {pool.pool: pool for pool in before.pools}
    assert before.thought is None
    assert (shown[small].spot_room, shown[small].on_demand_room) == (2, None)
    assert shown[small].spot_usd_per_slot_h is None
    h.submit(slots_max=1)
    (launch,) = h.only(h.wait(2.0), Launch)
    view = view_of(h.state, h.at_s)
    shown = {pool.pool: pool for pool in view.pools}
    bought = shown[launch.request.pool.key]
    assert bought.spot_room == 1
    prices = {
        (pool.pool, market): usd
        for pool in view.pools
        for market, usd in (
            ("spot", pool.spot_usd_per_slot_h),
            ("on_demand", pool.on_demand_usd_per_slot_h),
        )
        if usd is not None
    }
    assert min(prices, key=lambda name: prices[name]) == (bought.pool, launch.request.market)
    assert prices[bought.pool, "spot"] > bought.spot_usd_per_h / bought.slots
    assert view.thought is not None
    assert (view.thought.job, view.thought.at_s) == (h.job.id, h.at_s)
    assert "next best" in view.thought.because
    h.cancel()
    assert view_of(h.state, h.at_s).thought is None


def test_what_refuses_on_demand_is_shown_with_its_time(hand):
    h = hand()
    h.start()
    key = next(iter(h.state.pools))
    known = h.state.pools[key]
    reach = leases.reach_of(known, "on_demand")["pool"]
    h.state.blocks[reach] = Block(until_s=h.at_s + 60.0, because="NoCapacity")
    (shown,) = [pool for pool in view_of(h.state, h.at_s).pools if pool.pool == key]
    assert shown.on_demand_blocked_until_s == h.at_s + 60.0
    assert shown.on_demand_blocked_because == "NoCapacity"
    assert shown.blocked_until_s is None
    (shown,) = [pool for pool in view_of(h.state, h.at_s + 60.0).pools if pool.pool == key]
    assert (shown.on_demand_blocked_until_s, shown.on_demand_blocked_because) == (None, "")


def test_a_quote_on_demand_replaces_the_price_of_the_table(hand):
    h = hand()
    h.start()
    sell_west(h)
    quote = Quote(pool=ABROAD, at_s=h.at_s, price_usd_per_h=0.5, market="on_demand")
    h.see(QuotesSeen(at_s=h.at_s, place=WEST, quotes=(quote,)))
    assert leases.cost_now_usd_per_h(h.state, ABROAD, "on_demand") == 0.5
    assert h.state.pools[ABROAD.key].spot_usd_per_h == 0.02


def test_each_place_bills_by_its_own_clouds_rule_and_reserves_for_its_own_grace(hand):
    """One cloud by the hour with a list that lags two minutes, one by the second; the settings say a third."""
    h = hand(billing="azure", budget_usd=100.0, launch_grace_s=30.0)
    h.start()
    hourly = Traits(billing="aws_2016", bids="required", region_usd_per_gb=0.05)
    pace = Pace(list_s=60.0, offers_s=300.0, sold_s=3600.0, grace_s=120.0, boot_s=600.0)
    h.catalogue(ABROAD, traits=hourly, pace=pace)
    h.quoted(ABROAD, 0.02)
    assert situation.rule_at(h.state, WEST, "spot").name == "aws_2016"
    assert situation.rule_at(h.state, EAST, "spot").name == "azure"
    far, near = leases.terms_of(h.state, WEST), leases.terms_of(h.state, EAST)
    assert (far.grace_s, near.grace_s) == (120.0, 30.0)
    settings = h.state.settings
    more_s = 3600.0 + 120.0 - 30.0
    assert ledger.needed_usd(settings, far, 1.0) - ledger.needed_usd(settings, near, 1.0) == (
        pytest.approx(more_s / 3600.0)
    )
    h.submit(slots_max=1)
    (launch,) = h.only(h.wait(2.0), Launch)
    assert launch.request.pool == ABROAD
    assert h.leases[0].billing == "aws_2016"
    assert launch.request.bid_usd_per_h is not None
    offers = {o.pool.place: o.billing for o in situation.offers(h.state, h.job)}
    assert offers == {WEST: "aws_2016", EAST: "azure"}


def test_one_notice_that_comes_by_two_ways_is_one_notice(hand):
    """From the machine and from the cloud, seconds apart: the earlier deadline holds, and it is said once."""
    h = hand(on_demand_allowed=False).running(slots_max=1)
    machine = h.leases[0].machine_id
    h.notice(machine, 120.0)
    said = len(h.said)
    out = h.notice(machine, 118.0) + h.notice(machine, 123.0)
    assert not out
    assert len(h.said) == said
    assert h.state.leases[h.state.machines[machine]].goes_at_s == h.at_s + 118.0
    assert h.words(h.notice(machine, 60.0))


def test_what_is_left_of_a_lost_journal_is_ended_however_late_it_is_listed(hand):
    """It was made before we first looked, so no living manager has made it."""
    h = hand(launch_grace_s=30.0)
    h.start()
    one, late = (h.stray("test", f"test-00000000000a-1-{serial}") for serial in (1, 2))
    assert [x.ref for x in h.only(h.listed(one), Terminate)] == [one.ref]
    h.wait(200.0)
    assert {x.ref for x in h.only(h.listed(one, late), Terminate)} == {one.ref, late.ref}
