"""What AWS as a provider promises, in front of an EC2 that behaves as badly as the real one."""

import asyncio
import re

import pytest
from aws_house import (
    BEGIN_S,
    BIG,
    EAST,
    FAR,
    GPU,
    OTHER_ZONE,
    OURS,
    WEST,
    AwsHouse,
    request,
)
from cloudfake.ec2 import Key
from cloudfake.ec2_account import Dials
from msgspec.structs import replace

from cloud.aws.provider import AwsProvider
from cloud.errors import (
    Misconfigured,
    NotAllowed,
    NotOurs,
    Refused,
    TokenMismatch,
    TokenSpent,
    Unknown,
)
from cloud.model import DEPLOYMENT_TAG, Closed, Leftover, Machine, Place, Ref


@pytest.fixture
def house() -> AwsHouse:
    return AwsHouse(Dials(startup_s=10.0))


async def listed(provider: AwsProvider, place: Place = EAST) -> dict[str, Machine]:
    return {machine.id: machine for machine in (await provider.list(place)).machines}


def test_what_is_sold_has_sizes_prices_quotas_and_a_recipe(house: AwsHouse):
    """Types carry their GPUs, pools are the zones with a subnet, quotas count foreign machines too."""
    house.account.quota["g", "spot"] = 64

    async def scene(provider: AwsProvider):
        await provider.launch(request("t-1"))
        return await provider.sold(EAST), await provider.quotes(EAST)

    sold, quotes = house.play(scene)
    kinds = {kind.name: kind for kind in sold.types}
    assert set(kinds) == {"g5.xlarge", "g5.12xlarge", "m7i.xlarge"}
    big = kinds["g5.12xlarge"]
    assert (big.slots, big.accelerator, big.accelerators, big.vcpus) == (4, "a10g", 4, 48)
    assert big.network_bytes_per_s == 5e9
    assert (big.family, kinds["m7i.xlarge"].family) == ("g", "standard")
    assert {pool.zone for pool in sold.pools} == {"us-east-1a", "us-east-1b"}
    (room,) = [x for x in sold.rooms if (x.family, x.market) == ("g", "spot")]
    assert (room.vcpus_max, room.vcpus_used) == (64, 4)
    assert sold.recipe.parts["root_device"] == "/dev/xvda"
    assert {(q.pool, q.market) for q in quotes} == {
        (pool, market) for pool in sold.pools for market in ("spot", "on_demand")
    }
    on_demand = {q.pool.type: q.price_usd_per_h for q in quotes if q.market == "on_demand"}
    assert on_demand["g5.xlarge"] == 1.006


def test_a_price_that_has_not_changed_for_days_is_quoted(house: AwsHouse):
    """The window begins now, and the change before it is the price in force; Windows is dearer."""
    house.account.reprice("us-east-1a", "g5.xlarge", 0.41, BEGIN_S - 86_400)
    house.account.reprice("us-east-1a", "g5.xlarge", 0.99, BEGIN_S + 60)

    async def scene(provider: AwsProvider):
        return await provider.quotes(EAST)

    quotes = {q.pool: q for q in house.play(scene) if q.market == "spot"}
    assert (quotes[GPU].price_usd_per_h, quotes[GPU].at_s) == (0.41, BEGIN_S - 86_400)


def test_a_gang_starts_whole_in_one_call_and_is_listed_with_its_indexes(house: AwsHouse):
    """Eight machines of one request are one call, one token, indexes 0..7, and ours from the start."""

    async def scene(provider: AwsProvider):
        given = await provider.launch(request("t-1", count=8))
        house.wait(30)
        return given, await listed(provider)

    given, found = house.play(scene)
    assert house.door.calls["RunInstances"] == 1
    assert [machine.index for machine in given] == list(range(8))
    assert set(found) == {machine.id for machine in given}
    for machine in found.values():
        assert (machine.token, machine.state, machine.market) == ("t-1", "running", "spot")
        assert machine.tags == {DEPLOYMENT_TAG: OURS, "orchestrator-job": "j-1"}
        assert machine.pool == GPU
        assert machine.address.startswith("10.")


