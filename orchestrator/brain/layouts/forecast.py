"""The bidder's work term: the plan book's steps per second for any footprint.

work/s = 1 / T(n)          T(n) the step of the best layout of n equal workers, from the book
unlike types               count as equivalents of the measured type, linear between two counts
scaled by                  the predicted step time of the running layout over the observed one
"""

from collections.abc import Mapping
from math import floor

import msgspec

from agent.profile import EXCHANGED, Profile
from cloud.model import InstanceType
from orchestrator.brain.layouts import layout_choice, speeds
from orchestrator.events import JobSpec
from orchestrator.planner.errors import MorphError
from orchestrator.planner.plan_book import Book
from orchestrator.state import Job, LayoutState, Market, State

UNKNOWN_BYTES = 1e8  # of the gradients of a model that no worker has reported yet
GRADIENTS_SHARE = 1 / 3  # of a state: an optimizer keeps two numbers beside most parameters
SCALE_MAX = 5.0  # limits what a single odd step can do to purchases


class BookSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The steps per second of any footprint; 0 if no layout fits."""

    profile: Profile
    microbatches: int
    depth: int | None
    stages_max: int
    types: dict[str, InstanceType]
    slots_max: int
    scale: float = 1.0

    def work_per_s(self, counts: Mapping[str, int]) -> float:
        held = {self.types[name]: n * self.types[name].slots for name, n in counts.items() if n}
        slots = sum(held.values())
        if not slots:
            return 0.0
        used = min(1.0, self.slots_max / slots)
        measured = self.types.get(self.profile.instance_type)
        paces = {pace_of(measured, kind) for kind in held}
        if len(paces) == 1:
            book = self._book(held, paces.pop())
            return self._rate(book, round(slots * used))
        equal = sum(n / pace_of(measured, kind) for kind, n in held.items()) * used
        book = self._book(held, 1.0)
        low = floor(equal)
        part = equal - low
        return (1 - part) * self._rate(book, low) + part * self._rate(book, low + 1)

    def _book(self, held: Mapping[InstanceType, int], pace: float) -> Book:
        task = layout_choice.task_of(
            self.profile,
            self.microbatches,
            self.depth,
            self.stages_max,
            min(kind.slots for kind in held),
        )
        return layout_choice.book_of(self.profile, task, self.slots_max, pace)

    def _rate(self, book: Book, workers: int) -> float:
        plan = book.plans[min(workers, book.workers_max)] if workers else None
        return self.scale / plan.step_s if plan is not None else 0.0


def pace_of(measured: InstanceType | None, kind: InstanceType) -> float:
    """Return the seconds of a microbatch on this type over those on the measured type."""
    return (1.0 if measured is None else measured.speed) / kind.speed


def pace_for(state: State, job: Job, kind: InstanceType) -> float:
    """Return the same for a job, which may have measured how fast its types are."""
    profile, view = job.layouts.profile, speeds.view_of(state, job)
    measured = None if profile is None else state.types.get(profile.instance_type)
    return pace_of(None if measured is None else view(measured), view(kind))


def gradient_bytes(job: Job) -> float:
    """Return the bytes of all gradients as exchanged: as measured, else by the size of the state.

    Of a model of which nothing is known, a modest size is assumed: two zones are dear for most.
    """
    if job.layouts.profile is not None:
        return job.layouts.profile.sum_bytes
    guessed = job.layouts.state_bytes * GRADIENTS_SHARE or UNKNOWN_BYTES
    return guessed * EXCHANGED[job.layouts.exchange]


def speed_of(state: State, job: Job) -> BookSpeed | None:
    """Return the book's speed for the job's footprints, or `None` if the book cannot answer.

    It cannot before a profile is measured, or if what runs or has run has no plan.
    """
    if job.layouts.profile is None or not job.layouts.microbatches:
        return None
    if (
        job.layouts.plan is None
        and job.layouts.current is not None
        and job.layouts.acknowledged == job.layouts.generation
    ):
        return None  # no plan explains the running shape, so the measured speed counts
    speed = BookSpeed(
        profile=job.layouts.profile,
        microbatches=job.layouts.microbatches,
        depth=job.spec.depth,
        stages_max=job.layouts.stages_max,
        types=speeds.types_for(state, job),
        slots_max=job.workers_max,
        scale=_scale(job),
    )
    try:
        speed.work_per_s(dict.fromkeys(list(state.types)[:1], 1))
        slots = min((kind.slots for kind in state.types.values()), default=1)
        ran_without = job.progress.step > 0 and not any(
            _book_of(job, job.layouts.profile, slots).plans
        )
    except MorphError:
        return None
    return None if ran_without else speed


def fits(job: Job, slots: int) -> bool:
    """Return whether the profile has room for the layout that runs without a plan.

    If no layout does, return whether it has room for any layout. Without a profile return true.
    """
    if job.layouts.profile is None or not job.layouts.microbatches:
        return True
    try:
        book = _book_of(job, job.layouts.profile, slots)
    except MorphError:
        return True
    if (
        job.layouts.current is None
        or job.layouts.plan is not None
        or job.layouts.acknowledged != job.layouts.generation
    ):
        return any(book.plans)
    return book.plans[min(len(job.layouts.current.workers), book.workers_max)] is not None


def _book_of(job: Job, profile: Profile, slots: int) -> Book:
    task = layout_choice.task_of(
        profile, job.layouts.microbatches, job.spec.depth, job.layouts.stages_max, slots
    )
    return layout_choice.book_of(profile, task, job.workers_max)


def _scale(job: Job) -> float:
    """Return the predicted over the observed step time; above 1 if steps are faster."""
    if (
        job.layouts.plan is None
        or not job.progress.step_s
        or job.layouts.acknowledged != job.layouts.generation
    ):
        return 1.0
    return min(max(job.layouts.plan.step_s / job.progress.step_s, 1 / SCALE_MAX), SCALE_MAX)


def known_before(state: State, spec: JobSpec) -> tuple[LayoutState, Market]:
    """Return what the newest job with the same script and arguments knows: microbatches and speeds.

    Known in advance, they keep the bidder from slots that cannot compute and from slow types.
    """
    for job in reversed(state.jobs.values()):
        same = (job.spec.script_sha, job.spec.argv) == (spec.script_sha, spec.argv)
        if same and spec.script_sha and (microbatches := job.layouts.microbatches):
            return LayoutState(microbatches=microbatches), Market(speeds=job.market.speeds)
    return LayoutState(), Market()
