"""Which steps a worker shows to others, so that they can be compared. No torch here.

The first steps are shown, because what a script keeps for itself often shows there, and so is one of every few later
ones. What a joining worker reproduces is shown as well: the step after each snapshot, and the state that it leads to.
"""

from typing import Literal

# `some` layers in turn, or `all` of them.
Shown = Literal["nothing", "some", "all"]

EARLY, EVERY = 16, 4
# A microbatch that is computed twice takes one in so many.
TWICE = 100


def is_shown(step: int) -> bool:
    """Whether this step of the script is shown whatever else happens in it."""
    return step < EARLY or step % EVERY == EVERY - 1


def sampled(first: int, count: int, step: int) -> int:
    """Which of so many microbatches of a worker is shown: a different one in each step."""
    return first + step % max(1, count)


def turn_of(step: int, count: int) -> int | None:
    """In which turn a microbatch is computed twice in this step, if it is; workers have so many of them.

    In steps 0, 1, 2, 4, 8 and so on, because what a script keeps often shows within the first; and in every so many.
    """
    every = -(-TWICE // max(1, count))
    if not step & (step - 1):
        return step.bit_length()
    return step // every if step % every == 0 else None
