"""The words of the bidder: what it sees, what it wants, what it decides."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from cloud.model import InstanceType, Market, Pool


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Something that can be bought now. `blocked` pools refused us a moment ago."""

    pool: Pool
    type: InstanceType
    market: Market
    price_usd_per_h: float
    blocked: bool = False


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """A lease as the bidder sees it: what it costs and whether it is about to go."""

    lease: str
    pool: Pool
    type: InstanceType
    market: Market
    price_usd_per_h: float
    bid_usd_per_h: float | None
    started_at_s: float
    noticed: bool = False
    reliable: bool = False


class Throughput(Protocol):
    """Work per second of a footprint: instance counts by type name. The planner has a better one."""

    def work_per_s(self, counts: Mapping[str, int]) -> float: ...


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What may be spent and held. `None` means no limit."""

    slots_min: int = 1
    slots_max: int = 4
    budget_left_usd: float | None = None
    usd_per_h_max: float | None = None
    finish_by_s: float | None = None
    on_demand_allowed: bool = True


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What the job still needs, and what changes cost it (sigma and lambda of BidBrain)."""

    work_left: float | None
    start_s: float
    morph_s: float
    recovery_s: float


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
    """The decision of one period: every part with its sentence."""

    acquire: tuple[Acquire, ...]
    release: tuple[Release, ...]
    because: str
    runner_up: str
    cost_usd_per_work: float | None
