"""Whether a loop still computes what was recorded.

What it reads is looked at in every step, as far as that can be seen (`agent.source.reads`). The rest shows when the loop is
recorded once more: where a layout begins, in the step behind that, and then ever more seldom, so that it takes next to no time.
"""

import time
from collections.abc import Callable

from agent.errors import CannotRecord, Misuse

FAR = 63  # odd, or what alternates would look the same
SHARE = 1 / 512  # of the time
WAY = (
    "something that changes from step to step where nobody sees it (an environment variable, an array that is written to): put "
    "it into the microbatches, or into an attribute of an object that the loop names"
)


class Doubts:
    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._right = self._played = -1  # the last steps in which it was right, and used
        self._wait = 1
        self._clock_s, self._rested_s = clock_s, 0.0

    def recorded(self, step: int) -> None:
        self._right, self._wait = step, 1

    def right(self, step: int, look: Callable[[], bool], *, entered: bool) -> bool:
        """If not, it is to be recorded anew: that is for all workers to do, in the first step of their layout."""
        before, self._played = self._played, step
        if step < self._right:
            return False  # sent back
        since = step - self._right
        if since < (1 if entered else self._wait):
            return True
        began_s = self._clock_s()
        if self._wait == FAR and began_s < self._rested_s and not entered:
            return True
        if look():
            self._right, self._wait = step, min(2 * self._wait, FAR)
            ended_s = self._clock_s()
            self._rested_s = ended_s + (ended_s - began_s) / SHARE
            return True
        if before > self._right:
            raise Misuse(
                f"step {step}: the loop over session.share(...) computes something else than in step {self._right}, and steps "
                f"between may have been computed as that one: it goes by {WAY}"
            )
        if not entered:
            self._played = before  # the job trains with depth 1
            raise CannotRecord(
                f"step {step}: the loop over session.share(...) computes something else than in the step before: it goes by "
                f"{WAY}. Or train with depth 1"
            )
        return False
