"""Train PyTorch models on spot machines; `from orchestrator import Session` is the door for scripts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent.session import Result, Session, unbuilt

__all__ = ["Result", "Session", "unbuilt"]


def __getattr__(name: str) -> Any:
    """A session brings torch with it, so it is loaded by the scripts that use it, not by the manager."""
    if name in __all__:
        from agent import session

        return getattr(session, name)
    raise AttributeError(f"module 'orchestrator' has no attribute {name!r}")
