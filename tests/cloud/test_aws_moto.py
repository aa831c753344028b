"""The happy path of AWS against moto, which somebody else wrote: a second opinion on our fake.

moto knows neither launch tokens nor capacity nor quotas, so what goes wrong is our fake's alone.
"""

import asyncio
from collections.abc import Iterator

import boto3
import pytest
from aws_house import GPU, OURS, request
from moto import mock_aws

from cloud.aws.calls import Calls
from cloud.aws.provider import AwsProvider
from cloud.aws.settings import AwsSettings, Region
from cloud.errors import NotOurs
from cloud.model import DEPLOYMENT_TAG, Place, Ref

EAST = Place("aws", "us-east-1")
ZONE = "us-east-1a"


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsSettings]:
    """The settings of an account of moto's, which has an image, a subnet and a group."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "moto")
    with mock_aws():
        ec2 = boto3.client("ec2", region_name="us-east-1")
        in_zone = [{"Name": "availability-zone", "Values": [ZONE]}]
        (subnet,) = ec2.describe_subnets(Filters=in_zone)["Subnets"]
        (group,) = ec2.describe_security_groups(GroupNames=["default"])["SecurityGroups"]
        image = ec2.describe_images(Owners=["amazon"])["Images"][0]
        region = Region(
            name="us-east-1",
            image=image["ImageId"],
            subnets={ZONE: subnet["SubnetId"]},
            security_group=group["GroupId"],
        )
        yield AwsSettings(
            regions=(region,), types=("g5.xlarge", "m7i.large"), user_data="#!/bin/sh\n"
        )


def test_what_is_bought_is_listed_and_given_back(settings: AwsSettings) -> None:
    """A gang of two, its list, its end: moto's answers read as our fake's do."""

    async def scene(provider: AwsProvider) -> None:
        assert await provider.places() == [EAST]
        made = await provider.launch(request("t-1", GPU, "on_demand", count=2))
        listed = (await provider.list(EAST)).machines
        assert {x.id for x in listed} == {x.id for x in made}
        for machine in listed:
            assert (machine.state, machine.token, machine.pool) == ("running", "t-1", GPU)
            assert machine.tags[DEPLOYMENT_TAG] == OURS
            assert machine.address
        assert sorted(x.index for x in listed) == [0, 1]
        ended = await provider.end([x.ref for x in made])
        assert set(ended) == {x.ref for x in made}
        over = (await provider.list(EAST)).machines
        assert {(x.state, x.ended_by) for x in over} == {("terminated", "user")}
        assert all(x.ended_at_s for x in over)

    played(scene, settings)


def test_machines_of_others_are_not_touched(settings: AwsSettings) -> None:
    ec2 = boto3.client("ec2", region_name="us-east-1")
    image = settings.regions[0].image
    made = ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1, InstanceType="m7i.large")
    foreign = made["Instances"][0]["InstanceId"]

    async def scene(provider: AwsProvider) -> None:
        assert (await provider.list(EAST)).machines == ()
        with pytest.raises(NotOurs):
            await provider.end([Ref(EAST, foreign)])

    played(scene, settings)
    (one,) = ec2.describe_instances()["Reservations"][0]["Instances"]
    assert one["State"]["Name"] in ("pending", "running")


def played(scene, settings: AwsSettings) -> None:
    async def play() -> None:
        provider = AwsProvider(settings, OURS, Calls(new_session=boto3.Session))
        try:
            await scene(provider)
        finally:
            await provider.close()

    asyncio.run(play())
