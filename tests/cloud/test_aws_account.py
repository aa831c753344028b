"""The template of an account: the manager's policy is enough, and nothing in it is too much."""

import asyncio
import json
from importlib import resources
from typing import Any

import pytest
from aws_house import EAST, GPU, OURS, SETTINGS, AwsHouse, request, with_policy
from botocore.exceptions import ClientError
from cloudfake import wire
from cloudfake.ec2_account import ACCOUNT, Dials
from cloudfake.ec2_policy import actions, allows, many
from msgspec.structs import replace

from cloud.aws.examine import examine
from cloud.aws.provider import AwsProvider
from cloud.errors import NotAllowed
from cloud.model import DEPLOYMENT_TAG, Ref

TEMPLATE = json.loads(resources.files("cloud.aws").joinpath("account.json").read_text())
RESOURCES = TEMPLATE["Resources"]
VALUES = {
    "AWS::Region": "us-east-1",
    "AWS::AccountId": ACCOUNT,
    "Deployment": OURS,
    "Bucket": "bucket",
    "ImageParameter": "/team/image",
    "SubnetA": "subnet-us-east-1a",
    "SubnetB": "subnet-us-east-1b",
    "Group": "sg-us-east-1",
}
ARNS = {
    "WorkerRole": f"arn:aws:iam::{ACCOUNT}:role/workers",
    "ManagerRole": f"arn:aws:iam::{ACCOUNT}:role/manager",
    "DrillRole": f"arn:aws:iam::{ACCOUNT}:role/drill",
    "Queue": f"arn:aws:sqs:us-east-1:{ACCOUNT}:interruptions",
}
URL = "https://sqs.us-east-1.amazonaws.com/111122223333/interruptions"
ONE_REGION = replace(
    SETTINGS,
    regions=(replace(SETTINGS.regions[0], image="/team/image"),),
    queue_url=URL,
    drill_role=ARNS["DrillRole"],
)


def resolved(value: Any) -> Any:
    """What CloudFormation makes of a value."""
    if isinstance(value, list):
        return [resolved(one) for one in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"Ref": name}:
            return VALUES[name]
        case {"Fn::GetAtt": [name, "Arn"]}:
            return ARNS[name]
        case {"Fn::Sub": text}:
            for name, told in VALUES.items():
                text = text.replace(f"${{{name}}}", told)
            assert "${" not in text
            return text
    return {name: resolved(one) for name, one in value.items()}


POLICY = resolved(RESOURCES["Machines"]["Properties"]["PolicyDocument"])


@pytest.fixture
def house() -> AwsHouse:
    house = AwsHouse(Dials(startup_s=10.0))
    with_policy(house, POLICY)
    return house


def everything(house: AwsHouse) -> None:
    """Every verb of the provider, with every kind of thing that it can end, and the examination."""

    async def scene(provider: AwsProvider) -> None:
        await provider.places()
        sold = await provider.sold(EAST)
        await provider.quotes(EAST)
        wanted = replace(request("t-1", count=2), recipe=sold.recipe.digest)
        given = await provider.launch(wanted)
        (other,) = await provider.launch(request("t-2", market="on_demand"))
        await provider.list(EAST)
        house.wait(30)
        assert await provider.rehearse([given[0].ref]) == 120.0
        notices = provider.notices()
        await anext(notices)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(notices), 0.3)
        x = house.account.instances[given[1].id]
        house.account.volumes[next(iter(x.volumes.values()))].goes_along = False
        house.account.nics[x.nic].goes_along = False
        house.account.spot_requests[x.spot_request].state = "open"
        await provider.end([given[1].ref, other.ref])
        house.account.spot_requests[x.spot_request].state = "open"
        house.wait(200)
        listing = await provider.list(EAST)
        assert sorted(x.kind for x in listing.leftovers) == ["disk", "nic", "spot_request"]
        await provider.end([x.ref for x in listing.leftovers])

    house.play(scene, settings=ONE_REGION)
    lines = house.examined(lambda calls: examine(ONE_REGION, OURS, calls))
    if wrong := [line for line in lines if not line.ok]:
        raise NotAllowed(f"{wrong[0].found}; permission")


