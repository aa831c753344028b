"""What the house hands to a new manager, and the namespace of its actors in Ray."""

import msgspec

NAMESPACE = "orchestrator"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Where the manager finds everything."""

    state_dir: str
    redis_url: str
    ray_address: str
    config_path: str | None
    house: str  # which life of the house asks
