"""What runs on every instance: the training session, its workers, and the reliable tier's keeper."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent.session import Session, unbuilt

__all__ = ["Session", "unbuilt"]


def __getattr__(name: str) -> Any:
    """The session brings torch with it, so it is loaded by the scripts that use it, not by the manager."""
    if name in __all__:
        from agent import session

        return getattr(session, name)
    raise AttributeError(f"module 'agent' has no attribute {name!r}")
