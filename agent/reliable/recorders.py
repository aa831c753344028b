"""Who is asked to find out whether a script can be cut, though some may have died of it. No torch here.

Recording a loop may take more memory than there is, and kill whoever does it. So after a few losses in the middle of
it nobody is asked for a while, and then again, ever more seldom: machines are also taken away for reasons that have
nothing to do with it, and a job that is never cut stays as small as one worker for good.
"""

LOSSES_MAX = 2
AGAIN_S, AGAIN_S_MAX = 600.0, 86_400.0


class Recorders:
    def __init__(self) -> None:
        self.told = False  # somebody has said whether the script can be cut
        self._begun: set[str] = set()
        self._last = ""  # that has begun
        self._losses = 0
        self._again_s = 0.0  # before that nobody else is asked

    def begin(self, worker: str) -> None:
        self._begun.add(worker)
        self._last = worker

    def is_busy(self, worker: str) -> bool:
        """It may hold up all of its threads, as it does while it imports and builds."""
        return worker == self._last and not self.told

    def lost(self, worker: str, now_s: float, *, announced: bool) -> None:
        """What was `announced` by the cloud is nobody's doing."""
        if worker not in self._begun:
            return
        self._begun.discard(worker)
        if self.told or announced:
            return
        self._losses += 1
        if self._losses >= LOSSES_MAX:
            pause_s = min(AGAIN_S * 2 ** (self._losses - LOSSES_MAX), AGAIN_S_MAX)
            self._again_s = now_s + pause_s

    def wanted(self, now_s: float) -> bool:
        """Whether the next leader shall find out."""
        return not self.told and now_s >= self._again_s