def test_all_that_the_manager_does_is_allowed_and_all_that_is_allowed_it_does(house: AwsHouse):
    """The calls of every verb run under the document, and each action of it is needed by one."""
    everything(house)
    assert set(house.door.asked) == actions(POLICY)
    assert not house.account.books.alive(OURS)
    assert house.door.flaws == set()


def test_a_request_that_a_model_forbids_is_a_flaw_though_boto3_sends_it(house: AwsHouse):
    """Words, lengths and members: what EC2 refuses, a fake that takes it hides."""
    ec2 = house.session.client("ec2", region_name="us-east-1")
    with pytest.raises(ClientError):
        ec2.run_instances(MinCount=1, MaxCount=1, InstanceInitiatedShutdownBehavior="vanish")
    ec2.describe_instances(MaxResults=5)
    shape = wire.service("sqs").operation_model("ReceiveMessage").output_shape
    assert house.door.flaws == {
        "RunInstances.InstanceInitiatedShutdownBehavior is 'vanish', which is none of its words"
    }
    assert list(wire.flaws(shape, {"Messages": [{"Body": 3, "Handle": ""}]}, "told")) == [
        "told.Messages[] has no Handle",
        "told.Messages[].Body is 3, and no string",
    ]


@pytest.mark.parametrize("name", sorted(actions(POLICY)))
def test_each_permission_that_is_missing_is_named(name: str):
    """Without one action, either a verb fails and names it, or what needs it does without."""
    without = [
        {**s, "Action": [x for x in many(s["Action"]) if x != name]} for s in POLICY["Statement"]
    ]
    house = AwsHouse(Dials(startup_s=10.0))
    with_policy(house, {"Statement": without})
    quiet = {"iam:GetRole", "pricing:GetProducts", "sqs:ReceiveMessage", "sqs:DeleteMessage"}
    if name in quiet:
        assert house.play(lambda provider: provider.sold(EAST)).pools
        return
    with pytest.raises(NotAllowed, match=f"{name} .*permission"):
        everything(house)


def test_a_machine_reaches_the_parts_of_states_and_no_mark_of_which_state_counts():
    """Workers put, read, list and take back parts; manifests and fences are the manager's alone."""
    (one,) = RESOURCES["WorkerRole"]["Properties"]["Policies"]
    policy = [resolved(one["PolicyDocument"])]
    for folder, may in (("parts/0000000120", True), ("manifests", False), ("fences", False)):
        for place in ("bucket/job-1", "bucket/some/prefix/job-1"):
            for verb in ("GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload"):
                file = f"arn:aws:s3:::{place}/{folder}/x"
                assert allows(policy, f"s3:{verb}", file, {}) == may, (verb, file)
    assert allows(policy, "s3:ListBucket", "arn:aws:s3:::bucket", {})
    assert not allows(policy, "s3:PutObject", "arn:aws:s3:::other/job-1/parts/1/x", {})


def test_who_may_write_objects_may_give_up_an_upload_that_is_half_done():
    """S3 charges for its parts until then, and no list of objects shows them."""
    for role in ("WorkerRole", "ManagerRole"):
        (one,) = RESOURCES[role]["Properties"]["Policies"]
        (wrote, *_) = one["PolicyDocument"]["Statement"]
        assert {"s3:PutObject", "s3:AbortMultipartUpload"} <= set(wrote["Action"]), role


