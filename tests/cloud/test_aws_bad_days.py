"""Days on which an account is large, slow, or somebody else's, and the way over a real socket."""

import asyncio
from pathlib import Path

import boto3
import pytest
from aws_house import EAST, FAR, OURS, SETTINGS, AwsHouse, request
from cloudfake.ec2 import Key, served
from cloudfake.ec2_account import Dials
from msgspec.structs import replace

from cloud.aws.calls import Calls
from cloud.aws.provider import AwsProvider
from cloud.errors import Misconfigured, NotAllowed, Refused, Throttled, Unknown
from cloud.model import DEPLOYMENT_TAG, Ref


def test_the_way_over_a_socket_is_the_same():
    """By `endpoint_url`: launch, list, end, and a connection that breaks after the purchase."""
    house = AwsHouse()
    house.door.keys["AKIDSOCKET"] = Key(secret="other")

    async def scene(provider: AwsProvider) -> None:
        assert await provider.places() == [EAST]
        (machine,) = await provider.launch(request("t-1"))
        house.door.fault = lambda action, nth: "after" if action == "RunInstances" else None
        with pytest.raises(Unknown, match="the list will tell"):
            await provider.launch(request("t-2"))
        listing = await provider.list(EAST)
        assert {x.token for x in listing.machines} == {"t-1", "t-2"}
        refs = [x.ref for x in listing.machines]
        assert machine.ref in refs
        assert sorted(await provider.end(refs)) == sorted(refs)

    with served(house.door) as url:
        session = boto3.Session(aws_access_key_id="AKIDSOCKET", aws_secret_access_key="other")
        settings = replace(SETTINGS, regions=SETTINGS.regions[:1], endpoint_url=url)
        house.play(scene, calls=Calls(url, new_session=lambda: session), settings=settings)
    house.wait(60)
    assert house.account.books.alive(OURS) == []


def test_keys_that_come_late_and_keys_that_are_renewed_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """boto3 keeps what it has found first, also that there was nothing: AWS stayed closed for good."""
    house, file = AwsHouse(), tmp_path / "credentials"
    house.door.keys["AKIDOLD"] = Key(secret="other", expires_s=0.0)
    house.door.keys["AKIDNEW"] = Key(secret="other")
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    async def scene(provider: AwsProvider) -> None:
        for key, why in (("", "NoCredentialsError"), ("AKIDOLD", "expired"), ("AKIDNEW", "")):
            if key:
                keys = f"aws_access_key_id={key}\naws_secret_access_key=other"
                file.write_text(f"[default]\n{keys}\n")
            (found,) = await provider.places()
            assert found == EAST if not why else why in found.because

    with served(house.door) as url:
        settings = replace(SETTINGS, regions=SETTINGS.regions[:1], endpoint_url=url)
        house.play(scene, calls=Calls(url), settings=settings)


def test_thousands_of_foreign_machines_are_no_work_and_no_danger():
    """The list asks AWS for ours only, so it is one call; looking at quotas reads them all."""
    house = AwsHouse(room=20_000)
    house.account.dials.machines_burst = 1e9
    house.account.dials.page = 500
    ec2 = house.session.client("ec2", region_name="us-east-1")
    for zone in ("us-east-1a", "us-east-1b"):
        house.account.free_addresses[f"subnet-{zone}"] = 9000
    for nth in range(2):
        ec2.run_instances(
            ImageId="ami-us-east-1",
            InstanceType="m7i.xlarge",
            MinCount=1000,
            MaxCount=1000,
            SubnetId=f"subnet-us-east-1{'ab'[nth]}",
        )

    async def scene(provider: AwsProvider):
        (ours,) = await provider.launch(request("t-1"))
        before = house.door.calls["DescribeInstances"]
        listing = await provider.list(EAST)
        assert [x.id for x in listing.machines] == [ours.id]
        assert house.door.calls["DescribeInstances"] == before + 1
        return await provider.sold(EAST)

    sold = house.play(scene)
    (room,) = [x for x in sold.rooms if (x.family, x.market) == ("standard", "on_demand")]
    assert room.vcpus_used == 8_000


def test_keys_that_expire_in_the_middle_of_a_list_lose_no_machine():
    """The second page is refused, so there is no list: nothing is missing and nothing is ended."""
    house = AwsHouse(Dials(page=2), room=20)
    key = house.door.keys[house.key_id]

    def fault(action: str, nth: int) -> str | None:
        if action == "DescribeInstances" and nth % 2 == 0:
            house.door.keys[house.key_id] = replace(key, expires_s=house.clock.now_s() - 1)
        return None

    async def scene(provider: AwsProvider) -> None:
        for nth in range(5):
            await provider.launch(request(f"t-{nth}"))
        house.door.fault = fault
        with pytest.raises(NotAllowed, match=r"RequestExpired.*keys have expired"):
            await provider.list(EAST)
        house.door.fault = lambda action, nth: None
        house.door.keys[house.key_id] = key
        assert len((await provider.list(EAST)).machines) == 5

    house.play(scene)
    assert not house.account.books.bought_twice()


