"""Machines of the fake accounts are real: bought through the SDK, they run their user data.

One account of each cloud serves all that is asserted here, because a start takes seconds.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from cloudfake.account.running import Cloud, Running, running

from cloud.aws.identity import AwsIdentity
from cloud.azure.identity import AzureIdentity
from cloud.identity.proof import Identity, Proof
from cloud.local.processes import MARKER
from cloud.model import DEPLOYMENT_TAG, LaunchRequest, Machine, Place, Pool
from orchestrator.clouds import providers
from orchestrator.config import load

pytestmark = pytest.mark.processes

POOLS = {
    "aws": Pool("aws", "us-east-1", "us-east-1a", "g5.xlarge"),
    "azure": Pool("azure", "eastus", "eastus-1", "Standard_NC4as_T4_v3"),
}
CURL = """\
import os, sys, urllib.request
def get(path, method="GET", **headers):
    base = os.environ["SPOT_METADATA_URL"]
    asked = urllib.request.Request(base + path, method=method, headers=headers)
    return urllib.request.urlopen(asked, timeout=10).read().decode()
if sys.argv[1] == "aws":
    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    key = {"X-aws-ec2-metadata-token": get("/latest/api/token", "PUT", **ttl)}
    print(get("/latest/dynamic/instance-identity/rsa2048", **key).replace("\\n", ""))
else:
    said = get("/metadata/attested/document?api-version=2020-09-01&nonce=1234567890", Metadata="true")
    import json; print(json.loads(said)["signature"])
"""
BOOT = """\
#!/bin/sh
env > env.txt
"$SPOT_PYTHON" {curl} {cloud} > identity.part && mv identity.part identity.txt
while [ ! -e go ]; do sleep 0.05; done
shutdown -h now
sleep 600
"""


async def until(what: str, look: Callable[[], Any], patience_s: float = 60.0) -> Any:
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        found = look()
        found = await found if asyncio.iscoroutine(found) else found
        if found:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"waited {patience_s:.0f} s in vain: {what}")


def line_of(account: Running, machine: Machine) -> dict[str, Any]:
    return next(x for x in account.books()["lines"] if x["token"] == machine.token)


@pytest.mark.parametrize("cloud", ["aws", "azure"])
def test_a_bought_machine_runs_its_user_data_and_ends_as_its_cloud_does(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It proves who it is, finds no secret, shuts itself down, is drilled away, and is given back."""
    (tmp_path / "curl.py").write_text(CURL)
    script = BOOT.format(curl=tmp_path / "curl.py", cloud=cloud)
    with opened(cloud, tmp_path, script, monkeypatch) as (account, provider):
        asyncio.run(played(cloud, provider, account))
        books = account.books()
        assert (books["left"], books["bought_twice"], books["touched"]) == ([], [], [])


def test_a_machine_that_another_account_calls_the_same_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two accounts on one computer sell machines of one name; one of them is given back."""
    script = "#!/bin/sh\ntouch up\nexec sleep 600\n"

    async def bought(account: Running, provider: Any) -> tuple[Machine, Path]:
        await provider.places()
        await provider.sold(POOLS["aws"].place)
        (machine,) = await provider.launch(asked("t-0", POOLS["aws"]))
        disk = account.directory / "machines" / machine.id
        await until("its first boot", (disk / "up").exists)
        return machine, disk

    async def both() -> None:
        kept, disk = await bought(*ours)
        given_back, _ = await bought(*theirs)
        assert kept.id == given_back.id
        await theirs[1].end([given_back.ref])
        await until("an empty account", lambda: not theirs[0].books()["left"])
        assert _pid_of(disk)
        assert ours[0].books()["left"]
        for _, provider in (ours, theirs):
            await provider.close()

    with (
        opened("aws", tmp_path / "one", script, monkeypatch) as ours,
        opened("aws", tmp_path / "two", script, monkeypatch) as theirs,
    ):
        asyncio.run(both())


def asked(token: str, pool: Pool) -> LaunchRequest:
    tags = {DEPLOYMENT_TAG: "ours"}
    return LaunchRequest(token=token, pool=pool, market="spot", bid_usd_per_h=None, tags=tags)


@contextmanager
def opened(
    cloud: Cloud, folder: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Running, Any]]:
    """Run an account in this folder; yield it and its provider, whose machines run this script."""
    folder.mkdir(exist_ok=True)
    with running(cloud, folder / "account", "--startup-s", "0.3", "--owner", "ours") as account:
        for name, value in account.environment().items():
            monkeypatch.setenv(name, value)
        settings = folder / "orchestrator.toml"
        settings.write_text(
            '[manager]\ndeployment = "ours"\n[local]\nenabled = false\n' + account.settings()
        )
        (provider,) = providers(load(settings, {}), folder, lambda _: script).values()
        yield account, provider


async def played(cloud: Cloud, provider: Any, account: Running) -> None:
    pool = POOLS[cloud]
    assert await provider.places() == [pool.place]
    assert pool in (await provider.sold(pool.place)).pools

    async def bought(token: str) -> tuple[Machine, Path]:
        (machine,) = await provider.launch(asked(token, pool))
        disk = account.directory / "machines" / machine.id
        await until("its first boot", (disk / "identity.txt").exists)
        return machine, disk

    async def state(machine: Machine) -> str:
        found = (await provider.list(pool.place)).machines
        return next((x.state for x in found if x.id == machine.id), "unlisted")

    (first, disk), (second, disk_2), (third, disk_3) = [
        await bought(f"t-{nth}") for nth in range(3)
    ]
    proof = Proof(signature=(disk / "identity.txt").read_text())
    identity = _verifier(cloud, account)(proof, "1234567890", time.time())
    assert isinstance(identity, Identity), identity
    assert identity.place == Place(cloud, "us-east-1" if cloud == "aws" else "")
    known = (disk / "env.txt").read_text()
    assert "AWS_" not in known
    assert "TOKEN" not in known
    (disk / "go").touch()
    if cloud == "aws":  # its launch said that a shutdown ends it
        assert identity.machine_id == first.id
        await until("its end", lambda: line_of(account, first)["ended_by"] == "user")
    else:  # it is off, and costs the same

        async def stopped() -> bool:
            return await state(first) == "stopped"

        await until("its stop", stopped)
        assert line_of(account, first)["ended_s"] is None
        await provider.end([first.ref])
    pid = _pid_of(disk_2)
    assert account.drill("ours", 1, 0.0) == [second.id]
    await until("its processes to end", lambda: not Path(f"/proc/{pid}").exists())
    assert line_of(account, second)["ended_by"] == "provider"
    pid = _pid_of(disk_3)
    await provider.end([third.ref])
    await until("its processes to end", lambda: not Path(f"/proc/{pid}").exists())
    await until("an empty account", lambda: not account.books()["left"])
    await provider.close()


def _verifier(cloud: Cloud, account: Running) -> Any:
    from cryptography import x509

    told = (account.directory / "certificates.pem").read_bytes()
    certificates = x509.load_pem_x509_certificates(told)
    if cloud == "aws":
        return AwsIdentity(certificates)
    from cloudfake.arm import SUBSCRIPTION

    return AzureIdentity(certificates, SUBSCRIPTION)


def _pid_of(disk: Path) -> int:
    """Return the first process of a machine that carries its mark."""
    mark = f"{MARKER}={disk}".encode()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (place / "environ").read_bytes().split(b"\0"):
                return int(place.name)
        except OSError:
            continue
    raise AssertionError(f"no process has {disk}")
