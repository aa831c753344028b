"""What an Azure subscription lacks for a deployment, looked at before anything is bought.

Nothing is made. What the manager may do, Azure says as a list, which is compared with the role that
comes with this package.
"""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from fnmatch import fnmatchcase
from importlib import resources
from ipaddress import ip_network
from typing import Any

from cloud.azure import calls
from cloud.azure.connection import NO_SDK, Connection, has_sdk
from cloud.azure.provider import AzureProvider
from cloud.azure.settings import AzureSettings
from cloud.findings import Finding, Found, bad, good, looked, room_left
from cloud.model import Place, Sold

LOOK_S = 60.0
SKEW_S = 60.0  # tokens are refused from five minutes on
ADDRESSES_MIN = 16
RESERVED = 5  # addresses of every subnet that Azure keeps
GROUPS, AUTHORIZATION, NETWORK, GALLERIES = "2021-04-01", "2022-04-01", "2024-05-01", "2024-03-03"
WORLD = ("*", "internet", "any", "0.0.0.0/0", "::/0")
INSIDE = ("virtualnetwork", "*", "any", "0.0.0.0/0")  # the tag Internet is what lies outside
OURS_FROM = 1024  # our machines listen on no port below
IMAGE = re.compile(r"(?P<all>/.*/versions)/(?P<version>\d+(\.\d+)*)", re.IGNORECASE)
ROLE_REMEDY = "assign the role of cloud/azure/role.json to the manager's identity on the group"
SUBNET_REMEDY = "set azure.subnets to the output `subnet` of cloud/azure/template.json"


async def examine(
    settings: AzureSettings, wall: Callable[[], float] = time.time, **sdk: Any
) -> tuple[Finding, ...]:
    """Return a line for everything that has to be right, all regions at the same time."""
    if not has_sdk():
        said, _, todo = NO_SDK.partition("; ")
        return (bad("azure", said, todo),)
    look = _Look(settings, Connection(settings, **sdk), wall)
    provider = AzureProvider(settings, "examined-only", **sdk)
    try:
        account = await look.account()
        if not all(line.ok for line in account[:1]):
            return tuple(account)
        regions = await asyncio.gather(*(look.region(x, provider) for x in settings.regions))
    finally:
        await provider.close()
        look.close()
    return (*account, *(line for some in regions for line in some))


