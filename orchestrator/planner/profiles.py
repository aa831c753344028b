"""Reading profiles: checked, and refused with one line."""

from pathlib import Path

import msgspec

from agent.profile import Profile
from agent.profile import parse as read
from cloud import plain_file
from cloud.ranges import explain
from orchestrator.planner.errors import ProfileError

BYTES_MAX = 64 * 1024 * 1024
AGAIN = "write it again with: orchestrator tools profile JOB --out FILE"


def load(path: Path) -> Profile:
    """Return the profile in a file; an error says in one line what is wrong and what to do."""
    return parse(_read(path), str(path))


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > BYTES_MAX:
            raise ProfileError(f"{path}: larger than {BYTES_MAX >> 20} MiB, no profile; {AGAIN}")
        return plain_file.read(path).decode()
    except FileNotFoundError:
        raise ProfileError(
            f"{path}: there is no such profile; write one with: orchestrator tools profile JOB --out FILE"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: cannot be read ({error}); {AGAIN}") from None


def parse(text: str, source: str = "profile") -> Profile:
    """Return the profile that a text holds."""
    try:
        return read(text)
    except msgspec.ValidationError as error:
        reason = explain(error, msgspec.json.decode(text))
        raise ProfileError(f"{source}: no usable profile, {reason}; {AGAIN}") from None
    except ValueError as error:  # msgspec's other errors are of this kind, too
        reason = str(error).splitlines()[0]
        raise ProfileError(f"{source}: no usable profile, {reason}; {AGAIN}") from None