def test_a_gang_that_has_no_room_starts_nothing(house: AwsHouse):
    """Nine of eight are refused for this market of this pool, and none is running."""

    async def scene(provider: AwsProvider):
        with pytest.raises(Refused) as no:
            await provider.launch(request("t-1", count=9))
        await provider.launch(request("t-2", market="on_demand"))
        return no.value.refusal

    refusal = house.play(scene)
    assert (refusal.scope, refusal.code) == ("pool", "InsufficientInstanceCapacity")
    assert refusal.retry_s == 180
    assert house.door.calls["RunInstances"] == 2
    assert len(house.account.books.alive(OURS, ["machine"])) == 1


def test_the_same_token_at_once_is_one_machine(house: AwsHouse):
    async def scene(provider: AwsProvider):
        await provider.launch(request("t-0"))
        given = await asyncio.gather(*(provider.launch(request("t-1")) for _ in range(10)))
        return {machine.id for machines in given for machine in machines}

    assert len(house.play(scene)) == 1
    assert not house.account.books.bought_twice()


def test_a_token_stands_for_one_request_and_one_life(house: AwsHouse):
    """Another size under a token is a mismatch; a token whose machine has ended is spent."""

    async def scene(provider: AwsProvider):
        (machine,) = await provider.launch(request("t-1"))
        with pytest.raises(TokenMismatch):
            await provider.launch(request("t-1", BIG))
        with pytest.raises(TokenMismatch):
            await provider.launch(request("t-1", bid=1.0))
        await provider.end([machine.ref])
        with pytest.raises(TokenSpent):
            await provider.launch(request("t-1"))

    house.play(scene)
    assert not house.account.books.alive(OURS, ["machine"])


def test_a_refused_launch_binds_its_token(house: AwsHouse):
    """EC2 remembers a refused request; the same one may be tried again, and another one may not."""
    house.account.room["us-east-1a", "g5.xlarge", "spot"] = 0

    async def scene(provider: AwsProvider):
        with pytest.raises(Refused):
            await provider.launch(request("t-1"))
        with pytest.raises(TokenMismatch):
            await provider.launch(request("t-1", bid=0.9))
        house.account.room["us-east-1a", "g5.xlarge", "spot"] = 1
        await provider.launch(request("t-1"))

    house.play(scene)


def test_everything_of_a_launch_carries_our_tags_and_goes_with_its_machine(house: AwsHouse):
    """Disk, network interface and spot request: tagged in the call, no public address, none left."""

    async def scene(provider: AwsProvider):
        (machine,) = await provider.launch(request("t-1"))
        lines = house.account.books.alive(OURS)
        assert sorted(line.kind for line in lines) == ["disk", "machine", "nic"]
        (spot,) = house.account.spot_requests.values()
        assert spot.tags[DEPLOYMENT_TAG] == OURS
        (nic,) = [line for line in lines if line.kind == "nic"]
        assert nic.usd(BEGIN_S + 3600) == 0
        x = house.account.instances[machine.id]
        assert x.request["MetadataOptions"]["HttpTokens"] == "required"
        assert await provider.end([machine.ref]) == [machine.ref]
        house.wait(60)

    house.play(scene)
    assert not house.account.books.alive(OURS)


def test_a_machine_that_shuts_itself_down_ends_its_bill(house: AwsHouse):
    """The launch says terminate, because EC2's own choice is to stop and keep the disk's bill."""

    async def scene(provider: AwsProvider):
        (machine,) = await provider.launch(request("t-1"))
        house.wait(30)
        house.account.shut_down(machine.id, house.clock.now_s())
        house.wait(60)
        found = (await listed(provider))[machine.id]
        assert (found.state, found.ended_by) == ("terminated", "user")

    house.play(scene)
    assert not house.account.books.alive(OURS)


def test_a_machine_that_was_taken_tells_when_and_by_whom(house: AwsHouse):
    """EC2 says the time of an interruption in the spot request only; ours is the text's time."""

    async def scene(provider: AwsProvider):
        given = await provider.launch(request("t-1", count=2))
        house.wait(30)
        house.account.interrupt(given[0].id, house.clock.now_s(), 120.0)
        await provider.end([given[1].ref])
        house.wait(200)
        found = await listed(provider)
        return [found[machine.id] for machine in given]

    taken, ours = house.play(scene)
    assert (taken.state, taken.ended_by, taken.ended_at_s) == (
        "terminated",
        "provider",
        BEGIN_S + 150,
    )
    assert (ours.state, ours.ended_by, ours.ended_at_s) == ("terminated", "user", BEGIN_S + 30)
    bill = house.account.books.bill(house.clock.now_s(), OURS)
    assert bill[taken.id] == 0


