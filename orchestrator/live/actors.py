"""The manager as a Ray actor; its imports happen only in the actor's process."""


class ManagerActor:
    """A detached actor with unlimited restarts."""

    def __init__(self, order: bytes) -> None:
        from cloud.open_files import raise_limit
        from orchestrator.live.manager import Manager

        raise_limit()
        self._manager = Manager(order)

    def ping(self) -> int:
        """Return the pid of the actor's process."""
        return self._manager.ping()
