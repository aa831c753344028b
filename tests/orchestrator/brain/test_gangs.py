"""Several machines of one pool in one call: all or none, one lease for each, one token for all."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from cloud.errors import CloudError, Refused
from cloud.model import Leftover, Listing, Machine, Place, Ref, Traits
from orchestrator.actions import Launch, Terminate
from orchestrator.brain.holdings import leases
from orchestrator.events import Launched, Listed
from orchestrator.world import decode_state, encode_state

PLACE = Place("local", "east")
GANGS = Traits(billing="local", launch_max=64)


def asking(hand: Any, slots: int, slots_min: int = 1, **settings: Any) -> tuple[Any, list[Launch]]:
    """A manager that wants so many slots, and what it asks for in its first turn of buying."""
    h = hand(on_demand_allowed=False, **settings)
    h.traits = GANGS
    h.prices = (0.03, 0.90, 0.04, 0.90)  # small machines are far cheaper
    h.start()
    h.submit(slots_min=slots_min, slots_max=slots)
    return h, h.only(h.wait(2.0), Launch)


def refused_for(h: Any, seconds: float, queue: list[Launch]) -> list[tuple[float, int]]:
    """When the first pool was asked for how many machines, of which none can be had anywhere."""
    found, begun_s = [], h.at_s
    while h.at_s < begun_s + seconds:
        for one in queue:
            if one.request.pool.zone == "east-a" and one.request.pool.type == "small":
                found.append((h.at_s - begun_s, one.request.count))
            h.refused(one)
        queue = h.only(h.wait(2.0), Launch)
    return found


def machines(h: Any, launch: Launch) -> list[Machine]:
    """What the cloud starts for it."""
    made = [
        Machine(
            id=f"i-{launch.request.token}-{index}",
            token=launch.request.token,
            index=index,
            pool=launch.request.pool,
            market="spot",
            state="running",
            launched_at_s=h.at_s,
            tags=launch.request.tags,
        )
        for index in range(launch.request.count)
    ]
    h.machines |= {machine.id: machine for machine in made}
    return made


def test_sixty_four_machines_are_one_call_and_sixty_four_leases(hand):
    h, out = asking(hand, 64)
    assert [(x.request.pool.zone, x.request.count) for x in out] == [("east-a", 64)]
    assert len(h.leases) == 64
    for machine in machines(h, out[0]):
        h.see(Launched(at_s=h.at_s, token=machine.token, machine=machine))
    assert all(lease.machine_id for lease in h.leases)
    assert len({lease.machine_id for lease in h.leases}) == 64
    assert not h.only(h.listed(), Terminate)
    assert encode_state(decode_state(encode_state(h.state))) == encode_state(h.state)


@pytest.mark.parametrize("heard", [0, 1, 3])
def test_a_manager_that_dies_after_the_call_adopts_each_machine_from_the_list(hand, heard):
    """However many answers it heard: none is bought twice, none is ended, none is left without a lease."""
    h, (launch,) = asking(hand, 4)
    made = machines(h, launch)
    for machine in made[:heard]:
        h.see(Launched(at_s=h.at_s, token=machine.token, machine=machine))
    h.start(epoch=2)
    out = h.listed()
    assert not h.only(out, Terminate)
    assert {lease.machine_id for lease in h.leases} == {machine.id for machine in made}
    assert not h.only(h.wait(60.0), Launch)


def test_a_gang_that_never_started_is_dropped_as_a_whole_after_the_grace(hand):
    h, (launch,) = asking(hand, 4)
    tokens = set(h.state.leases)
    h.at_s += h.settings.launch_grace_s + 1.0
    h.listed()
    assert not tokens & set(h.state.leases)
    assert h.state.account.leases == len(h.state.leases)
    late = machines(h, launch)
    out = [a for m in late for a in h.see(Launched(at_s=h.at_s, token=m.token, machine=m))]
    assert {x.machine_id for x in h.only(out, Terminate)} == {machine.id for machine in late}


def test_a_refusal_that_says_its_room_is_followed_by_a_gang_of_that_size(hand):
    """5 of 8 in the first pool, the rest from the next best, and the first is not asked again."""
    h, (launch,) = asking(hand, 8)
    said = Refused("pool", "NoCapacity", "5 of 8", room=5)
    h.refused(launch, said)
    assert not h.leases
    again = h.only(h.wait(4.0), Launch)
    assert [(x.request.pool.zone, x.request.count) for x in again] == [("east-a", 5), ("east-b", 3)]
    assert len({x.request.token for x in (launch, *again)}) == 3
    assert not [x for x in h.only(h.wait(20.0), Launch) if x.request.pool.zone == "east-a"]


def test_an_unsure_launch_stops_buying_in_a_place_whose_refusal_left_room(hand):
    """The room lasts for minutes, and still nothing is asked for until the list may have told."""
    h, (launch,) = asking(hand, 8, control_period_s=20.0)
    h.refused(launch, Refused("place", "Quota", "5 of 8", room=5))
    again = h.only(h.wait(25.0), Launch)
    assert sum(x.request.count for x in again) == 8
    h.refused(again[0], CloudError("no answer"))
    block = leases.block_of(h.state, h.state.pools[again[0].request.pool.key], "spot")
    assert block is not None
    assert block.room == 0
    assert block.until_s == h.at_s + 20.0


def test_without_a_word_about_room_half_is_asked_for_and_at_last_the_pool_is_left_alone(hand):
    """8, 4, 2, 1; then none for three minutes, and after that one at a time until one has joined."""
    h, queue = asking(hand, 8)
    found = refused_for(h, 1800.0, queue)
    at_s, asked = [at for at, _ in found], [count for _, count in found]
    assert asked[:4] == [8, 4, 2, 1]
    assert set(asked[4:]) == {1}
    assert all(later - before >= 178.0 for before, later in pairwise(at_s[3:]))


def test_a_job_for_which_one_of_each_pool_is_too_few_asks_for_all_again(hand):
    """One at a time until one has joined would be none for ever: what has capacity again is never found out."""
    h, queue = asking(hand, 7, slots_min=7)
    asked = refused_for(h, 7200.0, queue)
    assert asked[0] == (0.0, 7)
    assert asked[-1][0] > 3600.0


def test_pools_that_have_less_than_is_wanted_are_asked_for_more_ever_more_seldom(hand):
    """Else, where there are many, each is asked for all again before the last one has said how few it has."""
    h, queue = asking(hand, 16, slots_min=16)
    asked = refused_for(h, 7200.0, queue)
    whole = [at_s for at_s, count in asked if count == 16]
    gaps_s = [later - before for before, later in pairwise(whole)]
    assert len(gaps_s) > 3
    assert all(later >= 1.9 * before for before, later in pairwise(gaps_s))


def test_a_pool_whose_gang_did_not_join_is_left_alone_and_then_tried_with_one_machine(hand):
    """Half of them would not join either, and each of them costs until it is given up."""
    h, queue = asking(hand, 8)
    asked, begun_s = [], h.at_s
    while h.at_s < begun_s + 1800.0:
        for launch in queue:
            if launch.request.pool.zone == "east-a":
                asked.append((h.at_s - begun_s, launch.request.count))
            for machine in machines(h, launch):
                h.see(Launched(at_s=h.at_s, token=machine.token, machine=machine))
        out = h.wait(5.0)
        for ended in h.only(out, Terminate):
            h.machines.pop(ended.ref.id, None)
        h.listed()
        queue = h.only(out, Launch)
    assert [count for _, count in asked] == [8, 1, 1, 1]
    boot_s = h.settings.boot_timeout_s
    assert all(later - before >= boot_s + 170 for (before, _), (later, _) in pairwise(asked))


def test_what_one_machine_of_a_gang_leaves_is_swept_while_the_others_work(hand):
    """Not while one of them has yet to run, as it may be about to use it."""
    h, (launch,) = asking(hand, 2)
    first, second = machines(h, launch)
    disk = Leftover(
        ref=Ref(PLACE, "disk-1"),
        kind="disk",
        created_at_s=h.at_s - 100.0,
        token=launch.request.token,
        tags=launch.request.tags,
    )

    def swept() -> list[str]:
        h.at_s += 5.0
        listing = Listing(place=PLACE, machines=tuple(h.machines.values()), leftovers=(disk,))
        out = h.see(Listed(at_s=h.at_s, asked_at_s=h.at_s, listing=listing))
        return [x.machine_id for x in h.only(out, Terminate)]

    h.see(Launched(at_s=h.at_s, token=first.token, machine=first))
    del h.machines[second.id]
    assert swept() == []
    h.machines[second.id] = second
    h.see(Launched(at_s=h.at_s, token=second.token, machine=second))
    assert swept() == ["disk-1"]


def test_a_budget_for_a_part_of_a_gang_buys_that_part(hand):
    whole, _ = asking(hand, 8)
    each_usd = whole.state.account.committed_usd / 8
    h, out = asking(hand, 8, budget_usd=4.5 * each_usd)
    (launch,) = out[:1]
    assert 1 < launch.request.count < 8
    assert len(h.leases) == launch.request.count
    assert msgspec.structs.asdict(launch.request)["count"] == len(h.job.leases)
