"""Values in a job's part of the journal on which deciding fails: the job is set aside, and all else goes on.

`SPOT_FUZZ=1000000` poisons ten thousand states.
"""

import math
import os
from random import Random
from typing import Any

import msgspec
import pytest

from orchestrator import loop
from orchestrator.actions import AnyAction, CloseJob, Terminate
from orchestrator.brain.decide import decide
from orchestrator.brain.holdings import ledger
from orchestrator.events import AnyEvent, EventSetAside, ManagerStarted, PartSetAside, Tick
from orchestrator.simulated.restarts import live
from orchestrator.simulated.scenario import wild
from orchestrator.state import Job, State
from orchestrator.view_builder import view_of
from orchestrator.world import MemoryJournal, decode_state, encode_state

POISONED = int(os.environ.get("SPOT_FUZZ", "20000")) // 100
SEEDS = (4, 7, 20)
TICKS = 40
FLOATS = (-1e300, -1.0, 0.0, 1e300, 1e18)
INTS = (-5, -1, 0, 7, 100_000)


class ShortLife:
    """A world in which a manager starts and time passes; what it does is written down."""

    def __init__(self, state: State) -> None:
        self.done: list[AnyAction] = []
        self.shown: State | None = None
        self._first = ManagerStarted(
            at_s=state.now_s, epoch=state.epoch + 1, settings=state.settings, house=state.house
        )
        self._ticks = 0

    async def next_event(self, by_s: float) -> AnyEvent | None:
        self._ticks += 1
        if self._ticks == 1:
            return self._first
        return None if self._ticks > TICKS else Tick(at_s=by_s)

    async def perform(self, action: AnyAction) -> None:
        self.done.append(action)

    async def show(self, state: State) -> None:
        self.shown = state


async def aside(event: AnyEvent, error: Exception) -> EventSetAside:
    return EventSetAside(at_s=event.at_s, kind=type(event).__name__, entry="", why=str(error))


def lived(state: State) -> tuple[State, ShortLife, MemoryJournal]:
    """What a manager does that finds this state in its journal."""
    journal, world = MemoryJournal(), ShortLife(state)
    loop.run_now(journal.snapshot(state))
    found = loop.run_now(loop.resume(journal))
    return loop.run_now(loop.run(world, journal, found, aside)), world, journal


def states(seed: int) -> list[bytes]:
    """States of a simulated deployment in which several jobs hold machines."""
    journal, found, state = MemoryJournal(), [], State()
    live(wild(seed), keep=journal)
    for nth, entry in enumerate(journal.entries, start=1):
        state, _ = decide(state, entry.event)
        if nth % 31 == 0 and state.leases and not state.stopped:
            found.append(encode_state(state))
    return found


def parts_of(state: State, job: Job) -> list[Any]:
    """Everything of the state that belongs to this job."""
    own = [job, job.progress, job.market, job.layouts, job.trouble, job.account]
    own += [state.leases[token] for token in job.leases]
    return own + [state.workers[worker] for worker in job.workers]


def poison(dice: Random, part: Any) -> str:
    """Change one value to something that no manager would have written; its name."""
    names = [
        name
        for name in part.__struct_fields__
        if isinstance(getattr(part, name), (int, float, dict)) or getattr(part, name) is None
    ]
    dicts = [name for name in names if isinstance(getattr(part, name), dict)]
    name = dice.choice(dicts if dicts and dice.random() < 0.3 else names)
    value = getattr(part, name)
    if isinstance(value, dict):
        setattr(part, name, {**value, "nobody": None})
    elif isinstance(value, bool):
        setattr(part, name, not value)
    elif isinstance(value, float) or name.endswith(("_s", "_usd")):
        setattr(part, name, dice.choice(FLOATS))
    elif isinstance(value, int):
        setattr(part, name, dice.choice(INTS))
    return name


