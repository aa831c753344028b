"""What the Azure provider promises, each in one scene against a door whose promises all hold.

`test_azure_promises` breaks the door's promises one by one, and each time a scene has to fail.
"""

import asyncio
import json
from collections.abc import Callable
from functools import partial, wraps

import pytest
from azure_account import (
    D4,
    OURS,
    PLACE,
    SETTINGS,
    T4,
    listed,
    play,
    provider_of,
    request,
    swept,
)
from cloudfake.arm import GROUP, SUBSCRIPTION, ArmDoor, Dials, vm_body
from msgspec.structs import replace

from cloud.azure import offers
from cloud.azure.settings import PRICES
from cloud.errors import NotAllowed, NotOurs, Refused, Throttled, TokenMismatch, TokenSpent
from cloud.model import DEPLOYMENT_TAG, Closed, Place, Ref

SCENES: list[Callable[[str], None]] = []


def scene(settings=SETTINGS, seed=0, **dials):
    """Play this at a door with these dials, one of whose promises may be broken."""

    def played_at_a_door(played):
        @wraps(played)
        def tried(broken: str) -> None:
            door = ArmDoor(dials=Dials(**dials), seed=seed, broken=broken)
            play(door, partial(played, door), settings=settings)

        SCENES.append(tried)
        return played

    return played_at_a_door


@scene()
async def a_machine_is_listed_with_all_that_was_asked_for(door, provider):
    """Token, pool, market and tags come back, and the machine starts to run."""
    (given,) = await provider.launch(request("t-1"))
    assert (given.token, given.pool, given.market) == ("t-1", T4, "spot")
    assert (given.state, given.tags) == ("pending", request("t-1").tags)
    door.pass_s(41)
    machine = (await listed(provider))[given.id]
    assert (machine.state, machine.tags, machine.ref) == ("running", given.tags, given.ref)
    assert machine.launched_at_s == door.now_s - 41


@scene()
async def a_token_is_one_machine_however_often_it_is_sent(door, provider):
    """Repeated and simultaneous launches under one token buy once, and change nothing."""
    await asyncio.gather(*(provider.launch(request("t-1")) for _ in range(10)))
    door.pass_s(41)
    await provider.launch(request("t-1"))
    assert list(await listed(provider)) == ["t-1"]
    assert door.books.bought_twice() == []


@scene()
async def a_machine_is_never_changed_by_a_launch(door, provider):
    """A PUT that is older than what it meets is refused, although its sender saw no machine."""
    late = provider_of(door)
    late._get = nothing
    await provider.launch(request("t-1"))
    with pytest.raises(TokenMismatch):
        await late.launch(request("t-1", D4))
    assert door.vms["t-1"].size == T4.type
    await late.close()


async def nothing(*_):
    return None


@scene(honours_create_only=False)
async def without_a_look_a_launch_could_change_a_machine(door, provider):
    """Where create-only is not honoured, the look before the PUT is what protects a machine."""
    await provider.launch(request("t-1"))
    with pytest.raises(TokenMismatch):
        await provider.launch(request("t-1", D4))
    provider._get = nothing
    await provider.launch(request("t-1", D4))
    assert door.vms["t-1"].size == D4.type


@scene(honours_create_only=False)
async def another_request_under_a_token_is_refused(door, provider):
    """Another pool, bid or recipe under a token in use is a mismatch, also where PUTs change."""
    await provider.launch(request("t-1"))
    for other in (request("t-1", D4), request("t-1", bid_usd_per_h=1.0)):
        with pytest.raises(TokenMismatch):
            await provider.launch(other)
    with pytest.raises(TokenMismatch):
        await provider.launch(request("by-hand"))
    assert door.vms["t-1"].size == T4.type


async def a_failed_creation_is_a_refusal_and_is_swept(door, provider):
    """The list shows `failed` with a scope; machine, disk and interface go, reserved or not."""
    await provider.launch(request("t-1"))
    door.pass_s(41)
    (machine,) = (await provider.list(PLACE)).machines
    assert machine.state == "failed"
    assert machine.refusal.code == door.vms["t-1"].failure[0]
    timed_out = machine.refusal.code == "OSProvisioningTimedOut"
    assert machine.refusal.scope == ("request" if timed_out else "pool")
    await swept(door, provider)


