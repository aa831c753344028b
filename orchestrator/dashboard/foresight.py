"""What the manager would decide for a job under other terms: its own decision, on a copy of its state."""

import asyncio
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec

from orchestrator.formatting import plural, usd

if TYPE_CHECKING:  # the brain takes longer to import than the whole page, and few ask
    from orchestrator.what_if import Outcome


class Foreseen(msgspec.Struct, frozen=True, kw_only=True):
    """What a job would hold, when it would end and at which cost; None is not known."""

    machines: int
    usd_per_h: float
    finish_in_s: float | None
    final_usd: float | None
    over_budget: bool
    sentences: tuple[str, ...]


class Foresight(msgspec.Struct, frozen=True, kw_only=True):
    """The decision as things are, and under other terms; `took_s` is what deciding both took."""

    now: Foreseen
    then: Foreseen
    took_s: float


class Other(msgspec.Struct, frozen=True, kw_only=True):
    """Other terms of a job; None leaves a thing as it is."""

    budget_usd: float | None = None
    deadline_s: float | None = None
    regions: tuple[str, ...] | None = None
    slots_max: int | None = None


async def state_of(url: str) -> bytes:
    """Return the manager's state at the end of its journal, which is only read."""
    import redis.asyncio

    from orchestrator.journal import RedisJournal
    from orchestrator.loop import resume
    from orchestrator.redis_client import retry_policy
    from orchestrator.world import encode_state

    store = redis.asyncio.Redis.from_url(url, **retry_policy(asynchronous=True))
    try:
        return encode_state(await resume(RedisJournal(store)))
    finally:
        await store.aclose()


async def foresee(data: bytes, job: str, asked: Other) -> Foresight | None:
    """Return both decisions, each on its own copy; None if there is no such job."""
    return await asyncio.to_thread(_foresee, data, job, asked)


def _foresee(data: bytes, job: str, asked: Other) -> Foresight | None:
    from orchestrator.what_if import Terms, what_if
    from orchestrator.world import decode_state

    begun_s = perf_counter()
    if job not in decode_state(data).jobs:
        return None
    terms = Terms(**msgspec.structs.asdict(asked))
    now, then = (what_if(decode_state(data), job, one) for one in (Terms(), terms))
    return Foresight(now=_foreseen(now), then=_foreseen(then), took_s=perf_counter() - begun_s)


def _foreseen(outcome: "Outcome") -> Foreseen:
    buys = [
        f"Buy {plural(one.count, 'machine')} in {one.pool} at {usd(one.usd_per_h)}/h: {one.because}"
        for one in outcome.buys
    ]
    gives = [f"Give back {one.machine} in {one.pool}: {one.because}" for one in outcome.gives_back]
    return Foreseen(
        machines=outcome.machines,
        usd_per_h=outcome.usd_per_h,
        finish_in_s=outcome.finish_in_s,
        final_usd=outcome.final_usd,
        over_budget=outcome.over_budget,
        sentences=(*buys, *gives) or (f"Nothing would change: {outcome.because}",),
    )
