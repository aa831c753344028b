"""The sums of committed steps that a worker applies again, requested one by one."""

from collections.abc import Iterable

from agent.protocol import Part, Redo, RedoAsked
from agent.worker.peers import PeerWorker

TAG = "redo"

Spans = tuple[tuple[int, int], ...]
Payload = tuple[memoryview, bytes]  # the sum, and marks of the entries that it has


class Redoing:
    def __init__(self, crew: PeerWorker) -> None:
        self._crew = crew
        self._come: dict[tuple[int, int], Payload] = {}  # by generation, step
        self._early: dict[tuple[int, int], Spans] = {}  # the bytes that were asked for in advance

    def __len__(self) -> int:
        """Return how many sums are here and not applied yet."""
        return len(self._come)

    def hear(self, redo: Redo, payload: memoryview) -> None:
        self._come[redo.generation, redo.step] = (payload, redo.present)

    def clear(self) -> None:
        self._come.clear()
        self._early.clear()

    def meet(self, step: int, chain: Iterable[str]) -> None:
        """Wait until all workers of the chain are at this version.

        No commit keeps them together here, and a worker that is a step ahead has changed layers
        that the others' scripts may still read to look at the whole model.
        """
        others = [worker for worker in chain if worker != self._crew.me]
        here = Part(generation=self._crew.generation, step=step, tag=TAG)
        for peer in others:
            self._crew.send(peer, here, [])
        for peer in others:
            self._crew.take(peer, step, TAG)

    def take(self, step: int, spans: Spans = ()) -> Payload:
        """Return the sum of this step, or these bytes of it."""
        entered = self._crew.entered
        assert entered is not None
        generation = entered.layout.generation
        early = self._early.pop((generation, step), None)
        if early is not None and early != spans:
            # The loop has been recorded again since, and other layers are kept.
            self._wait(generation, step)
        # Ask one step ahead, so that a sum arrives while the one before it is applied. A sum that
        # is not asked for takes no memory here.
        for wanted in range(step if early != spans else step + 1, min(step + 2, entered.version)):
            asked = RedoAsked(generation=generation, step=wanted, spans=spans)
            self._crew.link.send(asked)
            if wanted != step:
                self._early[generation, wanted] = spans
        return self._wait(generation, step)

    def _wait(self, generation: int, step: int) -> Payload:
        return self._crew.wait(lambda: self._come.pop((generation, step), None))
