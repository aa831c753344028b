"""The step in flight: who is prepared for its commit, and what has come of its sum. No torch here."""

from agent.backup import Assembly, Room
from agent.errors import WireError
from agent.layout import Layout
from agent.protocol import Prepared


class Round:
    def __init__(self, room: Room) -> None:
        self._room = room
        self._prepared: dict[str, Prepared] = {}
        self._sums: Assembly | None = None

    def begin(self) -> None:
        """Whatever has come was of another step, or of another layout."""
        self._prepared.clear()
        self._sums = None

    def sums(self, total: int) -> Assembly:
        if self._sums is None:
            self._sums = Assembly(total, self._room)
        if self._sums.total != total:
            raise WireError(f"a sum of {total} bytes, but others say {self._sums.total}")
        return self._sums

    def prepared(self, worker: str, message: Prepared) -> None:
        self._prepared[worker] = message

    def whole(self, layout: Layout) -> bool:
        """Whether it can be committed."""
        here = self._sums is not None and self._sums.whole
        return here and all(worker in self._prepared for worker in layout.workers)

    def loss(self, layout: Layout) -> float:
        return self._prepared[layout.workers[0]].loss

    def end(self, layout: Layout) -> tuple[bytes, memoryview, dict[str, Prepared]]:
        """What the step contributed to, its sum, and who was prepared; the next one begins."""
        assert self._sums is not None
        prepared, body = self._prepared, self._sums.body
        self._prepared, self._sums = {}, None
        return prepared[layout.workers[0]].present, body, prepared
