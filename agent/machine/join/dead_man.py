"""The dead man: when a machine has had no word from a manager for too long, it ends itself.

A word is the door's answer that says how long ago the manager itself was seen alive. So a door
without a manager gives none, and a manager that restarts in time costs nobody anything. Time is
counted by the machine's own clock from its first boot on, whatever anybody says.
"""

WORDS = 10  # that have to fail, one after the other
WORD_S_MAX = 30.0
WORD_S_MIN = 0.2
ANSWER_S_MAX = 2.0


class LastWord:
    """When a manager was last known to live; pure, the time is handed in."""

    def __init__(self, silent_after_s: float, now_s: float) -> None:
        self._silent_after_s = silent_after_s
        self._heard_s = now_s
        self.every_s = min(WORD_S_MAX, max(WORD_S_MIN, silent_after_s / WORDS))

    def hear(self, silent_s: float, now_s: float) -> None:
        """Take an answer: the manager was seen alive so long ago. No answer goes back in time."""
        self._heard_s = max(self._heard_s, now_s - max(0.0, silent_s))

    def left_s(self, now_s: float) -> float:
        """Return how much longer the machine may go on unless a word comes."""
        return self._heard_s + self._silent_after_s - now_s

    def patience_s(self, now_s: float) -> float:
        """Return how long to wait for an answer, so that its time-out is not late for the end."""
        return max(0.1, min(ANSWER_S_MAX, self.left_s(now_s)))
