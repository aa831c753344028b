"""Footprints of unlike instances: different types and zones, replicas of unequal speed.

Formations are compared by linear estimates (`chains`). The best of them are then simulated in
full, with different cuts and shares. Each group of equal instances is also tried alone, because it
may be faster without the others.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import comb, inf
from typing import NamedTuple

import msgspec

from agent.profile import Profile
from orchestrator.formatting import memory, plural
from orchestrator.planner import cost_model, gantt, search
from orchestrator.planner.chains import (
    Chain,
    Lanes,
    Play,
    WorkerGroup,
    even_firsts,
    formed,
    has_room,
)
from orchestrator.planner.cost_model import Firsts
from orchestrator.planner.errors import DoesNotFit, ProfileError
from orchestrator.planner.plan_book import ROUNDS_MAX, best, moved, smallest
from orchestrator.planner.plans import Holding, LayoutPlan, RunnerUp, Way
from orchestrator.planner.search import GROUPINGS_MAX, RUNNERS_UP, Task
from orchestrator.planner.simulation import schedules

MIXED_DEPTH_MAX = 64
TRIED_MAX, FINALISTS = 96, 24
UNFIT_MAX = 2000  # drafts that are tried until one fits
GROUPINGS_OF_ALL_MAX = 2000  # with so few, every draft is simulated with all its cuts
LEFT_OUT_MAX = 4  # kinds of workers; with more, each kind is only tried alone
HOPELESS = 1.25  # times the best step; better cuts cannot make up for that
ROUNDING = 1e-9


def best_mix(
    profiles: Mapping[str, Profile], task: Task, holdings: Sequence[Holding], groups_min: int = 1
) -> tuple[LayoutPlan, tuple[Chain, ...]]:
    """Return the best layout for the holdings, and the group of every worker of every replica.

    Groups are numbered from the fastest on. Slow ones may be left out, except the first
    `groups_min`.
    """
    groups = _groups(profiles, task, holdings)
    workers = sum(group.holding.workers for group in groups)
    if workers == 0:
        raise DoesNotFit("there are no workers; the job waits for 1 of them")
    return _best_of(_Known(profiles, groups, {}, {}), task, tuple(range(len(groups))), groups_min)


def _best_of(
    known: "_Known", task: Task, numbers: tuple[int, ...], groups_min: int = 1
) -> tuple[LayoutPlan, tuple[Chain, ...]]:
    """Return the best layout of some of the groups."""
    groups = [known.groups[number] for number in numbers]
    if len(groups) == 1:
        plan = known.alone(task, numbers[0])
        return plan, (Chain((0,) * plan.way.depth),) * plan.width
    desk = _Desk(_together(task, groups), groups, numbers, known)
    found = _finalists(desk, _drafts(desk, groups_min))
    if groups_min < 2:
        found += _with_fewer(
            known, task, numbers, min((plan.step_s for plan, _ in found), default=inf)
        )
    found.sort(key=lambda pair: pair[0].step_s)
    if not found:
        workers = sum(group.holding.workers for group in groups)
        raise DoesNotFit(_nothing_fits(task, groups, workers))
    plan, chains = found[0]
    kinds = {(plan.way, plan.width): plan}
    for other, _ in found:  # others of the same kind differ only in their formation
        kinds.setdefault((other.way, other.width), other)
    others = tuple(
        RunnerUp(way=other.way, width=other.width, cost=other.cost)
        for other in list(kinds.values())[1 : 1 + RUNNERS_UP]
    )
    return msgspec.structs.replace(plan, runners_up=others), chains


def _together(task: Task, groups: Sequence[WorkerGroup]) -> Task:
    """Return the task reduced to what all groups can do.

    It must be common to all, because chains of unlike workers compute the same microbatches.
    """
    each = [search.sizes(task, group.tables.profile) for group in groups]
    common = tuple(sorted(set(each[0]).intersection(*each[1:])))
    if not common:
        listed = " and of ".join(", ".join(map(str, sizes)) for sizes in dict.fromkeys(each))
        raise ProfileError(
            f"the profiles have microbatches of {listed} for a batch of {task.global_batch}, none in common; "
            "calibrate with the same sizes"
        )
    hosted = all(group.tables.profile.host_bytes_per_s > 0 for group in groups)
    shardings = tuple(one for one in task.shardings if one != "offload" or hosted)
    return msgspec.structs.replace(task, microbatch_sizes=common, shardings=shardings)


def _with_fewer(
    known: "_Known", task: Task, numbers: tuple[int, ...], step_s: float
) -> list[tuple[LayoutPlan, tuple[Chain, ...]]]:
    """Return layouts of fewer kinds of workers that could be faster than `step_s`.

    A search among fewer kinds has more ways. Each kind is tried alone, and few kinds also without
    one of them, because with many kinds leaving one out seldom gains.
    """
    groups = [known.groups[number] for number in numbers]
    every = range(len(groups))
    kept = [(index,) for index in every]
    if 2 < len(groups) <= LEFT_OUT_MAX:
        kept += [(*every[:index], *every[index + 1 :]) for index in every]
    found, workers = [], sum(group.holding.workers for group in groups)
    for indices in kept:
        pace = sum(groups[index].holding.workers / groups[index].pace for index in indices)
        if task.global_batch / pace >= step_s:
            continue
        try:
            plan, chains = _best_of(known, task, tuple(numbers[index] for index in indices))
        except DoesNotFit:
            continue
        plan = msgspec.structs.replace(plan, workers=workers)
        step_s = min(step_s, plan.step_s)
        found.append(
            (
                plan,
                tuple(Chain(tuple(indices[group] for group in chain.groups)) for chain in chains),
            )
        )
    return found


def in_order(
    profiles: Mapping[str, Profile], task: Task, holdings: Sequence[Holding]
) -> tuple[Holding, ...]:
    """Return the groups in the order in which chains number them."""
    return tuple(group.holding for group in _groups(profiles, task, holdings))


def _nothing_fits(task: Task, groups: Sequence[WorkerGroup], workers: int) -> str:
    roomy = max(groups, key=lambda group: group.tables.profile.memory_bytes)
    held = memory(roomy.tables.profile.memory_bytes)
    least = smallest(roomy.tables, task, workers)
    return f"no layout of {plural(workers, 'worker')} fits; the roomiest accelerator has {held}: {least}"


def _groups(
    profiles: Mapping[str, Profile], task: Task, holdings: Sequence[Holding]
) -> list[WorkerGroup]:
    """WorkerGroup equal instances of one zone, the fastest group first."""
    merged: dict[tuple[str, str, int], Holding] = {}
    for holding in holdings:
        key = (holding.instance_type, holding.zone, holding.per_instance)
        more = merged[key].instances if key in merged else 0
        merged[key] = msgspec.structs.replace(holding, instances=holding.instances + more)
    groups = []
    for holding in merged.values():
        profile = profiles.get(holding.instance_type)
        if profile is None:
            raise ProfileError(
                f"{holding.instance_type}: there is no profile for this type; calibrate on it first"
            )
        tables = cost_model.tables(profile, whole=task.whole)
        row = tables.size(search.sizes(task, profile)[-1])
        seconds = float(tables.forward[row, -1] + tables.backward[row, -1])
        if holding.workers:
            groups.append(WorkerGroup(holding, tables, seconds / profile.microbatch_sizes[row]))
    _check_one_model(groups)
    return sorted(groups, key=_rank)


def _rank(group: WorkerGroup) -> tuple[float, float, str, str, int]:
    """Return a sort key: the fastest first, then the roomiest.

    So the answer does not depend on the order in which holdings are listed.
    """
    holding, room = group.holding, group.room_bytes
    return group.pace, -room, holding.zone, holding.instance_type, holding.per_instance


def _check_one_model(groups: Sequence[WorkerGroup]) -> None:
    counts = {len(group.tables.profile.sections) for group in groups}
    if len(counts) > 1:
        raise ProfileError(
            f"the profiles have {sorted(counts)} sections; they must be of one model, calibrate again"
        )
    for each in zip(*(group.tables.profile.sections for group in groups), strict=True):
        sizes = sorted({section.parameter_bytes for section in each})
        if len(sizes) > 1:
            raise ProfileError(
                f"section {each[0].name} has parameters of {memory(sizes[0])} in one profile and of "
                f"{memory(sizes[-1])} in another; they must be of one model, calibrate again"
            )


class _Draft(NamedTuple):
    """A way, a formation, and its cuts; `step_s` is a linear estimate."""

    step_s: float
    way: Way
    chains: tuple[Chain, ...]
    firsts: Firsts


class _Known(NamedTuple):
    """Results about groups, by their numbers here, and about chains of one way and its cuts.

    A search among fewer groups finds most of its results here.
    """

    profiles: Mapping[str, Profile]
    groups: Sequence[WorkerGroup]
    lanes: dict[tuple[Way, Firsts], Lanes]
    plans: dict[int, LayoutPlan]

    def alone(self, task: Task, number: int) -> LayoutPlan:
        """Return the best layout of one group."""
        if number not in self.plans:
            held = self.groups[number].holding
            only = msgspec.structs.replace(task, per_instance=held.per_instance)
            self.plans[number] = best(self.profiles[held.instance_type], only, held.workers)
        return self.plans[number]


class _Desk(NamedTuple):
    """A question about some groups.

    Chains number these groups from 0; `numbers` are their numbers in `known`.
    """

    task: Task
    groups: Sequence[WorkerGroup]
    numbers: tuple[int, ...]
    known: _Known

    def play(self, way: Way, firsts: Firsts, chains: tuple[Chain, ...]) -> Play:
        lanes = self.known.lanes.get((way, firsts))
        if lanes is None:
            lanes = self.known.lanes[way, firsts] = Lanes(self.known.groups, way, firsts)
        if len(self.numbers) < len(self.known.groups):
            kinds = {
                chain: Chain(tuple(self.numbers[group] for group in chain.groups))
                for chain in dict.fromkeys(chains)
            }
            chains = tuple(kinds[chain] for chain in chains)
        return Play(self.task, lanes, chains)


def _drafts(desk: _Desk, groups_min: int) -> list[_Draft]:
    """Return every way with every formation, the fastest first."""
    found, task, groups = list[_Draft](), desk.task, desk.groups
    deepest = min(MIXED_DEPTH_MAX, sum(group.holding.workers for group in groups))
    known: dict[tuple[int, int], list[tuple[Chain, ...]]] = {}
    for way in search.ways(task, groups[0].tables.profile, deepest):
        if way.placement != "chain" or way.schedule in schedules.MODULO:
            continue
        key = way.depth, task.global_batch // way.microbatch_size
        if key not in known:
            known[key] = formed(groups, *key, groups_min)
        drafted = (_drafted(desk, way, chains) for chains in known[key])
        found += [draft for draft in drafted if draft is not None]
    return sorted(found, key=lambda draft: draft.step_s)


def _drafted(desk: _Desk, way: Way, chains: tuple[Chain, ...]) -> _Draft | None:
    """Return a way with a formation as a draft, or `None` if no cuts could fit.

    The cuts of a draft need not fit, because different ones may.
    """
    if not has_room(desk.groups, way, chains):
        return None
    each = -(-desk.task.global_batch // (way.microbatch_size * len(chains)))
    firsts = even_firsts(desk.groups, way, chains, min(each, 2 * way.depth))
    if firsts is None:
        return None
    step_s = desk.play(way, firsts, chains).about_s()
    return _Draft(step_s, way, chains, firsts)


def _finalists(desk: _Desk, drafts: Sequence[_Draft]) -> list[tuple[LayoutPlan, tuple[Chain, ...]]]:
    """Return fully simulated drafts: all if that is little work, else enough of the fastest."""
    found = list[tuple[LayoutPlan, tuple[Chain, ...]]]()
    few = sum(_groupings(desk, draft) for draft in drafts) <= GROUPINGS_OF_ALL_MAX
    for tried, draft in enumerate(drafts[:UNFIT_MAX]):
        if found and not few:
            hopeless = draft.step_s > HOPELESS * min(plan.step_s for plan, _ in found)
            if hopeless or len(found) == FINALISTS or tried >= TRIED_MAX:
                break
        found += _refined(desk, draft)
    return found


def _refined(desk: _Desk, draft: _Draft) -> list[tuple[LayoutPlan, tuple[Chain, ...]]]:
    """Return the draft as a plan with its best cuts, or nothing if none fits.

    If there are many cuts, sections are moved over boundaries while that gains.
    """

    def laid(every: Sequence[Firsts]) -> list[LayoutPlan]:
        plays = [desk.play(draft.way, firsts, draft.chains) for firsts in every]
        plan = min(plays, key=_step_s).plan() if plays else None
        return [plan] if plan is not None else []

    sections, stages = len(desk.groups[0].tables.profile.sections), draft.way.stages
    if _groupings(desk, draft) <= GROUPINGS_MAX:
        few = laid([(0, *cuts) for cuts in combinations(range(1, sections), stages - 1)])
        return [(plan, draft.chains) for plan in few]
    best_ = laid([draft.firsts])
    for _ in range(ROUNDS_MAX if best_ else 0):
        better = laid(moved(best_[0]))
        if not better or better[0].step_s >= best_[0].step_s * (1 - ROUNDING):
            break
        best_ = better
    return [(plan, draft.chains) for plan in best_]


def _groupings(desk: _Desk, draft: _Draft) -> int:
    return comb(len(desk.groups[0].tables.profile.sections) - 1, draft.way.stages - 1)


def _step_s(play: Play) -> float:
    return play.step_s


def picture(
    profiles: Mapping[str, Profile],
    task: Task,
    holdings: Sequence[Holding],
    plan: LayoutPlan,
    chains: Sequence[Chain],
) -> str:
    """Return the predicted step of the slowest chain, for which the others wait, as SVG."""
    groups = _groups(profiles, task, holdings)
    if len(groups) == 1:
        only = msgspec.structs.replace(task, per_instance=groups[0].holding.per_instance)
        return gantt.picture(groups[0].tables.profile, only, plan)
    way, laid = plan.way, tuple(chains)
    play = Play(task, Lanes(groups, way, plan.firsts), laid)
    chain, share = max(zip(laid, plan.shares, strict=True), key=lambda pair: play.ends_s(*pair))
    schedule = schedules.make(
        way.schedule, way.depth, share, recompute=way.recompute, chunks=way.chunks
    )
    costs = play.lanes.costs(chain)
    return gantt.svg(schedule, costs, title=plan.because, tail_s=play.tail_s)