def test_a_launch_that_fails_after_its_answer_is_failed_and_costs_nothing():
    """pending → terminated with a reason is no preemption: it says what the refusal would have said."""
    house = AwsHouse(Dials(fails_after_share=1.0))

    async def scene(provider: AwsProvider):
        given = await provider.launch(request("t-1", count=2))
        assert [machine.state for machine in given] == ["pending", "pending"]
        house.wait(60)
        return sorted((await listed(provider)).values(), key=lambda machine: machine.index)

    first, second = house.play(scene)
    assert (first.state, first.gone, second.state) == ("failed", True, "failed")
    assert (first.refusal.scope, first.refusal.code) == (
        "pool",
        "Server.InsufficientInstanceCapacity",
    )
    assert second.refusal.code == "Client.VolumeLimitExceeded"
    assert sum(house.account.books.bill(house.clock.now_s(), OURS).values()) < 0.001
    assert not house.account.books.alive(OURS)


@pytest.mark.parametrize(
    ("code", "scope"),
    [("Client.InvalidKMSKey.InvalidState", "place"), ("Client.InternalError", "pool")],
)
def test_a_disk_whose_key_is_not_ours_to_use_is_a_refusal_that_says_so(code: str, scope: str):
    """Accounts encrypt all disks by a key of theirs; taken for an end by hand, it was tried for ever."""
    house = AwsHouse()

    async def scene(provider: AwsProvider):
        (given,) = await provider.launch(request("t-1"))
        house.account.fail(house.account.instances[given.id], house.clock.now_s(), code)
        return (await listed(provider))[given.id]

    machine = house.play(scene)
    assert (machine.state, machine.refusal.scope) == ("failed", scope)
    assert "kms:CreateGrant" in machine.refusal.said


def test_machines_of_others_are_neither_listed_nor_touched(house: AwsHouse):
    """Another deployment's, untagged, hand-made under our tag: one of them keeps all from ending."""
    ec2 = house.session.client("ec2", region_name="us-east-1")
    copied = [
        {"Key": DEPLOYMENT_TAG, "Value": OURS},
        {"Key": "orchestrator-token", "Value": "t-1"},
    ]

    def by_hand(tags: list[dict[str, str]]) -> str:
        marks = [{"ResourceType": "instance", "Tags": tags}] if tags else []
        told = ec2.run_instances(
            ImageId="ami-us-east-1",
            InstanceType="g5.xlarge",
            MinCount=1,
            MaxCount=1,
            TagSpecifications=marks,
        )
        return str(told["Instances"][0]["InstanceId"])

    async def scene(provider: AwsProvider):
        (ours,) = await provider.launch(request("t-1"))
        (theirs,) = await provider.launch(request("t-2", tags={DEPLOYMENT_TAG: "theirs"}))
        foreign = [theirs.id, by_hand([]), by_hand(copied), by_hand(copied[:1])]
        assert set(await listed(provider)) == {ours.id}
        for name in foreign:
            with pytest.raises(NotOurs, match=DEPLOYMENT_TAG):
                await provider.end([ours.ref, Ref(EAST, name)])
        assert await provider.end([Ref(EAST, "i-0123456789abcdef0")]) == []
        assert (await listed(provider))[ours.id].state == "pending"

    house.play(scene)
    assert not house.account.books.touched(OURS)


def test_a_young_machine_is_left_out_and_its_end_is_asked_again():
    """For ten seconds a new id is not found: nothing is ended, nothing is lost, and later it goes."""
    house = AwsHouse(Dials(young_s=10.0, lag_s=20.0))

    async def scene(provider: AwsProvider):
        (machine,) = await provider.launch(request("t-1"))
        assert await listed(provider) == {}
        assert await provider.end([machine.ref]) == []
        house.wait(11)
        assert (await listed(provider))[machine.id].state == "pending"
        assert await provider.end([machine.ref]) == [machine.ref]
        assert await provider.end([machine.ref]) == [machine.ref]

    house.play(scene)


