"""Where the door is, and how its certificate is known: what user data is made of."""

import msgspec

from cloud import private
from cloud.first_boot import user_data
from orchestrator.config import Config
from orchestrator.errors import OrchestratorError
from orchestrator.paths import Places


class DoorFile(msgspec.Struct, frozen=True, kw_only=True):
    """What the house publishes in `door.json`, before the manager starts; no secret."""

    address: str  # HOST:PORT
    fingerprint: str


def publish_door(places: Places, door: DoorFile) -> None:
    private.write(places.door, msgspec.json.encode(door))


def read_door(places: Places) -> DoorFile | None:
    """Return where the newest house's door is, or None if there was none."""
    try:
        return msgspec.json.decode(places.door.read_bytes(), type=DoorFile)
    except (OSError, ValueError):
        return None


def first_boot_of(config: Config, places: Places, cloud: str) -> str:
    """Return what a cloud's machines run first; raise `OrchestratorError` if there is no door."""
    door = read_door(places)
    if door is None:
        raise OrchestratorError(
            f"the join door of this house is not known, so no machine could join; see "
            f"{places.log('door')}"
        )
    deployment, silent_after_s = config.manager.deployment, config.silent_after_s
    return user_data(door.address, door.fingerprint, deployment, cloud, silent_after_s)
