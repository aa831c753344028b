"""The timeline of a step on one worker, recorded when it was asked for."""

from agent.protocol import Traced
from agent.schedule import Kind
from agent.timeline import Notes
from agent.worker.peers import PeerWorker


class Noting:
    def __init__(self, crew: PeerWorker) -> None:
        self._crew = crew
        self.asked_at: int | None = None  # the step to record

    def begin(self) -> None:
        replica = self._crew.replica
        replica.notes = Notes() if self.asked_at == replica.version else None

    def tell(self, step: int, cuts: tuple[int, ...] = ()) -> None:
        notes, generation = self._crew.replica.notes, self._crew.layout.generation
        if notes is not None:
            notes.lap(Kind.REDUCE, 0)
            moments = tuple(notes.moments)
            traced = Traced(generation=generation, step=step, cuts=cuts, moments=moments)
            self._crew.link.send(traced)
