"""Two workers whose connection broke each say so of the other, and only one of them can be gone.

The one with most broken connections is lost, whoever told of them, once the oldest complaint has had its time: a worker
that died is found by its own connection to the keeper before that. What reaches nobody complains of everybody, and
maybe nobody of it. Of those with as many it is the one that most complain about. What the lost one said, and what was
said of it, is dropped.
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
        broken = {frozenset(pair) for pair in self._due_s}
        counts = Counter(worker for pair in broken for worker in pair)
        accused = Counter(worker for worker, _ in self._due_s)
        worst = max(counts, key=lambda worker: (counts[worker], accused[worker], worker))
        return worst, min(one for pair in broken if worst in pair for one in pair - {worst})