def test_an_answer_of_ten_megabytes_is_read_and_its_sentence_is_short():
    """An error's text may be anything; what a person reads of it is one line."""
    house = AwsHouse()
    house.account.image_says["ami-us-east-1"] = {"Name": "x" * 10_000_000}
    house.account.quota["g", "spot"] = 0

    async def scene(provider: AwsProvider) -> None:
        assert (await provider.sold(EAST)).pools
        house.account.images.clear()
        huge = replace(SETTINGS.regions[0], image="ami-" + "y" * 10_000_000)
        other = house.provider(settings=replace(SETTINGS, regions=(huge,)))
        with pytest.raises(Misconfigured) as refused:
            await other.sold(EAST)
        assert len(str(refused.value)) < 1000
        assert "\n" not in str(refused.value)

    house.play(scene)


def test_both_throttles_are_a_definite_no_with_a_time():
    """EC2 counts requests and, apart from them, machines; neither refusal has started anything."""
    house = AwsHouse(Dials(mutate_burst=3, mutate_per_s=1), room=100)

    async def scene(provider: AwsProvider) -> None:
        for nth in range(3):
            await provider.launch(request(f"t-{nth}"))
        with pytest.raises(Throttled) as no:
            await provider.launch(request("t-3"))
        assert (no.value.refusal.scope, no.value.refusal.retry_s) == ("place", 5.0)
        await provider.launch(request("t-far", FAR))  # each region counts for itself
        house.wait(5)
        house.door._buckets.clear()
        house.account.dials.machines_burst = 8
        await provider.launch(request("t-4", count=8))
        with pytest.raises(Throttled):
            await provider.launch(request("t-5", count=2))
        house.wait(1)
        await provider.launch(request("t-5", count=2))

    house.play(scene)
    assert len(house.account.books.alive(OURS, ["machine"])) == 14


def test_two_deployments_of_one_name_see_each_other_but_own_tokens():
    """With one tag two managers list each other's machines; only the name can keep them apart."""
    house = AwsHouse()

    async def scene(provider: AwsProvider) -> None:
        await provider.launch(request("t-1"))
        other = AwsProvider(SETTINGS, "other", house.calls, house.clock)
        assert (await other.list(EAST)).machines == ()
        await other.launch(request("t-1", tags={DEPLOYMENT_TAG: "other"}, market="on_demand"))

    with pytest.raises(Refused, match="IdempotentParameterMismatch"):
        house.play(scene)


def test_a_slow_region_holds_up_no_other():
    """Each region has threads to itself: calls that hang in one are not waited for in another."""
    house = AwsHouse()
    calls = house.calls

    async def scene(provider: AwsProvider) -> None:
        await provider.list(EAST)
        release = asyncio.Event()
        loop = asyncio.get_running_loop()
        west = calls._executors.setdefault("us-west-2", type(calls._executors["us-east-1"])(4))
        hung = [
            loop.run_in_executor(
                west, lambda: asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
            )
            for _ in range(8)
        ]
        for _ in range(3):
            await provider.list(EAST)
        assert not any(one.done() for one in hung)
        release.set()
        await asyncio.gather(*hung)

    house.play(scene)


def test_a_bill_follows_every_price_and_ends_with_the_machine():
    """What the books of the fake say is what EC2 would: running time at the price of each moment."""
    house = AwsHouse(Dials(startup_s=0.0))

    async def scene(provider: AwsProvider) -> str:
        (machine,) = await provider.launch(request("t-1"))
        house.wait(0)
        house.wait(1800)
        house.account.reprice("us-east-1a", "g5.xlarge", 0.5, house.clock.now_s())
        house.wait(1800)
        await provider.end([machine.ref])
        house.wait(3600)
        return machine.id

    machine_id = house.play(scene)
    bill = house.account.books.bill(house.clock.now_s(), OURS)
    assert bill[machine_id] == pytest.approx((0.3521 + 0.5) / 2, abs=1e-6)
    disk = next(x for x in house.account.books.lines.values() if x.kind == "disk")
    assert bill[disk.id] == pytest.approx(60 * 0.08 / 730 * (3630 / 3600), abs=1e-6)


def test_a_throttled_place_still_gives_its_machines():
    """Looking for leftovers may be refused for minutes; the list of machines does not wait for it."""
    house = AwsHouse()

    async def scene(provider: AwsProvider) -> None:
        (machine,) = await provider.launch(request("t-1"))
        house.door.fault = lambda action, nth: (
            "throttle" if action in ("DescribeVolumes", "DescribeSpotInstanceRequests") else None
        )
        for _ in range(3):
            assert [x.id for x in (await provider.list(EAST)).machines] == [machine.id]
            house.wait(20)
        assert house.door.calls["DescribeVolumes"] == 1
        house.account.interrupt(machine.id, house.clock.now_s(), 0.0)
        (taken,) = (await provider.list(EAST)).machines
        assert (taken.state, taken.ended_at_s) == ("terminated", None)
        house.door.fault = lambda action, nth: None
        (taken,) = (await provider.list(EAST)).machines
        assert taken.ended_at_s == house.clock.now_s()

    house.play(scene)


def test_a_leftover_that_is_in_use_again_is_ended_later():
    """EC2 words that as a wrong parameter or as a state; neither is a setting of a person's."""
    house = AwsHouse()

    async def scene(provider: AwsProvider) -> None:
        (machine,) = await provider.launch(request("t-1"))
        x = house.account.instances[machine.id]
        refs = [Ref(EAST, x.nic), *(Ref(EAST, name) for name in x.volumes.values())]
        assert await provider.end(refs) == []
        assert await provider.end([machine.ref]) == [machine.ref]

    house.play(scene)
