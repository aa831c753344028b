"""The manager as Ray knows it: what it decides with is imported in its own process only."""


class ManagerActor:
    """A detached actor with unlimited restarts."""

    def __init__(self, order: bytes) -> None:
        from orchestrator.live.manager import Manager

        self._manager = Manager(order)

    def ping(self) -> int:
        """The process that answers."""
        return self._manager.ping()
