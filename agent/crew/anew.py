"""Says in the job's log that a loss is recorded anew in each step, which nobody would see otherwise."""

import sys
import time
from collections.abc import Callable

from agent.pipeline.closure import Closure
from agent.pipeline.recording import Recording

STEPS_MIN = 4
SAID = f"loss_of was recorded anew in each of the last {STEPS_MIN} steps"


class Anew:
    def __init__(self) -> None:
        self._closure: Closure | None = None
        self._last, self._row, self._took_s = -2, 0, 0.0

    def recorded(self, step: int, record: Callable[[], Recording]) -> Recording:
        began_s = time.monotonic()
        found = record()
        if found.because and found.closure is not self._closure:
            self._hear(step, found.because, time.monotonic() - began_s)
        self._closure = found.closure
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
