"""A worker of a P x D layout: its stages, its steps, and the sums at the end of each.

This is the pipeline without the commit protocol around it: `step` leaves the summed gradients in
the parameters of this worker's stages, and the caller applies them.
"""

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from agent.layout import Layout
from agent.pipeline.stages.channel import Channel
from agent.pipeline.stages.execute import Executor, Program, StageStep
from agent.pipeline.stages.reduce import ReduceShare, StageSums, tell_tied
from agent.pipeline.stages.stage import Stage
from agent.pipeline.stages.stage_parts import Piece
from agent.profile import SumFormat
from agent.schedule import Schedule, one_by_one
from agent.tensors.metrics import Numbers

PieceOf = Callable[[int, Any], Piece]  # takes a stage and a microbatch


class Phase(msgspec.Struct, frozen=True):
    """The microbatches of a call of `backward`, and what is done around each.

    `open` begins its random stream, and `check` may raise what ends the phase. `scale` is the scale
    of the loss, which is reported without it. `look` sees the gradients that a microbatch of
    `shown` has in a stage, before they are added to others.
    """

    batches: Sequence[Sequence[Any]]
    open: Callable[[int], None]
    check: Callable[[], None] = lambda: None
    scale: float = 1.0
    shown: Collection[int] = ()
    look: Callable[[Stage, int, Numbers], None] = lambda _stage, _microbatch, _numbers: None

    def unscaled(self, numbers: Numbers) -> Numbers:
        loss, *metrics = numbers.values
        return Numbers(numbers.names, (loss / self.scale, *metrics))


class Worker:
    """A worker of the chain `layout.replicas[i].workers`, for as long as the layout holds.

    `schedule` is the one of its own replica, as replicas may differ in their numbers of
    microbatches. `trained` are the ids of parameters that have room in a sum while they are frozen.
    """

    def __init__(  # noqa: PLR0913
        self,
        layout: Layout,
        me: str,
        schedule: Schedule,
        pieces: Mapping[int, Piece],
        channel: Channel,
        *,
        reach: int = 1,
        piece_of: PieceOf | None = None,
        deterministic: bool = True,
        exchange: SumFormat = "float32",
        trained: Container[int] = (),
    ) -> None:
        self.replica = layout.replica_of(me)
        place = self.replica.workers.index(me)
        self._hosts = [self.replica.workers[schedule.host(s, 0)] for s in range(schedule.stages)]
        self._channel = channel
        self.stages = {
            index: Stage(
                piece,
                microbatches=layout.microbatches,
                piece_of=None if piece_of is None else partial(piece_of, index),
            )
            for index, piece in pieces.items()
        }
        self.executor = Executor(
            Program(schedule, place), self.stages, channel, self.replica.workers, reach=reach
        )
        self._single = Program(one_by_one(schedule), place)
        shares = [
            ReduceShare(peer=replica.workers[place], first=replica.first, count=replica.count)
            for replica in layout.replicas
        ]
        self.sums = {
            index: StageSums(
                stage,
                shares,
                me,
                layout.microbatches,
                deterministic=deterministic,
                exchange=exchange,
                trained=trained,
            )
            for index, stage in self.stages.items()
        }
        self._microbatches = layout.microbatches

    def step(
        self, number: int, batches: Sequence[Sequence[Any]], open_: Callable[[int], None]
    ) -> dict[str, float] | None:
        """Put the step's gradients into the parameters; return its loss and metrics by name.

        They are returned only on the worker that has the last stage.
        """
        self.compute(number, Phase(batches, open_))
        means = None
        # Last to install is the first owner of a tied parameter, whose sum becomes its gradient.
        for _, sums in sorted(self.sums.items(), reverse=True):
            total = sums.reduce(self._channel, f"{number}/s{sums.stage.piece.index}")
            sums.install(total)
            if sums.stage.piece.last:
                found = {"loss": total.loss, **total.metrics}
                means = {name: value / self._microbatches for name, value in found.items()}
        tell_tied(self.sums, self._hosts, self._channel, str(number))
        return means

    def compute(self, number: int, phase: Phase) -> None:
        """Compute every microbatch of this worker, forward and back."""

        def lend(stage: Stage, microbatch: int) -> None:
            if microbatch not in phase.shown:
                self.sums[stage.piece.index].lend(microbatch)

        def take(stage: Stage, microbatch: int, numbers: Numbers) -> None:
            told = phase.unscaled(numbers)
            if microbatch in phase.shown:
                phase.look(stage, microbatch, told)
            self.sums[stage.piece.index].take(microbatch, told)

        self._run(self.executor, str(number), self.replica.first, phase, lend, take)

    def compute_aside(self, name: str, microbatch: int, phase: Phase) -> None:
        """Compute any microbatch of the step with the rest of the chain, only to look at it.

        It is in no sum.
        """

        def take(stage: Stage, microbatch: int, numbers: Numbers) -> None:
            phase.look(stage, microbatch, phase.unscaled(numbers))
            self.sums[stage.piece.index].space.take(numbers)

        executor = Executor(self._single, self.stages, self._channel, self.replica.workers)
        self._run(executor, name, microbatch, phase, lambda _stage, _microbatch: None, take)

    def _run(
        self,
        executor: Executor,
        name: str,
        first: int,
        phase: Phase,
        lend: Callable[[Stage, int], None],
        take: Callable[[Stage, int, Numbers], None],
    ) -> None:
        for sums in self.sums.values():
            sums.begin()
        step = StageStep(
            name=name,
            first=first,
            batches=phase.batches,
            open=phase.open,
            lend=lend,
            take=take,
            check=phase.check,
        )
        try:
            executor.run(step)
        except BaseException:
            executor.clear()
            raise
