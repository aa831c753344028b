"""What Azure sells in a region and for how much: SKUs, quotas and the public price list. No I/O."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from math import ceil
from typing import Any

import msgspec

from cloud.accelerators import prior_speed
from cloud.azure.machines import zone_name
from cloud.clock import utc_s
from cloud.model import InstanceType, Market, Place, Pool, Quote, Room, Score

GIB = 1 << 30
MIB = 1 << 20
ACCELERATORS = (
    ("*_T4_v3", "T4"),
    ("*_A10_v4", "A10"),
    # Smaller ones of this series have a part of a card.
    ("Standard_NV6ads_A10_v5", "A10/6"),
    ("Standard_NV12ads_A10_v5", "A10/3"),
    ("Standard_NV18ads_A10_v5", "A10/2"),
    ("Standard_NV36ad*s_A10_v5", "A10"),
    ("Standard_NV72ads_A10_v5", "A10"),
    ("Standard_NC*s_v3", "V100"),
    ("Standard_ND*rs_v2", "V100"),
    ("Standard_ND96asr_v4", "A100"),
    ("*_A100_v4", "A100"),
    ("*_H100_v5", "H100"),
    ("*_H200_v5", "H200"),
)
"""Accelerators by the names of their sizes."""
AMDS = ("Standard_NV*as_v4", "Standard_NG*", "*_V710_v5", "*_MI300X_v5")
"""Sizes with AMD's accelerators, which a worker does not use."""


class Capability(msgspec.Struct, frozen=True):
    name: str
    value: str


class Location(msgspec.Struct, frozen=True):
    location: str
    zones: tuple[str, ...] = ()


class Restricted(msgspec.Struct, frozen=True):
    zones: tuple[str, ...] = ()


class Restriction(msgspec.Struct, frozen=True, rename="camel"):
    type: str
    restriction_info: Restricted = Restricted()


class Sku(msgspec.Struct, frozen=True, rename="camel"):
    """A size as one region sells it."""

    name: str
    resource_type: str
    family: str = ""
    location_info: tuple[Location, ...] = ()
    capabilities: tuple[Capability, ...] = ()
    restrictions: tuple[Restriction, ...] = ()

    def number(self, name: str) -> float:
        """Return a capability as a number; zero if the size does not have it."""
        return float(self.says(name) or 0)

    def says(self, name: str) -> str:
        """Return a capability as Azure writes it, in small letters; empty if the size has it not."""
        return next((x.value.lower() for x in self.capabilities if x.name == name), "")

    @property
    def trains(self) -> bool:
        """Return whether the image boots on it, and a worker uses its cards."""
        boots = self.says("CpuArchitectureType") != "arm64"
        boots = boots and not self.says("ConfidentialComputingType")
        return boots and not any(fnmatchcase(self.name, pattern) for pattern in AMDS)

    @property
    def zones(self) -> tuple[str, ...]:
        """Return the zones that sell it to us: one empty name in a region without zones."""
        if any(restriction.type == "Location" for restriction in self.restrictions):
            return ()
        closed = {zone for x in self.restrictions for zone in x.restriction_info.zones}
        known = [zone for place in self.location_info for zone in place.zones]
        return tuple(sorted(set(known) - closed)) if known else ("",)


class Price(msgspec.Struct, frozen=True, rename="camel"):
    """One line of the price list."""

    retail_price: float
    arm_region_name: str
    arm_sku_name: str
    meter_name: str
    product_name: str
    unit_of_measure: str
    type: str
    currency_code: str
    effective_start_date: datetime

    @property
    def since_s(self) -> float:
        return utc_s(self.effective_start_date)


class Usage(msgspec.Struct, frozen=True, rename="camel"):
    class Name(msgspec.Struct, frozen=True):
        value: str

    name: Name
    current_value: int
    limit: int


Prices = Mapping[tuple[str, Market], Price]


def wanted(skus: Iterable[Mapping[str, Any]], patterns: Sequence[str]) -> list[Sku]:
    """Return the sizes that the settings name, this account may have, and a worker can train on."""
    found = []
    for answer in skus:
        if answer.get("resourceType") != "virtualMachines":
            continue
        if not any(fnmatchcase(str(answer.get("name")), pattern) for pattern in patterns):
            continue
        sku = msgspec.convert(answer, Sku)
        if sku.zones and sku.trains:
            found.append(sku)
    return found


def price_filter(region: str, size: str) -> str:
    """Return the price list's filter, whose values have to be written exactly as Azure does."""
    return (
        "serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and "
        f"armRegionName eq '{region}' and armSkuName eq '{size}'"
    )


