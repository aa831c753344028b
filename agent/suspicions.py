"""Two workers whose connection broke each say so of the other, and only one of them can be gone.

The one that most complain about is lost, once the oldest complaint has had its time: a worker that died is found
by its own connection to the keeper before that. What the lost one said, and what was said of it, is dropped.
"""

from collections import Counter


class Suspicions:
    """Of one generation."""

    def __init__(self) -> None:
        self._due_s: dict[tuple[str, str], float] = {}  # accused, by whom

    def hear(self, accused: str, by: str, due_s: float) -> None:
        self._due_s.setdefault((accused, by), due_s)

    def drop(self, worker: str) -> None:
        """It is gone, and nothing that has to do with it matters any more."""
        self._due_s = {pair: due_s for pair, due_s in self._due_s.items() if worker not in pair}

    def clear(self) -> None:
        self._due_s.clear()

    def lost(self, now_s: float) -> tuple[str, str] | None:
        """Who is to be given up now, and the word of whom that rests on."""
        if not any(due_s <= now_s for due_s in self._due_s.values()):
            return None
        counts = Counter(accused for accused, _ in self._due_s)
        worst = max(counts, key=lambda worker: (counts[worker], worker))
        return next(pair for pair in self._due_s if pair[0] == worst)
