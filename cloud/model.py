"""Values that describe what a cloud sells and what it reports.

These words are used everywhere: an *instance type* is sold in a *pool* (one type in one zone),
as an *offer* at a *quote* (a price seen); a *machine* is what a provider lists; a *notice* says
that a machine will be taken away.
"""

from typing import Literal

import msgspec

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

    cloud: str
    region: str
    zone: str
    type: str

    @property
    def key(self) -> str:
        return f"{self.cloud}/{self.zone}/{self.type}"


class InstanceType(msgspec.Struct, frozen=True, kw_only=True):
    """The size and price of one machine of this type. `speed` is relative work per slot."""

    name: str
    cloud: str
    slots: int
    memory_bytes: int
    on_demand_usd_per_h: float
    speed: float = 1.0
    accelerator: str = "cpu"

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
    at_s: float
    price_usd_per_h: float


class LaunchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a provider needs to start one machine exactly once.

    `token` makes the call idempotent: the same token with the same request never starts a second
    machine, and with a different request it is refused. `tags` mark the machine as ours.
    """

    token: str
    pool: Pool
    market: Market
    bid_usd_per_h: float | None
    tags: dict[str, str]

    def __post_init__(self) -> None:
        if not 1 <= len(self.token) <= TOKEN_MAX:
            raise ValueError(
                f"launch token must have 1..{TOKEN_MAX} characters, not {len(self.token)}"
            )


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as the provider lists it. `price_usd_per_h` is the price it charges now."""

    id: str
    token: str
    pool: Pool
    market: Market
    state: MachineState
    launched_at_s: float
    price_usd_per_h: float
    tags: dict[str, str]
    address: str = ""
    ended_at_s: float | None = None
    ended_by: EndedBy | None = None


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """The cloud's warning that a machine will go (`terminate`) or may go (`rebalance`)."""

    machine_id: str
    kind: NoticeKind
    deadline_s: float