for seed in range(6):
    scene(seed=seed, failed=1.0)(a_failed_creation_is_a_refusal_and_is_swept)


@scene(failed=1.0, stranded=1.0, delete_s=(1, 1))
async def an_interface_that_is_reserved_is_asked_for_again(door, provider):
    """The deletion of a reserved interface is no error, and works when the reservation is over."""
    await provider.launch(request("t-1"))
    door.pass_s(41)
    await provider.end([Ref(PLACE, "t-1")])
    door.pass_s(2)
    left = (await provider.list(PLACE)).leftovers
    assert sorted(one.kind for one in left) == ["disk", "nic"]
    assert {one.token for one in left} == {"t-1"}
    await provider.end([one.ref for one in left])
    assert [line.kind for line in door.books.alive(OURS)] == ["nic"]
    door.pass_s(180)
    await swept(door, provider)


@scene()
async def a_deletion_is_asked_for_and_believed_when_the_list_says_so(door, provider):
    """A machine that is being deleted is listed as stopping, and it still costs."""
    (given,) = await provider.launch(request("t-1"))
    door.pass_s(41)
    assert await provider.end([given.ref]) == []
    assert (await listed(provider))["t-1"].state == "stopping"
    with pytest.raises(TokenSpent):
        await provider.launch(request("t-1"))
    assert [line.kind for line in door.books.alive(OURS, ["machine"])] == ["machine"]
    door.pass_s(121)
    assert await listed(provider) == {}
    (ended,) = (await provider.list(PLACE)).machines
    (line,) = [x for x in door.books.lines.values() if (x.owner, x.kind) == (OURS, "machine")]
    assert (ended.state, ended.ended_by) == ("terminated", "user")
    assert ended.ended_at_s == pytest.approx(line.ended_s, abs=1e-3)
    assert door.books.alive(OURS) == []
    assert await provider.end([given.ref]) == []


@scene(delete_failed=1.0)
async def a_deletion_that_fails_shows_a_machine_that_runs(door, provider):
    """The machine is listed again as running, not as a failed launch, and can be ended again."""
    (given,) = await provider.launch(request("t-1"))
    door.pass_s(41)
    await provider.end([given.ref])
    door.pass_s(121)
    assert (await listed(provider))["t-1"].state == "running"
    door.dials = Dials()
    await swept(door, provider)


@scene()
async def a_stopped_machine_is_seen_while_it_costs(door, provider):
    """A machine that shuts down is listed as stopped: on Azure that does not end its bill."""
    await provider.launch(request("t-1"))
    door.pass_s(41)
    door.shut_down("t-1")
    before_usd = door.bill(OURS)
    door.pass_s(3600)
    assert door.bill(OURS) - before_usd > 0.12
    assert (await listed(provider))["t-1"].state == "stopped"
    await swept(door, provider)


@scene()
async def an_evicted_machine_leaves_nothing(door, provider):
    """We ask for the policy Delete; with Azure's own the machine stays, and its disk costs."""
    assert door.plant("spot-by-hand", {}).name
    door.vms["spot-by-hand"].body["properties"]["priority"] = "Spot"
    await provider.launch(request("t-1"))
    door.pass_s(41)
    door.evict("t-1")
    door.evict("spot-by-hand")
    assert await listed(provider) == {}
    assert door.books.alive(OURS) == []
    assert door.vms["spot-by-hand"].power == "deallocated"


@scene()
async def disk_and_interface_go_with_their_machine(door, provider):
    """Ours have a delete option; those of a machine made by hand outlive it."""
    (given,) = await provider.launch(request("t-1"))
    await provider.end([given.ref])
    door._delete_vm({"name": "by-hand"}, {"origin": ""})
    door.pass_s(200)
    assert door.books.alive(OURS) == []
    assert len(door.books.alive("", ["disk", "nic"])) == 2
    assert (await provider.list(PLACE)).leftovers == ()


@scene(delete_s=(1, 1))
async def an_interface_that_only_lags_in_the_list_is_no_trouble(door, provider):
    """It is listed as left over for a minute, and ending it again is fine."""
    (given,) = await provider.launch(request("t-1"))
    door.pass_s(41)
    await provider.end([given.ref])
    door.pass_s(2)
    (left,) = (await provider.list(PLACE)).leftovers
    assert left.kind == "nic"
    assert await provider.end([left.ref]) == [left.ref]
    door.pass_s(61)
    assert (await provider.list(PLACE)).leftovers == ()


