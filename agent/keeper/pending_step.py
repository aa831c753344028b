"""The step in flight: which workers are prepared, and its sum so far. No torch here."""

from agent.errors import WireError
from agent.keeper.storage.backup import Assembly, LoggedSum, Room
from agent.layout import Layout
from agent.protocol import Prepared


class Round:
    def __init__(self, room: Room) -> None:
        self._room = room
        self._prepared: dict[str, Prepared] = {}
        self._sums: Assembly | None = None

    def begin(self) -> None:
        """Forget what has arrived, because it was of a different step or layout."""
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
        """Whether the step can be committed."""
        if any(worker not in self._prepared for worker in layout.workers):
            return False
        return self._kept_back or (self._sums is not None and self._sums.whole)

    @property
    def _kept_back(self) -> bool:
        """Whether the step's sum stays with the workers, because one of them was asked to keep it.

        After a restart, others may have sent theirs.
        """
        return not all(message.told for message in self._prepared.values())

    def script_step(self, layout: Layout) -> int:
        """Return the step of the script that it belongs to."""
        return self._prepared[layout.workers[0]].script_step

    def phase(self, layout: Layout) -> int:
        """Return which of the commits of the script's step it is; 0 is the first."""
        return self._prepared[layout.workers[0]].phase

    def loss(self, layout: Layout) -> float:
        return self._prepared[layout.workers[0]].loss

    def logged(self, step: int, layout: Layout) -> LoggedSum | None:
        """Return the sum and what the step contributed to; None if it stays with the workers."""
        if self._kept_back:
            return None
        assert self._sums is not None
        return LoggedSum(step, self._prepared[layout.workers[0]].present, self._sums.body)

    def end(self, step: int, layout: Layout) -> tuple[LoggedSum | None, dict[str, Prepared]]:
        """Begin the next step. Return this step's sum, and the messages of its prepared workers."""
        logged, prepared = self.logged(step, layout), self._prepared
        self._prepared, self._sums = {}, None
        return logged, prepared
