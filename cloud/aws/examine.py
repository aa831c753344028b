"""What an account of AWS lacks for a deployment, looked at before anything is bought.

Nothing is made: what buys is asked with `DryRun`. Permissions to end cannot be tried so, because AWS
decides them by the tags of a thing that has to exist; IAM's own simulator says them. A role that may
buy and may not end is the dearest mistake there is.
"""

import asyncio
import re
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any

from cloud import errors
from cloud.aws.answers import family_of
from cloud.aws.calls import Calls, matching
from cloud.aws.launching import run_instances
from cloud.aws.selling import Shop
from cloud.aws.settings import AwsSettings, Region
from cloud.findings import Finding, Found, bad, failed, good, looked, room_left
from cloud.model import DEPLOYMENT_TAG, LaunchRequest, Market, Pool, Recipe, Sold

LOOK_S = 60.0
SKEW_S = 60.0  # AWS refuses signatures that are five minutes off
ADDRESSES_MIN = 16
NEVER_SENT = "examined-only"
READS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("describe_instances", {}),
    ("describe_volumes", {}),
    ("describe_network_interfaces", {}),
    ("describe_spot_instance_requests", {}),
    ("describe_spot_price_history", {}),
    ("get_spot_placement_scores", {"TargetCapacity": 1, "InstanceTypes": ["m7i.large"]}),
)
ENDS = (
    ("ec2:TerminateInstances", "instance"),
    ("ec2:DeleteVolume", "volume"),
    ("ec2:DeleteNetworkInterface", "network-interface"),
    ("ec2:CancelSpotInstanceRequests", "spot-instances-request"),
)
DRILLS = (
    "fis:CreateExperimentTemplate",
    "fis:StartExperiment",
    "fis:GetExperiment",
    "fis:DeleteExperimentTemplate",
)
ROLE_REMEDY = "attach the policy `Machines` of cloud/aws/account.json to the manager's role"
NO_KEYS = "aws"
WORLD = ("0.0.0.0/0", "::/0")
NUMBERED = re.compile(r"[-_.]?\d[\dT:._-]*$")


async def examine(
    settings: AwsSettings, deployment: str, calls: Calls | None = None
) -> tuple[Finding, ...]:
    """Return a line for everything that has to be right, all regions at the same time."""
    own = calls or Calls(settings.endpoint_url)
    try:
        found = await asyncio.gather(
            *(_Region(own, settings, region, deployment).findings() for region in settings.regions)
        )
    finally:
        if calls is None:
            await own.close()
    lines = tuple(line for some in found for line in some)
    # No keys or no package: what one region says holds for all of them.
    return lines[:1] if all(line.name == NO_KEYS for line in lines) else lines


