"""The one loop: take an event, decide what to do, write both down, then do it.

The same loop drives the live manager, the simulated month and the replay of an incident. It is
`async` because the live world waits for networks; a world that never waits runs it at full speed
under `run_now`, with no event loop at all.
"""

import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal, TypeVar

from cloud.ranges import shown_text
from orchestrator.actions import AnyAction, Stop
from orchestrator.brain.decide import decide
from orchestrator.events import AnyEvent, EventSetAside, ManagerStarted, PartSetAside, Tick
from orchestrator.state import Job, Lease, PoolState, State, Worker
from orchestrator.world import Journal, World, decode_state, encode_state

SNAPSHOT_EVERY = 500
TRIES = 2  # at an event at which deciding fails
PARTS_MAX = 16  # of the state, set aside in one turn
Part = Literal["job", "pool"]
Turn = tuple[AnyEvent, list[AnyAction]]
SetAside = Callable[[AnyEvent, Exception], Awaitable[EventSetAside]]
T = TypeVar("T")


async def resume(journal: Journal) -> State:
    """Return the state at the end of the journal, and perform nothing.

    The next event, `ManagerStarted`, settles actions whose outcome is unknown.
    """
    saved, entries = await journal.load()
    state = State() if saved is None else saved
    for entry in entries:
        state, _ = decide(state, entry.event)
    return state


async def run(
    world: World, journal: Journal, state: State, set_aside: SetAside | None = None
) -> State:
    """Run the loop until the world ends or the brain says stop.

    The first event must be `ManagerStarted`. A snapshot follows the first turn too, so that a
    manager after many short lives does not have ever more entries to read. With `set_aside`, an
    event at which `decide` fails twice is replaced by what that returns, so no event can end one
    manager after the other; nor can a job or a pool at which a `Tick` or the first event fails.
    """
    turns = 0
    while (event := await world.next_event(state.wake_at_s)) is not None:
        state, made = await _decided(journal, state, event, set_aside)
        for event, actions in made:
            await journal.append(event, actions)
            for action in actions:
                await world.perform(action)
        await world.show(state)
        turns += 1
        if turns % SNAPSHOT_EVERY == 1:  # after all of them: the state is that after the last
            await journal.snapshot(state)
        if any(isinstance(action, Stop) for _, actions in made for action in actions):
            await journal.snapshot(state)
            break
    return state


async def _decided(
    journal: Journal, state: State, event: AnyEvent, set_aside: SetAside | None
) -> tuple[State, list[Turn]]:
    """Decide about an event, or about its being set aside.

    After a failure the state is read again, because it was changed in part. Without the first event
    there is no manager, and without a `Tick` time stands still, so these are never set aside: the
    job or the pool is on which they fail. The same holds where an alarm that is due fails.
    """
    if set_aside is None:
        state, actions = decide(state, event)
        return state, [(event, actions)]
    failures: list[Exception] = []
    while len(failures) < TRIES:
        try:
            state, actions = decide(state, event)
        except Exception as error:
            failures.append(error)
            state = await resume(journal)
        else:
            return state, [(event, actions)]
    if isinstance(event, (ManagerStarted, Tick)):
        return _without(encode_state(state), event, failures[-1])
    kept, aside = encode_state(state), await set_aside(event, failures[-1])
    try:
        state, actions = decide(state, aside)
    except Exception as error:  # it was no fault of the event: an alarm is due that fails
        return _without(kept, aside, error)
    return state, [(aside, actions)]


def _without(kept: bytes, event: AnyEvent, error: Exception) -> tuple[State, list[Turn]]:
    """Decide about an event without the part of the state on which that fails.

    What the failing functions worked on is tried first, then every other job and pool alone. Where
    several are at fault, each failure names the next. What no part explains ends the manager.
    """
    named: list[tuple[Part, str]] = []
    for _ in range(PARTS_MAX):
        suspects = [part for part in _at_hand(error) if part not in named]
        others = [part for part in _parts(decode_state(kept), named) if part not in suspects]
        after: Exception | None = None  # what fails without the first suspect
        for part in [*suspects, *others]:
            try:
                return _decided_without(kept, event, [*named, part], error)
            except Exception as other:
                after = after or other
        if not suspects or after is None:
            break
        named.append(suspects[0])
        error = after
    raise error


def _decided_without(
    kept: bytes, event: AnyEvent, named: Sequence[tuple[Part, str]], error: Exception
) -> tuple[State, list[Turn]]:
    state, made = decode_state(kept), []
    for part, name in named:
        at_s = state.now_s - state.skew_s
        aside = PartSetAside(at_s=at_s, part=part, name=name, why=said_of(error))
        state, actions = decide(state, aside)
        made.append((aside, actions))
    state, actions = decide(state, event)
    return state, [*made, (event, actions)]


def _at_hand(error: Exception) -> list[tuple[Part, str]]:
    """Return the jobs and pools that the failing functions worked on, the innermost first."""
    found: dict[tuple[Part, str], None] = {}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in frame.f_locals.values():
            if isinstance(value, Job):
                found["job", value.id] = None
            elif isinstance(value, (Lease, Worker)):
                found["job", value.job] = None
            elif isinstance(value, PoolState):
                found["pool", value.pool.key] = None
    return list(found)


def _parts(state: State, named: Sequence[tuple[Part, str]]) -> list[tuple[Part, str]]:
    """Return what else could be at fault: live jobs, all others, pools."""
    jobs = dict.fromkeys([*state.live_jobs, *state.jobs])
    parts: list[tuple[Part, str]] = [("job", job) for job in jobs]
    parts += [("pool", pool) for pool in state.pools]
    return [part for part in parts if part not in named]


def said_of(error: Exception) -> str:
    """Return what failed, and where, as a text of bounded length."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
    return f"{where} ({shown_text(f'{type(error).__name__}: {error}')})"


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits for anything outside."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    coroutine.close()
    raise RuntimeError(f"{coroutine!r} waits for something: run it under asyncio")
