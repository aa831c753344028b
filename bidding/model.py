"""The values of the bidder: what it sees, what the job needs, and what it decides."""

import math
from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from bidding.errors import ConstraintError
from cloud.model import InstanceType, Market, Pool

MATURE_H = 1.0


class Climate(msgspec.Struct, frozen=True, kw_only=True):
    """Rates per hour at which all spot capacity is lost, and some comes back.

    Each rate depends on the age of the running stretch; young means younger than `MATURE_H`. The
    defaults assume one loss in eight hours, twice as likely early.
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
    """A bid, and the chance that the price evicts its machine within the hour."""

    bid_usd_per_h: float
    evicted_in_1h: float


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Machines that can be bought now, from one pool in one market.

    A `blocked` pool is not bought from for now; `blocked_because` says why. `hazard_per_h` is the
    rate at which the pool loses machines, `return_per_h` the rate at which it sells again after it
    refused; `None` means that only the prior is known. `billing` names a rule of `bidding.markets.billing`;
    `None` means the usual one of the cloud. `losses_seen` says whether the hazard rests on machines
    that the pool took, or only on assumptions. `egress_usd` is the cost per machine of bringing the
    job's data and state there; `disk_usd_per_h` is the cost of its disks, which no rule refunds.
    `machines_max` is the number that quota or capacity leave. `zone_usd_per_gb` is what a byte costs
    that its machines send to another zone, `region_usd_per_gb` to another region.
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
    zone_usd_per_gb: float = 0.0
    region_usd_per_gb: float = 0.0


class HeldMachine(msgspec.Struct, frozen=True, kw_only=True):
    """A lease as the bidder sees it: its cost, and whether it is about to go.

    It `starts` until it has worked for the first time, and `idles` if it is left out after that.
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
    zone_usd_per_gb: float = 0.0
    region_usd_per_gb: float = 0.0


class Throughput(Protocol):
    """The work per second of a footprint, given as instance counts by type name.

    The planner has a more exact one.
    """

    def work_per_s(self, counts: Mapping[str, int]) -> float: ...


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What may be spent and held. `None` means no limit.

    A machine may cost up to `haste` more per work than the cheapest (0.5: half as much again) and
    still be bought for the time it saves; 0 buys only the cheapest work.
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
    """What the job still needs, and the cost of changes (sigma and lambda of BidBrain).

    `recovery_s` covers the steps that an eviction would really lose. `climate` describes how spot
    capacity as a whole comes and goes, for deadlines; without it, it is derived from the offers.
    `manager_usd_per_h` is paid as long as the job lasts, even if it holds no machine.
    `exchange_gb_per_work` is what machines send each other per work, were none near another, and
    `boundary_gb_per_work` what passes between two stages of a chain of `depth` workers: see
    `bidding.traffic`.
    """

    work_left: float | None
    start_s: float
    morph_s: float
    recovery_s: float
    manager_usd_per_h: float = 0.0
    climate: Climate | None = None
    exchange_gb_per_work: float = 0.0
    boundary_gb_per_work: float = 0.0
    depth: int = 1

    def __post_init__(self) -> None:
        amounts = ("start_s", "morph_s", "recovery_s", "manager_usd_per_h")
        for name in (*amounts, "exchange_gb_per_work", "boundary_gb_per_work"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConstraintError(f"{name}={getattr(self, name)} must be 0 or more, and finite")
        if self.work_left is not None and math.isnan(self.work_left):
            raise ConstraintError("work_left is not a number: give one, or None if it is not known")
        if self.depth < 1:
            raise ConstraintError(f"depth={self.depth} must be 1 or more: a chain has a worker")


class Acquire(msgspec.Struct, frozen=True, kw_only=True):
    pool: Pool
    market: Market
    bid_usd_per_h: float | None
    count: int
    because: str


class Release(msgspec.Struct, frozen=True, kw_only=True):
    lease: str
    because: str


class Priced(msgspec.Struct, frozen=True, kw_only=True):
    """What an hour of one slot at speed one is expected to cost there, as offers were put in order."""

    pool: Pool
    market: Market
    usd_per_slot_h: float


class Purchase(msgspec.Struct, frozen=True, kw_only=True):
    """The decision of one period; every part has a sentence that explains it.

    `for_now` says that nothing fits only because offers are blocked for now; the manager may keep
    its machines until then. `priced` has every offer that would work, the cheapest work first.
    """

    acquire: tuple[Acquire, ...]
    release: tuple[Release, ...]
    because: str
    runner_up: str
    cost_usd_per_work: float | None
    for_now: bool = False
    priced: tuple[Priced, ...] = ()
