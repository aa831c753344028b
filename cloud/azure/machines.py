"""Machines as Azure describes them: what a launch asks for, and what an answer says. No I/O.

The launch token is the machine's name. A PUT on a name that exists would change the machine that
has it, so every machine carries a digest of the whole request, and what differs is never sent
again. Azure gives a disk no tags and a network interface a name of its choice; both begin with
the machine's name and our mark, so that what outlives its machine is known to be ours.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from math import ceil
from shlex import quote
from typing import Any

import msgspec

from cloud.azure import refusals
from cloud.azure.own_end import IDENTITY_VARIABLE
from cloud.azure.settings import AzureSettings
from cloud.clock import utc_s
from cloud.model import (
    DEPLOYMENT_TAG,
    LaunchRequest,
    Leftover,
    LeftoverKind,
    Machine,
    MachineState,
    Market,
    Place,
    Pool,
    Recipe,
    Ref,
    Refusal,
)

TOKEN_TAG = "orchestrator-token"  # noqa: S105 - the name of a tag
INDEX_TAG = "orchestrator-index"
REQUEST_TAG = "orchestrator-request"
OUR_TAGS = (TOKEN_TAG, INDEX_TAG, REQUEST_TAG)
BID_STEPS = 100_000  # Azure takes a bid with five decimals
KINDS: tuple[LeftoverKind, ...] = ("disk", "nic")


class Vm(msgspec.Struct, frozen=True, kw_only=True):
    """What we read of a virtual machine that Azure lists."""

    class Properties(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
        class Hardware(msgspec.Struct, frozen=True, rename="camel"):
            vm_size: str

        hardware_profile: Hardware
        provisioning_state: str
        priority: str = "Regular"
        time_created: str = ""
        vm_id: str = ""

    name: str
    location: str
    properties: Properties
    tags: dict[str, str] = {}
    zones: tuple[str, ...] = ()


class View(msgspec.Struct, frozen=True):
    """What the instance view of a machine says: does it run, and why was it not made."""

    power: str = ""
    code: str = ""
    text: str = ""
    at_s: float | None = None  # since when its creation is over, well or badly


def mark_of(deployment: str) -> str:
    """Return what the names of a deployment's disks and network interfaces hold."""
    return blake2b(deployment.encode(), digest_size=4).hexdigest()


def names_of(request: LaunchRequest) -> list[str]:
    """Return the names of the machines of a launch, in the order of their indexes."""
    if request.count == 1:
        return [request.token]
    return [f"{request.token}-{index}" for index in range(request.count)]


def digest_of(request: LaunchRequest) -> str:
    """Return what two launches have in common if and only if they are equal."""
    return blake2b(msgspec.json.encode(request, order="sorted"), digest_size=12).hexdigest()


def recipe_of(settings: AzureSettings, region: str) -> Recipe:
    """Return all that decides how a machine is made in a region, besides the request."""
    return Recipe(
        {
            "image": settings.image,
            "subnet": settings.subnets.get(region, ""),
            "identity": settings.identity,
            "disk": f"{settings.disk_gb} GB {settings.disk_type}",
            "admin": settings.admin,
            "ssh": _digest(settings.ssh_public_key),
            "boot": _digest(settings.boot_script),
            "resource_group": settings.resource_group,
        }
    )


