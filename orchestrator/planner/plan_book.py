"""The plan book: the best layout for every count of workers, known before it is needed.

A look-up on a preemption is an index into a tuple. The book is a value: when a calibrated number
drifts, a new book is made from the new profile and replaces it.
"""

from collections.abc import Sequence
from itertools import combinations, pairwise
from math import comb
from typing import NamedTuple

import msgspec
import numpy as np

from agent.profile import Profile
from orchestrator.formatting import memory, plural
from orchestrator.planner import cost_model, search
from orchestrator.planner.compiled import Codes, Reals
from orchestrator.planner.cost_model import Firsts, Tables
from orchestrator.planner.errors import DoesNotFit
from orchestrator.planner.partition import NEVER
from orchestrator.planner.plans import Cost, LayoutPlan, RunnerUp, Way
from orchestrator.planner.search import GROUPINGS_MAX, RUNNERS_UP, WORKERS_MAX, Priced, Task
from orchestrator.planner.simulation import schedules, simulator

FINALISTS = 12
ROUNDS_MAX = 64
BISECTIONS = 40
STAGES_LISTED = 8
SAME = 1e-9  # among ways that differ by less, the first one wins


class Book(msgspec.Struct, frozen=True, kw_only=True):
    """The best layouts: `plans[n]` is the one for n workers, `None` if nothing fits."""

    plans: tuple[LayoutPlan | None, ...]
    fewest: int  # the fewest workers with which a layout fits; 0 if there is none
    missing: str  # the reason to give if nothing fits

    @property
    def workers_max(self) -> int:
        return len(self.plans) - 1

    def at(self, workers: int) -> LayoutPlan:
        """Return the layout for a number of workers; those beyond `workers_max` stay unused."""
        if workers < 1:
            raise DoesNotFit(_no_workers(self.fewest))
        plan = self.plans[min(workers, self.workers_max)]
        if plan is None:
            raise DoesNotFit(f"on {plural(workers, 'worker')}: {self.missing}")
        return plan


def _no_workers(fewest: int) -> str:
    return f"there are no workers; the job waits for {max(fewest, 1)} of them"


class _Desk(NamedTuple):
    """The inputs of all answers."""

    tables: Tables
    task: Task
    prices: list[Priced]


Ranked = list[tuple[int, int]]  # for a count: indices of prices, and the workers each would use


def book(profile: Profile, task: Task, workers_max: int) -> Book:
    """Return the best layout for every count of workers up to `workers_max`."""
    tables = cost_model.tables(profile, whole=task.whole)
    desk = _Desk(tables, task, list(search.priced_ways(tables, task, workers_max)))
    counts = np.arange(1, workers_max + 1)
    plans = [
        _plan(desk, ranked, workers) if ranked else None
        for ranked, workers in zip(_rank(desk, counts, RUNNERS_UP), counts.tolist(), strict=True)
    ]
    fewest = min((plan.workers for plan in plans if plan is not None), default=0)
    missing = ""
    if fewest != 1:
        missing = f"at least {fewest} are needed" if fewest else smallest(tables, task, workers_max)
    return Book(plans=(None, *plans), fewest=fewest, missing=missing)


def best(profile: Profile, task: Task, workers: int) -> LayoutPlan:
    """Return the best layout for one count, with the finalists' stages refined."""
    if workers < 1:
        raise DoesNotFit(_no_workers(0))
    tables = cost_model.tables(profile, whole=task.whole)
    workers = min(workers, WORKERS_MAX)
    desk = _Desk(tables, task, list(search.priced_ways(tables, task, workers, FINALISTS)))
    (ranked,) = _rank(desk, np.array([workers]), FINALISTS)
    if not ranked:
        raise DoesNotFit(
            f"{profile.model} on {plural(workers, 'worker')}: {smallest(tables, task, workers)}"
        )
    plans = [_refined(desk, _plan(desk, [pair], workers)) for pair in ranked]
    plans.sort(key=lambda plan: plan.step_s)
    others = tuple(
        RunnerUp(way=plan.way, width=plan.width, cost=plan.cost)
        for plan in plans[1 : 1 + RUNNERS_UP]
    )
    return msgspec.structs.replace(plans[0], runners_up=others)


