"""Whether the sum of every step goes to the keeper before its commit. No torch here.

With it nothing can be lost, and every step waits for it. Where that is dear it stays with the workers, and the keeper has
states only, which nobody waits for: what goes down with all machines that could go on alone is computed again from the
newest. Where that is one machine it has to be much dearer, and where it is none that stays, nothing is too dear.
"""

import statistics
from collections import deque

from agent.messages import Sums

DEAR, DEAR_ALONE = 0.02, 0.2  # of a step
AGAIN = 0.5  # of that: then it is sent again
BYTES_MIN = 1 << 24  # less is never dear
MEASURED_MIN, MEASURED, MEASURED_LATE = 8, 15, 3  # steps
PROBES = 0.01  # of all time, for what is sent to see whether it has become cheap


class Toll:
    def __init__(self, policy: Sums) -> None:
        self._policy = policy
        # By worker, of the step in flight: since when a slice is on its way, and what those took that are here.
        self._begun: dict[str, float] = {}
        self._took: dict[str, float] = {}
        self._pace = deque[float](maxlen=MEASURED)  # seconds per byte of a whole sum
        self._insisted_until_s = 0.0
        self._unpaid = 0  # steps since one was sent
        self.sum_bytes = 0
        self.paid = True  # it is sent
        self.probing = False  # it is, to see how long it takes

    def begins(self, worker: str, now_s: float) -> None:
        """Some of a sum begins to come from this worker."""
        self._begun[worker] = now_s

    def ends(self, worker: str, now_s: float) -> None:
        took_s = now_s - self._begun.pop(worker, now_s)
        self._took[worker] = self._took.get(worker, 0.0) + took_s

    def step(self, sum_bytes: int) -> None:
        """One is committed. Its slices came side by side."""
        if self._took and sum_bytes:
            self.sum_bytes = sum_bytes
            self._pace.append(max(self._took.values()) / sum_bytes)
        self.forget()

    def forget(self) -> None:
        """What has come of the step in flight is of another layout."""
        self._begun.clear()
        self._took.clear()

    @property
    def sum_s(self) -> float:
        """What a sum takes; 0 if that is not known."""
        if len(self._pace) < MEASURED_MIN:
            return 0.0
        newest = list(self._pace)[-(MEASURED if self.paid else MEASURED_LATE) :]
        return statistics.median(newest) * self.sum_bytes

    def insist(self, until_s: float) -> None:
        """Until then nothing may be lacking, whatever it costs."""
        self._insisted_until_s = until_s

    def pay(self, copies: int, step_s: float, now_s: float) -> bool:
        """Whether the next sum is sent, where so many machines could go on alone."""
        self.probing = False
        if now_s < self._insisted_until_s:
            return True
        self.paid = not copies or self._worth(copies, step_s)
        self._unpaid = 0 if self.paid else self._unpaid + 1
        if self._policy == "auto" and self._unpaid >= MEASURED:
            self.probing = self.sum_s <= PROBES * self._unpaid * step_s
            self._unpaid *= not self.probing
        return self.paid or self.probing

    def _worth(self, copies: int, step_s: float) -> bool:
        if self._policy != "auto":
            return self._policy == "always" or copies == 1
        if self.sum_bytes < BYTES_MIN:
            return True
        sum_s = self.sum_s
        if not sum_s or not step_s:
            return self.paid
        dear_s = (DEAR if copies > 1 else DEAR_ALONE) * step_s
        return sum_s <= dear_s * (1.0 if self.paid else AGAIN)
