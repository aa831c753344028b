"""Where the door is, and how its certificate is known: what user data is made of."""

from pathlib import Path

import msgspec

from cloud import private
from orchestrator.paths import Places


class DoorFile(msgspec.Struct, frozen=True, kw_only=True):
    """What the house publishes in `door.json`, before the manager starts; no secret."""

    address: str  # HOST:PORT
    fingerprint: str


def publish_door(places: Places, door: DoorFile) -> None:
    private.write(_file(places), msgspec.json.encode(door))


def read_door(places: Places) -> DoorFile | None:
    """Return where the newest house's door is, or None if there was none."""
    try:
        return msgspec.json.decode(_file(places).read_bytes(), type=DoorFile)
    except (OSError, msgspec.DecodeError):
        return None


def _file(places: Places) -> Path:
    return places.state_dir / "door.json"
