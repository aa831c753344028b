"""A worker's messages to the keeper before the commit of a step.

It sends its slice of the sum, if that is wanted, and the promise that it can apply all of the sum.
"""

from functools import partial

import torch

from agent.faults import passing
from agent.net.beside import Beside
from agent.protocol import Held, Prepared, Slice
from agent.tensors.shards import cut
from agent.tensors.sums import Sum, Summed
from agent.worker.peers import PeerWorker


class Preparing:
    def __init__(self, crew: PeerWorker) -> None:
        self._crew = crew
        self.wanted = True  # whether the keeper wants the sums of steps that begin now
        self._told = True  # whether the keeper gets the sum of this step
        self._step, self._sliced_at = 0, 0  # and the connection by which the sum was sent
        self._promise: Prepared | None = None
        # the part of the sum that the keeper got
        self._slices: list[tuple[int, list[memoryview]]] = []
        self._beside = Beside("slices")

    @property
    def forgotten(self) -> bool:
        """Whether the keeper was restarted since the slices were sent, and so lacks them."""
        return self._crew.link.connects != self._sliced_at

    def begin(self, step: int) -> None:
        """Begin to send what this worker has of the sum of a step, if that is wanted."""
        self.settle()
        self._told, self._step, self._slices = self.wanted, step, []
        self._sliced_at = self._crew.link.connects

    def add(self, total: Sum, start: int, end: int, after: torch.Event | None = None) -> None:
        """Send what lies between these bytes of the sum, without waiting.

        On a device it lies there when that has come to `after`.
        """
        if not self._told:
            return
        add = partial(self._add, total, start, end, after)
        if (start, end) == (0, total.space.total_bytes):
            add()  # nothing is computed beside it
        else:
            self._beside.do(add)

    def _add(self, total: Sum, start: int, end: int, after: torch.Event | None) -> None:
        self._slices.append((start, [total.copied(start, end, after)]))
        self._tell(self._step, self._slices[-1:])

    def withhold(self) -> None:
        """Keep the sum of this step back, because what was sent of it is void."""
        self.settle()
        self._told, self._slices = False, []

    def slice(self, step: int, total: Sum) -> None:
        """Send an equal part of the sum, in a layout where every worker has the whole sum."""
        workers = self._crew.layout.workers
        start, end = cut(total.space.total_bytes, len(workers), workers.index(self._crew.me))
        self.send(step, [(start, [total.memory(start, end)])])

    def send(self, step: int, slices: list[tuple[int, list[memoryview]]]) -> None:
        """Send slices of the sum, each as an offset and the bytes there, if they are wanted."""
        self.begin(step)
        if self._told:
            self._slices = slices
            self._tell(step, slices)

    def _tell(self, step: int, slices: list[tuple[int, list[memoryview]]]) -> None:
        for offset, pieces in slices:
            message = Slice(
                generation=self._crew.generation,
                step=step,
                offset=offset,
                total=self._crew.replica.space.total_bytes,
            )
            self._crew.link.send(message, *pieces)

    def settle(self) -> None:
        """Return when nothing of a sum is being sent any more, so that its memory may change."""
        with self._crew.link.stuck.aided():
            self._beside.settle()

    def promise(self, step: int, summed: Summed, held: Held | None, given: int) -> None:
        """Tell the keeper that this worker can apply the sum.

        `held` is what will be here after the step, if that is not all, and `given` how many
        microbatches others have computed for it.
        """
        self.settle()
        passing("step: slice sent")
        layout, replica, evidence = self._crew.layout, self._crew.replica, self._crew.evidence
        self._promise = Prepared(
            generation=layout.generation,
            step=step,
            loss=summed.total.loss / layout.microbatches,
            present=replica.space.sealed(summed.marks),
            script_step=replica.step,
            phase=replica.phase,
            idle=replica.idle,
            held=held,
            computed=(*self._crew.reproduced, *evidence.computed),
            reached=evidence.reached if replica.phase == 0 else None,
            told=self._told,
            given=given,
        )
        self._crew.link.send(self._promise)
        passing("step: prepared")

    def promise_again(self) -> None:
        """Send slices and promise again, because a restarted keeper has neither."""
        assert self._promise is not None
        self.settle()
        self._sliced_at = self._crew.link.connects
        self._tell(self._promise.step, self._slices)
        passing("step: slice sent")
        self._crew.link.send(self._promise)
        passing("step: prepared")