def test_the_policy_keeps_the_manager_from_what_is_not_its_own(house: AwsHouse):
    """Without our tag nothing is bought and nothing ended, even by whoever has the manager's keys."""
    ec2 = house.session.client("ec2", region_name="us-east-1")
    marks = [{"Key": DEPLOYMENT_TAG, "Value": OURS}, {"Key": "orchestrator-token", "Value": "t"}]
    kinds = ("instance", "volume", "network-interface")
    plain = {
        "ImageId": "ami-us-east-1",
        "InstanceType": GPU.type,
        "MinCount": 1,
        "MaxCount": 1,
        "SubnetId": "subnet-us-east-1a",
        "SecurityGroupIds": ["sg-us-east-1"],
        "MetadataOptions": {"HttpTokens": "required"},
        "TagSpecifications": [{"ResourceType": kind, "Tags": marks} for kind in kinds],
    }
    ec2.run_instances(**plain)
    wrong = [
        {"TagSpecifications": []},
        {"TagSpecifications": plain["TagSpecifications"][:1]},
        {"MetadataOptions": {"HttpTokens": "optional"}},
        {"SubnetId": "subnet-foreign"},
        {"IamInstanceProfile": {"Name": "admin"}},
    ]
    house.account.subnets["subnet-foreign"] = "us-east-1a"
    house.account.free_addresses["subnet-foreign"] = 9
    house.account.profiles.add("admin")
    for one in wrong:
        with pytest.raises(ClientError, match="UnauthorizedOperation"):
            ec2.run_instances(**(plain | one))
    key = house.door.keys[house.key_id]
    house.door.keys[house.key_id] = replace(key, policy=None)
    told = ec2.run_instances(**(plain | {"TagSpecifications": []}))
    house.door.keys[house.key_id] = key
    foreign = told["Instances"][0]["InstanceId"]
    with pytest.raises(ClientError, match="UnauthorizedOperation"):
        ec2.terminate_instances(InstanceIds=[foreign])
    with pytest.raises(ClientError, match="UnauthorizedOperation"):
        ec2.create_tags(Resources=[foreign], Tags=marks)
    assert not house.account.books.touched(OURS)


def test_the_evaluator_denies_what_no_statement_allows():
    """Conditions that lack their key fail, Deny beats Allow, IfExists and Null mean what AWS says."""
    allow = {"Effect": "Allow", "Action": "ec2:Run*", "Resource": "*"}
    deny = allow | {"Effect": "Deny", "Condition": {"StringNotEquals": {"k": "v"}}}
    tagged = allow | {"Condition": {"StringEquals": {"k": "v"}}}
    lacking = allow | {"Condition": {"Null": {"k": "true"}}}
    perhaps = allow | {"Condition": {"StringEqualsIfExists": {"k": "v"}}}

    def allowed(statements: Any, **context: str) -> bool:
        return allows([{"Statement": statements}], "ec2:RunInstances", "arn:x", context)

    assert not allowed([])
    assert allowed(allow)
    assert allowed([allow, deny], k="v")
    assert not allowed([allow, deny], k="w")
    assert (allowed(tagged, k="v"), allowed(tagged, k="w"), allowed(tagged)) == (True, False, False)
    assert (allowed(lacking), allowed(lacking, k="v")) == (True, False)
    assert (allowed(perhaps), allowed(perhaps, k="w")) == (True, False)


def test_the_network_has_no_nat_no_open_port_and_the_storage_endpoint():
    """A NAT gateway would take 4.5 cents for each gigabyte of a checkpoint; the endpoint takes none."""
    kinds = {one["Type"] for one in RESOURCES.values()}
    assert "AWS::EC2::NatGateway" not in kinds
    assert "AWS::EC2::VPCEndpoint" in kinds
    assert not RESOURCES["Group"]["Properties"].get("SecurityGroupIngress")
    ways_in = [x for x in RESOURCES.values() if x["Type"] == "AWS::EC2::SecurityGroupIngress"]
    assert [x["Properties"]["SourceSecurityGroupId"] for x in ways_in] == [{"Ref": "Group"}]
    outputs = {one["Description"] for one in TEMPLATE["Outputs"].values()}
    assert {
        "aws.subnets",
        "aws.security_groups",
        "aws.instance_profile",
        "aws.queue_url",
    } <= outputs


def test_a_machine_of_another_deployment_cannot_be_ended(house: AwsHouse):
    """Two deployments in one account: the tag's value counts, not its name."""
    theirs = with_owner(house, "theirs")

    async def scene(provider: AwsProvider) -> None:
        with pytest.raises(Exception, match="not made by a launch of ours"):
            await provider.end([Ref(EAST, theirs)])

    house.play(scene, settings=ONE_REGION)
    ec2 = house.session.client("ec2", region_name="us-east-1")
    with pytest.raises(ClientError, match="UnauthorizedOperation"):
        ec2.terminate_instances(InstanceIds=[theirs])


def with_owner(house: AwsHouse, owner: str) -> str:
    key = house.door.keys[house.key_id]
    house.door.keys[house.key_id] = replace(key, policy=None)
    (machine,) = house.play(
        lambda provider: provider.launch(request("t-9", tags={DEPLOYMENT_TAG: owner})),
        settings=ONE_REGION,
    )
    house.door.keys[house.key_id] = key
    house.calls._executors.clear()
    return machine.id
