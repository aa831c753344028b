"""What one region sells, at which prices, and how machines are made there."""

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from cloud import errors
from cloud.aws import answers
from cloud.aws.calls import Calls, matching
from cloud.aws.codes import error_of
from cloud.aws.settings import AwsSettings, Region
from cloud.model import InstanceType, LaunchRequest, Place, Pool, Quote, Recipe, Score, Sold

PRICE_REGION = "us-east-1"  # where the price list of all regions is
HISTORY_S = 3600.0
UNUSED = (
    "BareMetal",
    "NeuronInfo",
    "InferenceAcceleratorInfo",
    "FpgaInfo",
    "MediaAcceleratorInfo",
)
"""What a type says that has something to pay for which no worker uses."""
COUNTED = ("pending", "running", "stopping")  # by quotas; a stopped machine counts no more


def tabled_prices(region: str) -> dict[str, float]:
    """Return the on-demand prices that were shipped for a region."""
    table = json.loads(resources.files("cloud.aws").joinpath("prices.json").read_text())
    name = table["same_as"].get(region, region)
    return dict(table["usd_per_h"].get(name, {}))


class Shop:
    """The catalogue of one region."""

    def __init__(self, calls: Calls, settings: AwsSettings, region: Region) -> None:
        self._calls = calls
        self._settings = settings
        self._region = region
        self._place = Place("aws", region.name)
        self._prices = tabled_prices(region.name)
        self._types: tuple[InstanceType, ...] = ()
        self._pools: tuple[Pool, ...] = ()
        self._recipe: Recipe | None = None
        self._recipes: dict[str, Recipe] = {}

    async def sold(self) -> Sold:
        region, recipe = self._region, await self.pin()
        types = matching("instance-type", self._settings.types)
        told = await self._list("describe_instance_types", "InstanceTypes", Filters=[types])
        offered = await self._list(
            "describe_instance_type_offerings",
            "InstanceTypeOfferings",
            LocationType="availability-zone",
            Filters=[types],
        )
        quotas = await self._quotas()
        counted = matching("instance-state-name", COUNTED)
        held = await self._list("describe_instances", "Reservations", Filters=[counted])
        usable = {x["InstanceType"]: x for x in told if _runs_our_image(x)}
        await self._learn_prices(usable)
        self._pools = tuple(
            Pool(cloud="aws", region=region.name, zone=x["Location"], type=x["InstanceType"])
            for x in offered
            if x["InstanceType"] in usable
            and x["InstanceType"] in self._prices
            and x["Location"] in region.subnets
        )
        self._types = tuple(
            answers.type_of(usable[name], self._prices[name], self._settings.disk_gib)
            for name in sorted({pool.type for pool in self._pools})
        )
        rooms = answers.rooms_of(quotas, answers.instances_of(held), self._place)
        return Sold(types=self._types, pools=self._pools, rooms=tuple(rooms), recipe=recipe)

    async def _quotas(self) -> Sequence[Any]:
        """Return all quotas: as applied to this account, or else as AWS gives them to everybody.

        AWS leaves a quota that was never applied out of the first list.
        """
        found: dict[str, Any] = {}
        for operation in ("list_aws_default_service_quotas", "list_service_quotas"):
            told = await self._calls.pages(
                self._region.name, "service-quotas", operation, "Quotas", ServiceCode="ec2"
            )
            found |= {quota["QuotaCode"]: quota for quota in told}
        return [*found.values()]

    async def quotes(self, now_s: float) -> Sequence[Quote]:
        """Return the prices of each pool in the last hour, the one that holds last.

        AWS adds the last change before the window. Those within it are what a machine was charged
        if its price moved more than once since it was asked for last.
        """
        if not self._pools:
            await self.sold()
        names = [kind.name for kind in self._types]
        if not names:
            return []
        history = await self._list(
            "describe_spot_price_history",
            "SpotPriceHistory",
            InstanceTypes=names,
            ProductDescriptions=["Linux/UNIX"],
            StartTime=datetime.fromtimestamp(now_s - HISTORY_S, UTC),
        )
        sold = set(self._pools)
        spot = [q for q in answers.quotes_of(history, self._place, names) if q.pool in sold]
        return spot + [
            Quote(pool=x, market="on_demand", at_s=now_s, price_usd_per_h=self._prices[x.type])
            for x in self._pools
        ]

    async def scores(self) -> dict[Pool, Score]:
        """Return AWS's placement score of each zone, which is for all types that we would take.

        AWS names zones by ids here, which are the same in every account; the subnets have both.
        """
        if not self._pools:
            await self.sold()
        names = [kind.name for kind in self._types]
        if not names:
            return {}
        region = self._region
        subnets = await self._list(
            "describe_subnets", "Subnets", SubnetIds=list(region.subnets.values())
        )
        zones = {x["AvailabilityZoneId"]: x["AvailabilityZone"] for x in subnets}
        told = await self._list(
            "get_spot_placement_scores",
            "SpotPlacementScores",
            InstanceTypes=names,
            TargetCapacity=1,
            SingleAvailabilityZone=True,
            RegionNames=[region.name],
        )
        known = {zones.get(x.get("AvailabilityZoneId")): int(x["Score"]) for x in told}
        return {pool: known[pool.zone] for pool in self._pools if pool.zone in known}

    async def recipe_of(self, request: LaunchRequest) -> Recipe:
        """Return how the machines of this request are made; refuse what is not sold here."""
        if request.pool.zone not in self._region.subnets:
            said = f"{request.pool.key} is not sold: aws.subnets names no subnet in its zone"
            raise errors.Refused("zone", "NotSold", said)
        if self._recipe is None:
            await self.pin()
        recipe = self._recipes.get(request.recipe) if request.recipe else self._recipe
        if recipe is None:
            said = f"{request.pool.key}: the launch was made for other settings of [aws] than these"
            raise errors.Refused("request", "OtherRecipe", said)
        return recipe

    async def _list(self, operation: str, field: str, **params: Any) -> Sequence[Any]:
        return await self._calls.pages(self._region.name, "ec2", operation, field, **params)

    async def pin(self) -> Recipe:
        """Resolve the image and its disk now: what they are called may mean another one later."""
        region, image = self._region, self._region.image
        if image.startswith("/"):
            answer = await self._calls.call(region.name, "ssm", "get_parameter", Name=image)
            image = answer["Parameter"]["Value"]
        answer = await self._calls.call(region.name, "ec2", "describe_images", ImageIds=[image])
        if not answer["Images"]:  # as of one that is disabled, or shared with us no more
            said = f"no image {image} is shown to this account"
            raise error_of("InvalidAMIID.NotFound", said, region.name)
        root = answer["Images"][0]["RootDeviceName"]
        parts = self._settings.recipe(region, image).parts | {"root_device": root}
        self._recipe = Recipe(parts)
        self._recipes[self._recipe.digest] = self._recipe
        return self._recipe

    async def _learn_prices(self, names: Iterable[str]) -> None:
        """Ask the price list; where it does not answer, the shipped table holds."""
        for name in names:
            wanted = {
                "regionCode": self._region.name,
                "instanceType": name,
                "operatingSystem": "Linux",
                "tenancy": "Shared",
                "preInstalledSw": "NA",
                "capacitystatus": "Used",
            }
            filters = [
                {"Type": "TERM_MATCH", "Field": field, "Value": told}
                for field, told in wanted.items()
            ]
            try:
                answer = await self._calls.call(
                    PRICE_REGION,
                    "pricing",
                    "get_products",
                    ServiceCode="AmazonEC2",
                    Filters=filters,
                    MaxResults=20,
                )
                usd = answers.listed_usd_per_h(answer.get("PriceList", ()))
            except (errors.CloudError, ValueError, KeyError, TypeError, AttributeError):
                return
            if usd is not None:
                self._prices[name] = usd


def _runs_our_image(told: dict[str, Any]) -> bool:
    """Return whether a worker can train on a type, and whether it is sold by the hour at all."""
    architectures = (told.get("ProcessorInfo") or {}).get("SupportedArchitectures") or ()
    makers = {x.get("Manufacturer") for x in (told.get("GpuInfo") or {}).get("Gpus") or ()}
    return (
        "x86_64" in architectures
        and makers <= {"NVIDIA"}
        and not any(told.get(name) for name in UNUSED)
        and told.get("SupportedUsageClasses") != ["capacity-block"]
    )
