"""A warning in the job's log if a loss is recorded again in each step, which costs time."""

import sys
import time
from collections import deque
from collections.abc import Callable

from agent.pipeline.tracing.closures.closure import Closure
from agent.pipeline.tracing.graphs import Recording

STEPS_MIN = 4
KNOWN_MAX = 16
SAID = f"loss_of was recorded again in each of the last {STEPS_MIN} steps"


class Anew:
    def __init__(self) -> None:
        # The closures of the last recordings; several, because a step may have several phases.
        self._known = deque[Closure](maxlen=KNOWN_MAX)
        self._last, self._row, self._took_s = -2, 0, 0.0

    def recorded(self, step: int, record: Callable[[], Recording]) -> Recording:
        began_s = time.monotonic()
        found = record()
        if not any(found.closure is each for each in self._known):
            self._known.append(found.closure)
            if found.because:
                self._hear(step, found.because, time.monotonic() - began_s)
        return found

    def _hear(self, step: int, what: str, took_s: float) -> None:
        if step != self._last + 1:
            self._row, self._took_s = 0, 0.0
        self._last, self._row, self._took_s = step, self._row + 1, self._took_s + took_s
        if self._row == STEPS_MIN:
            sys.stderr.write(
                f"{SAID}, in {self._took_s / STEPS_MIN:.2f} s on average: it closes over `{what}`, which has changed. What "
                "changes in every step costs nothing if it is in the microbatches\n"
            )
