"""What a deployment says about AWS, as plain values, and the recipes that follow from it."""

import re
from hashlib import blake2b

import msgspec

from cloud.model import Recipe

DISK_GIB = 60


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """One region: what machines are made of there. `subnets` are by zone, and they are the zones.

    `image` is the id of an image, or the name of an SSM parameter that holds one ("/team/image").
    """

    name: str
    image: str
    subnets: dict[str, str]
    security_group: str


class AwsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All regions of a deployment. `types` are names or patterns such as "g5.*".

    `drill_role` is what AWS's fault injection may do. `endpoint_url` sends every call
    elsewhere, for tests and private endpoints. `queue_url` is the queue that EventBridge
    puts interruptions on.
    """

    regions: tuple[Region, ...]
    types: tuple[str, ...] = ("g5.*",)
    instance_profile: str = ""
    disk_gib: int = DISK_GIB
    user_data: str = ""
    endpoint_url: str | None = None
    queue_url: str | None = None
    drill_role: str = ""

    @property
    def queue_region(self) -> str:
        """Return the region in the queue's address: https://sqs.us-east-1.amazonaws.com/..."""
        host = (self.queue_url or "").partition("://")[2].partition("/")[0].split(".")
        return host[1] if host[0] == "sqs" and len(host) > 2 else self.regions[0].name

    def recipe(self, region: Region, image: str) -> Recipe:
        """Return everything that decides, beside a request, whether two launches are equal."""
        parts = {
            "image": image,
            "security_group": region.security_group,
            "instance_profile": self.instance_profile,
            "disk_gib": str(self.disk_gib),
            "user_data": blake2b(self.user_data.encode(), digest_size=16).hexdigest(),
        }
        subnets = {f"subnet:{zone}": subnet for zone, subnet in region.subnets.items()}
        return Recipe(parts | subnets)


def texts(value: str | None) -> tuple[str, ...]:
    """Return the entries of a setting with commas: "a, b" is ("a", "b")."""
    return tuple(part.strip() for part in (value or "").split(",") if part.strip())


def pairs(value: str | None) -> dict[str, str]:
    """Return the entries of a setting such as "us-east-1a=subnet-1,us-east-1b=subnet-2"."""
    found = {}
    for entry in texts(value):
        name, equals, told = entry.partition("=")
        if not equals or not name.strip() or not told.strip():
            raise ValueError(f'{entry!r} must be "name=value", as in us-east-1a=subnet-0123')
        found[name.strip()] = told.strip()
    return found


def zone_region(zone: str) -> str:
    """Return the region of a zone: "us-east-1a" is in us-east-1, and so is "us-east-1-bos-1a"."""
    found = re.match(r"[a-z]{2}(-[a-z]+)+-\d", zone)
    if found is None:
        raise ValueError(f"{zone!r} is not the name of a zone such as us-east-1a")
    return found[0]


def settings_of(
    *, regions: str | None, images: str | None, subnets: str | None, security_groups: str | None
) -> AwsSettings:
    """Return the regions that these texts describe; whatever lacks something is named."""
    names = texts(regions)
    if not names:
        raise ValueError("regions is not set; name at least one, such as us-east-1")
    image, group, subnet = pairs(images), pairs(security_groups), pairs(subnets)
    by_region: dict[str, dict[str, str]] = {name: {} for name in names}
    for zone, told in subnet.items():
        if zone_region(zone) not in by_region:
            raise ValueError(f"subnets names the zone {zone}, and its region is not in regions")
        by_region[zone_region(zone)][zone] = told
    for what, known in (("images", image), ("security_groups", group), ("subnets", by_region)):
        if missing := [name for name in names if not known.get(name)]:
            raise ValueError(f"{what} names nothing for the region {missing[0]}")
        if strange := sorted(set(known) - set(names)):
            raise ValueError(f"{what} names the region {strange[0]}, which is not in regions")
    return AwsSettings(
        regions=tuple(
            Region(
                name=name,
                image=image[name],
                subnets=by_region[name],
                security_group=group[name],
            )
            for name in names
        )
    )
