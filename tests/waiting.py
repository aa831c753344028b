"""How a test waits: for a condition, within a bound."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

LOOK_S = 0.02

T = TypeVar("T")


def until(
    what: str, look: Callable[[], T | None], patience_s: float = 60.0, every_s: float = LOOK_S
) -> T:
    """Return what `look` finds, as soon as it finds something; a failure says what was waited for."""
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        if found := look():
            return found
        time.sleep(every_s)
    raise AssertionError(f"waited {patience_s:.0f} s in vain: {what}")


def write_whole(path: Path, what: object) -> None:
    """In one go: whoever reads the file again and again would see it empty in between."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(str(what))
    part.replace(path)
