"""What the manager knows."""

import msgspec

from orchestrator.settings import Settings


class State(msgspec.Struct, kw_only=True):
    """Everything that decisions rest on. Only `decide` changes it."""

    settings: Settings = Settings()
    epoch: int = 0
    now_s: float = 0.0
    wake_at_s: float = 0.0
