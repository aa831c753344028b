"""The times of a model's sections, measured by one worker, alone or beside others.

The measured parts are those that a step is made of: a section's forward (on memory that is used
again, and on fresh memory), its backward whole and in halves, taking its gradients into the step's
sums, and taking in what comes from the section before.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from agent.calibration.assignment import OWNER, ROUND, Alone, Board, Round, Times
from agent.calibration.peak_memory import most_bytes
from agent.faults import passing
from agent.net.wire import room
from agent.pipeline.stages.channel import Parcel
from agent.pipeline.stages.stage import Stage
from agent.pipeline.stages.stage_parts import Piece
from agent.pipeline.stages.transport import asked_for, pack, unpack
from agent.tensors.absent import any_away, stood_in
from agent.tensors.device import where
from agent.tensors.metrics import Numbers
from agent.tensors.sums import Contribution, Sum, SumSpace

Clock = Callable[[], float]
Batch = Sequence[torch.Tensor]
HELD = 4  # microbatches held at once to see what fresh memory costs
SECONDS_MAX, SECONDS_LEAST = 50.0, 1.0  # of all measuring; a measurement that has begun is finished
SHARE_OF_RUN = 0.05


class Needless(Exception):  # noqa: N818 - it is no error
    """What is being measured is here already, or is not wanted any more."""


class Patience:
    """The time limit of a measurement: a share of the waiting run, within bounds."""

    def __init__(self, check: Callable[[], None], limit_s: float = SECONDS_MAX) -> None:
        """Begin now; `check` raises to end the measurement."""
        self._check, self._start_s, self._limit_s = check, time.monotonic(), limit_s
        self.needless: Callable[[], bool] = lambda: False

    def learn(self, run_s: float) -> None:
        """Set the limit from the time that the waiting run will take; 0 if no run waits."""
        if run_s:
            self._limit_s = min(max(SECONDS_LEAST, SHARE_OF_RUN * run_s), SECONDS_MAX)

    def check(self) -> None:
        self._check()
        if self.needless():
            raise Needless

    @property
    def left_s(self) -> float:
        return self._start_s + self._limit_s - time.monotonic()

    @property
    def over(self) -> bool:
        self.check()
        return self.left_s < 0


class How(NamedTuple):
    rounds: int
    patience: Patience
    clock: Clock


class Gauge:
    """A model in pieces, a microbatch of every size, and the section that this worker is at."""

    def __init__(self, pieces: Sequence[Piece], examples: Sequence[Batch], how: How) -> None:
        self._pieces, self._examples, self._how = pieces, examples, how
        self.in_parts = any(any_away(piece.module) for piece in pieces)
        self._warm = False
        self._at, self._arrived = 0, list[Parcel | None]()

    def finish(self, board: Board) -> None:
        """Do tasks until none is lacking, even if the other workers are lost."""
        patience = self._how.patience
        while True:
            patience.needless = lambda: False
            if patience.over:
                board.hurry()
            task = board.take(OWNER)
            if task is None and (task := board.lacking()) is None:
                return
            patience.needless = partial(board.has, task)
            try:
                board.put(self.do(task))
            except Needless:
                continue

    def do(self, task: int) -> Round | Alone:
        return self._round() if task == ROUND else self._alone(task)

    def _round(self) -> Round:
        """Measure a round. A worker's first one counts only if there is no time for another."""
        passing("survey: round begun")
        found = self._once()
        if not self._warm:
            self._warm = True
            if not self._how.patience.over:
                found = self._once()
        return found

    def _once(self) -> Round:
        """Measure every size in turn, so that a slow moment does not fall on one of them alone."""
        return Round(tuple(one_round(self._pieces, each, self._how) for each in self._examples))

    def _alone(self, section: int) -> Alone:
        passing("survey: section begun")
        piece, arrived = self._pieces[section], self._arrive(section)
        pairs = list(zip(arrived, self._examples, strict=True))
        before, example = pairs[0]
        with stood_in(piece.module):
            return Alone(
                section=section,
                rounds=tuple(self._rounds_of(piece, pairs)) if self.in_parts else (),
                fresh_s=tuple(_fresh_s(piece, *pair, self._how) for pair in pairs),
                stash_bytes=_stash_bytes(piece, before, example),
                taking_in_s=0.0 if before is None else _taking_in_s(before, self._how),
                most_bytes=most_bytes(piece, *pairs[-1]),
            )

    def _arrive(self, section: int) -> list[Parcel | None]:
        """Return what arrives at this section, for every size."""
        if section < self._at or not self._arrived:
            self._at, self._arrived = 0, [None] * len(self._examples)
        for piece in self._pieces[self._at : section]:
            self._how.patience.check()
            with stood_in(piece.module):
                stage = Stage(piece, microbatches=1)
                for index, example in enumerate(self._examples):
                    self._arrived[index] = stage.forward(0, self._arrived[index], example)
                    stage.clear()
            self._at += 1
        return self._arrived

    def _rounds_of(self, piece: Piece, pairs: Sequence[tuple[Parcel | None, Batch]]) -> list[Round]:
        found: list[Round] = []
        for turn in range(self._how.rounds + 1):
            if turn > 0 and self._how.patience.over:
                break
            if turn == 1:
                found.clear()  # because it has the first round, which takes longer
            once = [one_round([piece], example, self._how, before) for before, example in pairs]
            found.append(Round(tuple(once)))
        return found