def test_a_list_of_many_pages_is_whole_or_an_error(house: AwsHouse):
    """Short pages make one list; a page that fails or says something else makes none."""
    house.account.dials.page = 3
    house.account.usual_room = 100

    async def scene(provider: AwsProvider):
        await provider.launch(request("t-1", count=20))
        assert len(await listed(provider)) == 20
        for wrong in (
            "before",
            "broken",
            "garbled0",
            "garbled1",
            "garbled2",
            "garbled3",
            "throttle",
        ):
            first = house.door.calls["DescribeInstances"]
            house.door.fault = lambda action, nth, first=first, wrong=wrong: (
                wrong if action == "DescribeInstances" and nth == first + 4 else None
            )
            with pytest.raises((Unknown, Refused)):
                await provider.list(EAST)

    house.play(scene)


def test_regions_are_apart(house: AwsHouse):
    """A silent region is no list of nothing, and the others answer as before."""

    async def scene(provider: AwsProvider):
        (near,) = await provider.launch(request("t-1"))
        (far,) = await provider.launch(request("t-1", FAR))
        house.door.silent = {"us-west-2"}
        with pytest.raises(Unknown, match="us-west-2"):
            await provider.list(WEST)
        with pytest.raises(Unknown):
            await provider.end([near.ref, far.ref])
        assert set(await listed(provider)) == {near.id}
        assert await provider.places() == [EAST, WEST]
        house.door.silent = set()
        assert set(await listed(provider, WEST)) == {far.id}

    house.play(scene)


def test_a_token_holds_for_one_zone(house: AwsHouse):
    """EC2 starts a second machine under the same token in another zone; both are listed."""

    async def scene(provider: AwsProvider):
        await provider.launch(request("t-1"))
        await provider.launch(request("t-1", OTHER_ZONE))
        return await listed(provider)

    assert len(house.play(scene)) == 2
    assert house.account.books.bought_twice() == ["t-1"]


def test_what_outlived_its_machine_is_listed_and_ended(house: AwsHouse):
    """Disks, network interfaces and open spot requests of ours are leftovers; those of others not."""
    ec2 = house.session.client("ec2", region_name="us-east-1")

    def leave(owner: str) -> None:
        tags = [
            {"Key": DEPLOYMENT_TAG, "Value": owner},
            {"Key": "orchestrator-token", "Value": "t-9"},
        ]
        kinds = ("instance", "volume", "network-interface", "spot-instances-request")
        told = ec2.run_instances(
            ImageId="ami-us-east-1",
            InstanceType="g5.xlarge",
            MinCount=1,
            MaxCount=1,
            InstanceMarketOptions={"MarketType": "spot"},
            BlockDeviceMappings=[{"DeviceName": "/dev/sdf", "Ebs": {"VolumeSize": 100}}],
            NetworkInterfaces=[
                {"DeviceIndex": 0, "SubnetId": "subnet-us-east-1a", "DeleteOnTermination": False}
            ],
            TagSpecifications=[{"ResourceType": kind, "Tags": tags} for kind in kinds],
        )
        ec2.terminate_instances(InstanceIds=[told["Instances"][0]["InstanceId"]])

    leave(OURS)
    leave("theirs")
    house.wait(60)
    spot = next(iter(house.account.spot_requests.values()))
    spot.state = "open"

    async def scene(provider: AwsProvider):
        found: tuple[Leftover, ...] = (await provider.list(EAST)).leftovers
        assert sorted(x.kind for x in found) == ["disk", "nic", "spot_request"]
        assert {x.token for x in found} == {"t-9"}
        assert sorted(await provider.end([x.ref for x in found])) == sorted(x.ref for x in found)
        assert (await provider.list(EAST)).leftovers == ()
        theirs = house.account.books.alive("theirs", ["disk"])
        with pytest.raises(NotOurs):
            await provider.end([Ref(EAST, theirs[0].id)])

    house.play(scene)
    assert not house.account.books.alive(OURS)
    assert len(house.account.books.alive("theirs", ["disk", "nic"])) == 2
    assert spot.state == "cancelled"


