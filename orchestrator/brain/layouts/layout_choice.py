"""The choice of a job's layout for the workers at hand; question and answer are values.

With a profile the plan book answers; workers that are not equally fast form a mix. Without a
profile the job is data parallel, or in chains of the depth that a person asked for. Answers are
cached, which changes nothing, because the same question always has the same answer.

    pace    seconds of a microbatch on this worker over those on a healthy worker of speed one
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise

import msgspec
import numpy as np

from agent.layout import Layout, Replica
from agent.messages import UNRECORDED
from agent.profile import Link, Network, Profile, Section
from agent.schedule import Schedule
from bidding import traffic
from cloud.clock import HOUR_S
from orchestrator.formatting import pause, plural
from orchestrator.planner import (
    drift,
    gantt,
    matching,
    partition,
    plan_book,
    transition,
    unlike_machines,
)
from orchestrator.planner.chains import Chain, shared_by_pace
from orchestrator.planner.compiled import Flags
from orchestrator.planner.errors import DoesNotFit, MorphError
from orchestrator.planner.plans import Holding, LayoutPlan, RunnerUp
from orchestrator.planner.search import SEARCHED, Task
from orchestrator.planner.simulation import kernel, schedules
from orchestrator.planner.transition import Pace, Transition

BOOKS_KEPT = 64
MIXES_KEPT, LIKELY_MAX = 256, 16
MATCHED_MAX = 1024  # workers; with more, no worker is moved to save bytes
NEAR, FAR, NEIGHBOUR = 1.0, 2.0, 0.5
ORDER = 1e-6  # cost of a changed order, which decides between equal choices
UNKNOWN_BYTES_PER_S = 1e9
PACE_DIGITS = 3
UNEVEN = 1.25  # margin for a stage larger than the others, and for memory besides the state
PROGRAMS_MAX = 256  # microbatches; with more, only the schedule that workers know by name is used


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that can be in the layout, and its machine and zone."""

    worker: str
    machine: str
    zone: str
    slots: int = 1  # of its machine
    pace: float = 1.0
    region: str = ""
    zone_usd_per_gb: float = 0.0  # of what it sends to another zone of the region
    region_usd_per_gb: float = 0.0
    usd_per_h: float = 0.0  # of its slot; 0 where traffic costs nothing
    eased: bool = False  # it is slow and its share was cut, so next it may be left out


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """All inputs of a choice. The seats of the running layout come first, in its order."""

    microbatches: int
    seats: tuple[Seat, ...]
    workers_max: int
    seats_min: int = 1
    profile: Profile | None = None
    depth: int | None = None  # asked for by a person
    stages_max: int = 1
    uncuttable: str = ""
    state_bytes: float = 0.0
    training_bytes: float = 0.0  # of an unbuilt model; 0 if every worker builds the whole model
    room_bytes: float = 0.0  # of the worker with the least room
    before: Layout | None = None
    before_plan: LayoutPlan | None = None
    morph_s: float = 0.0  # the fixed pause of every change
    gradient_bytes: float = 0.0
    slot_step_s: float = 0.0  # what a step takes on one slot; 0 until one was timed
    haste: float = 0.5


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen replicas in order, their plan, and the reason. Without a profile, no plan."""

    replicas: tuple[Replica, ...]
    plan: LayoutPlan | None
    because: str
    moving: str  # what it moves, and how long that will take
    left_out: tuple[str, ...]
    moved_bytes: float
    pause_s: float
    traffic_usd: float = 0.0  # of what a step sends between zones

    @property
    def step_s(self) -> float | None:
        return None if self.plan is None else self.plan.step_s


def choose(asked: Question) -> Choice:
    """Return the best layout; if there is none, `DoesNotFit` says what is missing.

    Where traffic between zones costs, a layout within one zone or region is weighed against that of
    all seats as the bidder weighs footprints: what its work is worth at most, less what it costs.
    """
    homes = _homes(asked)
    if len(homes) == 1:
        return _choose(asked)
    found: list[Choice] = []
    flaw: MorphError | None = None
    for seats in homes:
        try:
            found.append(_choose(msgspec.structs.replace(asked, seats=seats)))
        except MorphError as error:
            flaw = flaw or error
    if not found:
        assert flaw is not None
        raise flaw
    costs = [_usd_and_rate(asked, choice) for choice in found]
    most = (1 + asked.haste) * min(usd / rate for usd, rate in costs)
    left = [most * rate - usd for usd, rate in costs]
    best = found[left.index(max(left))]
    if best.traffic_usd > 0:
        paid = f"its traffic between zones costs ${best.traffic_usd:.4f} a step"
    elif (apart := max(choice.traffic_usd for choice in found)) > 0:
        paid = f"in one zone, as traffic to others would cost ${apart:.4f} a step"
    else:
        return best
    return msgspec.structs.replace(best, because=f"{best.because}; {paid}")


def _homes(asked: Question) -> list[tuple[Seat, ...]]:
    """Return all seats, then those of each region and of each zone, where that makes a difference."""
    seats = asked.seats
    found = {seats: None}
    for key in (_region, _zone):
        names = dict.fromkeys(map(key, seats))
        dear = any(seat.zone_usd_per_gb or seat.region_usd_per_gb for seat in seats)
        for name in names if dear and len(names) > 1 else ():
            some = tuple(seat for seat in seats if key(seat) == name)
            if len(some) >= max(asked.seats_min, 1):
                found[some] = None
    return list(found)


def _region(seat: Seat) -> tuple[str, ...]:
    return (seat.region,)


def _zone(seat: Seat) -> tuple[str, ...]:
    return (seat.region, seat.zone)


def _usd_and_rate(asked: Question, choice: Choice) -> tuple[float, float]:
    """Return the dollars per hour of a choice, traffic included, and its steps per hour."""
    inside = {worker for replica in choice.replicas for worker in replica.workers}
    seats = [seat for seat in asked.seats if seat.worker in inside]
    step_s = choice.step_s
    if step_s is None:
        depth = len(choice.replicas[0].workers)
        step_s = drawn_out(choice.replicas, seats) / depth / asked.microbatches
        step_s *= asked.slot_step_s or 1.0
    rate = HOUR_S / step_s
    return sum(seat.usd_per_h for seat in seats) + choice.traffic_usd * rate, rate


def _choose(asked: Question) -> Choice:
    if asked.profile is None:
        chains, shares, plan = *_by_hand(asked), None
    else:
        plan, chains = _planned(asked)
        shares = plan.shares
    found = _who_moves(asked, plan, chains)
    replicas, first = [], 0
    for chain, count in zip(found.chains, shares, strict=True):
        replicas.append(Replica(workers=chain, first=first, count=count))
        first += count
    inside = {worker for chain in found.chains for worker in chain}
    return Choice(
        replicas=tuple(replicas),
        plan=plan,
        because=_sentence(asked, plan, (len(chains), len(chains[0]))),
        moving=f"{_size(found.moved_bytes)} move, pause about {pause(found.pause_s)}",
        left_out=tuple(s.worker for s in asked.seats if s.worker not in inside and s.eased),
        moved_bytes=found.moved_bytes,
        pause_s=found.pause_s,
        traffic_usd=traffic_usd(asked, tuple(replicas), plan),
    )


def traffic_usd(asked: Question, replicas: tuple[Replica, ...], plan: LayoutPlan | None) -> float:
    """Return what a step of a layout sends between zones costs.

    Replicas exchange the gradients of each stage, neighbours in a chain activations and their
    gradients; who keeps the whole state gets the sums of all stages, from the nearest.
    """
    seats = {seat.worker: seat for seat in asked.seats}
    if len({_zone(seats[w]) for r in replicas for w in r.workers}) == 1:
        return 0.0
    zones = {zone: n for n, zone in enumerate(dict.fromkeys(map(_zone, asked.seats)))}
    regions = {region: n for n, region in enumerate(dict.fromkeys(map(_region, asked.seats)))}
    depth = len(replicas[0].workers)
    sums_gb = asked.gradient_bytes / depth / 1e9
    exchange, total = traffic.Exchange(2 * sums_gb, 1, 0.0), 0.0
    for stage in range(depth):
        spread = traffic.nowhere(len(zones))
        for replica in replicas:
            seat = seats[replica.workers[stage]]
            at = zones[_zone(seat)], regions[_region(seat)]
            traffic.place(spread, 1, at, (seat.zone_usd_per_gb, seat.region_usd_per_gb))
        total += traffic.usd_per_work(spread, exchange)
    owned = plan.owned if plan is not None else asked.training_bytes > 0
    for replica in replicas if depth > 1 else ():
        chain = [seats[worker] for worker in replica.workers]
        for stage, (one, other) in enumerate(pairwise(chain)):
            gb = _activation_gb(asked, plan, stage) * replica.count
            total += gb * (_usd_per_gb(one, other) + _usd_per_gb(other, one))
            total += 0.0 if owned else sums_gb * depth * _usd_per_gb(one, other)
    return total


def _activation_gb(asked: Question, plan: LayoutPlan | None, stage: int) -> float:
    """Return what one microbatch sends from a stage to the next."""
    if asked.profile is None or plan is None:
        return 0.0
    section = asked.profile.sections[plan.firsts[stage + 1] - 1]
    return section.activation_bytes * asked.profile.microbatch_sizes[0] / 1e9


def _usd_per_gb(one: Seat, other: Seat) -> float:
    if _zone(one) == _zone(other):
        return 0.0
    return one.zone_usd_per_gb if one.region == other.region else one.region_usd_per_gb


def plan_of(asked: Question, layout: Layout) -> LayoutPlan | None:
    """Return the book's plan of a layout that was chosen without one, else `None`.

    It exists only for chains of one worker, a single pace, and the book's own shares.
    """
    inside = [seat for seat in asked.seats if seat.worker in layout.workers]
    paces = {round(seat.pace, PACE_DIGITS) for seat in inside}
    if asked.profile is None or layout.depth > 1 or len(paces) != 1:
        return None
    slots = min(seat.slots for seat in inside)
    task = task_of(asked.profile, asked.microbatches, 1, 1, slots)
    plan = book_of(asked.profile, task, asked.workers_max, paces.pop()).at(len(layout.workers))
    counts = tuple(replica.count for replica in layout.replicas)
    return plan if plan.shares == counts else None


def likely(asked: Question) -> tuple[Question, ...]:
    """Return the questions that may come next.

    They are the same question, and those with a machine of each kind less or more, or without a
    zone. Workers are compared by pace only, so few of these questions differ.
    """
    machines: dict[str, list[Seat]] = {}
    for seat in asked.seats:
        machines.setdefault(seat.machine, []).append(seat)
    kinds = {tuple(sorted(seat.pace for seat in some)): some for some in machines.values()}
    options = [asked.seats]
    for some in kinds.values():
        options.append(tuple(seat for seat in asked.seats if seat.machine != some[0].machine))
        options.append((*asked.seats, *some))
    for zone in dict.fromkeys(seat.zone for seat in asked.seats):
        options.append(tuple(seat for seat in asked.seats if seat.zone != zone))
    found: dict[object, Question] = {}
    for seats in options[:LIKELY_MAX]:
        if len(seats) >= max(asked.seats_min, 1):
            question = msgspec.structs.replace(asked, seats=seats[: asked.workers_max])
            counts = {pace: len(some) for pace, some in _by_pace(question.seats).items()}
            found.setdefault(tuple(counts.items()), question)
    return tuple(found.values())


def foresee(asked: Question) -> None:
    """Answer the likely next questions in advance, so that each is a look-up when it comes."""
    if asked.profile is None:
        return
    for question in likely(asked):
        with suppress(MorphError):
            _planned(question)


def laid_out(generation: int, asked: Question, choice: Choice) -> Layout:
    """Return the choice as the layout that workers read, with cuts and any non-1F1B schedules."""
    layout = Layout(
        generation=generation, microbatches=asked.microbatches, replicas=choice.replicas
    )
    plan, profile = choice.plan, asked.profile
    if plan is None or profile is None:
        return msgspec.structs.replace(layout, owned=layout.depth > 1 and asked.training_bytes > 0)
    if plan.way.depth == 1:
        return layout
    way = plan.way
    cuts = tuple(profile.sections[first - 1].after for first in plan.firsts[1:])
    programs: tuple[Schedule, ...] = ()
    if way.schedule != "1f1b":
        programs = tuple(
            schedules.make(
                way.schedule, way.depth, count, recompute=way.recompute, chunks=way.chunks
            )
            for count in sorted(set(plan.shares))
        )
    return msgspec.structs.replace(
        layout,
        cuts=cuts if min(cuts) >= 0 else (),
        schedule=way.schedule,
        recompute=way.recompute,
        owned=plan.owned,
        schedules=programs,
    )


def picture(asked: Question, choice: Choice) -> str:
    """Return the predicted step of the slowest replica, for which the others wait, as SVG."""
    assert asked.profile is not None
    assert choice.plan is not None
    paces = {seat.worker: seat.pace for seat in asked.seats}
    pace, slowest = 0.0, choice.replicas[0]
    for replica in choice.replicas:
        its = max(paces[worker] for worker in replica.workers)
        if its * replica.count > pace * slowest.count:
            pace, slowest = its, replica
    shares = sorted(choice.plan.shares, key=lambda share: share != slowest.count)
    plan = msgspec.structs.replace(choice.plan, shares=tuple(shares))
    return gantt.picture(_at(asked.profile, pace), _task(asked), plan)


def task_of(
    profile: Profile,
    microbatches: int,
    depth: int | None,
    stages_max: int,
    per_instance: int,
) -> Task:
    """Return the planner's task; the size and number of microbatches stay those of the script.

    Every worker keeps the whole state if that fits, because more copies survive more losses.
    """
    size = profile.microbatch_sizes[0]
    only = None if depth is None else min(depth, stages_max)
    return Task(
        global_batch=microbatches * size,
        per_instance=per_instance,
        schedules=SEARCHED if microbatches <= PROGRAMS_MAX else ("1f1b",),
        microbatch_sizes=(size,),
        depth_min=only or 1,
        depth_max=only or stages_max,
        whole=True,
    )


@lru_cache(maxsize=BOOKS_KEPT)
def book_of(profile: Profile, task: Task, workers_max: int, pace: float = 1.0) -> plan_book.Book:
    """Return the best layout for every count of workers of one pace.

    If nothing fits with the whole state on every worker, each keeps that of its own stages only.
    """
    profile = _at(profile, pace)
    found = plan_book.book(profile, task, workers_max)
    if task.depth_max == 1 or None not in found.plans[1:]:
        return found
    owned = plan_book.book(profile, msgspec.structs.replace(task, whole=False), workers_max)
    plans = (plan or other for plan, other in zip(found.plans, owned.plans, strict=True))
    return msgspec.structs.replace(owned, plans=tuple(plans))


@lru_cache(maxsize=MIXES_KEPT)
def _mix_of(
    profile: Profile, task: Task, groups: tuple[tuple[float, int], ...], groups_min: int
) -> tuple[LayoutPlan, tuple[Chain, ...]]:
    profiles = {str(pace): _at(profile, pace) for pace, _ in groups}
    holdings = [Holding(instance_type=str(pace), instances=count) for pace, count in groups]
    try:
        return unlike_machines.best_mix(profiles, task, holdings, groups_min)
    except DoesNotFit:
        task = msgspec.structs.replace(task, whole=False)
        return unlike_machines.best_mix(profiles, task, holdings, groups_min)


def _at(profile: Profile, pace: float) -> Profile:
    return profile if pace == 1 else drift.refit(profile, pace)


def rehearse() -> None:
    """Plan a few made-up layouts, so that the planner is compiled before a job waits for it."""
    link = Link(bandwidth_bytes_per_s=1e9)
    section = Section(
        name="none",
        forward_s=(1e-3,),
        backward_s=(1e-3,),
        activation_bytes=1.0,
        parameter_bytes=1.0,
    )
    profile = Profile(
        model="none",
        microbatch_sizes=(1,),
        network=Network(intra=link, inter=link, reduce_intra=link, reduce_inter=link),
        memory_bytes=1e9,
        sections=(section, section),
    )
    seats = [Seat(worker=str(n), machine=str(n), zone="", pace=1 + n // 2) for n in range(4)]
    dear = Seat(worker="4", machine="4", zone="else", zone_usd_per_gb=0.02, usd_per_h=1.0)
    for some in (seats[:2], seats, [seats[0], dear]):
        choose(Question(microbatches=4, seats=tuple(some), workers_max=4, profile=profile))
    for schedule in SEARCHED:
        kernel.peaks(schedules.pack(schedule, 2, 2), 2)
    partition.evened(np.array([0.0, 1.0, 2.0]), np.array([0, 1]), 2)


# --- with a profile --------------------------------------------------------------------------------


def _planned(asked: Question) -> tuple[LayoutPlan, list[tuple[Seat, ...]]]:
    """Return the plan, and seats of the right paces for every replica.

    Which worker takes which stage is decided later.
    """
    assert asked.profile is not None
    groups, task = _by_pace(asked.seats), _task(asked)
    if len(groups) == 1:
        ((pace, seats),) = groups.items()
        plan = book_of(asked.profile, task, asked.workers_max, pace).at(len(seats))
        seats, depth = _placed(asked, seats, plan.way.depth), plan.way.depth
        return plan, [tuple(seats[i * depth : (i + 1) * depth]) for i in range(plan.width)]
    must = [i for i, some in enumerate(groups.values(), 1) if not all(s.eased for s in some)]
    task = msgspec.structs.replace(task, per_instance=1)
    plan, chains = _mix_of(
        asked.profile,
        task,
        tuple((pace, len(s)) for pace, s in groups.items()),
        max(must, default=1),
    )
    waiting = [_placed(asked, seats, plan.way.depth) for seats in groups.values()]
    return plan, [tuple(waiting[group].pop(0) for group in chain.groups) for chain in chains]


def _task(asked: Question) -> Task:
    assert asked.profile is not None
    slots = min(seat.slots for seat in asked.seats)
    return task_of(asked.profile, asked.microbatches, asked.depth, asked.stages_max, slots)


def _placed(asked: Question, seats: Sequence[Seat], depth: int) -> list[Seat]:
    """Return the seats in the order in which chains are filled.

    If chains are formed again, workers of one machine stand together, and machines of one zone.
    """
    if depth == 1 or (asked.before is not None and asked.before.depth == depth):
        return list(seats)
    machines = {seat.machine: n for n, seat in reversed(list(enumerate(seats)))}
    return sorted(seats, key=lambda seat: (seat.zone, machines[seat.machine]))


def _by_pace(seats: Sequence[Seat]) -> dict[float, list[Seat]]:
    """Group the seats by pace, the fastest first; each group keeps the order of its seats."""
    groups: dict[float, list[Seat]] = {}
    for seat in seats:
        groups.setdefault(round(seat.pace, PACE_DIGITS), []).append(seat)
    return dict(sorted(groups.items()))


# --- without one -----------------------------------------------------------------------------------


def _by_hand(asked: Question) -> tuple[list[tuple[Seat, ...]], tuple[int, ...]]:
    """Return chains and shares chosen without a profile.

    The depth is the one asked for, else one, or more if the model needs more to fit. Shares follow
    the pace; slow workers are left out if the rest is faster without them.
    """
    depth = max(min(asked.depth or 1, asked.stages_max), _depth_to_fit(asked))
    if len(asked.seats) < depth:
        raise DoesNotFit(
            f"depth {depth} needs {plural(depth, 'worker')}, and has {len(asked.seats)}"
        )
    least = max(asked.seats_min, depth)
    inside = set() if asked.before is None else {*asked.before.workers}
    slow = [seat for seat in asked.seats if seat.eased]
    slow.sort(key=lambda seat: (-seat.pace, seat.worker in inside))
    best = _chained(asked, asked.seats, depth)
    end_s = _end_s(*best)
    for count in range(1, len(slow) + 1):
        rest = tuple(seat for seat in asked.seats if seat not in slow[:count])
        if len(rest) < least:
            break
        other = _chained(asked, rest, depth)
        if _end_s(*other) < end_s:
            best, end_s = other, _end_s(*other)
    return best


def _depth_to_fit(asked: Question) -> int:
    """Return how many workers a chain of an unbuilt model needs, by the model's size alone."""
    if not asked.training_bytes:
        return 1
    depth = max(1, math.ceil(UNEVEN * asked.training_bytes / max(1.0, asked.room_bytes)))
    recorded = asked.uncuttable != UNRECORDED
    if len(asked.seats) >= depth and (depth <= asked.stages_max or not recorded):
        return depth
    needs = (
        f"the model takes {_size(asked.training_bytes)} to train, and a worker has room for "
        f"{_size(asked.room_bytes)}: it needs a chain of {plural(depth, 'worker')}"
    )
    if recorded and depth > asked.stages_max:
        why = asked.uncuttable or f"it can be cut into {asked.stages_max} stages at most"
        raise DoesNotFit(f"{needs}, but {why}")
    raise DoesNotFit(f"{needs}, and there are {len(asked.seats)}")


