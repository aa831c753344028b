"""One step as it happened: what each worker did, and when. No torch here.

Seconds count from the moment at which the worker was let into the step, when it received the commit
before. That moment is the same for all workers, apart from the time that a message takes.
"""

import time

import msgspec

from agent.layout import Layout
from agent.schedule import Action, Kind
from cloud.ranges import Count, Name, Number, Step, Time

MOMENTS_MAX = 20_000  # moments of one worker


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """An action and its time; `kind` is one of `agent.schedule.Kind`."""

    kind: Count
    stage: Count
    microbatch: Step
    start_s: Number
    end_s: Number


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a job, played by all workers of its layout; `cuts` are theirs, if deep."""

    job: Name
    step: Count
    at_s: Time
    layout: Layout
    cuts: tuple[Step, ...]
    workers: dict[Name, tuple[Moment, ...]]


class Notes:
    """The actions of one worker in one step, lap by lap, if its timeline was asked for."""

    def __init__(self) -> None:
        self._start_s = self._lap_s = time.perf_counter()
        self.moments: list[Moment] = []

    def skip(self) -> None:
        """Leave out the time since the last lap."""
        self._lap_s = time.perf_counter()

    def lap(self, kind: Kind, microbatch: int) -> None:
        """Record what was done since the last lap."""
        self.add(Action(kind, 0, microbatch), self._lap_s, time.perf_counter())

    def add(self, action: Action, start_s: float, end_s: float) -> None:
        self._lap_s = end_s
        if len(self.moments) < MOMENTS_MAX:
            times = round(start_s - self._start_s, 7), round(end_s - self._start_s, 7)
            self.moments.append(Moment(action.kind, action.stage, action.microbatch, *times))
