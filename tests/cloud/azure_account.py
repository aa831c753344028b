"""A deployment in the fake Azure: its settings, its provider, and requests that it could make."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from cloudfake import arm_wire
from cloudfake.arm import GROUP, IDENTITY, IMAGE, SUBNET, SUBSCRIPTION, ArmDoor
from msgspec.structs import replace

from cloud.azure.examine import examine
from cloud.azure.provider import AzureProvider
from cloud.azure.settings import AzureSettings
from cloud.findings import Finding
from cloud.model import DEPLOYMENT_TAG, LaunchRequest, Machine, Place, Pool

PLACE = Place("azure", "eastus")
T4 = Pool("azure", "eastus", "eastus-1", "Standard_NC4as_T4_v3")
D4 = Pool("azure", "eastus", "eastus-1", "Standard_D4s_v5")
OURS = "ours"
SETTINGS = AzureSettings(
    subscription=SUBSCRIPTION,
    resource_group=GROUP,
    regions=("eastus", "northcentralus"),
    subnets={"eastus": SUBNET, "northcentralus": SUBNET},
    image=IMAGE,
    identity=IDENTITY,
    ssh_public_key="ssh-ed25519 AAAA trainer",
    types=("Standard_NC*", "Standard_D4s_v5"),
    endpoint=arm_wire.ENDPOINT,
    prices_endpoint=arm_wire.ENDPOINT,
    boot_script="#!/bin/sh\nexec sleep 600\n",
)


EAST = replace(SETTINGS, regions=("eastus",), subnets={"eastus": SUBNET})


def provider_of(
    door: ArmDoor, settings: AzureSettings = SETTINGS, deployment: str = OURS, **sdk: Any
) -> AzureProvider:
    """Return a provider whose SDK reaches the door without a socket, unless `sdk` says otherwise."""
    sdk = {"credential": arm_wire.Key(door), "session": arm_wire.session(door), **sdk}
    return AzureProvider(settings, deployment, door.clock, **sdk)


def request(token: str, pool: Pool = T4, **changes: Any) -> LaunchRequest:
    wanted = {
        "market": "spot",
        "bid_usd_per_h": None,
        "tags": {DEPLOYMENT_TAG: OURS, "orchestrator-job": "j-1"},
        **changes,
    }
    return LaunchRequest(token=token, pool=pool, **wanted)


def play(door: ArmDoor, scene: Callable[[AzureProvider], Awaitable[Any]], **changes: Any) -> Any:
    """Play a scene with a provider that is closed afterwards."""

    async def played() -> Any:
        provider = provider_of(door, **changes)
        try:
            return await scene(provider)
        finally:
            await provider.close()

    return asyncio.run(played())


def examined(door: ArmDoor, settings: AzureSettings = SETTINGS, **sdk: Any) -> tuple[Finding, ...]:
    """Return what an examination through the SDK finds."""
    sdk = {"credential": arm_wire.Key(door), "session": arm_wire.session(door), **sdk}
    return asyncio.run(examine(settings, **sdk))


async def listed(provider: AzureProvider) -> dict[str, Machine]:
    """Return what is there still, by name."""
    found = (await provider.list(PLACE)).machines
    return {machine.id: machine for machine in found if not machine.gone}


async def swept(door: ArmDoor, provider: AzureProvider, rounds: int = 40) -> None:
    """End all that is listed until nothing is, as `gc` would."""
    for _ in range(rounds):
        listing = await provider.list(PLACE)
        refs = [*(x.ref for x in listing.machines), *(x.ref for x in listing.leftovers)]
        if not refs and not door.books.alive(OURS):
            return
        await provider.end(refs)
        door.pass_s(30)
    raise AssertionError(f"still there: {[line.id for line in door.books.alive(OURS)]}")