@scene()
async def what_is_foreign_is_neither_listed_nor_touched(door, provider):
    """One foreign machine or disk among those to end, and none is ended."""
    (ours,) = await provider.launch(request("t-1"))
    assert list(await listed(provider)) == ["t-1"]
    for foreign in ("web-1", "by-hand", "disk/by-hand_OsDisk_1_00000002", "nic/other"):
        with pytest.raises(NotOurs, match=DEPLOYMENT_TAG):
            await provider.end([ours.ref, Ref(PLACE, foreign)])
    assert (await listed(provider))["t-1"].state != "stopping"
    await swept(door, provider)
    assert door.books.touched(OURS) == []
    assert len(door.books.alive("theirs")) == 3


@scene(quotas={"lowPriorityCores": 4, "standardNCASv3_T4Family": 0})
async def quotas_are_shown_and_refuse_with_their_scope(door, provider):
    """All spot shares one quota, on demand has one a family and one in all; zero holds longer."""
    await provider.launch(request("t-1"))
    rooms = {(r.market, r.family): r for r in (await provider.sold(PLACE)).rooms}
    assert (rooms["spot", ""].vcpus_max, rooms["spot", ""].vcpus_used) == (4, 4)
    assert rooms["on_demand", "standardNCASv3_T4Family"].vcpus_max == 0
    with pytest.raises(Refused, match="lowPriorityCores") as spot:
        await provider.launch(request("t-2"))
    assert (spot.value.refusal.scope, spot.value.refusal.retry_s) == ("market", 600)
    with pytest.raises(Refused) as family:
        await provider.launch(request("t-3", market="on_demand"))
    assert (family.value.refusal.scope, family.value.refusal.retry_s) == ("family", 3600)


@scene(burst=2, per_s=0.1)
async def too_many_calls_are_a_pause_with_its_length(door, provider):
    """A 429 comes back at once, as the seconds that Azure asks for; nothing is sent again."""
    for _ in range(2):
        await provider._get("eastus", "nobody")
    with pytest.raises(Throttled) as paused:
        await provider._get("eastus", "nobody")
    assert paused.value.refusal.retry_s == 17


@scene()
async def a_key_that_expires_closes_the_cloud_with_one_sentence(door, provider):
    """The sentence says what to do, and nothing was started."""
    await provider.list(PLACE)
    provider._connection._credential._until_s = door.now_s + 1e9
    door.pass_s(3601)
    with pytest.raises(NotAllowed, match="sign in again"):
        await provider.launch(request("t-1"))
    assert door.books.alive(OURS) == []


@scene()
async def a_missing_permission_is_named(door, provider):
    """The role that lacks a permission is one sentence with the permission's name."""
    door.allowed = lambda action: action != "Microsoft.Network/networkInterfaces/join/action"
    with pytest.raises(NotAllowed, match=r"networkInterfaces/join/action.*role\.json"):
        await provider.launch(request("t-1"))
    assert door.books.alive(OURS) == []


@scene(page=2)
async def a_long_list_is_read_to_its_end(door, provider):
    """Machines after the first page are listed, and the price list is read to its last page."""
    for nth in range(5):
        await provider.launch(request(f"t-{nth}"))
    assert len(await listed(provider)) == 5
    shown = door._get_vms({}, {"api-version": "1", "origin": "http://x"}).body
    assert len(shown["value"]) == 2
    assert shown["nextLink"]


@scene(page=1)
@scene(page=1, settings=replace(SETTINGS, prices_endpoint=PRICES))
async def prices_are_asked_for_as_azure_writes_them(door, provider):
    """Every pool that is sold has a spot and an on-demand price, never that of Windows."""
    sold = await provider.sold(PLACE)
    quotes = await provider.quotes(PLACE)
    assert {quote.pool for quote in quotes} == set(sold.pools)
    assert {pool.type for pool in sold.pools} == {kind.name for kind in sold.types}
    prices = {(q.pool.type, q.market): q.price_usd_per_h for q in quotes}
    assert prices[T4.type, "spot"] == 0.12
    assert prices[T4.type, "on_demand"] == 0.526
    wrong = offers.price_filter("EastUS", T4.type)
    assert provider._connection.prices(wrong) == []


