"""The schedule, interpreted with tensors: one worker's part of one step.

The program says which action comes next; what is sent and received follows from it by the rule of
`agent.schedule`. A worker whose next input is late may take a later action whose input is
there (Varuna's opportunistic deviation), by the rules that the simulator plays:

* it looks at most `reach` actions ahead;
* it stashes no more forwards, and owes no more weight-gradients, than its program does anyway;
* a recompute is never early, and only a forward may overtake one that is due.

The first remaining action is always allowed, so no worker waits for one that waits for room. The
order does not matter to the numbers, because sums follow the canonical tree.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from agent.pipeline.stages.channel import Channel, Key, Parcel
from agent.pipeline.stages.stage import Stage
from agent.schedule import Action, Kind, Schedule
from agent.tensors.device import CPU, DeviceWatch, Mark
from agent.tensors.metrics import Numbers

REACH = 8


class Span(msgspec.Struct, frozen=True):
    """One action with its times, for the picture of a step."""

    action: Action
    start_s: float
    end_s: float


class StageStep(msgspec.Struct, frozen=True, kw_only=True):
    """What an execution needs from outside. Microbatches are counted within the step.

    `open` seeds the random streams for a microbatch. `lend` is called before a backward into a
    stage's `.grad`s, and may leave gradients there for it to add to. `take` is called when the
    `.grad`s and buffers hold one microbatch's contribution, with its loss and metrics on the last
    stage and 0 elsewhere; it leaves none there. `check` is called between actions, and raises what
    ends the step early.
    """

    name: str  # marks its messages; no two steps in flight share it
    first: int
    batches: Sequence[Sequence[Any]]
    open: Callable[[int], None]
    lend: Callable[[Stage, int], None]
    take: Callable[[Stage, int, Numbers], None]
    check: Callable[[], None]


class Program:
    """A worker's program, what it may hold, and which microbatches are forwarded untraced."""

    def __init__(self, schedule: Schedule, worker: int) -> None:
        self.schedule, self.worker = schedule, worker
        self.actions = schedule.program(worker)
        self.again = {
            (action.stage, action.microbatch)
            for action in self.actions
            if action.kind == Kind.RECOMPUTE
        }
        counts, self.stashed_max, self.owed_max = Counts(), 0, 0
        for action in self.actions:
            counts.count(action.kind)
            self.stashed_max = max(self.stashed_max, counts.stashed)
            self.owed_max = max(self.owed_max, counts.owed)

    def source(self, action: Action) -> int | None:
        """Return the worker that sends the message an action waits for, if any."""
        stage, schedule = action.stage, self.schedule
        if action.kind == Kind.FORWARD and stage > 0:
            return schedule.host(stage - 1, action.microbatch)
        backward = action.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT)
        if backward and stage < schedule.stages - 1:
            return schedule.host(stage + 1, action.microbatch)
        return None


class Counts:
    """What a worker holds: forwards stashed, weight-gradients owed, recomputes not yet used."""

    def __init__(self) -> None:
        self.stashed = self.owed = self.recomputed = 0

    def count(self, kind: Kind) -> None:
        match kind:
            case Kind.FORWARD:
                self.stashed += 1
            case Kind.RECOMPUTE:
                self.recomputed += 1
            case Kind.BACKWARD:
                self.stashed, self.recomputed = self.stashed - 1, 0
            case Kind.INPUT_GRADIENT:
                self.owed, self.recomputed = self.owed + 1, 0
            case Kind.WEIGHT_GRADIENT:
                self.stashed, self.owed = self.stashed - 1, self.owed - 1


