"""What the manager was told before it started: limits, periods, patience.

The settings travel in `ManagerStarted`, so that a journal alone is enough to replay every decision.
"""

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`None` means no limit. Times that wait for the outside world are patience, not sleep."""

    deployment: str = "default"
    budget_usd: float | None = None
    usd_per_h_max: float | None = None
    machines_max: int = 1000
    on_demand_allowed: bool = True
    manager_usd_per_h: float = 0.0

    control_period_s: float = 30.0
    reserve_s: float = 300.0
    launch_grace_s: float = 120.0
    listing_lag_s: float = 60.0
    boot_timeout_s: float = 600.0
    worker_timeout_s: float = 300.0
    rejoin_s: float = 60.0
    stall_s: float = 300.0
    settle_s: float = 0.5
    notice_margin_s: float = 5.0
    start_s: float = 60.0
    morph_s: float = 1.0
    recovery_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ("control_period_s", "reserve_s", "launch_grace_s", "boot_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.machines_max < 1:
            raise ValueError(f"machines_max must be at least 1, not {self.machines_max}")
