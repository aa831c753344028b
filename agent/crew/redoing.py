"""The sums of committed steps that a worker applies again, asked of the keeper one by one."""

from collections.abc import Iterable

from agent.crew.crew import Crew
from agent.protocol import Part, Redo, RedoAsked

TAG = "redo"

Spans = tuple[tuple[int, int], ...]
Payload = tuple[memoryview, bytes]  # the sum, and what was contributed to


class Redoing:
    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._come: dict[tuple[int, int], Payload] = {}  # by generation, step
        self._early: dict[tuple[int, int], Spans] = {}  # what was asked for in advance

    def __len__(self) -> int:
        """How many are here and not applied yet."""
        return len(self._come)

    def hear(self, redo: Redo, payload: memoryview) -> None:
        self._come[redo.generation, redo.step] = (payload, redo.present)

    def clear(self) -> None:
        self._come.clear()
        self._early.clear()

    def meet(self, step: int, chain: Iterable[str]) -> None:
        """Nobody's commit holds anybody back here, and who is a step ahead has changed what others of the chain, whose
        scripts look at the whole model, want of it: so all go on from a version together."""
        others = [worker for worker in chain if worker != self._crew.me]
        here = Part(generation=self._crew.generation, step=step, tag=TAG)
        for peer in others:
            self._crew.send(peer, here, [])
        for peer in others:
            self._crew.take(peer, step, TAG)

    def take(self, step: int, spans: Spans = ()) -> Payload:
        """The sum of this step, or these bytes of it."""
        entered = self._crew.entered
        assert entered is not None
        generation = entered.layout.generation
        early = self._early.pop((generation, step), None)
        if early is not None and early != spans:
            # The loop has been recorded anew since, and other layers are kept.
            self._wait(generation, step)
        # One comes while the one before is applied; what is not asked for takes no memory here.
        for wanted in range(step if early != spans else step + 1, min(step + 2, entered.version)):
            asked = RedoAsked(generation=generation, step=wanted, spans=spans)
            self._crew.link.send(asked)
            if wanted != step:
                self._early[generation, wanted] = spans
        return self._wait(generation, step)

    def _wait(self, generation: int, step: int) -> Payload:
        return self._crew.wait(lambda: self._come.pop((generation, step), None))
