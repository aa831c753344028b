"""Named points in each phase of a step, a morph and a save, where tests inject faults.

As long as no test has armed the process, passing a point costs a call and a comparison. No torch
here.
"""

from collections.abc import Callable, Mapping
from typing import Any

# What an armed process does at a point, if anything, and what it does to the next message that it
# sends.
passed: Callable[[str, Mapping[str, Any] | None], Callable[[], object] | None] | None = None
trap: Any = None


def passing(point: str, params: Mapping[str, Any] | None = None) -> None:
    """Pass `point` on this thread. `params` are those whose gradients are there."""
    if passed is not None and (happens := passed(point, params)) is not None:
        happens()  # called here, so that a hang is in code of ours
