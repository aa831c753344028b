"""What the fake Azure sells: sizes, the regions and zones that sell them, and the price list."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

DISK_USD_PER_H = 0.006
REGIONS: dict[str, tuple[str, ...]] = {"eastus": ("1", "2", "3"), "northcentralus": ()}


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """A size of machines; `closed` are the zones of a region that restrict it ("*": all of it)."""

    name: str
    family: str
    vcpus: int
    memory_gb: float
    spot: float
    on_demand: float
    gpus: int = 0
    low_priority: bool = True
    closed: Mapping[str, tuple[str, ...]] = {}

    def sold(self, region: str, zone: str) -> bool:
        closed = self.closed.get(region, ())
        return "*" not in closed and zone not in closed and zone in ("", *REGIONS[region])


SIZES = {
    size.name: size
    for size in (
        Size(
            name="Standard_D4s_v5",
            family="standardDSv5Family",
            vcpus=4,
            memory_gb=16,
            spot=0.04,
            on_demand=0.192,
        ),
        Size(
            name="Standard_NC4as_T4_v3",
            family="standardNCASv3_T4Family",
            vcpus=4,
            memory_gb=28,
            spot=0.12,
            on_demand=0.526,
            gpus=1,
            closed={"eastus": ("3",)},
        ),
        Size(
            name="Standard_NC24ads_A100_v4",
            family="StandardNCADSA100v4Family",
            vcpus=24,
            memory_gb=220,
            spot=1.2,
            on_demand=3.673,
            gpus=1,
            closed={"northcentralus": ("*",)},
        ),
        Size(
            name="Standard_B2s",
            family="standardBSFamily",
            vcpus=2,
            memory_gb=4,
            spot=0.01,
            on_demand=0.0416,
            low_priority=False,
        ),
    )
}


def sku(size: Size, region: str) -> dict[str, Any]:
    """Return one entry of the list of SKUs: every value is a string, as Azure writes them."""
    closed = size.closed.get(region, ())
    restrictions: list[dict[str, Any]] = []
    if closed:
        kind = "Location" if "*" in closed else "Zone"
        restrictions.append(
            {
                "type": kind,
                "values": [region],
                "reasonCode": "NotAvailableForSubscription",
                "restrictionInfo": {
                    "locations": [region],
                    "zones": list(closed) if kind == "Zone" else [],
                },
            }
        )
    capabilities = {
        "vCPUs": str(size.vcpus),
        "MemoryGB": f"{size.memory_gb:g}",
        "GPUs": str(size.gpus),
        "LowPriorityCapable": str(size.low_priority),
        "MaxResourceVolumeMB": "32768",
    }
    return {
        "resourceType": "virtualMachines",
        "name": size.name,
        "tier": "Standard",
        "size": size.name.removeprefix("Standard_"),
        "family": size.family,
        "locations": [region],
        "locationInfo": [{"location": region, "zones": list(REGIONS[region])}],
        "capabilities": [{"name": name, "value": value} for name, value in capabilities.items()],
        "restrictions": restrictions,
    }


def items(
    prices: Mapping[str, tuple[float, float]], since: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield the price list: Linux and Windows, spot, on demand and the retired low priority.

    Azure's older Cloud Services are under the names of the same sizes, at prices like Windows'.
    """
    for region in REGIONS:
        for name, (spot, on_demand) in prices.items():
            word = name.removeprefix("Standard_").replace("_", " ")
            for product_name, factor in (
                (f"Virtual Machines {word} Series", 1.0),
                (f"Virtual Machines {word} Windows", 1.9),
                (f"{word} Series Cloud Services", 2.6),
                (f"{word} Series CloudServices", 2.6),
            ):
                for meter, usd in (
                    (word, on_demand),
                    (f"{word} Spot", spot),
                    (f"{word} Low Priority", on_demand / 5),
                ):
                    yield {
                        "currencyCode": "USD",
                        "retailPrice": round(usd * factor, 6),
                        "unitPrice": round(usd * factor, 6),
                        "armRegionName": region,
                        "armSkuName": name,
                        "skuName": meter,
                        "meterName": meter,
                        "productName": product_name,
                        "serviceName": "Virtual Machines",
                        "unitOfMeasure": "1 Hour",
                        "type": "Consumption",
                        "effectiveStartDate": since.get(name, "2020-11-01T00:00:00Z"),
                    }
