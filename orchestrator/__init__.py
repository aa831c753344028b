"""Train models on spot machines; a script uses `from orchestrator import Session`, a notebook `Client`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent.served import ParamServerJob
    from agent.session import Result, Session, Variables, supervised, unbuilt
    from orchestrator.notebook import Client

__all__ = ["Client", "ParamServerJob", "Result", "Session", "Variables", "supervised", "unbuilt"]


def __getattr__(name: str) -> Any:
    """Import the session when a script asks for it, so that the manager does not import torch."""
    if name == "Client":
        from orchestrator.notebook import Client

        return Client
    if name in __all__:
        from agent import served, session

        return getattr(served if name == "ParamServerJob" else session, name)
    raise AttributeError(f"module 'orchestrator' has no attribute {name!r}")