class Executor:
    """Plays a worker's program over its stages, again for every step."""

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        channel: Channel,
        peers: Sequence[str],
        *,
        reach: int = 1,
    ) -> None:
        self._program, self._stages = program, stages
        self._channel, self._peers, self._reach = channel, peers, reach
        self._local: dict[str, Parcel] = {}
        self._step = ""
        self._watch = DeviceWatch(next(iter(stages.values())).piece.device)
        self.spans: list[Span] = []  # of the last step
        self.waited_s = 0.0

    @property
    def busy_s(self) -> float:
        """Return the time of the last step without the waits for other workers."""
        if self._watch.device != CPU:  # the device may be busy while the host waits
            return sum(span.end_s - span.start_s for span in self.spans)
        return self.spans[-1].end_s - self.spans[0].start_s - self.waited_s

    def run(self, step: StageStep) -> None:
        """Perform every action of the program once."""
        # A thread takes over the process's number of threads when it first asks for it. Until then
        # OpenMP gives it one per core, and a convolution that is shared among more threads rounds
        # differently.
        torch.get_num_threads()
        left = list(self._program.actions)
        done: set[Action] = set()
        counts = Counts()
        told: list[tuple[Action, Mark, Mark]] = []
        self.waited_s, self._step = 0.0, step.name
        self._local.clear()
        self._watch.begin()
        while left:
            step.check()
            index = self._next(left, done, counts)
            if not told:
                self.waited_s = 0.0  # the wait before the first action lies in no span
            action = left.pop(index)
            start = self._watch.mark()
            self._perform(action, step)
            told.append((action, start, self._watch.mark()))
            counts.count(action.kind)
            done.add(action)
        at = self._watch.seconds
        self.spans = [Span(action, at(start), at(end)) for action, start, end in told]

    def clear(self) -> None:
        """Drop everything of the step, because it is given up."""
        self._local.clear()
        for stage in self._stages.values():
            stage.clear()

    # --- what comes next --------------------------------------------------------------------------

    def _next(self, left: list[Action], done: set[Action], counts: Counts) -> int:
        if self._reach == 1:
            return 0
        start_s = time.perf_counter()
        while True:
            index, awaited = self._pick(left, done, counts)
            if index is not None:
                self.waited_s += time.perf_counter() - start_s
                return index
            self._channel.wait(awaited)

    def _pick(
        self, left: list[Action], done: set[Action], counts: Counts
    ) -> tuple[int | None, list[Key]]:
        """Return the first action within reach that can start now, or else what to wait for."""
        awaited: list[Key] = []
        behind_recompute = False
        for index, action in enumerate(left[: self._reach]):
            early = index > 0 and (
                action.kind == Kind.RECOMPUTE
                or (behind_recompute and action.kind != Kind.FORWARD)
                or not self._room(action.kind, counts)
            )
            behind_recompute |= action.kind == Kind.RECOMPUTE
            if early or not self._prepared(action, done):
                continue
            key = self._key(action)
            if key is None or self._channel.ready(*key):
                return index, []
            awaited.append(key)
        return None, awaited

    def _room(self, kind: Kind, counts: Counts) -> bool:
        if kind == Kind.FORWARD:
            return counts.recomputed == 0 and counts.stashed < self._program.stashed_max
        if kind == Kind.INPUT_GRADIENT:
            return counts.owed < self._program.owed_max
        return True

    def _prepared(self, action: Action, done: set[Action]) -> bool:
        """Return whether all that the action needs from this worker has been done."""
        stage, microbatch = action.stage, action.microbatch
        needs = []
        match action.kind:
            case Kind.RECOMPUTE:
                needs = [Kind.FORWARD]
            case Kind.BACKWARD | Kind.INPUT_GRADIENT:
                again = (stage, microbatch) in self._program.again
                needs = [Kind.RECOMPUTE if again else Kind.FORWARD]
            case Kind.WEIGHT_GRADIENT:
                needs = [Kind.INPUT_GRADIENT]
        if not all(Action(kind, stage, microbatch) in done for kind in needs):
            return False
        return self._program.source(action) != self._program.worker or (
            self._tag(action.kind, stage, microbatch) in self._local
        )

    def _key(self, action: Action) -> Key | None:
        source = self._program.source(action)
        if source is None or source == self._program.worker:
            return None
        return self._peers[source], self._tag(action.kind, action.stage, action.microbatch)

    # --- doing it ---------------------------------------------------------------------------------

    def _perform(self, action: Action, step: StageStep) -> None:
        stage, microbatch = self._stages[action.stage], action.microbatch
        match action.kind:
            case Kind.FORWARD:
                self._forward(action, step)
            case Kind.RECOMPUTE:
                stage.recompute(microbatch)
            case Kind.BACKWARD:
                arrived = self._receive(action)
                step.lend(stage, step.first + microbatch)
                self._send(action, -1, stage.backward(microbatch, arrived))
                self._done(stage, microbatch, step)
            case Kind.INPUT_GRADIENT:
                parcel, whole = stage.input_gradient(microbatch, self._receive(action))
                self._send(action, -1, parcel)
                if whole:
                    self._done(stage, microbatch, step)
            case Kind.WEIGHT_GRADIENT:
                if not stage.shares:
                    step.lend(stage, step.first + microbatch)
                    stage.weight_gradient(microbatch)
                    self._done(stage, microbatch, step)
            case _:
                raise ValueError(f"a program has no {action.kind.name} of its own")

    def _forward(self, action: Action, step: StageStep) -> None:
        stage, microbatch = self._stages[action.stage], action.microbatch
        number = step.first + microbatch
        parcel = stage.forward(
            microbatch,
            self._receive(action),
            step.batches[number],
            lambda: step.open(number),
            keep=(action.stage, microbatch) not in self._program.again,
        )
        self._send(action, +1, parcel)

    def _done(self, stage: Stage, microbatch: int, step: StageStep) -> None:
        step.take(stage, step.first + microbatch, stage.release(microbatch))

    def _send(self, action: Action, way: int, parcel: Parcel) -> None:
        stage, schedule = action.stage + way, self._program.schedule
        if not 0 <= stage < schedule.stages:
            return
        host = schedule.host(stage, action.microbatch)
        tag = self._tag(action.kind, stage, action.microbatch)
        if host == self._program.worker:
            self._local[tag] = parcel
        else:
            self._channel.send(self._peers[host], tag, parcel)

    def _receive(self, action: Action) -> Parcel | None:
        source = self._program.source(action)
        tag = self._tag(action.kind, action.stage, action.microbatch)
        if source is None:
            return None
        if source == self._program.worker:
            return self._local.pop(tag)
        start_s = time.perf_counter()
        parcel = self._channel.receive(self._peers[source], tag)
        self.waited_s += time.perf_counter() - start_s
        return parcel

    def _tag(self, kind: Kind, stage: int, microbatch: int) -> str:
        """Return the tag of an activation or a gradient, named after the stage that receives it."""
        return f"{self._step}/{'a' if kind == Kind.FORWARD else 'g'}{stage}.{microbatch}"
