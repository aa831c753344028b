"""Which steps a worker shows to others, so that they can be compared. No torch here.

The first steps are shown, because script-defined state outside the session often shows there, and
so is one of every few later ones. What a joining worker reproduces is shown as well: the step after
each snapshot, and the state that it leads to.
"""

from typing import Literal

# `some` layers in turn, or `all` of them.
Shown = Literal["nothing", "some", "all"]

EARLY, EVERY = 16, 8
# One microbatch in so many is computed twice: four tenths of the hundredth of a step that a proof
# may take, as what is shown takes the rest of it.
TWICE = 250
_MASK, _GOLDEN, _MIXED = (1 << 64) - 1, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


def is_shown(step: int) -> bool:
    """Return whether this step of the script is always shown."""
    return step < EARLY or step % EVERY == EVERY - 1


def drawn(step: int, choices: int, what: int = 0) -> int:
    """Return which of so many choices is looked at in a step; `what` tells choices apart.

    They come in turn at first. Later steps are looked at in even distances, in which a turn could
    pass over some choices for ever; so there it is as if drawn.
    """
    if step < EARLY:
        return step % choices
    word = (step * 4 + what + 1) * _GOLDEN & _MASK
    word = (word ^ word >> 30) * _MIXED & _MASK
    return (word ^ word >> 27) % choices


def sampled(first: int, count: int, step: int) -> int:
    """Return which of a worker's `count` microbatches is shown in a step."""
    return first + drawn(step, max(1, count), 2)


def turn_of(step: int, count: int) -> int | None:
    """Return in which turn a microbatch is computed twice in this step, or None if in none.

    `count` is a worker's number of microbatches. It is done in steps 0, 1, 2, 4, 8 and so on,
    because script-defined state often shows within the first steps; and in every so many after
    that.
    """
    every = -(-TWICE // max(1, count))
    if not step & (step - 1):
        return step.bit_length()
    return step // every if step % every == 0 else None