def _rank(desk: _Desk, counts: Codes, others: int) -> list[Ranked]:
    """Return for every count the fastest ways, each at the best width that the count allows."""
    prices = desk.prices
    if not prices:
        return [[] for _ in counts]
    most = int(counts[-1])
    steps = np.full((len(prices), most + 1), np.inf)
    for row, priced in enumerate(prices):
        steps[row, priced.curve.way.depth * priced.widths] = priced.step_s
    least = np.minimum.accumulate(steps, axis=1)
    better = np.zeros(steps.shape, bool)
    better[:, 1:] = least[:, 1:] < least[:, :-1]
    used = np.maximum.accumulate(np.where(better, np.arange(most + 1), 0), axis=1)
    wanted = least[:, counts] * (1 + SAME * np.arange(len(prices))[:, None])
    kept = min(others + 1, len(prices))
    rows = np.argpartition(wanted, kept - 1, axis=0)[:kept]
    order = np.argsort(np.take_along_axis(wanted, rows, axis=0), axis=0)
    rows = np.take_along_axis(rows, order, axis=0)
    return [
        [(int(row), int(used[row, workers])) for row in rows[:, i] if wanted[row, i] < np.inf]
        for i, workers in enumerate(counts.tolist())
    ]


def _plan(desk: _Desk, ranked: Ranked, workers: int) -> LayoutPlan:
    """Return the first of the ranked ways as a plan, and the others as its runners-up."""
    (row, used), *others = ranked
    priced = desk.prices[row]
    way, at = priced.curve.way, _place(priced, used)
    width = int(priced.widths[at])
    shares = shared_out(desk.task.global_batch // way.microbatch_size, width)
    if not others and at and np.isfinite(priced.step_s[at - 1]):
        others = [(row, way.depth * int(priced.widths[at - 1]))]  # the same way, fewer replicas
    _, peaks = search.along(priced.curve, np.array(shares[:1]))
    held = cost_model.memory_bytes(
        desk.tables, priced.curve.firsts, way, np.array([float(width)]), peaks
    )
    return LayoutPlan(
        way=way,
        firsts=priced.curve.firsts,
        sections=len(desk.tables.profile.sections),
        shares=shares,
        workers=workers,
        samples=desk.task.global_batch,
        cost=_cost(desk, priced, at),
        memory_bytes=tuple(held[:, 0].tolist()),
        owned=way.depth > 1 and not desk.task.whole,
        runners_up=tuple(_runner_up(desk, pair) for pair in others),
    )


def _place(priced: Priced, used: int) -> int:
    return int(np.searchsorted(priced.widths, used // priced.curve.way.depth))


def _cost(desk: _Desk, priced: Priced, at: int) -> Cost:
    return search.cost(priced, at, desk.tables.profile.overhead_s)


def _runner_up(desk: _Desk, pair: tuple[int, int]) -> RunnerUp:
    row, used = pair
    priced = desk.prices[row]
    at = _place(priced, used)
    return RunnerUp(
        way=priced.curve.way, width=int(priced.widths[at]), cost=_cost(desk, priced, at)
    )


def shared_out(microbatches: int, width: int) -> tuple[int, ...]:
    """Share out microbatches as evenly as possible, the larger shares first."""
    least, more = divmod(microbatches, width)
    return tuple(least + 1 if i < more else least for i in range(width))


# --- exactly, for one plan -------------------------------------------------------------------------


def exact(tables: Tables, task: Task, plan: LayoutPlan) -> LayoutPlan:
    """Return the plan with its cost simulated in full, without linear extrapolation."""
    way, firsts = plan.way, plan.firsts
    like = cost_model.variant(way, task.per_instance, plan.width)
    costs = cost_model.costs(tables, firsts, way, task.per_instance, like)
    programs = schedules.pack(
        way.schedule, way.depth, plan.shares[0], recompute=way.recompute, chunks=way.chunks
    )
    outcome = simulator.run(programs, costs, way.schedule)
    width = np.array([float(plan.width)])
    tail_s = cost_model.tails(tables, firsts, way, width, task.per_instance)[:, 0]
    overhead_s = tables.profile.overhead_s
    step = simulator.finish([outcome], tail_s, overhead_s)
    peaks = search.peaks(way, programs)[:, :, None]
    held = cost_model.memory_bytes(tables, firsts, way, width, peaks)
    busy_s = float(outcome.busy.max())
    return msgspec.structs.replace(
        plan,
        cost=Cost(
            step_s=step.step_s,
            busy_s=busy_s,
            bubble_s=step.compute_s - busy_s,
            reduce_s=step.step_s - step.compute_s - overhead_s,
        ),
        memory_bytes=tuple(held[:, 0].tolist()),
    )


def _refined(desk: _Desk, plan: LayoutPlan) -> LayoutPlan:
    """Return the plan with the best grouping of sections into stages.

    If there are many groupings, sections are moved over boundaries while that gains.
    """
    plan = exact(desk.tables, desk.task, plan)
    if comb(plan.sections - 1, plan.way.stages - 1) <= GROUPINGS_MAX:
        inner = combinations(range(1, plan.sections), plan.way.stages - 1)
        return _least(desk, plan, [(0, *cuts) for cuts in inner])
    for _ in range(ROUNDS_MAX):
        better = _least(desk, plan, moved(plan))
        if better is plan:
            break
        plan = better
    return plan


def _least(desk: _Desk, plan: LayoutPlan, groupings: Sequence[Firsts]) -> LayoutPlan:
    """Return the fitting plan with the shortest exact step; `plan` itself if none is shorter."""
    least = plan
    for firsts in groupings:
        other = exact(desk.tables, desk.task, msgspec.structs.replace(plan, firsts=firsts))
        fits = max(other.memory_bytes) <= desk.tables.profile.memory_bytes
        if fits and other.step_s < least.step_s * (1 - SAME):
            least = other
    return least


def moved(plan: LayoutPlan) -> list[Firsts]:
    """Return every grouping that differs from the plan's by one section at one boundary."""
    found = []
    for stage in range(1, len(plan.firsts)):
        for first in (plan.firsts[stage] - 1, plan.firsts[stage] + 1):
            moved = (*plan.firsts[:stage], first, *plan.firsts[stage + 1 :])
            if all(a < b for a, b in pairwise((*moved, plan.sections))):
                found.append(moved)
    return found


# --- when nothing fits -----------------------------------------------------------------------------


def smallest(tables: Tables, task: Task, workers: int) -> str:
    """Say the least memory in which a layout would fit, and what its stages would hold."""
    profile, splitter = tables.profile, search.Splitter(tables)
    least: tuple[float, int, Way, Reals] | None = None
    for way in search.ways(task, profile, workers):
        widths = search.widths_of(task, way, workers, tables)
        if not len(widths):
            continue
        width, share = int(widths[-1]), int(search.shares_of(task, way, widths)[-1])
        found = _least_memory(splitter, way, (width, share), least[0] if least else NEVER)
        if found is not None and (least is None or found.max() < least[0]):
            least = (float(found.max()), width, way, found)
    if least is None:
        return _no_way(tables, task, workers)
    most, width, way, held = least
    listed = ", ".join(memory(stage) for stage in held[:STAGES_LISTED])
    more = ", ..." if len(held) > STAGES_LISTED else ""
    on = f" on {plural(width, 'replica')}" if cost_model.narrows(tables, way) else ""
    return (
        f"nothing fits into {memory(profile.memory_bytes)} per accelerator; the least that "
        f"would do is {memory(most)} with {plural(way.depth, 'stage')}{on} ({way.describe()}), "
        f"which {'holds' if way.depth == 1 else 'hold'} {listed}{more}"
    )


def _no_way(tables: Tables, task: Task, workers: int) -> str:
    """Say why no way exists: the task needs more sections, workers or microbatches than given."""
    sections, stages = len(tables.profile.sections), plural(task.depth_min, "stage")
    if task.depth_min > sections:
        return f"{stages} are asked for, and it has {plural(sections, 'section')}"
    if task.depth_min > workers:
        return f"{stages} are asked for, which takes as many workers"
    names = ", ".join(task.schedules) or "none"
    return (
        f"of the schedules asked for ({names}) none is possible with {plural(sections, 'section')} "
        f"and a global batch of {task.global_batch}"
    )


def _least_memory(
    splitter: search.Splitter, way: Way, replicas: tuple[int, int], enough_bytes: float
) -> Reals | None:
    """Return what the stages hold if cut so that the fullest holds as little as possible.

    Return `None` if that is certainly more than `enough_bytes`; for most ways one check settles
    this.
    """
    width, share = replicas
    programs = schedules.pack(
        way.schedule, way.depth, share, recompute=way.recompute, chunks=way.chunks
    )
    peaks, wide = search.peaks(way, programs), np.array([float(width)])

    def held(limit_bytes: float) -> Reals | None:
        firsts = splitter.firsts(way, peaks, width, limit_bytes)
        if firsts is None:
            return None
        return cost_model.memory_bytes(splitter.tables, firsts, way, wide, peaks[:, :, None])[:, 0]

    # If chunks share a worker's memory, not every grouping is tried, so finding none proves nothing.
    if way.chunks == 1 and held(enough_bytes * (1 + SAME)) is None:
        return None
    least = held(NEVER)
    assert least is not None
    low, high = 1.0, float(least.max())
    for _ in range(BISECTIONS):
        limit = (low * high) ** 0.5
        found = held(limit)
        if found is None:
            low = limit
        else:
            least, high = found, limit
    return least
