"""Clouds as the settings enable them: each is a provider, or closed with one sentence."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from cloudfake.papers import certificate, key, pem

from cloud.errors import Misconfigured
from cloud.model import Place, Ref
from orchestrator.clouds import BuysNothing, enabled, providers
from orchestrator.config import Config, load
from orchestrator.door.__main__ import verifiers
from orchestrator.door.order import DoorOrder
from orchestrator.errors import OrchestratorError
from orchestrator.paths import Places

AWS = """[aws]
enabled = true
regions = "us-east-1"
images = "us-east-1=ami-1"
subnets = "us-east-1a=subnet-1"
security_groups = "us-east-1=sg-1"
certificates = "aws.pem"
"""
AZURE = """[azure]
subscription = "0000"
subnets = "eastus=/subscriptions/0000/subnets/machines"
image = "/subscriptions/0000/versions/1.0.0"
ssh_public_key = "ssh-ed25519 AAAA me"
certificates = "azure.pem"
"""
CERTIFICATE = pem(certificate("a signer", key()))
PRIVATE = '[ray]\nhead_address = "10.0.0.5"\n'
NO_LOCAL = "[local]\nenabled = false\n"


def loaded(tmp_path: Path, *parts: str) -> Config:
    file = tmp_path / "orchestrator.toml"
    file.write_text("".join(parts))
    for name in ("aws", "azure"):
        (tmp_path / f"{name}.pem").write_bytes(CERTIFICATE)
    return load(file, {})


def script(cloud: str) -> str:
    return f"#!/bin/sh\nexec join --cloud {cloud}\n"


def why_none_is_bought(provider) -> str:
    """What it says in place of what it sells; it is open, so that what is held there can be ended."""
    with pytest.raises(Misconfigured) as caught:
        asyncio.run(provider.sold(Place(provider.name, "east")))
    assert caught.value.refusal.scope == "cloud"
    assert isinstance(provider, BuysNothing)
    return caught.value.refusal.said


class Books:
    """The machines of a cloud, as far as they can be listed and ended."""

    name = "aws"
    asked: tuple[object, ...] = ()

    async def list(self, place: Place) -> str:
        return f"all of {place.key}"

    async def end(self, refs: Sequence[Ref]) -> Sequence[Ref]:
        return refs


def test_where_nothing_can_be_bought_what_is_held_is_listed_and_ended():
    """A certificate that is gone must not leave machines running that nobody can end."""
    cloud, place = BuysNothing(Books(), "no machine could join"), Place("aws", "us-east-1")
    assert asyncio.run(cloud.list(place)) == f"all of {place.key}"
    assert asyncio.run(cloud.end([Ref(place, "i-1")])) == [Ref(place, "i-1")]
    for verb in (cloud.sold, cloud.launch):
        with pytest.raises(Misconfigured, match="no machine could join"):
            asyncio.run(verb(place))


def test_each_enabled_cloud_is_a_provider_with_the_first_boot_of_its_machines(tmp_path):
    config = loaded(tmp_path, NO_LOCAL, PRIVATE, AWS, AZURE, "lists_lag_s = 7\n")
    assert enabled(config) == ["aws", "azure"]
    found = providers(config, tmp_path, script)
    assert {name: provider.name for name, provider in found.items()} == {
        "aws": "aws",
        "azure": "azure",
    }
    assert found["aws"]._settings.user_data == script("aws")
    assert found["azure"]._settings.boot_script == script("azure")
    assert {name: provider.pace.grace_s for name, provider in found.items()} == {
        "aws": 120.0,
        "azure": 7.0,
    }
    for provider in found.values():
        assert provider.traits.pending_is_free


def test_a_head_that_only_this_machine_reaches_closes_a_real_cloud(tmp_path):
    """Unless the cloud is on this machine itself, as a fake one is."""
    found = providers(loaded(tmp_path, NO_LOCAL, AWS, AZURE), tmp_path, script)
    for provider in found.values():
        said = why_none_is_bought(provider)
        assert "ray.head_address is 127.0.40.1" in said
        assert "private address of the manager's machine" in said
    here = AWS + 'endpoint_url = "http://127.0.0.1:4566"\n'
    found = providers(loaded(tmp_path, NO_LOCAL, here), tmp_path, script)
    assert found["aws"]._settings.endpoint_url


def test_a_cloud_whose_machines_cannot_prove_who_they_are_is_closed(tmp_path):
    """Without the certificates that its documents are signed by, no machine of it could join."""
    without = AWS.replace('certificates = "aws.pem"\n', "")
    found = providers(loaded(tmp_path, NO_LOCAL, PRIVATE, without, AZURE), tmp_path, script)
    assert why_none_is_bought(found["aws"]).startswith(
        "aws.certificates is not set, so no machine of AWS could prove"
    )
    config = loaded(tmp_path, NO_LOCAL, PRIVATE, AWS, AZURE)
    (tmp_path / "aws.pem").unlink()
    (tmp_path / "azure.pem").write_text("-----BEGIN CERTIFICATE-----")
    found = providers(config, tmp_path, script)
    said = [why_none_is_bought(found[name]) for name in ("aws", "azure")]
    assert "aws.pem cannot be read (No such file or directory)" in said[0]
    assert "azure.pem holds no certificates that can be read" in said[1]
    order = DoorOrder(
        redis_url="",
        deployment="ours",
        local=False,
        aws_certificates=config.aws.certificates,
        azure_certificates=config.azure.certificates,
    )
    assert verifiers(order, Places(tmp_path)) == {}


def test_a_cloud_without_a_door_for_its_machines_is_closed_and_no_other_one(tmp_path):
    def doorless(cloud: str) -> str:
        if cloud == "aws":
            raise OrchestratorError("the join door is not known")
        return script(cloud)

    found = providers(loaded(tmp_path, NO_LOCAL, PRIVATE, AWS, AZURE), tmp_path, doorless)
    assert why_none_is_bought(found["aws"]) == "AWS is closed: the join door is not known"
    assert not hasattr(found["azure"], "_because")


def test_status_imports_no_sdk(tmp_path):
    """Nor do the settings of both clouds; a provider imports its SDK with its first call."""
    (tmp_path / "orchestrator.toml").write_text(PRIVATE + AWS + AZURE)
    code = (
        "import sys\n"
        "from orchestrator.__main__ import main\n"
        "sys.argv = ['orchestrator', 'status']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "import orchestrator.clouds, cloud.aws.provider, cloud.azure.provider\n"
        "found = {'boto3', 'botocore', 'azure.core', 'azure.identity'} & set(sys.modules)\n"
        "print('SDKs', sorted(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert "SDKs []" in done.stdout, done.stdout + done.stderr


MEMORY = """
import asyncio, os
from pathlib import Path
from orchestrator.config import load
from orchestrator.clouds import providers
import orchestrator.live.manager

def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

async def used():
    for provider in providers(load(Path("orchestrator.toml"), {}), Path(), lambda _: "#!/bin/sh").values():
        for place in await provider.places():
            for verb in (provider.sold, provider.list):
                try:
                    await verb(place)
                except Exception as error:
                    print(type(error).__name__)
        await provider.close()

before = rss()
asyncio.run(used())
import sys
from collections.abc import Sequence
print("SDKs", {"boto3", "azure.mgmt.compute"} <= set(sys.modules), (rss() - before) >> 20)
"""


def test_both_sdks_take_little_memory(tmp_path, monkeypatch):
    """A manager that buys from both clouds has at most 150 MB more than one that buys from none."""
    here = 'endpoint_url = "http://127.0.0.1:1"\n'
    azure = 'endpoint = "http://127.0.0.1:1"\nprices_endpoint = "http://127.0.0.1:1"\n'
    loaded(tmp_path, NO_LOCAL, PRIVATE, AWS, here, AZURE, azure, 'sign_in = "managed"\n')
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    word, whole, mb = done.stdout.split()[-3:]
    assert (word, whole) == ("SDKs", "True"), done.stdout + done.stderr
    assert int(mb) <= 150