class _Look:
    """The looks at one subscription."""

    def __init__(
        self, settings: AzureSettings, connection: Connection, wall: Callable[[], float]
    ) -> None:
        self._settings, self._connection, self._wall = settings, connection, wall
        self._group = (
            f"/subscriptions/{settings.subscription}/resourceGroups/{settings.resource_group}"
        )

    def close(self) -> None:
        self._connection.close()

    async def account(self) -> Found:
        """Look at what all regions share; without a sign-in nothing else is worth a call."""
        first = await looked("azure sign-in", self._sign_in(), "run `az login`", LOOK_S)
        if not first[0].ok:
            return first
        image = looked("azure image", self._image(), "correct azure.image", LOOK_S)
        role = looked("azure permissions", self._role(), ROLE_REMEDY, LOOK_S)
        return [*first, *(line for some in await asyncio.gather(image, role) for line in some)]

    async def region(self, region: str, provider: AzureProvider) -> Found:
        def look(what: str, found: Awaitable[Found], remedy: str) -> Awaitable[Found]:
            return looked(f"azure {region} {what}", found, remedy, LOOK_S)

        found = await asyncio.gather(
            look("network", self._network(region), SUBNET_REMEDY),
            look("types", self._sold(region, provider), "see azure.types and azure.subnets"),
        )
        return [line for some in found for line in some]

    async def _get(self, path: str, version: str) -> tuple[calls.Answer, Mapping[str, str]]:
        region = self._settings.regions[0]
        return await self._connection.run(region, "look", lambda c: calls.look(c, path, version))

    async def _sign_in(self) -> Found:
        """Look at the group: who may see it is signed in, and its answer has Azure's date."""
        told, headers = await self._get(self._group, GROUPS)
        lines = [good("azure sign-in", f"sees {told['id']}")]
        if date := headers.get("Date"):
            off_s = self._wall() - parsedate_to_datetime(date).timestamp()
            if abs(off_s) < SKEW_S:
                lines.append(good("azure clock", "as Azure's"))
            else:
                said = f"{off_s:+.0f} s from Azure's; from 300 s on tokens are refused"
                lines.append(bad("azure clock", said, "set the clock: timedatectl set-ntp true"))
        return lines

    async def _image(self) -> Found:
        name = "azure image"
        parts = IMAGE.fullmatch(self._settings.image)
        if parts is None:
            said = f"{self._settings.image} does not end in a version, such as /versions/1.0.0"
            return [bad(name, said, "pin one version: machines of one job have to be equal")]
        told, _ = await self._get(self._settings.image, GALLERIES)
        properties = told.get("properties") or {}
        state = properties.get("provisioningState", "Succeeded")
        if state != "Succeeded":
            said = f"version {parts['version']} is {state}, so no machine can start from it"
            return [bad(name, said, "wait for it, or set azure.image to another version")]
        targets = (properties.get("publishingProfile") or {}).get("targetRegions") or ()
        there = {_plain(str(x.get("name", ""))) for x in targets}
        if missing := [x for x in self._settings.regions if there and x not in there]:
            said = f"version {parts['version']} is not in {', '.join(missing)}"
            return [bad(name, said, "replicate it there, or drop the region from azure.subnets")]
        listed, _ = await self._get(parts["all"], GALLERIES)
        newest = max((str(x["name"]) for x in listed["value"]), key=_numbers, default="0")
        newer = _numbers(newest) > _numbers(parts["version"])
        more = f"; {newest} is newer: set azure.image to use it" if newer else ""
        return [good(name, f"version {parts['version']}{more}")]

    async def _role(self) -> Found:
        name = "azure permissions"
        path = f"{self._group}/providers/Microsoft.Authorization/permissions"
        told, _ = await self._get(path, AUTHORIZATION)
        missing = [x for x in needed() if not _allowed(x, told["value"])]
        if not missing:
            return [good(name, "all of cloud/azure/role.json")]
        return [bad(name, f"missing on the group: {', '.join(missing)}", ROLE_REMEDY)]

    async def _network(self, region: str) -> Found:
        """Look at the network of the region's subnet: where it is, its room, and who gets in."""
        name, subnet = f"azure {region} subnet", self._settings.subnets.get(region, "")
        network = subnet.partition("/subnets/")[0]
        if network == subnet:
            return [bad(name, f"azure.subnets names no subnet in {region}", SUBNET_REMEDY)]
        told, _ = await self._get(network, NETWORK)
        if _plain(str(told["location"])) != region:
            said = f"it is in {told['location']}, so every launch in {region} is refused"
            return [bad(name, said, SUBNET_REMEDY)]
        subnets = {str(x["name"]).lower(): x["properties"] for x in told["properties"]["subnets"]}
        properties = subnets.get(subnet.rpartition("/")[2].lower())
        if properties is None:
            return [bad(name, f"{subnet} is not there, and every machine needs it", SUBNET_REMEDY)]
        lines = [
            _room_in(name, properties),
            _storage(region, properties),
            _way_out(region, properties),
        ]
        title = f"azure {region} security group"
        group = (properties.get("networkSecurityGroup") or {}).get("id")
        if not group:
            said = "the subnet has none, so whatever has a public address is open to everybody"
            return [*lines, bad(title, said, SUBNET_REMEDY)]
        return [*lines, *await looked(title, self._rules(title, group), ROLE_REMEDY, LOOK_S)]

    async def _rules(self, name: str, group: str) -> Found:
        told, _ = await self._get(group, NETWORK)
        rules = sorted(
            (x["properties"] for x in told["properties"].get("securityRules", ())),
            key=lambda x: int(x["priority"]),
        )
        short = group.rpartition("/")[2]
        for rule in (x for x in rules if x["direction"] == "Inbound"):
            sources = {str(x).lower() for x in _sources(rule)}
            world = sources & set(WORLD)
            if rule["access"] == "Allow" and world:
                ports = rule.get("destinationPortRange") or "several ports"
                said = f"{short} admits everybody to port {ports}, so anybody may knock there"
                return [bad(name, said, "remove that rule; admit your own address only")]
            if rule["access"] == "Deny" and sources & set(INSIDE) and _reaches_ours(rule):
                said = f"{short} keeps the network's own machines out, so none could join or train"
                return [bad(name, said, "admit VirtualNetwork before what denies all others")]
            if rule["access"] == "Allow" and "virtualnetwork" in sources:
                break
        return [good(name, f"{short}: its own network, and not the world")]

    async def _sold(self, region: str, provider: AzureProvider) -> Found:
        sold = await provider.sold(Place("azure", region))
        names = sorted({pool.type for pool in sold.pools})
        name = f"azure {region} types"
        patterns = self._settings.types
        unsold = [x for x in patterns if not any(fnmatchcase(size, x) for size in names)]
        if unsold:
            said = f"{', '.join(unsold)}: {region} sells none to this subscription"
            return [bad(name, said, "correct azure.types, or buy in a region that sells it")]
        more = ", ..." if len(names) > 4 else ""
        return [good(name, ", ".join(names[:4]) + more), *_quotas(region, sold)]


