"""What runs on every instance: the training session, its workers, and the reliable tier's keeper."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent.session import Session

__all__ = ["Session"]


def __getattr__(name: str) -> Any:
    """The session brings torch with it, so it is loaded by the scripts that use it, not by the manager."""
    if name == "Session":
        from agent.session import Session

        return Session
    raise AttributeError(f"module 'agent' has no attribute {name!r}")
