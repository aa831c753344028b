"""What a deployment says about AWS, as plain values, and the recipes that follow from it."""

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

    `endpoint_url` sends every call elsewhere, for tests and private endpoints. `queue_url` is the
    queue that EventBridge puts interruptions on.
    """

    regions: tuple[Region, ...]
    types: tuple[str, ...] = ("g5.*",)
    instance_profile: str = ""
    disk_gib: int = DISK_GIB
    user_data: str = ""
    endpoint_url: str | None = None
    queue_url: str | None = None

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