def body_of(
    request: LaunchRequest, index: int, settings: AzureSettings, deployment: str
) -> dict[str, Any]:
    """Return the one PUT that makes machine, disk and interface; all three go together."""
    name, region = names_of(request)[index], request.pool.region
    part = f"{name}.{mark_of(deployment)}"
    spot = request.market == "spot"
    address = {"name": "private", "properties": {"subnet": {"id": settings.subnets[region]}}}
    tags = {
        **request.tags,
        TOKEN_TAG: request.token,
        INDEX_TAG: str(index),
        REQUEST_TAG: digest_of(request),
    }
    interface = {
        "name": part,
        "tags": tags,
        "properties": {
            "primary": True,
            "deleteOption": "Delete",
            "ipConfigurations": [address],
        },
    }
    properties: dict[str, Any] = {
        "hardwareProfile": {"vmSize": request.pool.type},
        "storageProfile": {
            "imageReference": {"id": settings.image},
            "osDisk": {
                "name": part,
                "createOption": "FromImage",
                "deleteOption": "Delete",
                "diskSizeGB": settings.disk_gb,
                "managedDisk": {"storageAccountType": settings.disk_type},
            },
        },
        "networkProfile": {
            "networkApiVersion": "2022-11-01",
            "networkInterfaceConfigurations": [interface],
        },
        "osProfile": _login(name, settings),
    }
    if settings.boot_script:
        properties["userData"] = base64.b64encode(_boot(settings).encode()).decode()
    if spot:
        bid = request.bid_usd_per_h
        most = -1 if bid is None else ceil(round(bid * BID_STEPS, 3)) / BID_STEPS
        properties["priority"] = "Spot"
        properties["evictionPolicy"] = "Delete"
        properties["billingProfile"] = {"maxPrice": most}
    body: dict[str, Any] = {"location": region, "tags": tags, "properties": properties}
    if zone := zone_number(request.pool):
        body["zones"] = [zone]
    if settings.identity:
        body["identity"] = {
            "type": "UserAssigned",
            "userAssignedIdentities": {settings.identity: {}},
        }
    return body


def _boot(settings: AzureSettings) -> str:
    """Return the boot script, which says as whom a machine asks: policies may give it more identities.

    The name of the variable is the one that Azure's tools and the state store read.
    """
    first, newline, rest = settings.boot_script.partition("\n")
    if not settings.identity:
        return settings.boot_script
    return f"{first}\nexport {IDENTITY_VARIABLE}={quote(settings.identity)}{newline}{rest}"


def zone_number(pool: Pool) -> str:
    """Return a pool's zone as Azure numbers it; empty in a region without zones."""
    return pool.zone.removeprefix(pool.region).removeprefix("-")


def zone_name(region: str, zone: str) -> str:
    """Return the name of a zone, which unlike Azure's number is unique among regions."""
    return f"{region}-{zone}" if zone else region


def read_vm(answer: Mapping[str, Any]) -> Vm:
    """Return a machine from an answer; raises `msgspec.ValidationError` on any other."""
    return msgspec.convert(answer, Vm)


def read_view(answer: Mapping[str, Any]) -> View:
    """Return what the statuses of an instance view say."""
    power = code = text = time = ""
    for status in answer.get("statuses") or ():
        words = str(status.get("code", "")).split("/")
        if words[0] == "PowerState" and len(words) > 1:
            power = words[1]
        elif words[0] == "ProvisioningState":
            if len(words) > 2:
                code, text = words[2], str(status.get("message", ""))
            if code != refusals.NOT_DELETED:
                time = str(status.get("time") or "")
    return View(power, code, text, _seconds(time) if time else None)


def tag_of(answer: Mapping[str, Any], name: str) -> str:
    """Return a tag's value; names of tags know no case, and Azure may change it."""
    for known, value in (answer.get("tags") or {}).items():
        if str(known).lower() == name:
            return str(value)
    return ""


def is_ours(answer: Mapping[str, Any], deployment: str) -> bool:
    """Return whether a launch of this deployment made it.

    A machine that a person made with our tags, or copied from one of ours, has another name than
    they say, so it is not ours.
    """
    token, index = tag_of(answer, TOKEN_TAG), tag_of(answer, INDEX_TAG)
    names = (token, f"{token}-{index}")
    ours = tag_of(answer, DEPLOYMENT_TAG) == deployment and bool(token)
    return ours and str(answer.get("name", "")).lower() in names


