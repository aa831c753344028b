"""What a worker tells the keeper of a step before the commit: its slice of the sum, where that is wanted, and that it can
apply all of it.
"""

from agent.crew.crew import Crew
from agent.faults import passing
from agent.protocol import Held, Prepared, Slice
from agent.tensors.shards import cut
from agent.tensors.sums import Sum, Summed


class Preparing:
    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.wanted = True  # the sums of steps that begin now
        self._told = True  # that of this step
        self._sliced_at = 0  # the connection to the keeper by which the sum was sent
        self._promise: Prepared | None = None
        self._slices: list[tuple[int, list[memoryview]]] = []  # what the keeper got of the sum

    @property
    def forgotten(self) -> bool:
        """Whether the keeper was restarted since, and does not know of it."""
        return self._crew.link.connects != self._sliced_at

    def slice(self, step: int, total: Sum) -> None:
        """Where everyone has the whole sum, each sends as much of it."""
        workers = self._crew.layout.workers
        start, end = cut(total.space.total_bytes, len(workers), workers.index(self._crew.me))
        self.send(step, [(start, [total.memory(start, end)])])

    def send(self, step: int, slices: list[tuple[int, list[memoryview]]]) -> None:
        """As offsets, and what lies there."""
        self._told = self.wanted
        self._tell(step, slices if self._told else [])

    def _tell(self, step: int, slices: list[tuple[int, list[memoryview]]]) -> None:
        self._sliced_at, self._slices = self._crew.link.connects, slices
        for offset, pieces in slices:
            message = Slice(
                generation=self._crew.generation,
                step=step,
                offset=offset,
                total=self._crew.replica.space.total_bytes,
            )
            self._crew.link.send(message, *pieces)
        passing("step: slice sent")

    def promise(self, step: int, summed: Summed, held: Held | None) -> None:
        """Tell the keeper that this worker can apply the sum. `held` is what will be here after the step, if not all."""
        layout, replica, evidence = self._crew.layout, self._crew.replica, self._crew.evidence
        self._promise = Prepared(
            generation=layout.generation,
            step=step,
            loss=summed.total.loss / layout.microbatches,
            present=summed.marks,
            script_step=replica.step,
            phase=replica.phase,
            held=held,
            computed=(*self._crew.reproduced, *evidence.computed),
            reached=evidence.reached if replica.phase == 0 else None,
            told=self._told,
        )
        self._crew.link.send(self._promise)
        passing("step: prepared")

    def promise_again(self) -> None:
        """A keeper that was restarted has neither the slices nor the promise."""
        assert self._promise is not None
        self._tell(self._promise.step, self._slices)
        self._crew.link.send(self._promise)
        passing("step: prepared")
