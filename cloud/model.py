"""Values that describe what a cloud sells and what it reports.

These words are used everywhere: an *instance type* is sold in a *pool* (one type in one zone),
as an *offer* at a *quote* (a price seen); a *machine* is what a provider lists; a *notice* says
that a machine will be taken away.
"""

from typing import Literal

import msgspec

from cloud.ranges import Count, Name, Number, Price, Slots, Speed, Time

Market = Literal["spot", "on_demand"]
MachineState = Literal["pending", "running", "stopping", "terminated"]
NoticeKind = Literal["terminate", "rebalance"]
EndedBy = Literal["user", "provider"]

DEPLOYMENT_TAG = "orchestrator-deployment"
"""The tag that makes a machine ours; its value names the deployment."""
TOKEN_MAX = 64
"""Characters of a launch token, at most."""
LINUX = "Linux/UNIX"
"""How AWS begins the names of the systems that we start; histories list other systems as well."""


class Pool(msgspec.Struct, frozen=True, order=True):
    """One instance type in one zone: the unit in which capacity and spot prices move."""

    cloud: Name
    region: Name
    zone: Name
    type: Name

    @property
    def key(self) -> str:
        return f"{self.cloud}/{self.zone}/{self.type}"


class InstanceType(msgspec.Struct, frozen=True, kw_only=True):
    """The size and price of one machine of this type. `speed` is relative work per slot."""

    name: Name
    cloud: Name
    slots: Slots
    memory_bytes: Count
    on_demand_usd_per_h: Price
    speed: Speed = 1.0
    accelerator: Name = "cpu"

    def __post_init__(self) -> None:
        if self.slots < 1 or self.on_demand_usd_per_h <= 0 or self.speed <= 0:
            raise ValueError(
                f"instance type {self.name}: slots={self.slots}, "
                f"on_demand_usd_per_h={self.on_demand_usd_per_h}, speed={self.speed} "
                "must all be positive"
            )


class Quote(msgspec.Struct, frozen=True, kw_only=True):
    """A spot price seen at a moment; it holds until the next quote of the same pool."""

    pool: Pool
    at_s: Number
    price_usd_per_h: Number


class LaunchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a provider needs to start one machine exactly once.

    `token` makes the call idempotent: the same token with the same request never starts a second
    machine, and with a different request it is refused. `tags` mark the machine as ours.
    """

    token: Name
    pool: Pool
    market: Market
    bid_usd_per_h: Number | None
    tags: dict[Name, Name]

    def __post_init__(self) -> None:
        if not 1 <= len(self.token) <= TOKEN_MAX:
            raise ValueError(
                f"launch token must have 1..{TOKEN_MAX} characters, not {len(self.token)}"
            )


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as the provider lists it. `price_usd_per_h` is the price it charges now."""

    id: Name
    token: Name
    pool: Pool
    market: Market
    state: MachineState
    launched_at_s: Time
    price_usd_per_h: Number
    tags: dict[Name, Name]
    address: Name = ""
    ended_at_s: Time | None = None
    ended_by: EndedBy | None = None


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """The cloud's warning that a machine will go (`terminate`) or may go (`rebalance`)."""

    machine_id: Name
    kind: NoticeKind
    deadline_s: Time
