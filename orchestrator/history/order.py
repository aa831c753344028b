"""What the house tells the process that keeps the history."""

import msgspec

from orchestrator.kinds import Kind

VARIABLE = "SPOT_HISTORY_ORDER"


class HistoryOrder(msgspec.Struct, frozen=True, kw_only=True):
    """It is in the environment of that process, as both addresses may hold a password."""

    redis_url: str
    deployment: str = ""
    hook_url: str = ""  # empty: nobody is told
    hook_kinds: tuple[Kind, ...] = ()