def machine_of(vm: Vm, view: View | None) -> Machine:
    """Return a machine of ours as the brain knows it."""
    region = vm.location.lower().replace(" ", "")
    market: Market = "spot" if vm.properties.priority.lower() == "spot" else "on_demand"
    state, refusal = _state(vm, view, market)
    tags = {name.lower(): value for name, value in vm.tags.items()}
    zone = zone_name(region, vm.zones[0] if vm.zones else "")
    return Machine(
        id=vm.name,
        token=tags.get(TOKEN_TAG, vm.name),
        index=int(tags.get(INDEX_TAG) or 0),
        pool=Pool("azure", region, zone, vm.properties.hardware_profile.vm_size),
        market=market,
        state=state,
        began_at_s=view.at_s if view and view.power else None,
        launched_at_s=_seconds(vm.properties.time_created),
        tags={name: value for name, value in tags.items() if name not in OUR_TAGS},
        refusal=refusal,
        identity=vm.properties.vm_id.lower(),
    )


def _state(vm: Vm, view: View | None, market: Market) -> tuple[MachineState, Refusal | None]:
    """Return the state, and why there is no machine if there is none.

    "Failed" is the state of a creation, of a change and of a deletion that failed. A machine that
    runs although its creation is not what failed is a running machine: only its deletion was.
    """
    power, provisioning = view.power if view else "", vm.properties.provisioning_state
    if provisioning == "Creating" or (provisioning == "Failed" and view is None):
        return "pending", None  # why one has failed is not known before it was looked at
    if provisioning == "Deleting":
        return "stopping", None
    if provisioning == "Failed" and view is not None:
        row = refusals.row_of(view.code, view.text)
        if power == "running" and (row is None or row.code == refusals.NOT_DELETED):
            return "running", None
        return "failed", refusals.refusal(view.code or "Failed", view.text, market)
    stopped = power in ("stopped", "stopping", "deallocated", "deallocating")
    return ("stopped" if stopped else "running"), None


def part_pattern(deployment: str) -> re.Pattern[str]:
    """Return what the name of a disk or interface of this deployment looks like."""
    return re.compile(rf"(?P<vm>[a-z0-9-]+)\.{mark_of(deployment)}([^a-z0-9].*)?", re.IGNORECASE)


def leftover_of(
    kind: LeftoverKind, answer: Mapping[str, Any], deployment: str, seen_s: float
) -> Leftover | None:
    """Return a disk or an interface of ours that no machine uses; `None` for all others."""
    name = str(answer["name"])
    match = part_pattern(deployment).fullmatch(name)
    tagged = tag_of(answer, DEPLOYMENT_TAG)
    properties = answer.get("properties") or {}
    if match is None or tagged not in ("", deployment):
        return None
    if answer.get("managedBy") or properties.get("virtualMachine"):
        return None
    created = properties.get("timeCreated")
    return Leftover(
        ref=Ref(Place("azure", str(answer["location"]).lower()), f"{kind}/{name}"),
        kind=kind,
        created_at_s=_seconds(str(created)) if created else seen_s,
        token=match["vm"],
        tags={DEPLOYMENT_TAG: deployment},  # its name's mark says as much
    )


def kind_of(ref: Ref) -> tuple[LeftoverKind | None, str]:
    """Return what a reference names: a leftover's kind, or None for a machine, and the name."""
    for kind in KINDS:
        if ref.id.startswith(f"{kind}/"):
            return kind, ref.id.removeprefix(f"{kind}/")
    return None, ref.id


def same_request(answers: Sequence[Mapping[str, Any]], request: LaunchRequest) -> bool:
    """Return whether all these machines were made by exactly this request."""
    return all(tag_of(answer, REQUEST_TAG) == digest_of(request) for answer in answers)


def _login(name: str, settings: AzureSettings) -> dict[str, Any]:
    path = f"/home/{settings.admin}/.ssh/authorized_keys"
    key = {"path": path, "keyData": settings.ssh_public_key}
    return {
        "computerName": name,
        "adminUsername": settings.admin,
        "linuxConfiguration": {
            "disablePasswordAuthentication": True,
            "ssh": {"publicKeys": [key]},
        },
    }


def _seconds(text: str) -> float:
    if not text:
        return 0.0
    return utc_s(datetime.fromisoformat(text))


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()