def _chained(
    asked: Question, seats: Sequence[Seat], depth: int
) -> tuple[list[tuple[Seat, ...]], tuple[int, ...]]:
    ordered = _placed(asked, seats, depth)
    if depth > 1:  # fast workers share chains with fast ones
        ordered.sort(key=lambda seat: seat.pace)
    microbatches = asked.microbatches
    width = min(len(ordered) // depth, microbatches)
    chains = [tuple(ordered[i * depth : (i + 1) * depth]) for i in range(width)]
    paces = [max(seat.pace for seat in chain) for chain in chains]
    if len(set(paces)) == 1:
        return chains, plan_book.shared_out(microbatches, width)
    return chains, shared_by_pace(microbatches, [0.0] * width, paces)


def drawn_out(replicas: Sequence[Replica], seats: Sequence[Seat]) -> float:
    """Return how long the slowest replica computes, in microbatches of a worker of pace one."""
    paces = {seat.worker: seat.pace for seat in seats}
    return max(r.count * max(paces.get(w, 1.0) for w in r.workers) for r in replicas)


def _end_s(chains: Sequence[tuple[Seat, ...]], shares: Sequence[int]) -> float:
    return max(
        share * max(seat.pace for seat in chain)
        for chain, share in zip(chains, shares, strict=True)
    )


# --- who takes which place -------------------------------------------------------------------------


def _who_moves(
    asked: Question, plan: LayoutPlan | None, chains: Sequence[tuple[Seat, ...]]
) -> Transition:
    """Assign workers to stages so that the fewest bytes move, then choose chain neighbours."""
    depth, before = len(chains[0]), asked.before
    inside = dict.fromkeys(seat.worker for chain in chains for seat in chain)
    pace = _pace(asked)
    if depth == 1 or plan is None or len(inside) > MATCHED_MAX:
        return _whole_states(asked, [tuple(s.worker for s in chain) for chain in chains], pace)
    workers = list(inside)
    seats = {seat.worker: seat for seat in asked.seats}
    held = {} if before is None else _held(asked, before, owned=plan.owned)
    assert asked.profile is not None
    moves = transition.transition(
        held, workers, plan, transition.section_bytes(asked.profile), pace, _barred(chains)
    )
    found = moves.chains
    if plan.way.placement == "chain":
        slots = [tuple(seat.pace for seat in chain) for chain in chains]
        found = _linked(found, seats, slots, before)
    if plan.owned:
        return msgspec.structs.replace(moves, chains=found)
    return _whole_states(asked, list(found), pace)


def bandwidth(profile: Profile | None) -> float:
    """Return the bandwidth between machines, in bytes per second."""
    return UNKNOWN_BYTES_PER_S if profile is None else profile.network.inter.bandwidth_bytes_per_s


def _pace(asked: Question) -> Pace:
    backup = bandwidth(asked.profile)
    if asked.profile is None:
        return Pace(backup, backup, asked.morph_s)
    network = asked.profile.network
    machines = {seat.machine for seat in asked.seats}
    link = network.intra if len(machines) == 1 else network.inter
    return Pace(link.bandwidth_bytes_per_s, backup, asked.morph_s)


def _held(asked: Question, before: Layout, *, owned: bool) -> Mapping[str, frozenset[int]]:
    """Return the sections with which each present worker of the running layout counts.

    A worker that holds the whole state counts with its stage's sections only, if the next layout is
    not owned either and the plan has the running depth; so it is asked to stay at its stage.
    """
    here = {seat.worker for seat in asked.seats}
    chains = [replica.workers for replica in before.replicas]
    plan = asked.before_plan
    has_all = not before.owned and owned
    assert asked.profile is not None
    if plan is not None and plan.sections != len(asked.profile.sections):
        plan = None  # it was made for another model
    if plan is None or has_all or (plan.way.depth != before.depth and not before.owned):
        whole = frozenset(range(len(asked.profile.sections)))
        held = {worker: whole for chain in chains for worker in chain}
    else:
        held = transition.held_by(plan, chains)
    return {worker: sections for worker, sections in held.items() if worker in here}


def _whole_states(asked: Question, chains: list[tuple[str, ...]], pace: Pace) -> Transition:
    """Return the transition if every worker holds the whole state.

    Newcomers get the state from all workers that have it.
    """
    had = set() if asked.before is None else {*asked.before.workers}
    had &= {seat.worker for seat in asked.seats}
    inside = [worker for chain in chains for worker in chain]
    new = sum(worker not in had for worker in inside) if had else 0
    sending_s = 0.0
    if new:
        busiest = asked.state_bytes * max(1.0, new / len(had))
        sending_s = busiest / pace.bandwidth_bytes_per_s
    return Transition(
        chains=tuple(chains),
        moves=(),
        kept_bytes=asked.state_bytes * (len(inside) - new),
        moved_bytes=asked.state_bytes * new,
        backup_bytes=0.0,
        pause_s=pace.fixed_s + sending_s,
    )


def _barred(chains: Sequence[tuple[Seat, ...]]) -> Flags | None:
    """Return which worker is barred from which place; `None` if all have the same pace.

    A place that was planned for a worker of one pace is not for a worker of a different pace.
    """
    paces = np.array([round(seat.pace, PACE_DIGITS) for chain in chains for seat in chain])
    if len(np.unique(paces)) == 1:
        return None
    found: Flags = paces[:, None] != paces[None, :]
    return found


def _linked(
    chains: Sequence[tuple[str, ...]],
    seats: Mapping[str, Seat],
    slots: Sequence[tuple[float, ...]],
    before: Layout | None,
) -> tuple[tuple[str, ...], ...]:
    """Join the holders of the stages into chains so that neighbours are near each other.

    This is free to choose, because a worker that holds a stage may serve any replica.
    """
    follows: dict[str, str] = {}
    for replica in before.replicas if before is not None else ():
        follows |= dict(zip(replica.workers, replica.workers[1:], strict=False))
    made = [[chain[0]] for chain in chains]
    for stage in range(1, len(chains[0])):
        able = [chain[stage] for chain in chains]
        cost = np.empty((len(made), len(able)))
        for i, chain in enumerate(made):
            for j, worker in enumerate(able):
                cost[i, j] = _distance(seats[chain[-1]], seats[worker]) + ORDER * (i - j) ** 2
                cost[i, j] -= NEIGHBOUR * (follows.get(chain[-1]) == worker)
                if round(seats[worker].pace, PACE_DIGITS) != round(slots[i][stage], PACE_DIGITS):
                    cost[i, j] += FAR * len(made) * len(chains[0])
        for i, j in zip(*matching.cheapest(cost), strict=True):
            made[i].append(able[j])
    return tuple(tuple(chain) for chain in made)


def _distance(one: Seat, other: Seat) -> float:
    if one.machine == other.machine:
        return 0.0
    return NEAR if one.zone == other.zone else FAR


# --- words -----------------------------------------------------------------------------------------


def _sentence(asked: Question, plan: LayoutPlan | None, shape: tuple[int, int]) -> str:
    width, depth = shape
    said = f"{depth}x{width} on {plural(len(asked.seats), 'worker')}"
    if plan is not None:
        said += f": predicted {pause(plan.step_s)} a step; {_next_best(plan)}"
        if plan.owned:
            said += "; each keeps its own stages only, since the whole state does not fit"
    elif depth > 1 and asked.training_bytes:
        said += "; each builds and keeps its own stages only, since the whole model does not fit"
    if asked.depth is not None and asked.depth != depth:
        why = asked.uncuttable or f"the model can be cut into {asked.stages_max} stages at most"
        said += f"; depth {asked.depth} was asked for, but {why}"
    return said


def _next_best(plan: LayoutPlan) -> str:
    other = next((o for o in plan.runners_up if not _same_shape(plan, o)), None)
    other = other or next(iter(plan.runners_up), None)
    if other is None:
        return "nothing else is possible"
    name = f"{other.way.depth}x{other.width}"
    if _same_shape(plan, other):
        name += f" as {other.way.describe()}"
    return f"next best {name} at {pause(other.cost.step_s)}"


def _same_shape(plan: LayoutPlan, other: RunnerUp) -> bool:
    return (plan.way.depth, plan.width) == (other.way.depth, other.width)


def _size(nbytes: float) -> str:
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:.1f} GB"
    return f"{nbytes / 1e6:.0f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.0f} kB"