def read_prices(items: Iterable[Mapping[str, Any]], now_s: float) -> Prices:
    """Return the prices of Linux machines by size and market: the newest that holds already.

    Azure's older Cloud Services are listed under the same sizes, at two or three times the price.
    """
    prices: dict[tuple[str, Market], Price] = {}
    for item in items:
        price = msgspec.convert(item, Price, strict=False)
        product = price.product_name.replace(" ", "")
        if "Windows" in product or "CloudServices" in product:
            continue
        if price.meter_name.endswith("Low Priority"):
            continue
        if price.type != "Consumption" or price.unit_of_measure != "1 Hour":
            continue
        if price.currency_code != "USD" or price.retail_price <= 0:
            continue
        market: Market = "spot" if price.meter_name.endswith("Spot") else "on_demand"
        known = prices.get((price.arm_sku_name, market))
        if price.since_s <= now_s and (known is None or known.since_s <= price.since_s):
            prices[price.arm_sku_name, market] = price
    return prices


def types_of(skus: Sequence[Sku], prices: Prices) -> tuple[InstanceType, ...]:
    """Return the sizes with a known price."""
    return tuple(
        _type(sku, prices[sku.name, "on_demand"].retail_price)
        for sku in skus
        if (sku.name, "on_demand") in prices
    )


def pools_of(skus: Sequence[Sku], place: Place, prices: Prices) -> tuple[Pool, ...]:
    return tuple(
        Pool(place.cloud, place.region, zone_name(place.region, zone), sku.name)
        for sku in skus
        if (sku.name, "on_demand") in prices
        for zone in sku.zones
    )


def spot_pools(skus: Sequence[Sku], place: Place) -> list[Pool]:
    """Return the pools whose machines are sold as spot."""
    return [
        Pool(place.cloud, place.region, zone_name(place.region, zone), sku.name)
        for sku in skus
        if sku.says("LowPriorityCapable") == "true"
        for zone in sku.zones
    ]


def quotes_of(skus: Sequence[Sku], place: Place, prices: Prices) -> list[Quote]:
    """Return the present price of every pool and market; one price holds for a whole region."""
    spot = {sku.name for sku in skus if sku.says("LowPriorityCapable") == "true"}
    markets: tuple[Market, ...] = ("spot", "on_demand")
    return [
        Quote(pool=pool, market=market, at_s=price.since_s, price_usd_per_h=price.retail_price)
        for pool in pools_of(skus, place, prices)
        for market in markets
        if market == "on_demand" or pool.type in spot
        for price in [prices.get((pool.type, market))]
        if price is not None
    ]


def scores_of(told: Iterable[Mapping[str, Any]], pools: Iterable[Pool]) -> dict[Pool, Score]:
    """Return Azure's word for each pool: High, Medium or Low, or why there is none."""
    words = {
        (zone_name(str(x["region"]).lower(), str(x.get("availabilityZone") or "")), x["sku"]): x
        for x in told
    }
    return {
        pool: str(words[pool.zone, pool.type]["score"])
        for pool in pools
        if (pool.zone, pool.type) in words
    }


def rooms_of(
    usages: Iterable[Mapping[str, Any]], skus: Sequence[Sku], place: Place
) -> tuple[Room, ...]:
    """Return the quotas that count here: one for all spot, one a family and one for all others."""
    known = {x.name.value.lower(): x for x in msgspec.convert(list(usages), list[Usage])}
    rooms = []
    keys: list[tuple[str, Market, str]] = [
        ("lowprioritycores", "spot", ""),
        ("cores", "on_demand", ""),
        *((family.lower(), "on_demand", family) for family in sorted({x.family for x in skus})),
    ]
    for key, market, family in keys:
        if (usage := known.get(key)) is not None:
            rooms.append(
                Room(
                    place=place,
                    market=market,
                    family=family,
                    vcpus_max=usage.limit,
                    vcpus_used=usage.current_value,
                )
            )
    return tuple(rooms)


def _type(sku: Sku, on_demand_usd_per_h: float) -> InstanceType:
    gpus = ceil(sku.number("GPUs"))
    named = (accelerator for pattern, accelerator in ACCELERATORS if fnmatchcase(sku.name, pattern))
    name = next(named, "gpu") if gpus else "cpu"
    return InstanceType(
        name=sku.name,
        cloud="azure",
        slots=max(1, gpus),
        memory_bytes=int(sku.number("MemoryGB") * GIB),
        on_demand_usd_per_h=on_demand_usd_per_h,
        speed=prior_speed(name),
        accelerator=name,
        accelerators=gpus,
        vcpus=int(sku.number("vCPUs")),
        disk_bytes=int(sku.number("MaxResourceVolumeMB") * MIB),
        family=sku.family,
    )