def test_a_quota_that_was_never_raised_counts_with_its_default_value(house: AwsHouse):
    """AWS lists only what was applied to the account, and defaults apart; what was applied holds."""
    house.account.default_quota |= {("g", "spot"): 8, ("g", "on-demand"): 0, ("c", "spot"): 5}
    house.account.quota["c", "spot"] = 32

    sold = house.play(lambda provider: provider.sold(EAST))
    rooms = {(x.family, x.market): x.vcpus_max for x in sold.rooms}
    assert len(rooms) == len(sold.rooms)
    assert rooms["g", "spot"] == 8
    assert rooms["g", "on_demand"] == 0
    assert rooms["standard", "spot"] == 32


def test_a_stopped_machine_takes_nothing_of_a_quota(house: AwsHouse):
    """A person's large machine that is stopped for months would have closed the market to us."""

    async def scene(provider: AwsProvider):
        (machine,) = await provider.launch(request("t-1", market="on_demand"))
        used = [max(room.vcpus_used for room in (await provider.sold(EAST)).rooms)]
        x = house.account.instances[machine.id]
        house.account.move(x, house.clock.now_s(), "stopped", "Client.UserInitiatedShutdown")
        return [*used, max(room.vcpus_used for room in (await provider.sold(EAST)).rooms)]

    assert house.play(scene) == [4, 0]


def test_a_stopped_machine_is_seen_as_one_that_costs(house: AwsHouse):
    async def scene(provider: AwsProvider):
        (machine,) = await provider.launch(request("t-1"))
        house.wait(30)
        x = house.account.instances[machine.id]
        house.account.move(x, house.clock.now_s(), "stopped", "Client.InstanceInitiatedShutdown")
        found = (await listed(provider))[machine.id]
        assert (found.state, found.gone) == ("stopped", False)
        assert await provider.end([machine.ref]) == [machine.ref]

    house.play(scene)


@pytest.mark.parametrize(
    ("scope", "code", "spoil"),
    [
        ("family", "MaxSpotInstanceCountExceeded", lambda a: a.quota.update({("g", "spot"): 3})),
        (
            "zone",
            "InsufficientFreeAddressesInSubnet",
            lambda a: a.free_addresses.update({"subnet-us-east-1a": 0}),
        ),
        ("pool", "Unsupported", lambda a: a.room.update({("us-east-1a", "g5.xlarge", "sold"): 0})),
        (
            "pool",
            "SpotMaxPriceTooLow",
            lambda a: a.prices.update({("us-east-1a", "g5.xlarge"): [(0.0, 9.0)]}),
        ),
    ],
)
def test_a_refusal_says_how_far_it_reaches(house: AwsHouse, scope: str, code: str, spoil):
    async def scene(provider: AwsProvider):
        spoil(house.account)
        with pytest.raises(Refused) as no:
            await provider.launch(request("t-1", bid=1.0))
        return no.value.refusal

    refusal = house.play(scene)
    assert (refusal.scope, refusal.code) == (scope, code)
    assert not house.account.books.lines


def test_what_can_never_work_is_said_in_one_sentence(house: AwsHouse):
    """An image that is gone, a subnet that is gone, a role that is gone: what to correct is named."""

    async def scene(provider: AwsProvider):
        await provider.sold(EAST)
        del house.account.subnets["subnet-us-east-1a"]
        with pytest.raises(Misconfigured, match=r"correct aws\.subnets"):
            await provider.launch(request("t-1"))
        house.account.profiles.clear()
        with pytest.raises(Misconfigured, match="IAM Instance Profile"):
            await provider.launch(request("t-2", OTHER_ZONE))
        house.account.images_hidden.update(house.account.images)
        with pytest.raises(Misconfigured, match=r"no image ami-us-east-1 .*set aws\.images"):
            await provider.sold(EAST)
        house.account.images.clear()
        with pytest.raises(Misconfigured, match=r"set aws\.images"):
            await provider.sold(EAST)

    house.play(scene)


