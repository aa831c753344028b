"""Which machines a job may train on together: in an exact job, those that round alike.

A job has the same bits in every layout as long as its workers round alike. Which do is known by the
hardware key that a worker tells: see `agent.tensors.device.hardware`. Machines with unlike
accelerators never have the same key, so these are not even bought together. A machine whose key is
not that of the job is given back, and its type is not bought for that job any more.

    kind    an accelerator, and the hardware key, as soon as a worker has told it
"""

from collections import Counter
from collections.abc import Iterable

from cloud.model import InstanceType, Pool
from orchestrator.actions import AnyAction
from orchestrator.brain.holdings import leases
from orchestrator.formatting import plural
from orchestrator.state import Job, Kind, Lease, State, Worker, consider, leases_of, note

TOLD_MAX = 3  # newest machines of a pool; a pool may have machines of several kinds
LACKS_S = 600.0  # without machines of its kind, before a job goes on with others
STRANGERS_MAX = 3  # of its own types in a row, before it does: a new image may have another driver
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
    """Return what an exact job keeps to; before it has trained, what it has begun to buy."""
    if not job.exact:
        return None
    staying = [lease for lease in leases_of(state, job) if lease.stays]
    if _has_kind(state, job):
        return job.layouts.kind
    return Kind(accelerator_of(staying[0].type)) if staying else None


def _has_kind(state: State, job: Job) -> bool:
    """Return whether it has trained on machines of its kind, or is about to."""
    kind = job.layouts.kind
    if kind is None or job.progress.step:
        return kind is not None
    ready = (state.workers[worker] for worker in job.workers if state.workers[worker].ready)
    return any(state.leases[worker.token].hardware == kind.hardware for worker in ready)


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
    """Return what else could be had: by keys, and by accelerators whose machines have told none."""
    told: dict[Kind, None] = {}
    for name in job.market.told:
        if name in state.types:
            accelerator = accelerator_of(state.types[name])
            told |= {Kind(accelerator, key): None for key in _told(job, name)}
    named = {each.accelerator for each in (*told, kind)}
    sold = sold_kinds(state, job)
    untold = [each for each in sold if each.accelerator not in named]
    return [*(each for each in told if each != kind), *untold]


def may_buy(job: Job, kind: Kind | None, sold: InstanceType, pool: Pool) -> bool:
    """Return whether a machine may be of that kind, by what others of its pool have told.

    Of a pool that has told nothing it is what others of its type have told.
    """
    if kind is None:
        return True
    keys = job.market.told.get(sold.name, {}).get(pool.key) or _told(job, sold.name)
    known = bool(keys and kind.hardware)
    return accelerator_of(sold) == kind.accelerator and (not known or kind.hardware in keys)


def _told(job: Job, name: str) -> list[str]:
    """Return the keys that machines of a type have told, whatever their pool."""
    return [key for keys in job.market.told.get(name, {}).values() for key in keys]


def may_hold(job: Job, kind: Kind | None, lease: Lease) -> bool:
    """Return whether a machine may be of that kind, by what it has told itself, if it has."""
    if kind is None or not (lease.hardware and kind.hardware):
        return may_buy(job, kind, lease.type, lease.pool)
    return lease.hardware == kind.hardware


def may_join(job: Job, lease: Lease) -> bool:
    """Return whether the machine's workers may be in the job's layout."""
    kind = job.layouts.kind
    if not job.exact or kind is None or not (kind.hardware and lease.hardware):
        return True
    return lease.hardware == kind.hardware


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
    lease.hardware = key
    if not job.exact:
        if not job.spec.exact and before and key not in before:
            note(out, job.id, _mixed(lease, key, before[0]))
        return False
    if may_join(job, lease) or not _has_kind(state, job):
        job.market.strangers = 0
        return False
    kind = job.layouts.kind
    job.market.strangers += kind is not None and kind.hardware in had
    _part(state, out, job, (lease,))
    return True


def settle(state: State, out: list[AnyAction], job: Job) -> None:
    """Choose the kind of an exact job that has none yet: that of most workers that are ready."""
    counts: Counter[Kind] = Counter()
    for worker in (state.workers[worker] for worker in job.workers):
        lease = state.leases[worker.token]
        if worker.ready and lease.hardware and lease.stays:
            counts[Kind(accelerator_of(lease.type), lease.hardware)] += 1
    kind = job.layouts.kind
    if not job.exact or not counts:
        return
    if kind is not None and kind.hardware and _has_kind(state, job):
        return
    job.layouts.kind = max(counts, key=counts.__getitem__)
    _part(state, out, job)


def lacks_its_own(state: State, job: Job) -> bool:
    """Return whether there is no hope left for machines of the job's kind; called while it lacks them."""
    if job.market.lacks_since_s is None:
        job.market.lacks_since_s = state.now_s
    waited = state.now_s >= job.market.lacks_since_s + LACKS_S
    return waited or job.market.strangers >= STRANGERS_MAX


def change(state: State, out: list[AnyAction], job: Job, kind: Kind) -> None:
    """Go on with machines of another kind, since none of the job's own could be had for long.

    No layout has both: what is left of its own is given back, as it is too few to train with.
    """
    before = job.layouts.kind
    assert before is not None
    why = f"for {LACKS_S / 60:.0f} min"
    if job.market.strangers >= STRANGERS_MAX:
        why = f"the newest {job.market.strangers} in a row round differently"
    said = f"no machines could be had that round as those it has trained on ({why})"
    apart = f"{kind.accelerator or 'unknown'} instead of {before.accelerator}"
    if kind.hardware and before.hardware:
        apart = against(kind.hardware, before.hardware)
    bits = f"from step {job.progress.step} on its last bits are those of others"
    note(out, job.id, f"{said}: {bits} ({apart})")
    job.layouts.kind, job.market.lacks_since_s, job.market.strangers = kind, None, 0
    for lease in leases_of(state, job):
        if not may_hold(job, kind, lease):
            leases.give_back(state, out, lease, f"{job.id} goes on with machines of another kind")


def _part(state: State, out: list[AnyAction], job: Job, first: Iterable[Lease] = ()) -> None:
    """Give back what cannot train with the machines that the job keeps to, and say so once."""
    kind = job.layouts.kind
    going = dict.fromkeys(lease.token for lease in first)
    for lease in leases_of(state, job):
        serves = any(worker in job.layouts.serving for worker in lease.workers.values())
        if lease.stays and not serves and not may_hold(job, kind, lease):
            going[lease.token] = None
    if not going or kind is None:
        return
    some = [state.leases[token] for token in going]
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


def _mixed(lease: Lease, key: str, other: str) -> str:
    return (
        f"{lease.machine_id} rounds differently from others of its machines ({against(key, other)}): with exact = false "
        "they train together, and the last bits of the weights depend on which computes what"
    )
