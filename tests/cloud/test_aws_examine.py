"""What `examine` says of an account: one line for each thing that is wrong, and what to do."""

import re

import pytest
from aws_house import OURS, SETTINGS, AwsHouse, with_policy
from cloudfake.ec2_policy import actions, many
from lines import by_name, faults
from msgspec.structs import replace
from test_aws_account import ONE_REGION, POLICY

from cloud.aws.examine import examine
from cloud.findings import Finding

EAST = replace(SETTINGS, regions=SETTINGS.regions[:1])


def found(house: AwsHouse, settings=EAST) -> dict[str, Finding]:
    lines = house.examined(lambda calls: examine(settings, OURS, calls))
    return by_name(lines, "aws us-east-1 ")


def wrong(house: AwsHouse, settings=EAST) -> dict[str, str]:
    return faults(found(house, settings))


def test_a_whole_account_is_good_in_every_region():
    """Every part has its line, nothing is bought, and the manager's own document is enough."""
    house = AwsHouse()
    lines = found(house, SETTINGS)
    assert {name for name in lines if not name.startswith("aws")} == {
        "identity",
        "clock",
        "image",
        "subnet us-east-1a",
        "subnet us-east-1b",
        "security group",
        "S3 endpoint",
        "types",
        "quota g on demand",
        "quota g spot",
        "quota standard on demand",
        "quota standard spot",
        "buying",
        "reading",
        "ending",
        "drills",
    }
    assert all(line.ok for line in lines.values()), lines
    assert any(name.startswith("aws us-west-2") for name in lines)
    assert not house.account.instances
    with_policy(house, POLICY)
    assert wrong(house) == {}


def _open_to_the_world(account):
    mine = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "sg-us-east-1"}], "IpRanges": []}
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    account.rules["sg-us-east-1"] = [mine, ssh]


BAD_DAYS = {
    "an image that is gone": (
        lambda a: a.images.pop("ami-us-east-1"),
        "image",
        r"InvalidAMIID.NotFound.*aws\.images",
    ),
    "an image that is not ready": (
        lambda a: a.image_says.update({"ami-us-east-1": {"State": "failed"}}),
        "image",
        "is failed",
    ),
    "an image for other machines": (
        lambda a: a.image_says.update({"ami-us-east-1": {"Architecture": "arm64"}}),
        "image",
        "x86_64",
    ),
    "a subnet that is full": (
        lambda a: a.free_addresses.update({"subnet-us-east-1a": 3}),
        "subnet us-east-1a",
        "3 free addresses.*larger subnet",
    ),
    "a subnet that is gone": (
        lambda a: a.subnets.pop("subnet-us-east-1b"),
        "subnet us-east-1b",
        "InvalidSubnetID.NotFound",
    ),
    "a subnet of another zone": (
        lambda a: a.subnets.update({"subnet-us-east-1a": "us-east-1b"}),
        "subnet us-east-1a",
        "is in us-east-1b.*us-east-1b=subnet-us-east-1a",
    ),
    "a group that the world may enter": (
        _open_to_the_world,
        "security group",
        r"0\.0\.0\.0/0 to port 22.*remove that rule",
    ),
    "a group that keeps its own machines out": (
        lambda a: a.rules.update({"sg-us-east-1": []}),
        "security group",
        "none could join.*all traffic",
    ),
    "no way to S3": (
        lambda a: a.endpoints.clear(),
        "S3 endpoint",
        r"\$3\.78.*gateway endpoint",
    ),
    "a way to S3 that no route table leads to": (
        lambda a: a.endpoint_routes.clear(),
        "S3 endpoint",
        r"no route table leads to: .*\$3\.78.*gateway endpoint",
    ),
    "a quota of zero": (
        lambda a: a.quota.update({("g", "spot"): 0}),
        "quota g spot",
        "0 of 0 vCPUs.*Service Quotas",
    ),
    "a quota below the smallest machine": (
        lambda a: a.quota.update({("g", "spot"): 3}),
        "quota g spot",
        r"0 of 3 vCPUs are used, and the smallest machine has \d+, .*Service Quotas",
    ),
}


