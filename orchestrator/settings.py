"""What the manager was told before it started: limits, periods, patience.

The settings travel in `ManagerStarted`, so that a journal alone is enough to replay every decision.
"""

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`None` means no limit. Every lease reserves `reserve_s` of its highest price until it is gone;
    nothing is bought that cannot be reserved for.
    """

    deployment: str = "default"
    budget_usd: float | None = None
    usd_per_h_max: float | None = None
    machines_max: int = 1000
    on_demand_allowed: bool = True
    manager_usd_per_h: float = 0.0
    billing: str = "local"  # a name of `bidding.billing.RULES`
    regions: tuple[str, ...] = ()  # where data may be; none means anywhere
    egress_usd_per_gb: float = 0.0
    disk_usd_per_h: float = 0.0  # of every machine, whatever becomes of it
    quote_max_age_s: float | None = None  # None: prices come by themselves and are never old

    control_period_s: float = 2.0
    listing_period_s: float = 2.0  # of the provider's list, which is long for 10,000 machines
    rethink_s: float = 2.0  # how often a job that has what it wants looks at the market again
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
    doubt_s: float = 5.0  # a worker is slow, or well again, when it has been for so long
    ease_s: float = 30.0  # after its share was cut, leaving it out is thought about
    probe_s: float = 60.0  # who was left out is tried again, then ever more seldom

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
