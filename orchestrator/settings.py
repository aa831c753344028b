"""The settings that a manager gets when it starts: limits, periods and timeouts.

The event `ManagerStarted` carries them, so a journal alone is enough to replay every decision.
"""

import msgspec

from cloud.model import Billing


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The manager's settings; `None` means no limit.

    Every lease reserves `reserve_s` of its highest price until it is gone. A machine is bought
    only if the budget has room for its reserve.
    """

    deployment: str = "default"
    budget_usd: float | None = None
    usd_per_h_max: float | None = None
    machines_max: int = 1000
    on_demand_allowed: bool = True
    manager_usd_per_h: float = 0.0
    billing: Billing = "local"  # a name of `bidding.markets.billing.RULES`
    regions: tuple[str, ...] = ()  # where data may be; none means anywhere
    egress_usd_per_gb: float = 0.0
    disk_usd_per_h: float = 0.0  # of every machine as long as it is held; never refunded
    silent_after_s: float | None = None  # None: machines outlive the time without a manager
    quote_max_age_s: float | None = None  # None: the provider pushes prices, so none is too old

    control_period_s: float = 2.0
    listing_period_s: float = 2.0  # of the provider's list, which is long for 10,000 machines
    rethink_s: float = 2.0  # how often the bidder is asked for a job that has what it wants
    reserve_s: float = 300.0
    drain_s: float = 60.0
    launch_grace_s: float = 30.0
    boot_timeout_s: float = 120.0
    worker_timeout_s: float = 120.0
    rejoin_s: float = 30.0
    stall_s: float = 60.0
    settle_s: float = 0.5
    notice_margin_s: float = 5.0
    penalty_s: float = 180.0
    start_s: float = 30.0
    morph_s: float = 1.0
    recovery_s: float = 2.0
    doubt_s: float = 5.0  # a worker counts as slow, or as recovered, after this long
    ease_s: float = 30.0  # from cutting a slow worker's share until leaving it out is considered
    probe_s: float = 60.0  # until a worker that was left out is tried again; longer each time

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name.endswith("_s") and value is not None and value <= 0:
                raise ValueError(f"settings: {name} must be positive, not {value}")
            money = name.endswith(("_usd", "_per_h", "_per_h_max", "_per_gb"))
            if money and value is not None and value < 0:
                raise ValueError(f"settings: {name} must not be negative, not {value}")
        if self.machines_max < 1:
            raise ValueError(f"settings: machines_max must be at least 1, not {self.machines_max}")
        if self.drain_s >= self.reserve_s:
            raise ValueError(
                f"settings: drain_s={self.drain_s} must be below reserve_s={self.reserve_s}: "
                "giving a machine back may not take longer than was reserved for"
            )
