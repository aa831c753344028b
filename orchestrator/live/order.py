"""What the house hands to a new manager, and the namespace of its actors in Ray."""

import msgspec

NAMESPACE = "orchestrator"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses and paths that a manager needs."""

    state_dir: str
    redis_url: str
    ray_address: str
    settings: str  # the text of a file with those of the house, in force for all its managers
    house: str  # the life of the house that starts the manager
