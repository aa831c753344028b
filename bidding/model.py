"""The words of the bidder: what it sees, what it wants, what it decides."""

import math
from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from bidding.errors import ConstraintError
from cloud.model import InstanceType, Market, Pool

MATURE_H = 1.0


class Climate(msgspec.Struct, frozen=True, kw_only=True):
    """How fast the last spot capacity is lost and some comes back, per hour, by age of the stretch.

    Young means younger than `MATURE_H`. What is assumed is a loss in eight hours, twice as likely early.
    """

    lost_young: float = 0.25
    lost_old: float = 0.125
    back_young: float = 1.0
    back_old: float = 0.5
    age_h: float = 0.0  # of the stretch that is running now

    def __post_init__(self) -> None:
        if min(self.lost_young, self.lost_old, self.back_young, self.back_old, self.age_h) < 0:
            raise ConstraintError(f"no rate or age of {self} may be negative")


class Bid(msgspec.Struct, frozen=True, kw_only=True):
    """What a bid means where price evicts: the chance of losing it within the hour."""

    bid_usd_per_h: float
    evicted_in_1h: float


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Something that can be bought now. `blocked` pools are left alone for now, because of
    what `blocked_because` says.

    `hazard_per_h` is the rate at which the pool loses machines, `return_per_h` the rate at which it
    sells again after it refused; `None` means that only the prior is known. `billing` names a rule
    of `bidding.billing`; `None` means the usual one of the cloud. `losses_seen` says whether the hazard
    rests on machines that the pool took, or on nothing but what is assumed. `egress_usd` is what it costs to
    bring the job's data and state there, per machine; `disk_usd_per_h` what its disks cost, which no
    rule refunds. `machines_max` is what quota or capacity leave.
    """

    pool: Pool
    type: InstanceType
    market: Market
    price_usd_per_h: float
    blocked: bool = False
    blocked_because: str = ""
    hazard_per_h: float | None = None
    return_per_h: float | None = None
    losses_seen: bool = True
    billing: str | None = None
    bids: tuple[Bid, ...] = ()
    egress_usd: float = 0.0
    disk_usd_per_h: float = 0.0
    machines_max: int | None = None


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """A lease as the bidder sees it: what it costs and whether it is about to go.

    It `starts` until it has worked for the first time, and `idles` when it is left out again.
    """

    lease: str
    pool: Pool
    type: InstanceType
    market: Market
    price_usd_per_h: float
    bid_usd_per_h: float | None
    started_at_s: float
    noticed: bool = False
    reliable: bool = False
    doing: Literal["starts", "works", "idles"] = "works"
    hazard_per_h: float | None = None
    losses_seen: bool = True
    billing: str | None = None
    disk_usd_per_h: float = 0.0


class Throughput(Protocol):
    """Work per second of a footprint: instance counts by type name. The planner has a better one."""

    def work_per_s(self, counts: Mapping[str, int]) -> float: ...


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What may be spent and held. `None` means no limit.

    `haste` is how much dearer per work than the cheapest a machine may be and still be bought for
    the time it saves; 0 buys only the cheapest work.
    """

    slots_min: int = 1
    slots_max: int = 4
    budget_left_usd: float | None = None
    usd_per_h_max: float | None = None
    finish_by_s: float | None = None
    on_demand_allowed: bool = True
    haste: float = 0.5
    regions: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.slots_min <= self.slots_max:
            raise ConstraintError(
                f"slots_min={self.slots_min} and slots_max={self.slots_max} contradict each other: "
                "0 <= slots_min <= slots_max is needed"
            )
        if not self.haste >= 0:
            raise ConstraintError(f"haste={self.haste} must be 0 or more")
        for name in ("budget_left_usd", "usd_per_h_max", "finish_by_s"):
            value = getattr(self, name)
            if value is not None and math.isnan(value):
                raise ConstraintError(f"{name} is not a number: give one, or None for no limit")


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What the job still needs, and what changes cost it (sigma and lambda of BidBrain).

    `recovery_s` covers the steps that an eviction would really lose, `recovery_all_s` those that are
    lost when no machine is left. `climate` tells a deadline how spot capacity as a whole comes and
    goes; without it, it is put together from the offers. `manager_usd_per_h` is what is paid as long
    as the job lasts, whatever it holds.
    """

    work_left: float | None
    start_s: float
    morph_s: float
    recovery_s: float
    recovery_all_s: float | None = None
    manager_usd_per_h: float = 0.0
    climate: Climate | None = None

    def __post_init__(self) -> None:
        for name in ("start_s", "morph_s", "recovery_s", "manager_usd_per_h"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConstraintError(f"{name}={getattr(self, name)} must be 0 or more, and finite")
        if self.work_left is not None and math.isnan(self.work_left):
            raise ConstraintError("work_left is not a number: give one, or None if it is not known")


class Acquire(msgspec.Struct, frozen=True, kw_only=True):
    pool: Pool
    market: Market
    bid_usd_per_h: float | None
    count: int
    because: str


class Release(msgspec.Struct, frozen=True, kw_only=True):
    lease: str
    because: str


class Purchase(msgspec.Struct, frozen=True, kw_only=True):
    """The decision of one period: every part with its sentence.

    `for_now`: nothing fits only because offers are left alone for now; what is held may outlast that.
    """

    acquire: tuple[Acquire, ...]
    release: tuple[Release, ...]
    because: str
    runner_up: str
    cost_usd_per_work: float | None
    for_now: bool = False
