"""What a manager hears late, because it stood still, keeps its own time."""

import asyncio
from typing import Any

import pytest

from cloud.clock import VirtualClock
from orchestrator.actions import Launch
from orchestrator.events import Launched, ManagerStarted, Tick
from orchestrator.live.world import LiveWorld

STILL_S = 40.0


class Journal:
    inbox_id = ""


def world_at(clock: VirtualClock) -> Any:
    parts: dict[str, Any] = {"store": None, "engine": None, "quotes": None}
    return LiveWorld(journal=Journal(), providers={}, clock=clock, **parts)  # type: ignore[arg-type]


def test_a_machine_that_began_while_the_manager_stood_still_is_charged_from_its_launch(
    hand: Any,
) -> None:
    h = hand()
    h.start()
    h.submit(slots_max=1)
    (launch,) = h.only(h.wait(2.0), Launch)
    clock = VirtualClock(h.at_s)
    world = world_at(clock)
    world._ticks = True  # its first event was long ago

    async def play() -> None:
        clock.advance_to(h.at_s + STILL_S)
        h.at_s += STILL_S
        seen: list[Any] = []
        h.see = seen.append
        h.launched(launch, at_s=h.at_s - 1.0)
        del h.see
        world._queue.put_nowait(("", seen[0]))
        while not isinstance(event := await world.next_event(h.state.wake_at_s), Launched):
            h.see(event)
        h.see(event)

    asyncio.run(play())
    (lease,) = h.leases
    assert lease.prices[0][0] == pytest.approx(h.at_s - 1.0)


def test_the_first_event_is_first_and_ticks_that_are_due_let_others_through() -> None:
    clock = VirtualClock(100.0)
    world = world_at(clock)
    for number in range(3):
        world._queue.put_nowait(("", ManagerStarted(at_s=90.0, epoch=number + 1, settings=None)))  # type: ignore[arg-type]

    async def play() -> list[Any]:
        return [await world.next_event(50.0) for _ in range(6)]

    kinds = [type(event) for event in asyncio.run(play())]
    assert kinds == [ManagerStarted, Tick, ManagerStarted, Tick, ManagerStarted, Tick]
