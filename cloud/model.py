"""Values that describe what a cloud sells and what it reports.

These words are used everywhere: a *place* is a cloud and a region; an *instance type* is sold in a
*pool* (one type in one zone), as an *offer* at a *quote* (a price seen); a *machine* is what a
provider lists; a *refusal* says what is not sold, and how far that reaches; a *notice* says that a
machine will be taken away.
"""

import re
from hashlib import blake2b
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from cloud.ranges import (
    Amount,
    Count,
    Name,
    Number,
    Period,
    Positive,
    Price,
    Slots,
    Speed,
    Text,
    Time,
    Usd,
)

Market = Literal["spot", "on_demand"]
MachineState = Literal["pending", "running", "stopping", "stopped", "failed", "terminated"]
Scope = Literal["request", "pool", "market", "family", "zone", "place", "cloud"]
Billing = Literal["local", "aws_today", "aws_2016", "azure", "fixed_discount"]
LeftoverKind = Literal["disk", "nic", "address", "spot_request"]
Bids = Literal["none", "optional", "required"]
NoticeKind = Literal["terminate", "rebalance"]
EndedBy = Literal["user", "provider"]
Score = int | str
"""How likely spot machines are to be had: AWS says 1 to 10, Azure High, Medium or Low."""

DEPLOYMENT_TAG = "orchestrator-deployment"
"""The tag that makes a machine ours; its value names the deployment."""
TOKEN_MAX = 60
"""Characters of a launch token, at most: with an index after it, it names a virtual machine."""
COUNT_MAX = 64
"""Machines of one launch, at most."""
TOKEN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
"""What a launch token looks like, so that every cloud takes it as the name of a machine."""
LINUX = "Linux/UNIX"
"""How AWS begins the names of the systems that we start; histories list other systems as well."""


class Place(msgspec.Struct, frozen=True, order=True):
    """A cloud and a region: what is listed, paced, refused and judged together."""

    cloud: Name
    region: Name

    @property
    def key(self) -> str:
        return f"{self.cloud}/{self.region}"


class Closed(msgspec.Struct, frozen=True):
    """A place that cannot be used now, and one sentence that says why and what to do.

    It is a whole cloud if the region is empty: its key or its package is missing.
    """

    place: Place
    because: Text


class Ref(msgspec.Struct, frozen=True, order=True):
    """What a provider is asked to end: a machine or a leftover, by its id in its place."""

    place: Place
    id: Name


class Pool(msgspec.Struct, frozen=True, order=True):
    """One instance type in one zone: the unit in which capacity and spot prices move."""

    cloud: Name
    region: Name
    zone: Name
    type: Name

    @property
    def key(self) -> str:
        return f"{self.cloud}/{self.zone}/{self.type}"

    @property
    def place(self) -> Place:
        return Place(self.cloud, self.region)


class InstanceType(msgspec.Struct, frozen=True, kw_only=True):
    """The size and price of one machine of this type, as one place sells it.

    `speed` is relative work per slot. `on_demand_usd_per_h` is the price in the provider's table,
    which holds until a quote states another one. Quotas are counted by `family`, in `vcpus`.
    """

    name: Name
    cloud: Name
    slots: Slots
    memory_bytes: Count
    on_demand_usd_per_h: Price
    speed: Speed = 1.0
    accelerator: Name = "cpu"
    accelerators: Count = 0
    vcpus: Count = 0
    disk_bytes: Count = 0
    network_bytes_per_s: Amount = 0.0
    fabric: Name = ""
    family: Name = ""

    def __post_init__(self) -> None:
        if self.slots < 1 or self.on_demand_usd_per_h <= 0 or self.speed <= 0:
            raise ValueError(
                f"instance type {self.name}: slots={self.slots}, "
                f"on_demand_usd_per_h={self.on_demand_usd_per_h}, speed={self.speed} "
                "must all be positive"
            )


