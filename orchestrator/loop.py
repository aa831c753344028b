"""The one loop: take an event, decide what to do, write both down, then do it.

The same loop drives the live manager, the simulated month and the replay of an incident. It is
`async` because the live world waits for networks; a world that never waits runs it at full speed
under `run_now`, with no event loop at all.
"""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from orchestrator.actions import AnyAction, Stop
from orchestrator.brain.decide import decide
from orchestrator.events import AnyEvent, EventSetAside, ManagerStarted, Tick
from orchestrator.state import State
from orchestrator.world import Journal, World

SNAPSHOT_EVERY = 500
TRIES = 2  # at an event at which deciding fails
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
    manager after the other.
    """
    turns = 0
    while (event := await world.next_event(state.wake_at_s)) is not None:
        event, state, actions = await _decided(journal, state, event, set_aside)
        await journal.append(event, actions)
        for action in actions:
            await world.perform(action)
        await world.show(state)
        turns += 1
        if turns % SNAPSHOT_EVERY == 1:
            await journal.snapshot(state)
        if any(isinstance(action, Stop) for action in actions):
            await journal.snapshot(state)
            break
    return state


async def _decided(
    journal: Journal, state: State, event: AnyEvent, set_aside: SetAside | None
) -> tuple[AnyEvent, State, list[AnyAction]]:
    """Decide about an event, or about its being set aside.

    After a failure the state is read again, because it was changed in part. Without the first event
    there is no manager, and without a `Tick` time stands still, so these are never set aside.
    """
    if set_aside is None or isinstance(event, (ManagerStarted, Tick)):
        return event, *decide(state, event)
    failures: list[Exception] = []
    while len(failures) < TRIES:
        try:
            return event, *decide(state, event)
        except Exception as error:
            failures.append(error)
            state = await resume(journal)
    aside = await set_aside(event, failures[-1])
    return aside, *decide(state, aside)


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits for anything outside."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    coroutine.close()
    raise RuntimeError(f"{coroutine!r} waits for something: run it under asyncio")