@pytest.mark.parametrize("day", BAD_DAYS)
def test_what_is_wrong_is_one_line_with_a_remedy(day):
    """Nothing else is complained of but what rests on it, and nothing is bought."""
    house = AwsHouse()
    change, name, said = BAD_DAYS[day]
    change(house.account)
    lines = wrong(house)
    assert re.search(said, lines.get(name, "")), lines
    assert len(lines) <= 3, lines
    assert not house.account.instances


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (replace(EAST, types=("g5.*", "p9.*")), r"p9\.\*: the region sells none.*aws\.types"),
        (replace(EAST, types=("p9.*",)), r"p9\.\*: the region sells none"),
        (
            replace(EAST, regions=(replace(EAST.regions[0], name="us-east-9"),)),
            "no region of this name; correct .*is it us-east-",
        ),
    ],
)
def test_a_setting_that_names_what_is_not_sold_is_named(settings, said):
    """A type that the region does not sell, and a region that is none."""
    lines = wrong(AwsHouse(), settings)
    assert any(re.search(said, line) for line in lines.values()), lines


def test_a_newer_image_is_named_and_nothing_is_wrong():
    """It is of the same owner, and its name differs in the number only."""
    house = AwsHouse()
    account = house.account
    account.images |= dict.fromkeys(("ami-new", "ami-old", "ami-other"), "us-east-1")
    account.image_says = {
        "ami-us-east-1": {"Name": "instance-2026-11-01", "CreationDate": "2026-11-01T00:00:00Z"},
        "ami-new": {"Name": "instance-2026-12-01", "CreationDate": "2026-12-01T00:00:00Z"},
        "ami-old": {"Name": "instance-2026-10-01", "CreationDate": "2026-10-01T00:00:00Z"},
        "ami-other": {"Name": "instance-gpu-1", "CreationDate": "2026-12-02T00:00:00Z"},
    }
    line = found(house)["image"]
    assert line.ok
    assert "ami-new (instance-2026-12-01) is newer" in line.found


@pytest.mark.parametrize(
    "name",
    sorted(
        actions(POLICY)
        - {"ec2:CreateTags", "iam:GetRole", "pricing:GetProducts", "sqs:DeleteMessage"}
    ),
)
def test_each_permission_that_the_role_lacks_is_named(name):
    """What reads is called, what buys is called with DryRun, and IAM says what may end."""
    house = AwsHouse()
    without = [
        {**s, "Action": [x for x in many(s["Action"]) if x != name]} for s in POLICY["Statement"]
    ]
    with_policy(house, {"Statement": without})
    lines = wrong(house, ONE_REGION)
    assert any(name in line for line in lines.values()), lines
    assert not house.account.instances


def test_a_role_with_a_path_is_looked_up_as_sessions_do_not_say_it():
    """As roles of IAM Identity Center have one; it takes the permission to read the role."""
    house = AwsHouse()
    house.account.role_path = "/aws-reserved/sso.amazonaws.com/"
    may = ["iam:SimulatePrincipalPolicy"]
    more = {"Effect": "Allow", "Action": may, "Resource": "*"}
    policy = {"Statement": [*POLICY["Statement"], more]}
    with_policy(house, policy)
    assert "allow iam:GetRole" in wrong(house, ONE_REGION)["ending"]
    may.append("iam:GetRole")
    with_policy(house, policy)
    assert not wrong(house, ONE_REGION)


def test_keys_that_are_none_or_expired_are_one_line_for_all_regions():
    """So is a clock that is ten minutes off, and one that is two minutes off is said beside the rest."""
    house = AwsHouse()
    house.door.keys.clear()
    (line,) = wrong(house, SETTINGS).values()
    assert "InvalidClientTokenId" in line
    late = AwsHouse()
    late.door.clock_off_s = 600.0
    assert re.search(r"clock is off by -(59|60)\d s", wrong(late, SETTINGS)["aws"])
    slow = AwsHouse()
    slow.door.clock_off_s = 120.0
    assert re.match(r"-1[12]\d s from AWS's", wrong(slow)["clock"])  # a header has whole seconds


@pytest.mark.parametrize("fault", ["before", "broken", "throttle"])
def test_a_call_without_an_answer_asks_for_another_try_first(fault):
    """A connection that was lost says nothing of the image or the subnets."""
    house = AwsHouse()
    house.door.fault = lambda action, _: (
        fault if action in ("DescribeImages", "DescribeSubnets") else None
    )
    lines = found(house)
    assert {"image", "subnet us-east-1a"} <= {name for name in lines if not lines[name].ok}
    for line in lines.values():
        assert line.ok or line.remedy.startswith("try again; if it stays so: "), line
        assert "the list will tell" not in line.found


def test_a_region_that_is_silent_keeps_no_other_from_being_looked_at():
    """Its one line says so."""
    house = AwsHouse()
    house.door.silent.add("us-west-2")
    lines = wrong(house, SETTINGS)
    assert list(lines) == ["aws us-west-2 identity"]
    assert "no usable answer" in lines["aws us-west-2 identity"]
