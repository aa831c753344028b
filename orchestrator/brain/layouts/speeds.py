"""How fast machines are for a job: as the catalogue states, until the job has measured its types.

The catalogue compares accelerators whatever is trained, and a model may be bound by memory,
transfers or the host. So a job learns, from what a part of its work takes on the machines that it
has, how its types compare. Its layouts and purchases count on that; nothing is bought to learn it.
"""

from collections.abc import Callable

import msgspec

from bidding.markets.observations import Scaling
from cloud.model import InstanceType
from orchestrator.actions import AnyAction
from orchestrator.state import Job, State, consider, note, want_layout

PROCESSOR = 0.05  # of a T4: without a card a worker trains on one thread


def view_of(state: State, job: Job) -> Callable[[InstanceType], InstanceType]:
    """Return what turns a type into one with the speed that it has for the job."""
    factors, stated = job.market.speeds.factors, _stated(state, job)

    def view(kind: InstanceType) -> InstanceType:
        speed = stated(kind) * factors.get(kind.name, 1.0)
        return kind if speed == kind.speed else msgspec.structs.replace(kind, speed=speed)

    return view


def kind_for(state: State, job: Job, kind: InstanceType) -> InstanceType:
    """Return the type with the speed that it has for the job."""
    return view_of(state, job)(kind)


def types_for(state: State, job: Job) -> dict[str, InstanceType]:
    """Return all types with the speeds that they have for the job."""
    view = view_of(state, job)
    return {name: view(kind) for name, kind in state.types.items()}


def together(state: State, job: Job) -> float | None:
    """Return the speeds of the workers in the layout in sum; None if one of them has gone."""
    inside = () if job.layouts.current is None else job.layouts.current.workers
    if not inside or any(worker not in job.workers for worker in inside):
        return None
    view = view_of(state, job)
    return sum(view(state.leases[state.workers[worker].token].type).speed for worker in inside)


def _stated(state: State, job: Job) -> Callable[[InstanceType], float]:
    """Return what says the catalogue's speed, which compares cards with cards only.

    A processor beside cards is worth less, and where tables are served a card has no work.
    """
    served = job.layouts.tables is not None
    beside = not served and any(kind.accelerators for kind in state.types.values())

    def stated(kind: InstanceType) -> float:
        if kind.accelerators:
            return 1.0 if served else kind.speed
        return kind.speed * PROCESSOR if beside else kind.speed

    return stated


def learn(state: State, out: list[AnyAction], job: Job) -> None:
    """Take what a part of the work takes each worker of a layout that has settled.

    In a chain the workers of different stages do different parts, so nothing is learned there. Of
    the workers of a machine the fastest counts. If a speed changes, all that rested on it is
    thought of again.
    """
    if job.layouts.current is None or job.layouts.current.depth > 1:
        return
    fastest: dict[str, float] = {}
    for worker in (state.workers[worker_id] for worker_id in job.layouts.current.workers):
        if worker.microbatch_s > 0:
            known_s = fastest.get(worker.token, worker.microbatch_s)
            fastest[worker.token] = min(worker.microbatch_s, known_s)
    before = speeds = job.market.speeds
    stated = _stated(state, job)
    by_name: dict[str, float] = {}
    for token, seconds in fastest.items():
        name = state.leases[token].type.name
        if speeds.seen.get(name, {}).get(token) != seconds:
            by_name = by_name or {n: stated(kind) for n, kind in state.types.items()}
            speeds = speeds.saw(name, token, seconds, by_name)
    job.market.speeds = speeds
    changed = {
        name: factor
        for name, factor in speeds.factors.items()
        if factor != before.factors.get(name)
    }
    if not changed:
        return
    said = ", ".join(f"{name} {factor:.2f}" for name, factor in sorted(changed.items()))
    note(
        out, job.id, f"measured how its types of machines compare, times as fast as stated: {said}"
    )
    job.market.scaling = Scaling()  # its sizes rest on the speeds of before
    for worker in (state.workers[worker_id] for worker_id in job.workers):
        if state.leases[worker.token].type.name in changed:  # it is compared with its peers again
            worker.slow, worker.doubted_at_s = 1.0, None
            worker.eased, worker.probes, worker.probed_at_s = 0, 0, None
    want_layout(state, job)
    consider(state, job)