def poisoned(data: bytes, dice: Random) -> tuple[State, str, str] | None:
    """A state with one bad value in one live job, the job, and what was changed; None if it says nothing."""
    state = decode_state(data)
    if not state.live_jobs:
        return None
    job = state.jobs[dice.choice(list(state.live_jobs))]
    part = dice.choice(parts_of(state, job))
    name = f"{type(part).__name__}.{poison(dice, part)}"
    try:
        return decode_state(encode_state(state)), job.id, name
    except msgspec.DecodeError:
        return None  # it could not stand in a journal


@pytest.mark.parametrize("seed", SEEDS)
def test_no_value_of_one_job_ends_the_manager(seed):
    """Whatever the value: the manager lives on, the state can be stored, shown and replayed."""
    dice, kept = Random(seed), states(seed)
    asides, tried = 0, 0
    while tried < POISONED // len(SEEDS):
        made = poisoned(dice.choice(kept), dice)
        if made is None:
            continue
        tried += 1
        before, victim, what = made
        try:
            state, world, journal = lived(before)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {what} of {victim}: {error!r}") from error
        away = [e.event for e in journal.entries if isinstance(e.event, PartSetAside)]
        asides += bool(away)
        for one in away:
            assert (one.part, one.name) == ("job", victim), f"{what} of {victim}: {one}"
            assert state.jobs[victim].status == "FAILED"
            assert any(isinstance(a, CloseJob) and a.job == victim for a in world.done)
            given_back = {a.machine_id for a in world.done if isinstance(a, Terminate)}
            mine = (e for e in before.leases.values() if e.job == victim and e.machine_id)
            assert given_back >= {lease.machine_id for lease in mine}
            assert all(lease.job != victim for lease in state.leases.values())
        if away:
            assert math.isfinite(ledger.spent_usd(state.account, state.now_s))
            view_of(state, state.now_s)
            assert encode_state(decode_state(encode_state(state))) == encode_state(state)
            again = loop.run_now(loop.resume(journal))
            assert encode_state(again) == encode_state(state)
    assert asides > tried // 50  # else the values were no poison


def first_state(jobs: int) -> State:
    for seed in range(200):
        for data in states(seed) if wild(seed).jobs >= jobs else ():
            state = decode_state(data)
            if sum(bool(state.jobs[job].leases) for job in state.live_jobs) >= jobs:
                return state
    raise AssertionError("no such deployment")


def test_a_job_whose_values_fail_is_named_and_the_other_jobs_keep_their_machines():
    """The sentence says the job, the place in the code, and what a person can do."""
    state = first_state(2)
    held = [job for job in state.live_jobs if state.jobs[job].leases]
    victim, other = held[:2]
    state.jobs[victim].leases["nobody"] = None
    kept = dict(state.jobs[other].leases)
    after, _, journal = lived(state)
    assert [e.event.name for e in journal.entries if isinstance(e.event, PartSetAside)] == [victim]
    assert "resume continues from the last committed step" in after.jobs[victim].because
    assert "KeyError" in after.jobs[victim].because
    assert not after.jobs[other].ended
    assert kept.keys() <= after.leases.keys() | after.ended_leases.keys()
    assert after.account.leases == len(after.leases)
    assert after.account.usd_per_h == pytest.approx(
        after.account.manager_usd_per_h + sum(j.account.usd_per_h for j in after.jobs.values())
    )


def test_several_poisoned_jobs_are_set_aside_one_by_one():
    state = first_state(2)
    victims = [job for job in state.live_jobs if state.jobs[job].leases]
    for job in victims:
        state.jobs[job].leases["nobody"] = None
    after, _, journal = lived(state)
    named = [e.event.name for e in journal.entries if isinstance(e.event, PartSetAside)]
    assert sorted(named) == sorted(victims)
    assert not after.leases


def test_a_job_that_only_an_index_knows_is_forgotten():
    state = first_state(1)
    state.live_jobs["ghost"] = None
    after, _, journal = lived(state)
    assert [e.event.name for e in journal.entries if isinstance(e.event, PartSetAside)] == ["ghost"]
    assert "ghost" not in after.live_jobs
