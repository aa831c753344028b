"""What the house tells the process that serves the door."""

import msgspec

VARIABLE = "SPOT_DOOR_ORDER"


class DoorOrder(msgspec.Struct, frozen=True, kw_only=True):
    """It is in the environment of that process, as the address of Redis may hold a password."""

    redis_url: str
    deployment: str
    local: bool = False  # whether machines of the local cloud may join
    aws_certificates: str = ""
    azure_certificates: str = ""
    subscription: str = ""
