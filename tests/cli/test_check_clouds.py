"""What the commands of a person say of real clouds, through the clouds' own libraries over loopback."""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from cloudfake.arm import GROUP, IMAGE, MANAGER, SUBNET, SUBSCRIPTION, ArmDoor
from cloudfake.arm_wire import listening
from cloudfake.ec2 import Ec2Door, served
from cloudfake.ec2_account import Account, Dials
from cloudfake.papers import certificate, key, pem

from cloud.aws import calls
from cloud.azure import connection
from cloud.azure.examine import needed
from cloud.clock import CLOCK
from cloud.model import DEPLOYMENT_TAG, LaunchRequest, Pool
from orchestrator import clouds
from orchestrator.cli import init_check
from orchestrator.config import Azure, Config, load

AWS = """
[aws]
enabled = true
regions = "us-east-1"
types = "g5.*"
images = "us-east-1=ami-us-east-1"
subnets = "us-east-1a=subnet-us-east-1a,us-east-1b=subnet-us-east-1b"
security_groups = "us-east-1=sg-us-east-1"
instance_profile = "workers"
certificates = "signers.pem"
endpoint_url = "{url}"
"""

AZURE = f"""
[azure]
subscription = "{SUBSCRIPTION}"
resource_group = "{GROUP}"
subnets = "eastus={SUBNET}"
image = "{IMAGE}"
ssh_public_key = "ssh-ed25519 AAAA me"
types = "Standard_NC*"
certificates = "signers.pem"
sign_in = "managed"
endpoint = "{{url}}"
prices_endpoint = "{{url}}"
"""
SIGNER = certificate("a signer", key())
PIPE = "a pipe"
SIGNERS = pem(SIGNER).decode()


@contextmanager
def ec2_beside(shell, monkeypatch) -> Iterator[Ec2Door]:
    """An account on a loopback port, with settings that name it and keys that open it."""
    # It answers from this process, which may have to wait for a processor.
    monkeypatch.setattr(calls, "READ_S", 120.0)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDTEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    door = Ec2Door(Account(Dials(startup_s=0.0)), CLOCK)
    with served(door) as url:
        shell.script("orchestrator.toml", AWS.format(url=url))
        shell.script("signers.pem", SIGNERS)
        yield door


@pytest.fixture
def ec2(shell, monkeypatch) -> Iterator[Ec2Door]:
    monkeypatch.setattr(init_check, "CHECKS", ())
    with ec2_beside(shell, monkeypatch) as door:
        yield door


@pytest.fixture
def arm(shell, monkeypatch) -> Iterator[ArmDoor]:
    """A subscription on a loopback port; the manager's machine has an identity that may do all."""
    door = ArmDoor(CLOCK)
    door.speaker = MANAGER
    monkeypatch.setattr(connection, "READ_S", 120.0)
    monkeypatch.setattr(init_check, "CHECKS", ())
    with listening(door) as url:
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", url)
        shell.script("orchestrator.toml", AZURE.format(url=url))
        shell.script("signers.pem", SIGNERS)
        yield door


def test_check_looks_at_a_whole_subscription(shell, arm):
    """Through the machine's own identity, and without buying anything."""
    before = set(arm.vms)
    answer = shell("check")
    assert answer.code == 0, answer.out
    assert "azure eastus security group" in answer.out
    assert set(arm.vms) == before
    arm.restrict(x for x in needed() if not x.endswith("virtualMachines/delete"))
    answer = shell("check", "--json")
    (wrong,) = [one for one in answer.json["checks"] if not one["ok"]]
    assert wrong["found"] == "missing on the group: Microsoft.Compute/virtualMachines/delete"
    assert answer.code == 1


def test_check_looks_at_a_whole_account(shell, ec2):
    """Every line is good, so the next command is named, and nothing was bought."""
    answer = shell("check")
    assert answer.code == 0, answer.out
    assert "Next: orchestrator up" in answer.out
    assert "aws us-east-1 S3 endpoint" in answer.out
    assert not ec2.account.instances


