"""Which machines a job may train on together: in an exact job, those that round alike.

A job has the same bits in every layout as long as its workers round alike. Which do is known by the
hardware key that a worker tells: see `agent.tensors.device.hardware`. Machines with unlike
accelerators never have the same key, so these are not even bought together. A machine whose key is
not that of the job is given back, and its pool is not bought from for that job for an hour; twice
as long each time that a machine of it is of another kind again.

    kind    an accelerator, and the hardware key, as soon as a worker has told it
"""

from collections import Counter
from collections.abc import Iterable

from cloud.model import InstanceType, Pool
from orchestrator.actions import AnyAction
from orchestrator.brain.holdings import leases
from orchestrator.formatting import plural
from orchestrator.state import (
    Job,
    Kind,
    Lease,
    PoolState,
    Shut,
    State,
    Worker,
    consider,
    leases_of,
    note,
)

TOLD_MAX = 3  # newest machines of a pool; a pool may have machines of several kinds
LACKS_S = 600.0  # without machines of its kind, before a job goes on with others
STRANGERS_MAX = 3  # of its own types in a row, before it does: a new image may have another driver
SHUT_S, SHUT_S_MAX = 3600.0, 86_400.0  # until a pool of other kinds is tried again
DOUBLINGS_MAX = 10
PARTS = "; "  # between the parts of a key

TOGETHER = "exact = false would use them together"


def against(key: str, other: str) -> str:
    """Return the parts in which two hardware keys differ."""
    one, two = key.split(PARTS), other.split(PARTS)
    if len(one) == len(two):
        apart = [(a, b) for a, b in zip(one, two, strict=True) if a != b]
        one, two = [a for a, _ in apart], [b for _, b in apart]
    return f"{', '.join(one)} against {', '.join(two)}"


# --- what a job keeps to --------------------------------------------------------------------------


def kind_of(state: State, job: Job) -> Kind | None:
    """Return what an exact job keeps to; before its first layout, what it has begun to buy."""
    if not job.exact:
        return None
    if has_kind(state, job):
        return job.layouts.kind
    staying = [lease for lease in leases_of(state, job) if lease.stays]
    some = [lease for lease in staying if serves(job, lease)] or staying
    counts = Counter(accelerator_of(lease.type) for lease in some)
    return Kind(counts.most_common(1)[0][0]) if counts else None


def has_kind(state: State, job: Job) -> bool:
    """Return whether it has trained on machines of its kind, or is about to."""
    kind = job.layouts.kind
    if kind is None or job.progress.step:
        return kind is not None
    ready = (state.workers[worker] for worker in job.workers if state.workers[worker].ready)
    return any(key_of(state, worker) == kind.hardware for worker in ready)


def accelerator_of(kind: InstanceType) -> str:
    """Return the accelerator as all clouds name it."""
    return kind.accelerator.lower()


def accelerators_sold(state: State) -> tuple[str, ...]:
    """Return the accelerators of what is sold, each once."""
    sold = (k for k in state.pools.values() if k.sold and not state.places[k.pool.place.key].closed)
    return tuple(dict.fromkeys(accelerator_of(known.kind) for known in sold))


def sold_kinds(state: State, job: Job) -> list[Kind]:
    """Return what an exact job may choose from, one accelerator each; nothing if it may mix."""
    return [Kind(each) for each in accelerators_sold(state)] if job.exact else []


def other_kinds(state: State, job: Job, kind: Kind) -> list[Kind]:
    """Return what else could be had: the very kind that it trained on last, and any that is sold."""
    own = job.layouts.trained
    found = [*([own] if own is not None else []), *sold_kinds(state, job)]
    return [each for each in found if each != kind]


def may_buy(state: State, job: Job, kind: Kind | None, sold: InstanceType, pool: Pool) -> bool:
    """Return whether a machine may be of that kind, by what others of its pool have told.

    Of a pool that has told nothing it is what others of its type have told. One that has told of
    other kinds only is tried again, because a cloud may sell several under one name.
    """
    if kind is None:
        return True
    if accelerator_of(sold) != kind.accelerator:
        return False
    shut = shut_of(job, kind, sold.name, pool)
    return shut is None or state.now_s >= shut.since_s + shut_s(shut)


