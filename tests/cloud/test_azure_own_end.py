"""A machine of Azure ends its own bill, with one permission and without the SDK."""

import base64
import os
import subprocess
import sys

import pytest
from azure_account import OURS, SETTINGS, play, request
from cloudfake.arm import ArmDoor, Dials
from cloudfake.arm_wire import listening
from msgspec.structs import replace
from test_azure_papers import TEMPLATE

from cloud.azure.own_end import NotDeleted, delete_this_machine

ALLOWED = next(
    one["properties"]["permissions"][0]["actions"]
    for one in TEMPLATE["resources"]
    if one["type"].endswith("roleDefinitions")
)


def running(door: ArmDoor, settings=SETTINGS) -> None:
    """Buy a machine, and let the door be its metadata service."""

    async def buy(provider):
        await provider.launch(request("t-1"))

    play(door, buy, settings=settings)
    door.pass_s(41)
    door.speaker = "t-1"


def test_a_machine_that_deletes_itself_costs_nothing_after_that():
    """Its role in the template is enough; machine, disk and interface are gone after minutes."""
    door = ArmDoor()
    door.machine_allowed = set(ALLOWED).__contains__
    running(door)
    with listening(door) as url:
        assert delete_this_machine(url, url).endswith("/virtualMachines/t-1")
        delete_this_machine(url, url)
    door.pass_s(121)
    assert door.books.alive(OURS) == []
    usd = door.bill(OURS)
    door.pass_s(3600)
    assert door.bill(OURS) == usd


def test_powering_off_alone_goes_on_costing():
    """The same machine that only shuts down costs as much as one that trains."""
    door = ArmDoor(dials=Dials(create_s=(10, 10)))
    running(door)
    usd = door.bill(OURS)
    door.shut_down("t-1")
    door.pass_s(3600)
    assert door.bill(OURS) - usd == pytest.approx(0.12 + 0.006)


def test_a_machine_that_cannot_delete_itself_says_why():
    """No identity, no permission and no metadata service are three different sentences."""
    with listening(ArmDoor()) as url:
        closed = url
    with pytest.raises(NotDeleted, match="GET /metadata/instance/compute"):
        delete_this_machine(closed, closed)
    door = ArmDoor()
    running(door)
    with listening(door) as url, pytest.raises(NotDeleted, match="AuthorizationFailed"):
        delete_this_machine(url, url)
    bare = ArmDoor()
    running(bare, replace(SETTINGS, identity=""))
    with listening(bare) as url, pytest.raises(NotDeleted, match="404 for /metadata/identity"):
        delete_this_machine(url, url)


def test_a_machine_that_was_given_more_identities_deletes_itself_by_ours():
    """Policies of organisations give machines identities, and Azure then gives a token of none."""
    door = ArmDoor()
    door.machine_allowed, door.more_identities = set(ALLOWED).__contains__, True
    running(door)
    script = base64.b64decode(door.vms["t-1"].body["properties"]["userData"]).decode()
    ahead = script.partition("exec sleep")[0]
    with listening(door) as url:
        with pytest.raises(NotDeleted, match="400 for /metadata/identity"):
            delete_this_machine(url, url)
        subprocess.run(
            ["sh", "-c", f'{ahead}exec "$PYTHON" -P -m cloud.azure.own_end'],
            env=os.environ
            | {"PYTHON": sys.executable, "SPOT_METADATA_URL": url, "SPOT_ARM_URL": url},
            timeout=60,
            check=True,
        )
    door.pass_s(121)
    assert door.books.alive(OURS) == []
