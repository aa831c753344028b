"""The one loop: take an event, decide what to do, write both down, then do it.

The same loop drives the live manager, the simulated month and the replay of an incident. It is
`async` because the live world waits for networks; a world that never waits runs it at full speed
under `run_now`, with no event loop at all.
"""

from collections.abc import Coroutine
from typing import Any, TypeVar

from orchestrator.actions import Stop
from orchestrator.brain.decide import decide
from orchestrator.state import State
from orchestrator.world import Journal, World

SNAPSHOT_EVERY = 500
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


async def run(world: World, journal: Journal, state: State) -> State:
    """Run the loop until the world ends or the brain says stop.

    The first event must be `ManagerStarted`. A snapshot follows the first turn too, so that a
    manager after many short lives does not have ever more entries to read.
    """
    turns = 0
    while (event := await world.next_event(state.wake_at_s)) is not None:
        state, actions = decide(state, event)
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


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits for anything outside."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    coroutine.close()
    raise RuntimeError(f"{coroutine!r} waits for something: run it under asyncio")