def most(state: State, job: Job, kind: Kind | None, known: PoolState) -> int | None:
    """Return how many machines of a pool may be bought to see what they are; None for any number.

    That is of a pool that is tried again, and of a type that has told nothing if others have told of
    other kinds. A job that cannot train takes what there is.
    """
    if kind is None or not kind.hardware:
        return None
    unknown = not _told(job, known.kind.name) and job.market.lacks_since_s is None
    careful = unknown and bool(job.market.shut)
    if not careful and shut_of(job, kind, known.kind.name, known.pool) is None:
        return None
    held = [state.leases[token] for token in known.leases]
    tried = sum(lease.job == job.id and not lease.hardware for lease in held)
    return max(0, max(1, -(-job.workers_min // known.kind.slots)) - tried)


def shut_of(job: Job, kind: Kind, name: str, pool: Pool) -> Shut | None:
    """Return since when a pool has told of other kinds only; None if it may well have this one."""
    told, every = job.market.told.get(name, {}), _told(job, name)
    keys = told.get(pool.key) or every
    if not (keys and kind.hardware) or kind.hardware in keys:
        return None
    pools = [pool.key] if kind.hardware in every else told
    found = [job.market.shut[key] for key in pools if key in job.market.shut]
    return Shut(sum(each.times for each in found), max((e.since_s for e in found), default=0.0))


def shut_s(shut: Shut) -> float:
    """Return how long a pool is not bought from: the less likely its machines are, the longer."""
    return min(SHUT_S * 2.0 ** min(shut.times - 1, DOUBLINGS_MAX), SHUT_S_MAX)


def _told(job: Job, name: str) -> list[str]:
    """Return the keys that machines of a type have told, whatever their pool."""
    return [key for keys in job.market.told.get(name, {}).values() for key in keys]


def may_hold(job: Job, kind: Kind | None, lease: Lease) -> bool:
    """Return whether a machine may be of that kind, by what it has told itself, if it has."""
    if kind is None:
        return True
    if lease.hardware and kind.hardware:
        return lease.hardware == kind.hardware
    shut = shut_of(job, kind, lease.type.name, lease.pool)
    tried = shut is None or lease.intended_at_s > shut.since_s
    return accelerator_of(lease.type) == kind.accelerator and tried


def serves(job: Job, lease: Lease) -> bool:
    """Return whether a worker of the machine is in the layout, whatever its kind."""
    return any(worker in job.layouts.serving for worker in lease.workers.values())


def may_join(state: State, job: Job, worker: Worker) -> bool:
    """Return whether the worker may be in the job's layout.

    Who is in it stays. They are of several kinds only if they began before their keys were known.
    """
    kind, key = job.layouts.kind, key_of(state, worker)
    if not job.exact or kind is None or not (kind.hardware and key):
        return True
    return key == kind.hardware or worker.id in job.layouts.serving


def key_of(state: State, worker: Worker) -> str:
    """Return the key of what a worker computes on, or else what another of its machine has told."""
    return worker.hardware or state.leases[worker.token].hardware


def has_its_own(state: State, job: Job) -> bool:
    """Return whether the machines that have shown to be of the job's kind suffice to train."""
    shown = [e for e in leases_of(state, job) if e.hardware]
    return _slots_alike(state, job, shown) >= job.workers_min


def awaits_its_own(state: State, job: Job) -> bool:
    """Return whether they would suffice with those that may be of its kind, and are on their way."""
    return _slots_alike(state, job, leases_of(state, job)) >= job.workers_min


def _slots_alike(state: State, job: Job, some: Iterable[Lease]) -> int:
    """Count the slots that can train; a machine may have unlike cards."""
    mine = [e for e in some if e.stays and may_hold(job, job.layouts.kind, e)]
    workers = [state.workers[worker] for lease in mine for worker in lease.workers.values()]
    apart = sum(not may_join(state, job, worker) for worker in workers)
    return sum(lease.type.slots for lease in mine) - apart


# --- what is heard --------------------------------------------------------------------------------


def hear(state: State, out: list[AnyAction], worker: Worker, key: str) -> bool:
    """Note what a worker tells of its machine; return whether the machine is given back for it."""
    lease, job = state.leases[worker.token], state.jobs[worker.job]
    if not key or not job.active:
        return False
    before = [told for name in job.market.told for told in _told(job, name)]
    had = _told(job, lease.type.name)
    pools = job.market.told.setdefault(lease.type.name, {})
    if key != lease.hardware or not pools.get(lease.pool.key):
        pools[lease.pool.key] = [*pools.get(lease.pool.key, []), key][-TOLD_MAX:]
        if (own := job.layouts.kind) is not None and key == own.hardware:
            job.market.shut.pop(lease.pool.key, None)
    first, worker.hardware = worker.hardware != key, key
    kind = job.layouts.kind
    beside = [state.workers[other] for other in lease.workers.values() if other != worker.id]
    if kind is None or not any(other.hardware == kind.hardware for other in beside):
        lease.hardware = key
    if not job.exact:
        if not job.spec.exact and before and key not in before:
            note(out, job.id, _mixed(lease, key, before[0]))
        return False
    if kind is None or may_join(state, job, worker) or not has_kind(state, job):
        job.market.strangers = 0
        return False
    if lease.hardware == kind.hardware or serves(job, lease):
        if first:
            note(out, job.id, _idle(lease, worker, against(key, kind.hardware)))
        return False
    newly = key not in had or job.market.strangers > 0
    job.market.strangers += kind.hardware in had and newly
    _part(state, out, job, (lease,))
    return True


def settle(state: State, out: list[AnyAction], job: Job) -> None:
    """Choose the kind of an exact job that has none yet: that of most workers that are ready.

    Those that will be taken count where no other is ready, because it trains on them until then.
    """
    ready = [w for worker in job.workers if (w := state.workers[worker]).ready]
    staying = [worker for worker in ready if state.leases[worker.token].stays]
    counts: Counter[Kind] = Counter()
    for worker in staying or ready:
        lease, key = state.leases[worker.token], key_of(state, worker)
        if key:
            counts[Kind(accelerator_of(lease.type), key)] += 1
    kind = job.layouts.kind
    if not job.exact or not counts:
        return
    if kind is not None and kind.hardware and has_kind(state, job):
        return
    job.layouts.kind = max(counts, key=counts.__getitem__)
    _part(state, out, job)


def lacks_its_own(state: State, job: Job) -> bool:
    """Return whether there is no hope left for machines of the job's kind; called while it lacks them."""
    if job.market.lacks_since_s is None:
        job.market.lacks_since_s = state.now_s
    waited = state.now_s >= job.market.lacks_since_s + LACKS_S
    return (waited or job.market.strangers >= STRANGERS_MAX) and not awaits_its_own(state, job)


def lacks_nothing(job: Job) -> None:
    """Note that the job has enough machines of its kind, or keeps to none."""
    job.market.lacks_since_s, job.market.sought, job.market.strangers = None, False, 0


def change(state: State, out: list[AnyAction], job: Job, kind: Kind) -> None:
    """Go on with machines of another kind, since none of the job's own could be had for long.

    Whichever key comes first is kept to, be it its own. No layout has both: what is left is given
    back, as it is too few to train with.
    """
    why = f"for {LACKS_S / 60:.0f} min"
    if job.market.strangers >= STRANGERS_MAX:
        why = f"the newest {job.market.strangers} in a row round differently"
    said = f"no machines could be had that round as those it has trained on ({why})"
    note(out, job.id, f"{said}: it goes on with {kind.hardware or f'any {kind.accelerator}'}")
    lacks_nothing(job)
    job.layouts.kind, job.market.shut = kind, {}
    for lease in leases_of(state, job):
        leases.give_back(state, out, lease, f"{job.id} goes on with machines of another kind")


def step(out: list[AnyAction], job: Job, before: int) -> None:
    """Note on what a step was computed, and say if it was another kind than that of the step before."""
    kind, last = job.layouts.kind, job.layouts.trained
    if kind is None or not kind.hardware or kind == last:
        return
    job.layouts.trained = kind
    if last is not None:
        apart = against(kind.hardware, last.hardware)
        note(out, job.id, f"from step {before} on its last bits are those of others ({apart})")
        _mark(job, before)


def look(state: State, out: list[AnyAction], job: Job) -> None:
    """Give back what an exact job cannot train with, and say if its layout has several kinds.

    It has only if that began before its machines told their keys. All of them go on, and whoever
    comes is of one kind: half a job's machines are not given up for bits that are mixed already.
    """
    if not job.exact:
        return
    serving = [lease for lease in leases_of(state, job) if serves(job, lease)]
    keys = {key for lease in serving if (key := lease.hardware)}
    mixed = len(keys) > 1 or len({accelerator_of(lease.type) for lease in serving}) > 1
    if mixed and job.layouts.unlike_step is None and job.progress.step:
        _mark(job, 0)
        note(
            out,
            job.id,
            f"trains on machines that round differently, as it did before that was known: all stay, new ones are of "
            f"one kind, and its bits are not; {TOGETHER}, and buy any",
        )
    _part(state, out, job)


def _mark(job: Job, step: int) -> None:
    """Note from which step on the bits are not those of one kind."""
    before = job.layouts.unlike_step
    job.layouts.unlike_step = step if before is None else min(before, step)


def _part(state: State, out: list[AnyAction], job: Job, first: Iterable[Lease] = ()) -> None:
    """Give back what cannot train with the machines that the job keeps to, and say so once."""
    kind = kind_of(state, job)
    going = dict.fromkeys(lease.token for lease in first)
    for lease in leases_of(state, job):
        if lease.stays and not serves(job, lease) and not may_hold(job, kind, lease):
            going[lease.token] = None
    if not going or kind is None:
        return
    some = [state.leases[token] for token in going]
    for pool, name in {lease.pool: lease.type.name for lease in some if lease.hardware}.items():
        if shut_of(job, kind, name, pool) is not None:
            shut = job.market.shut.get(pool.key, Shut(0, 0.0))
            job.market.shut[pool.key] = Shut(shut.times + 1, state.now_s)
    types = ", ".join(sorted({lease.type.name for lease in some}))
    key = next((lease.hardware for lease in some if lease.hardware), "")
    apart = f", {against(key, kind.hardware)}" if key and kind.hardware else ""
    rounds = f"{plural(len(some), 'machine')} ({types}{apart})"
    note(
        out,
        job.id,
        f"{rounds} cannot train with those of {job.id}, which round differently: {TOGETHER}",
    )
    for lease in some:
        leases.give_back(state, out, lease, f"it rounds differently from the machines of {job.id}")
    consider(state, job)


def _idle(lease: Lease, worker: Worker, apart: str) -> str:
    return (
        f"slot {worker.slot} of {lease.machine_id} rounds differently from its others ({apart}), and has nothing to do: "
        f"{TOGETHER}"
    )


def bits_of(job: Job) -> str:
    """Return what a person may expect of the last bits of its weights."""
    kind, step = job.layouts.kind, job.layouts.unlike_step
    if not job.spec.exact:
        return "not exact: machines that round differently train together (job.exact = false)"
    if not job.exact:
        return "not exact: its script lets sums depend on the layout (deterministic=False)"
    if step is not None:
        return f"exact up to step {step:,} only: machines that round differently go on from there"
    named = f" ({kind.accelerator})" if kind is not None else ""
    return f"exact: only machines that round alike train it{named}"


def _mixed(lease: Lease, key: str, other: str) -> str:
    return (
        f"{lease.machine_id} rounds differently from others of its machines ({against(key, other)}): with exact = false "
        "they train together, and the last bits of the weights depend on which computes what"
    )