def spent_s(pieces: Sequence[Piece], example: Batch, how: How) -> list[float]:
    """Take a first look: the seconds of forward and backward of every section, once."""
    if not any(any_away(piece.module) for piece in pieces):
        times = one_round(pieces, example, how, halves=(False,))
        return [f + b for f, b in zip(times.forward, times.backward, strict=True)]
    found, arrived = list[float](), None
    for piece in pieces:
        with stood_in(piece.module):
            times = one_round([piece], example, how, arrived, halves=(False,))
            stage = Stage(piece, microbatches=1)
            arrived = stage.forward(0, arrived, example)
            stage.clear()
        found.append(times.forward[0] + times.backward[0])
    return found


def one_round(
    pieces: Sequence[Piece],
    example: Batch,
    how: How,
    before: Parcel | None = None,
    halves: Sequence[bool] = (False, True),
) -> Times:
    """Run every section forward and back, once with whole backwards and once with halved ones.

    What arrives at the first section is `before`. If the last is not the model's last, the
    gradients that come back to it are made up.
    """
    clock, check = how.clock, how.patience.check
    times = Times([], [], [], [], [], [])
    stages = [Stage(piece, microbatches=1) for piece in pieces]
    spaces = [SumSpace({"piece": piece.module}) for piece in pieces]
    for halved in halves:
        for space in spaces:
            space.begin()
        arrived = before
        for stage in stages:
            check()
            start_s = clock()
            if halved:
                stage.forward(0, arrived, example, keep=False)
                times.untraced.append(clock() - start_s)
                stage.clear()
                start_s = clock()
            arrived = stage.forward(0, arrived, example)
            if not halved:
                times.forward.append(clock() - start_s)
        back = None if pieces[-1].last or arrived is None else stages[-1].ones_for(arrived)
        for stage, space in zip(reversed(stages), reversed(spaces), strict=True):
            check()
            start_s = clock()
            if halved:
                back, whole = stage.input_gradient(0, back)
                times.input_gradient.append(clock() - start_s)
                start_s = clock()
                if not whole:
                    stage.weight_gradient(0)
                times.weight_gradient.append(clock() - start_s)
            else:
                back = stage.backward(0, back)
                times.backward.append(clock() - start_s)
            numbers = stage.release(0)
            if not halved:
                times.taking.append(_taking_s(space, numbers, clock))
            stage.clear()
    for listed in times[1:-1]:
        listed.reverse()
    return times


def _taking_s(space: SumSpace, numbers: Numbers, clock: Clock) -> float:
    """Return the seconds of adding up gradients, for each microbatch.

    A step adds up every two microbatches, and then their sums, so each takes half of both.
    """
    one, seconds = space.take(numbers), []
    next_ = Contribution(
        one.numbers, [None if each is None else each.clone() for each in one.found]
    )
    into, other = Sum(space, space.device), Sum(space, space.device)
    for _ in range(2):  # the first write maps the memory
        start_s = clock()
        space.join(into, one, next_)
        space.add(into, other)
        seconds.append(clock() - start_s)
    return seconds[1] / 2


def _fresh_s(piece: Piece, parcel: Parcel | None, example: Batch, how: How) -> float:
    """Return by how much a forward is slower while others are held than when each is released."""
    stage = Stage(piece, microbatches=1)
    seconds: dict[bool, list[float]] = {True: [0.0], False: [0.0]}
    for turn in range(how.rounds + 1):
        if how.patience.over:
            break
        if turn == 1:
            seconds = {True: [], False: []}
        for held in (True, False):
            seconds[held] += _forwards_s(stage, parcel, example, how.clock, held=held)
    slower_s = statistics.median(seconds[True]) - statistics.median(seconds[False])
    return max(slower_s, 0.0)


def _forwards_s(
    stage: Stage, parcel: Parcel | None, example: Batch, clock: Clock, *, held: bool
) -> list[float]:
    """Time some forwards in a row, without the first, which is on memory used before."""
    stage.clear()
    found = []
    for microbatch in range(HELD):
        start_s = clock()
        stage.forward(microbatch, parcel, example)
        found.append(clock() - start_s)
        if not held:
            stage.clear()
    stage.clear()
    return found[1:]


def _stash_bytes(piece: Piece, arrived: Parcel | None, example: Batch) -> float:
    """Return the bytes that autograd keeps for the backward, each storage once, no parameters."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in piece.module.parameters()}

    def keep(tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    stage = Stage(piece, microbatches=1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stage.forward(0, arrived, example)
    stage.clear()
    return float(sum(kept.values()))


def _taking_in_s(parcel: Parcel, how: How) -> float:
    """Return the seconds of unpacking a message, which the worker that waits for it does."""
    device = where(parcel.tensors)
    extra, lying = pack(parcel, asked_for(parcel))
    sent = b"".join(lying)
    payload, times = room(len(sent)), list[float]()
    payload[:] = sent
    for _ in range(how.rounds + 1):
        start_s = how.clock()
        unpack(extra, payload, device)
        times.append(how.clock() - start_s)
    return statistics.median(times[1:] or times)