def test_keys_close_a_place_with_one_sentence(house: AwsHouse):
    """Unknown, wrong and expired keys, and a clock that is off: each named, with what to do."""
    right = house.door.keys[house.key_id]

    async def scene(provider: AwsProvider):
        assert await provider.places() == [EAST, WEST]
        house.door.keys[house.key_id] = Key(secret="other")
        closed = (await provider.places())[0]
        assert isinstance(closed, Closed)
        assert "secret key or the clock is wrong" in closed.because
        house.door.keys[house.key_id] = Key(secret="secret", expires_s=BEGIN_S + 1)
        assert await provider.places() == [EAST, WEST]
        house.wait(2)
        assert "get new ones" in (await provider.places())[0].because
        with pytest.raises(NotAllowed, match="expired"):
            await provider.launch(request("t-1"))
        house.door.keys.clear()
        assert "check the keys" in (await provider.places())[0].because
        house.door.keys[house.key_id] = right
        house.door.clock_off_s = -600.0
        assert re.search(r"clock is off by \+(599|600|601) s", (await provider.places())[0].because)

    house.play(scene)


def test_a_recipe_of_other_settings_is_refused(house: AwsHouse):
    """A launch that was journalled under other settings is never made from these."""

    async def scene(provider: AwsProvider):
        sold = await provider.sold(EAST)
        await provider.launch(replace(request("t-1"), recipe=sold.recipe.digest))
        with pytest.raises(Refused, match="other settings"):
            await provider.launch(replace(request("t-2"), recipe="0123456789abcdef"))

    house.play(scene)


def test_an_image_by_its_parameter_is_pinned(house: AwsHouse):
    """What the parameter names today is part of the recipe, so that it cannot change in between."""
    settings = house_settings_with_parameter()

    async def scene(provider: AwsProvider):
        return (await provider.sold(EAST)).recipe

    assert house.play(scene, settings=settings).parts["image"] == "ami-us-east-1"


def house_settings_with_parameter():
    from aws_house import SETTINGS

    regions = tuple(replace(region, image="/team/image") for region in SETTINGS.regions)
    return replace(SETTINGS, regions=regions)


def test_what_is_not_sold_is_refused_by_name(house: AwsHouse):
    async def scene(provider: AwsProvider):
        with pytest.raises(Refused, match=r"aws/eu-west-1a/g5\.xlarge"):
            await provider.launch(
                request("t-1", replace(GPU, region="eu-west-1", zone="eu-west-1a"))
            )
        with pytest.raises(Refused, match=r"aws/us-east-1f/g5\.xlarge"):
            await provider.launch(request("t-1", replace(GPU, zone="us-east-1f")))

    house.play(scene)
    assert not house.door.calls


@pytest.mark.parametrize("listed", [True, False])
def test_notices_come_from_the_queue_for_our_machines_only(house: AwsHouse, listed: bool):
    """A foreign machine's event and a broken one are taken off the queue and say nothing.

    A manager that has just been started has seen no list when it hears the first one.
    """
    from aws_house import SETTINGS

    url = "https://sqs.us-east-1.amazonaws.com/111122223333/interruptions"

    async def scene(provider: AwsProvider):
        given = await provider.launch(request("t-1", count=2))
        (theirs,) = await provider.launch(request("t-2", tags={DEPLOYMENT_TAG: "theirs"}))
        if listed:
            await provider.list(EAST)
        house.wait(30)
        house.account.queue.append({"id": "event-0", "detail-type": "nonsense"})
        for machine in (theirs, given[0], given[1]):
            house.account.interrupt(machine.id, house.clock.now_s(), 120.0)
        notices = provider.notices()
        found = [await anext(notices) for _ in given]
        await notices.aclose()
        return given, found

    given, found = house.play(scene, settings=replace(SETTINGS, queue_url=url))
    assert [notice.machine_id for notice in found] == [machine.id for machine in given]
    assert {notice.deadline_s for notice in found} == {BEGIN_S + 150}
    assert len(house.account.queue) == 1


def test_sixty_four_machines_of_a_pool_are_one_call():
    """All or none, whatever else is asked of EC2 for them: two calls at most."""
    house = AwsHouse(room=64)

    async def scene(provider: AwsProvider) -> None:
        await provider.sold(EAST)
        before = house.door.calls.total()
        machines = await provider.launch(request("t-64", count=64))
        assert [machine.index for machine in machines] == list(range(64))
        assert house.door.calls.total() - before <= 2
        assert house.door.calls["RunInstances"] == 1

    house.play(scene)