class Quote(msgspec.Struct, frozen=True, kw_only=True):
    """A price seen at a moment; it holds until the next quote of the same pool and market."""

    pool: Pool
    at_s: Time
    price_usd_per_h: Number
    market: Market = "spot"


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What a quota leaves in one market of a place; an empty family stands for all of them."""

    place: Place
    market: Market
    family: Name = ""
    vcpus_max: Count
    vcpus_used: Count


class Recipe(msgspec.Struct, frozen=True):
    """Everything besides the request that decides whether two launches are equal.

    It is image, subnet, role, disk, the digest of the boot script and so on: values that are
    resolved once and then stay, never names such as "newest". Another value is another recipe.
    """

    parts: dict[Name, Text] = {}

    @property
    def digest(self) -> str:
        text = msgspec.json.encode(sorted(self.parts.items()))
        return blake2b(text, digest_size=8).hexdigest()


class Sold(msgspec.Struct, frozen=True, kw_only=True):
    """What a place sells: types, pools, how much of them, and how machines are made there now."""

    types: tuple[InstanceType, ...]
    pools: tuple[Pool, ...]
    rooms: tuple[Room, ...] = ()
    recipe: Recipe = Recipe()


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """What is true of a cloud everywhere: how it bills, and what traffic between machines costs.

    `billing` names a rule of `bidding.markets.billing`. It counts from the launch, or from when the
    machine runs if a pending one is free. The prices per GB are what a byte costs in total that is
    sent from one zone, or one region, to another. One call starts up to `launch_max` equal
    machines, all of them or none.
    """

    billing: Billing
    pending_is_free: bool = False
    bids: Bids = "none"
    zone_usd_per_gb: Usd = 0.0
    region_usd_per_gb: Usd = 0.0
    launch_max: Annotated[int, Meta(ge=1, le=COUNT_MAX)] = 1


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How often a place may be asked, and the least patience that it needs.

    A list may miss a machine for `grace_s` after its launch; a machine may take `boot_s` to join.
    """

    list_s: Period
    offers_s: Period
    sold_s: Period
    grace_s: Amount
    boot_s: Amount


class LaunchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a provider needs to start `count` equal machines exactly once, or none.

    `token` makes the call idempotent: the same token with the same request never starts a machine
    more, and with a different request it never changes one. `recipe` is a recipe's digest, which
    the provider made known with `sold`. `tags` mark the machines as ours.
    """

    token: Name
    pool: Pool
    market: Market
    bid_usd_per_h: Number | None
    tags: dict[Name, Name]
    count: Positive = 1
    recipe: Name = ""

    def __post_init__(self) -> None:
        if not 1 <= len(self.token) <= TOKEN_MAX:
            raise ValueError(
                f"launch token must have 1..{TOKEN_MAX} characters, not {len(self.token)}"
            )
        if TOKEN.fullmatch(self.token) is None:
            raise ValueError(
                f"launch token {self.token!r} must be a-z, 0-9 and inner hyphens, because it names "
                "a virtual machine"
            )
        if not 1 <= self.count <= COUNT_MAX:
            raise ValueError(f"a launch is 1..{COUNT_MAX} machines, not {self.count}")


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A definite no, and how far it reaches.

    request   this launch only
    pool      this market of this pool
    market    this market of the place: all of its spot machines, or all on demand
    family    this market of the type's family in the place
    zone      this zone, in both markets
    place     everything in the region
    cloud     every region of the cloud

    `code` is the cloud's own word. `retry_s` is how long it holds, and `room` how many machines could
    be had instead, if the cloud says so.
    """

    scope: Scope
    code: Name
    said: Text
    retry_s: Amount | None = None
    room: Count | None = None


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as the provider lists it; `index` counts the machines of one launch.

    pending      asked for; it has not run yet
    running      its boot has begun
    stopping     on its way out, and it may still cost
    stopped      it does not run, and its machine or its disk still costs: it has to be ended
    failed       it never ran, and `refusal` says why; what was made of it may still cost, and has
                 to be ended, until `ended_at_s` is known
    terminated   it costs nothing any more

    `began_at_s` is since when it runs, and costs where a pending one is free, if the cloud says so.
    """

    id: Name
    token: Name
    pool: Pool
    market: Market
    state: MachineState
    launched_at_s: Time
    tags: dict[Name, Name]
    index: Count = 0
    address: Name = ""
    identity: Name = ""  # what the cloud signs that it is, if that is not its id
    began_at_s: Time | None = None
    ended_at_s: Time | None = None
    ended_by: EndedBy | None = None
    refusal: Refusal | None = None

    @property
    def ref(self) -> Ref:
        return Ref(self.pool.place, self.id)

    @property
    def gone(self) -> bool:
        """Return whether it costs nothing any more."""
        return self.state == "terminated" or (
            self.state == "failed" and self.ended_at_s is not None
        )


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """What a launch of ours made besides its machine, and what outlived it: it still costs.

    A provider lists what no machine uses; `token` names the launch, as far as it is known.
    """

    ref: Ref
    kind: LeftoverKind
    created_at_s: Time
    token: Name = ""
    tags: dict[Name, Name] = {}


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """Everything in one place with our deployment's tag; ended machines stay for a while."""

    place: Place
    machines: tuple[Machine, ...]
    leftovers: tuple[Leftover, ...] = ()


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """The cloud's warning that a machine will go (`terminate`) or may go (`rebalance`)."""

    machine_id: Name
    kind: NoticeKind
    deadline_s: Time