def test_check_says_in_one_line_what_is_wrong(shell, ec2):
    """What was found, why it matters, and what to do; the exit code says that it is not good."""
    ec2.account.endpoints.clear()
    answer = shell("check")
    (line,) = [line for line in answer.out.splitlines() if line.startswith("FAIL")]
    assert "aws us-east-1 S3 endpoint" in line
    assert answer.code == 1
    (wrong,) = [one for one in shell("check", "--json").json["checks"] if not one["ok"]]
    assert "$3.78" in wrong["found"]
    assert "add a gateway endpoint" in wrong["remedy"]


def test_machines_of_a_manager_with_our_name_are_said_before_it_starts(shell, ec2):
    """Two managers of one name would end each other's machines; a machine made by hand is no matter."""
    ours = shell("check", "--json").json["checks"]
    assert {"aws deployment"} == {one["name"] for one in ours if "nobody holds" in one["found"]}
    cloud = clouds.provider(load(shell.folder / "orchestrator.toml", {}), "aws")
    pool = Pool(cloud="aws", region="us-east-1", zone="us-east-1a", type="g5.xlarge")
    request = LaunchRequest(
        token="t-1", pool=pool, market="spot", bid_usd_per_h=None, tags={DEPLOYMENT_TAG: "default"}
    )

    async def buy() -> None:
        await cloud.launch(request)
        await cloud.close()

    asyncio.run(buy())
    answer = shell("check", "--json")
    (wrong,) = [one for one in answer.json["checks"] if not one["ok"]]
    assert wrong["name"] == "aws deployment"
    assert "found 1 machine with our tag default" in wrong["found"]
    assert "manager.deployment" in wrong["remedy"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read (No such file or directory), so no machine of AWS could prove who"),
        (PIPE, "cannot be read (not a file)"),
        ("-----BEGIN CERTIFICATE-----", "holds no certificates that can be read"),
        ("", "holds no certificates that can be read"),
        (
            SIGNERS + pem(certificate("old", key(), days=(-9, -1))).decode(),
            "1 of 2 certificates exp",
        ),
    ],
)
def test_check_says_what_is_wrong_with_the_certificates(shell, ec2, text, said):
    """The file, why it matters and where certificates are; and the manager says the same of a file."""
    file = shell.folder / "signers.pem"
    file.unlink()
    if text == PIPE:
        os.mkfifo(file)
    elif text is not None:
        file.write_text(text)
    answer = shell("check", "--json")
    (wrong,) = [one for one in answer.json["checks"] if not one["ok"]]
    assert (answer.code, wrong["name"]) == (1, "aws certificates")
    assert said in wrong["found"]
    assert "aws.certificates" in wrong["found"]
    assert "RSA-2048" in wrong["remedy"]
    closed = clouds.obstacle(load(shell.folder / "orchestrator.toml", {}), "aws")
    expired = "expired" in wrong["found"]
    assert closed == (None if expired else f"{wrong['found']}; {wrong['remedy']}")


def test_certificates_that_are_not_set_are_said_of_each_cloud(tmp_path):
    """By the name of the setting, and with the place where that cloud's are."""
    for name, where in (("aws", "instance identity document"), ("azure", "Authority details")):
        one = clouds.certificates(Config(), name, 0.0)
        assert not one.ok
        assert one.found.startswith(f"{name}.certificates is not set, so no machine of")
        assert where in one.remedy
    file = tmp_path / "signers.pem"
    file.write_text(SIGNERS)
    good = clouds.certificates(Config(azure=Azure(certificates=str(file))), "azure", CLOCK.now_s())
    assert good.ok
    assert f"1 certificate, valid until {SIGNER.not_valid_after_utc:%F}" in good.found


def test_check_finds_the_cloud_that_this_machine_plays_beside_a_real_one(shell, ec2, monkeypatch):
    """Its prices are a game's, and jobs would train on the manager's machine for them."""
    monkeypatch.setattr(init_check, "CHECKS", (init_check._played,))
    lines = [shell("check", "--json", "--set", f"local.enabled={on}") for on in ("true", "false")]
    found = [each.json["checks"][1] for each in lines]
    assert [(one["name"], one["ok"]) for one in found] == [
        ("local cloud", False),
        ("local cloud", True),
    ]
    assert "on beside AWS" in found[0]["found"]
    assert found[0]["remedy"] == "set local.enabled = false"
