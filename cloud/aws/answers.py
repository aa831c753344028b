"""What EC2 answers, turned into our values. Pure; what does not parse raises an ordinary error."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from string import ascii_lowercase
from typing import Any

from cloud.accelerators import prior_speed
from cloud.aws.codes import is_of_launch, refusal_of
from cloud.clock import utc_s
from cloud.model import (
    DEPLOYMENT_TAG,
    LINUX,
    EndedBy,
    InstanceType,
    Leftover,
    LeftoverKind,
    Machine,
    MachineState,
    Market,
    Place,
    Pool,
    Quote,
    Ref,
    Room,
)

Told = Mapping[str, Any]
NOTHING: Mapping[str, float] = {}

TOKEN_TAG = "orchestrator-token"  # noqa: S105 - the name of a tag
GIB = 1 << 30
MIB = 1 << 20
STATES: dict[str, MachineState] = {
    "pending": "pending",
    "running": "running",
    "shutting-down": "terminated",  # AWS bills no more from here on
    "terminated": "terminated",
    "stopping": "stopped",
    "stopped": "stopped",
}
ENDED_AT = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")
QUOTAS: dict[str, tuple[Market, tuple[str, ...]]] = {
    "L-DB2E81BA": ("on_demand", ("g",)),
    "L-3819A6DF": ("spot", ("g",)),
    "L-417A185B": ("on_demand", ("p", "p5")),
    "L-7212CCBC": ("spot", ("p",)),
    "L-C4BD4855": ("spot", ("p5",)),
    "L-1216C47A": ("on_demand", ("standard",)),
    "L-34B43A08": ("spot", ("standard",)),
    "L-7295265B": ("on_demand", ("x",)),
    "L-E3A00192": ("spot", ("x",)),
}
"""Quotas in vCPUs by the code that Service Quotas gives them: the market and its families."""


def tags_of(told: Told) -> dict[str, str]:
    """Return tags by name; network interfaces call them otherwise."""
    entries = told.get("Tags") or told.get("TagSet") or ()
    return {entry["Key"]: entry["Value"] for entry in entries}


def is_ours(told: Told, deployment: str) -> bool:
    """Return whether a launch of this deployment made it.

    A machine that a person made with our tag, or copied from one of ours, has another client token
    than its tag says, so it is not ours.
    """
    tags = tags_of(told)
    token = tags.get(TOKEN_TAG, "")
    ours = tags.get(DEPLOYMENT_TAG) == deployment and bool(token)
    return ours and told.get("ClientToken", token) == token


def family_of(type_name: str) -> str:
    """Return the name under which quotas count this type."""
    letters = type_name[: len(type_name) - len(type_name.lstrip(ascii_lowercase))]
    if letters in ("dl", "trn", "inf"):
        return letters
    if letters.startswith(("g", "vt")):
        return "g"
    if letters == "p":
        return "p5" if type_name.startswith("p5") else "p"
    return letters[0] if letters.startswith(("f", "x")) else "standard"


def machine_of(
    told: Told,
    place: Place,
    ended: Mapping[str, float] = NOTHING,
    began: Mapping[str, float] = NOTHING,
) -> Machine:
    """Return a machine, which its list does not date.

    `ended` has the times at which spot requests say that theirs ended, and `began` those at which
    machines came to run, as events say.
    """
    tags = tags_of(told)
    state = STATES[told["State"]["Name"]]
    code = (told.get("StateReason") or {}).get("Code", "")
    launched_s = utc_s(told["LaunchTime"])
    ended_s: float | None = None
    ended_by: EndedBy | None = None
    refusal = None
    if state == "terminated":
        ended_by = "provider" if code.startswith("Server.") else "user"
        at = ENDED_AT.search(told.get("StateTransitionReason") or "")
        ended_s = _gmt_s(at[1]) if at else ended.get(told.get("SpotInstanceRequestId") or "")
        if is_of_launch(code):
            state, ended_by, ended_s = "failed", "provider", launched_s
            refusal = refusal_of(code, told["StateReason"].get("Message", code))
    return Machine(
        id=told["InstanceId"],
        token=tags.get(TOKEN_TAG) or told.get("ClientToken", ""),
        index=told.get("AmiLaunchIndex", 0),
        pool=Pool(
            cloud=place.cloud,
            region=place.region,
            zone=told["Placement"]["AvailabilityZone"],
            type=told["InstanceType"],
        ),
        market="spot" if told.get("InstanceLifecycle") == "spot" else "on_demand",
        state=state,
        launched_at_s=launched_s,
        tags={name: value for name, value in tags.items() if name != TOKEN_TAG},
        address=told.get("PrivateIpAddress") or "",
        began_at_s=began.get(told["InstanceId"]),
        ended_at_s=ended_s,
        ended_by=ended_by,
        refusal=refusal,
    )


def _gmt_s(text: str) -> float:
    return datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()


def instances_of(reservations: Iterable[Told]) -> list[Told]:
    """Return the instances of a list once each, in its order; a page may repeat one."""
    found = {x["InstanceId"]: x for entry in reservations for x in entry["Instances"]}
    return list(found.values())


def leftover_of(told: Told, kind: LeftoverKind, id_field: str, place: Place) -> Leftover:
    tags = tags_of(told)
    created = told.get("CreateTime")
    return Leftover(
        ref=Ref(place, told[id_field]),
        kind=kind,
        created_at_s=utc_s(created) if created else 0.0,
        token=tags.get(TOKEN_TAG, ""),
        tags={name: value for name, value in tags.items() if name != TOKEN_TAG},
    )


def type_of(told: Told, usd_per_h: float, disk_gib: int) -> InstanceType:
    """Return what DescribeInstanceTypes says of one type; a machine without GPUs has one slot.

    A type with a part of a card has no whole one, so EC2 counts what is a device there apart.
    """
    gpus = (told.get("GpuInfo") or {}).get("Gpus") or ()
    count = sum(gpu.get("LogicalGpuCount") or gpu.get("Count") or 1 for gpu in gpus)
    network = told.get("NetworkInfo") or {}
    cards = network.get("NetworkCards") or ()
    gbps = sum(card.get("BaselineBandwidthInGbps", 0.0) for card in cards)
    name, accelerator = told["InstanceType"], _accelerator(gpus[0]) if gpus else "cpu"
    return InstanceType(
        name=name,
        cloud="aws",
        slots=count or 1,
        memory_bytes=told["MemoryInfo"]["SizeInMiB"] * MIB,
        on_demand_usd_per_h=usd_per_h,
        speed=prior_speed(accelerator),
        accelerator=accelerator,
        accelerators=count,
        vcpus=told["VCpuInfo"]["DefaultVCpus"],
        disk_bytes=disk_gib * GIB,
        network_bytes_per_s=gbps * 1e9 / 8,
        fabric="efa" if network.get("EfaSupported") else "",
        family=family_of(name),
    )


def _accelerator(gpu: Told) -> str:
    """Return the name of a card; "l4/8" is an eighth of one."""
    parts = round(1 / (gpu.get("GpuPartitionSize") or 1.0))
    return str(gpu["Name"]).lower() + (f"/{parts}" if parts > 1 else "")


def quotes_of(history: Iterable[Told], place: Place, types: Iterable[str]) -> list[Quote]:
    """Return all spot prices of a history, the oldest first: the last of a pool holds."""
    wanted = set(types)
    found = []
    for entry in history:
        if entry["InstanceType"] not in wanted:
            continue
        if not entry.get("ProductDescription", LINUX).startswith(LINUX):
            continue
        pool = Pool(
            cloud=place.cloud,
            region=place.region,
            zone=entry["AvailabilityZone"],
            type=entry["InstanceType"],
        )
        at_s, usd = utc_s(entry["Timestamp"]), float(entry["SpotPrice"])
        if usd > 0:
            found.append(Quote(pool=pool, market="spot", at_s=at_s, price_usd_per_h=usd))
    return sorted(found, key=lambda quote: quote.at_s)


def rooms_of(quotas: Iterable[Told], running: Sequence[Told], place: Place) -> list[Room]:
    """Return what quotas leave: all that runs in the account counts, whoever started it."""
    rooms = []
    for quota in quotas:
        market, families = QUOTAS.get(quota["QuotaCode"], ("spot", ()))
        used = sum(
            _vcpus(x)
            for x in running
            if (x.get("InstanceLifecycle") == "spot") == (market == "spot")
            and family_of(x["InstanceType"]) in families
        )
        rooms += [
            Room(
                place=place,
                market=market,
                family=family,
                vcpus_max=int(quota["Value"]),
                vcpus_used=used,
            )
            for family in families
        ]
    return rooms


def _vcpus(told: Told) -> int:
    options = told.get("CpuOptions") or {}
    return int(options.get("CoreCount", 0)) * int(options.get("ThreadsPerCore", 1))


def listed_usd_per_h(products: Iterable[str]) -> float | None:
    """Return the hourly price in a price list, which holds products as texts of JSON."""
    for text in products:
        for term in (json.loads(text)["terms"].get("OnDemand") or {}).values():
            for dimension in term["priceDimensions"].values():
                usd = float(dimension["pricePerUnit"].get("USD", 0))
                if dimension.get("unit") == "Hrs" and usd > 0:
                    return usd
    return None