def needed() -> list[str]:
    """Return the actions of the role that comes with this package."""
    text = resources.files("cloud.azure").joinpath("role.json").read_text()
    return [str(action) for action in json.loads(text)["Actions"]]


def _allowed(action: str, permissions: Iterable[Mapping[str, Any]]) -> bool:
    def among(patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(action.lower(), str(one).lower()) for one in patterns)

    return any(
        among(one.get("actions") or ()) and not among(one.get("notActions") or ())
        for one in permissions
    )


def _room_in(name: str, properties: Mapping[str, Any]) -> Finding:
    prefix = properties.get("addressPrefix") or properties["addressPrefixes"][0]
    used = len(properties.get("ipConfigurations") or ())
    free = max(0, ip_network(str(prefix)).num_addresses - RESERVED - used)
    if free >= ADDRESSES_MIN:
        return good(name, f"{prefix}, {free:,} free addresses")
    said = f"{prefix} has {free} free addresses, and each machine needs one"
    return bad(name, said, "end what holds them, or name a larger subnet in azure.subnets")


def _storage(region: str, properties: Mapping[str, Any]) -> Finding:
    name = f"azure {region} storage endpoint"
    services = [str(x.get("service")) for x in properties.get("serviceEndpoints") or ()]
    if any(x.startswith("Microsoft.Storage") for x in services):
        return good(name, "the subnet reaches storage directly")
    said = "the subnet has none, so states take the way over the internet, which a closed store refuses"
    return bad(name, said, "add the service endpoint Microsoft.Storage to the subnet")


def _way_out(region: str, properties: Mapping[str, Any]) -> Finding:
    """Look at how machines reach Azure's management endpoint: a private subnet has no way by itself."""
    name = f"azure {region} way out"
    if properties.get("defaultOutboundAccess") is not False:
        return good(name, "the subnet has Azure's default outbound access")
    ways = [x for x in ("natGateway", "routeTable") if properties.get(x)]
    if ways:
        return good(name, f"the subnet has a {ways[0]}")
    said = "the subnet is private, so a machine whose manager is gone could not end its own bill"
    return bad(name, said, "give the subnet a NAT gateway, or default outbound access")


def _quotas(region: str, sold: Sold) -> list[Finding]:
    remedy = "ask for more in the portal, Quotas, Compute; for GPUs it may take days"
    lines = []
    for room in sold.rooms:
        what = room.family or ("all spot" if room.market == "spot" else "all on demand")
        lines.append(room_left(f"azure {region} quota {what}", room, sold.types, remedy))
    return lines


def _sources(rule: Mapping[str, Any]) -> list[str]:
    several = rule.get("sourceAddressPrefixes") or ()
    return [str(x) for x in (rule.get("sourceAddressPrefix"), *several) if x]


def _reaches_ours(rule: Mapping[str, Any]) -> bool:
    """Return whether a rule speaks of what our machines say to each other, which is TCP."""
    if str(rule.get("protocol", "*")).lower() not in ("*", "tcp"):
        return False
    several = rule.get("destinationPortRanges") or ()
    ranges = [str(x) for x in (rule.get("destinationPortRange"), *several) if x]
    ends = [x.rpartition("-")[2] for x in ranges]
    return not ends or not all(x.isdecimal() and int(x) < OURS_FROM for x in ends)


def _plain(region: str) -> str:
    return region.lower().replace(" ", "")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