@scene()
async def a_maximum_price_refuses_and_evicts(door, provider):
    """A bid below the price buys nothing, and a price above the bid takes the machine."""
    with pytest.raises(Refused, match="USD/h") as refused:
        await provider.launch(request("t-1", bid_usd_per_h=0.01))
    assert refused.value.refusal.scope == "pool"
    await provider.launch(request("t-2", bid_usd_per_h=0.2))
    door.pass_s(41)
    door.reprice(T4.type, 0.3)
    assert await listed(provider) == {}


@scene()
async def a_bid_of_the_price_itself_buys(door, provider):
    """Azure's prices have six decimals, and it cuts a bid to five, which then is below the price."""
    door.reprice(T4.type, 0.032077)
    await provider.launch(request("t-1", bid_usd_per_h=0.032077))


@scene()
async def a_part_that_a_machine_uses_again_is_ended_later(door, provider):
    """Azure says so in two ways, and neither is a reason to stop buying there."""
    await provider.launch(request("t-1"))
    vm = door.vms["t-1"]
    assert await provider.end([Ref(PLACE, f"disk/{vm.disk}"), Ref(PLACE, f"nic/{vm.nic}")]) == []


@scene()
async def a_catalogue_knows_what_this_account_may_have(door, provider):
    """Sizes that a zone or a region restricts are not offered there; a region may have no zones."""
    east = await provider.sold(PLACE)
    assert {p.zone for p in east.pools if p.type == T4.type} == {"eastus-1", "eastus-2"}
    kind = next(x for x in east.types if x.name == T4.type)
    assert (kind.slots, kind.accelerator, kind.vcpus) == (1, "T4", 4)
    north = await provider.sold(Place("azure", "northcentralus"))
    assert {p.zone for p in north.pools} == {"northcentralus"}
    assert "Standard_NC24ads_A100_v4" not in {p.type for p in north.pools}
    assert "Standard_B2s" not in {x.name for x in east.types}


@scene(quotas={"lowPriorityCores": 8})
async def a_gang_is_bought_whole_or_not_at_all(door, provider):
    """With room for two of three, the refusal comes back and nothing stays."""
    with pytest.raises(Refused):
        await provider.launch(request("t-1", count=3))
    door.pass_s(121)
    assert door.books.alive(OURS) == []
    made = await provider.launch(request("t-2", count=2))
    assert [(x.id, x.token, x.index) for x in made] == [
        ("t-2-0", "t-2", 0),
        ("t-2-1", "t-2", 1),
    ]


@scene(create_s=(10, 10), delete_s=(60, 60))
async def the_bill_is_the_time_that_machines_ran(door, provider):
    """An hour of one spot machine and its disk costs what the books say, to the cent."""
    (given,) = await provider.launch(request("t-1"))
    door.pass_s(10)
    door.pass_s(3600 - 60)
    await provider.end([given.ref])
    door.pass_s(61)
    assert door.books.alive(OURS) == []
    assert door.bill(OURS) == pytest.approx(0.12 + 0.006 * 3610 / 3600)


@scene()
async def a_recipe_that_changed_is_refused(door, provider):
    """New settings are a new recipe; a request with the earlier one never makes another machine."""
    recipe = (await provider.sold(PLACE)).recipe.digest
    await provider.launch(request("t-1", recipe=recipe))
    newer = provider_of(door, replace(SETTINGS, disk_gb=128))
    with pytest.raises(Refused, match="no longer"):
        await newer.launch(request("t-2", recipe=recipe))
    await newer.close()


@scene(settings=replace(SETTINGS, subnets={"eastus": SETTINGS.subnets["eastus"]}))
async def places_say_what_closes_them(door, provider):
    """A region without a subnet is closed with one sentence; the other one is open."""
    opened, closed = await provider.places()
    assert opened == PLACE
    assert isinstance(closed, Closed)
    assert "northcentralus" in closed.because


@scene()
async def a_machine_made_by_hand_sends_no_options(door, provider):
    """The door takes what the portal sends, so that foreign machines are real ones."""
    token, _ = door.new_token()
    url = (
        f"http://x/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/"
        "Microsoft.Compute/virtualMachines/mine?api-version=1"
    )
    body = json.dumps(vm_body("mine")).encode()
    answer = door.call("PUT", url, {"Authorization": f"Bearer {token}"}, body)
    assert answer.status == 201
    assert answer.headers["Azure-AsyncOperation"]
