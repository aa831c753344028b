"""Keep a history of steps within bounds: the further back, the less exactly. No torch here."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

FINENESS = (128, 64, 32, 16, 8, 4, 2)  # an age divided by it is what may be one thing


def thinned(
    history: list[T],
    most: int,
    step_of: Callable[[T], int],
    joined: Callable[[T, T], T | None],
) -> list[T]:
    """Return the same history as at most so many things, if neighbours can be joined.

    The newest one stays as it is. Some places are left free, so that this is seldom done.
    """
    newest = step_of(history[-1]) if history else 0
    for fineness in FINENESS if len(history) > most else ():
        kept = history[:1]
        for thing in history[1:]:
            first = step_of(kept[-1])
            near = (step_of(thing) - first) * fineness <= newest - first
            if near and (both := joined(kept[-1], thing)) is not None:
                kept[-1] = both
            else:
                kept.append(thing)
        history = kept
        if len(history) <= most * 3 // 4:
            break
    return history