class _Region:
    """The looks at one region."""

    def __init__(
        self, calls: Calls, settings: AwsSettings, region: Region, deployment: str
    ) -> None:
        self._calls, self._settings, self._region = calls, settings, region
        self._deployment = deployment
        self._arn = ""
        self._shop = Shop(calls, settings, region)

    async def findings(self) -> Found:
        """Return who we are first: without an answer to that, nothing else is worth a call."""
        known = await self._look("identity", self._identity(), "see docs/aws.md")
        if not self._arn:
            return known
        looks = (
            self._look("image", self._image(), "set aws.images to an image that exists"),
            self._look("network", self._network(), "see aws.subnets and aws.security_groups"),
            self._look("types", self._sold(), "see aws.types"),
            self._look("reading", self._reading(), ROLE_REMEDY),
            self._look("ending", self._ending(), ROLE_REMEDY),
            self._look("drills", self._drills(), ROLE_REMEDY),
            self._look("interruptions", self._queue(), "see aws.queue_url"),
        )
        return [*known, *(line for some in await asyncio.gather(*looks) for line in some)]

    async def _look(self, what: str, look: Awaitable[Found], remedy: str) -> Found:
        return await looked(self._name(what), look, remedy, LOOK_S)

    def _name(self, what: str) -> str:
        return f"aws {self._region.name} {what}"

    async def _call(self, operation: str, service: str = "ec2", **params: Any) -> dict[str, Any]:
        return await self._calls.call(self._region.name, service, operation, **params)

    async def _identity(self) -> Found:
        try:
            answer = await self._call("get_caller_identity", "sts")
        except errors.NotAllowed as error:
            return [bad(NO_KEYS, *_in_two(str(error)))]
        except errors.Unknown:
            near = await self._calls.near(self._region.name)
            if near is None:
                raise
            said = f"{self._region.name} does not answer, and boto3 knows no region of this name"
            return [bad(self._name("identity"), said, f"correct aws.regions; is it {near}?")]
        self._arn = str(answer["Arn"])
        lines = [good(self._name("identity"), self._arn)]
        headers = (answer.get("ResponseMetadata") or {}).get("HTTPHeaders") or {}
        if headers.get("date"):
            off_s = self._calls.wall() - parsedate_to_datetime(headers["date"]).timestamp()
            lines.append(self._clock(off_s))
        return lines

    def _clock(self, off_s: float) -> Finding:
        if abs(off_s) < SKEW_S:
            return good(self._name("clock"), "as AWS's")
        said = f"{off_s:+.0f} s from AWS's; from 300 s on every call is refused"
        return bad(self._name("clock"), said, "set the clock: timedatectl set-ntp true")

    async def _image(self) -> Found:
        recipe = await self._shop.pin()
        name = recipe.parts["image"]
        answer = await self._call("describe_images", ImageIds=[name])
        told = answer["Images"][0]
        if told.get("State", "available") != "available":
            said = f"{name} is {told['State']}, so no machine can start from it"
            return [bad(self._name("image"), said, "set aws.images to an image that is available")]
        if told.get("Architecture", "x86_64") != "x86_64":
            said = f"{name} is for {told['Architecture']}, and the machines are x86_64"
            return [bad(self._name("image"), said, "build it for x86_64, and set aws.images")]
        newer = await self._newer(told)
        more = f"; {newer} is newer: set aws.images to use it" if newer else ""
        return [good(self._name("image"), f"{name} {told.get('Name', '')}".rstrip() + more)]

    async def _newer(self, told: Mapping[str, Any]) -> str:
        """Return the newest image of the same owner whose name differs in its number only."""
        stem = NUMBERED.sub("", str(told.get("Name", "")))
        if not stem or "OwnerId" not in told or "CreationDate" not in told:
            return ""
        alike = await self._call(
            "describe_images", Owners=[told["OwnerId"]], Filters=[matching("name", [f"{stem}*"])]
        )
        later = [
            image
            for image in alike["Images"]
            if image.get("CreationDate", "") > told["CreationDate"]
            and NUMBERED.sub("", str(image.get("Name", ""))) == stem
        ]
        newest = max(later, key=lambda image: image["CreationDate"], default=None)
        return "" if newest is None else f"{newest['ImageId']} ({newest['Name']})"

    async def _network(self) -> Found:
        """Look at the subnets, then at what belongs to their network."""
        subnets = await asyncio.gather(
            *(self._subnet(zone, name) for zone, name in self._region.subnets.items())
        )
        lines = [line for line, _ in subnets]
        networks = {network for _, network in subnets if network}
        if len(networks) > 1:
            said = f"the subnets are in {', '.join(sorted(networks))}; machines have to reach each other"
            remedy = "name subnets of one network in aws.subnets"
            return [*lines, bad(self._name("network"), said, remedy)]
        for network in networks:
            lines += await self._look(
                "security group", self._group(network), "correct aws.security_groups"
            )
            lines += await self._look("S3 endpoint", self._endpoint(network), ROLE_REMEDY)
        return lines

    async def _subnet(self, zone: str, name: str) -> tuple[Finding, str]:
        title = self._name(f"subnet {zone}")
        try:
            answer = await self._call("describe_subnets", SubnetIds=[name])
        except errors.CloudError as error:
            return failed(title, error, "correct aws.subnets"), ""
        told = answer["Subnets"][0]
        network, free = str(told["VpcId"]), int(told["AvailableIpAddressCount"])
        if told["AvailabilityZone"] != zone:
            said = f"{name} is in {told['AvailabilityZone']}, so every launch in {zone} is refused"
            return bad(
                title, said, f"write {told['AvailabilityZone']}={name} in aws.subnets"
            ), network
        if free < ADDRESSES_MIN:
            said = f"{name} has {free} free addresses, and each machine needs one"
            return bad(
                title, said, "end what holds them, or name a larger subnet in aws.subnets"
            ), network
        return good(title, f"{name}, {free:,} free addresses"), network

    async def _group(self, network: str) -> Found:
        name, title = self._region.security_group, self._name("security group")
        answer = await self._call("describe_security_groups", GroupIds=[name])
        told = answer["SecurityGroups"][0]
        if told["VpcId"] != network:
            said = f"{name} is in {told['VpcId']} and the subnets are in {network}"
            return [bad(title, said, "set aws.security_groups to a group of that network")]
        rules = told.get("IpPermissions", ())
        for rule in rules:
            if world := [x for x in _ranges(rule) if x in WORLD]:
                said = f"{name} admits {world[0]} to {_ports(rule)}, so anybody may knock there"
                return [bad(title, said, "remove that rule; admit your own address only")]
        among = [
            rule
            for rule in rules
            if any(pair.get("GroupId") == name for pair in rule.get("UserIdGroupPairs", ()))
            and rule.get("IpProtocol") == "-1"
        ]
        if not among:
            said = (
                f"{name} does not admit its own machines on all ports, so none could join or train"
            )
            return [bad(title, said, f"add an inbound rule: all traffic, from {name}")]
        return [good(title, f"{name}: its own machines, and not the world")]

    async def _endpoint(self, network: str) -> Found:
        service, title = f"com.amazonaws.{self._region.name}.s3", self._name("S3 endpoint")
        wanted = [matching("vpc-id", [network]), matching("service-name", [service])]
        answer = await self._call("describe_vpc_endpoints", Filters=wanted)
        told = [x for x in answer["VpcEndpoints"] if x.get("VpcEndpointType") != "Interface"]
        if any(x.get("RouteTableIds", True) for x in told):
            return [good(title, f"a gateway in {network}: traffic with S3 costs nothing")]
        none = "has one that no route table leads to" if told else "has none"
        said = (
            f"{network} {none}: through a NAT gateway a gigabyte costs $0.045, "
            "so one checkpoint of 84 GB costs $3.78"
        )
        return [bad(title, said, f"add a gateway endpoint for {service} to its route table")]

    async def _sold(self) -> Found:
        """Look at types, quotas and buying: each needs what the one before it found."""
        sold = await self._shop.sold()
        zones = {pool.zone for pool in sold.pools}
        lines = [self._types(sold.pools)]
        for zone in sorted(set(self._region.subnets) - zones):
            said = f"sells none of {', '.join(self._settings.types)}"
            remedy = f"drop {zone} from aws.subnets, or add types to aws.types"
            lines.append(bad(self._name(f"zone {zone}"), said, remedy))
        if not sold.pools:
            return lines
        lines += self._quota(sold)
        first = {zone: min(p for p in sold.pools if p.zone == zone) for zone in sorted(zones)}
        asked: list[tuple[Pool, Market]] = [(pool, "spot") for pool in first.values()]
        asked.append((next(iter(first.values())), "on_demand"))
        return [*lines, *await self._look("buying", self._buying(asked, sold.recipe), ROLE_REMEDY)]

    def _types(self, pools: Sequence[Pool]) -> Finding:
        names = sorted({pool.type for pool in pools})
        title = self._name("types")
        unsold = [one for one in self._settings.types if not any(_fits(one, x) for x in names)]
        if unsold:
            said = f"{', '.join(unsold)}: the region sells none, no price is known, or no worker trains on it"
            return bad(title, said, "correct aws.types, or buy in a region that sells it")
        return good(title, f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}")

    def _quota(self, sold: Sold) -> Found:
        wanted = {family_of(pool.type) for pool in sold.pools}
        remedy = "ask for more in Service Quotas, Amazon EC2; an answer may take days"
        return [
            room_left(
                self._name(f"quota {room.family} {room.market.replace('_', ' ')}"),
                room,
                sold.types,
                remedy,
            )
            for room in sorted(sold.rooms, key=lambda x: (x.family, x.market))
            if room.family in wanted
        ]

    async def _buying(self, asked: Sequence[tuple[Pool, Market]], recipe: Recipe) -> Found:
        for pool, market in asked:
            request = LaunchRequest(
                token=NEVER_SENT,
                pool=pool,
                market=market,
                bid_usd_per_h=None,
                tags={DEPLOYMENT_TAG: self._deployment},
            )
            wanted = run_instances(request, recipe, self._settings.user_data)
            await self._dry("run_instances", **wanted)
        kinds = ", ".join(f"{pool.zone} {market.replace('_', ' ')}" for pool, market in asked)
        return [good(self._name("buying"), f"allowed, with our tags only: {kinds}")]

    async def _reading(self) -> Found:
        await asyncio.gather(*(self._dry(operation, **more) for operation, more in READS))
        return [good(self._name("reading"), "allowed: machines, disks, interfaces, prices, scores")]

    async def _dry(self, operation: str, **params: Any) -> None:
        """Ask whether a call would be allowed; raise the refusal if it would not."""
        try:
            await self._call(operation, **params, DryRun=True)
        except errors.Unknown as error:
            if "DryRunOperation" not in str(error):
                raise

    async def _ending(self) -> Found:
        title = self._name("ending")
        if self._arn.endswith(":root"):
            return [good(title, "allowed: these are the keys of the account's owner; use a role")]
        tagged = {f"ec2:ResourceTag/{DEPLOYMENT_TAG}": self._deployment}
        wanted = [(action, f"ec2:{self._region.name}:ACCOUNT:{kind}/*") for action, kind in ENDS]
        if missing := await self._denied(wanted, tagged):
            said = f"{', '.join(missing)} is not allowed, so what is bought could not be given back"
            return [bad(title, said, ROLE_REMEDY)]
        return [good(title, f"allowed for what carries {DEPLOYMENT_TAG}={self._deployment}")]

    async def _drills(self) -> Found:
        if not self._settings.drill_role or self._arn.endswith(":root"):
            return []
        title, template = (
            self._name("drills"),
            f"fis:{self._region.name}:ACCOUNT:experiment-template/*",
        )
        if missing := await self._denied([(action, template) for action in DRILLS], {}):
            said = f"{', '.join(missing)} is not allowed, so AWS interrupts nothing on purpose"
            return [bad(title, said, ROLE_REMEDY)]
        return [good(title, f"allowed, as {self._settings.drill_role}")]

    async def _denied(
        self, wanted: Sequence[tuple[str, str]], context: Mapping[str, str]
    ) -> list[str]:
        """Return which of these actions IAM's simulator does not allow us."""
        source = await self._principal()
        entries = [
            {"ContextKeyName": name, "ContextKeyValues": [told], "ContextKeyType": "string"}
            for name, told in context.items()
        ]
        missing = []
        for action, resource in wanted:
            answer = await self._call(
                "simulate_principal_policy",
                "iam",
                PolicySourceArn=source,
                ActionNames=[action],
                ResourceArns=[f"arn:aws:{resource.replace('ACCOUNT', source.split(':')[4])}"],
                **({"ContextEntries": entries} if entries else {}),
            )
            if any(x["EvalDecision"] != "allowed" for x in answer["EvaluationResults"]):
                missing.append(action)
        return missing

    async def _principal(self) -> str:
        """Return our role or user, as the simulator knows no sessions; these do not say a role's path."""
        found = re.fullmatch(r"arn:(aws[\w-]*):sts::(\d+):assumed-role/([^/]+)/.*", self._arn)
        if found is None:
            return self._arn
        with suppress(errors.NotAllowed):  # a role without a path need not be looked up
            answer = await self._call("get_role", "iam", RoleName=found[3])
            return str(answer["Role"]["Arn"])
        return f"arn:{found[1]}:iam::{found[2]}:role/{found[3]}"

    async def _queue(self) -> Found:
        url, title = self._settings.queue_url, self._name("interruptions")
        if url is None or self._settings.queue_region != self._region.name:
            return []
        await self._call(
            "receive_message", "sqs", QueueUrl=url, MaxNumberOfMessages=1, VisibilityTimeout=0
        )
        return [good(title, url)]


def _ranges(rule: Mapping[str, Any]) -> list[str]:
    return [x["CidrIp"] for x in rule.get("IpRanges", ())] + [
        x["CidrIpv6"] for x in rule.get("Ipv6Ranges", ())
    ]


def _ports(rule: Mapping[str, Any]) -> str:
    if rule.get("IpProtocol") == "-1" or "FromPort" not in rule:
        return "all ports"
    first, last = rule["FromPort"], rule["ToPort"]
    return f"port {first}" if first == last else f"ports {first} to {last}"


def _fits(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name) is not None


def _in_two(sentence: str) -> tuple[str, str]:
    """Return a sentence as what is wrong and what to do, which our errors put after the last `;`."""
    said, _, todo = sentence.rpartition("; ")
    return (said, todo) if said else (sentence, "see docs/aws.md")
