"""The manager as Ray knows it. What it thinks with is imported in its own process only: whoever asks for it needs none of that."""

import msgspec

NAMESPACE = "orchestrator"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Where the manager finds everything."""

    state_dir: str
    redis_url: str
    ray_address: str
    config_path: str | None
    house: str  # which life of the house asks


class ManagerActor:
    """A detached actor with unlimited restarts."""

    def __init__(self, order: bytes) -> None:
        from orchestrator.live.manager import Manager

        self._manager = Manager(order)

    def ping(self) -> int:
        """The process that answers."""
        return self._manager.ping()
