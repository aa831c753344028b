"""What a manager hears late, because it stood still, keeps its own time."""

import asyncio
from typing import Any

import pytest

from agent.messages import UNRECORDED, AgentJoined, Progress, WorkerReady
from cloud.clock import VirtualClock
from orchestrator.actions import Regroup, StartWorker, StopWorker, Terminate
from orchestrator.events import BootSeen, Launched, ManagerStarted, Tick
from orchestrator.live.world import LiveWorld

STILL_S = 40.0


class Journal:
    inbox_id = ""


def world_at(clock: VirtualClock) -> Any:
    parts: dict[str, Any] = {"store": None, "engine": None, "quotes": None}
    return LiveWorld(journal=Journal(), providers={}, clock=clock, **parts)  # type: ignore[arg-type]


def test_a_machine_that_began_while_the_manager_stood_still_is_charged_from_its_launch(hand):
    h = hand()
    launch = h.orders()
    clock = VirtualClock(h.at_s)
    world = world_at(clock)
    world._before_tick = 0  # its first event was long ago

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


def test_the_first_event_is_first_and_ticks_that_are_due_let_others_through():
    clock = VirtualClock(100.0)
    world = world_at(clock)
    for number in range(3):
        world._queue.put_nowait(("", ManagerStarted(at_s=90.0, epoch=number + 1, settings=None)))  # type: ignore[arg-type]

    async def play() -> list[Any]:
        return [await world.next_event(50.0) for _ in range(6)]

    kinds = [type(event) for event in asyncio.run(play())]
    assert kinds == [ManagerStarted, Tick, ManagerStarted, ManagerStarted, Tick, Tick]


@pytest.mark.parametrize("tick_s", [0.1, 1.9, 3.0])
def test_what_waits_is_heard_soon_also_where_a_tick_takes_longer_than_its_period(tick_s):
    """All that waited when a tick had come is heard before the next one."""
    clock = VirtualClock(0.0)
    world, period_s, event_s, events = world_at(clock), 2.0, 0.01, 1000
    for number in range(events):
        seen = BootSeen(at_s=0.0, machine_id=str(number), phase="node", took_s=1.0)
        world._queue.put_nowait(("", seen))

    async def play() -> None:
        due_s = period_s
        while not world._queue.empty():
            if isinstance(await world.next_event(due_s), Tick):
                due_s = clock.now_s() + period_s
                clock.advance_to(clock.now_s() + tick_s)
            else:
                clock.advance_to(clock.now_s() + event_s)

    asyncio.run(play())
    assert clock.now_s() < events * event_s + 2 * tick_s


def news_that_waits(h: Any, kind: str) -> list[Any]:
    """What a machine, a worker or the keeper says in time, just before the manager hears it."""
    launch = h.orders()
    machine = h.launched(launch)
    if kind == "joined":
        return [AgentJoined(at_s=h.at_s + 20, machine_id=machine, address="1", slots=1)]
    h.joined(machine)
    if kind == "came back":
        h.away(machine)
        return [AgentJoined(at_s=h.at_s + 5, machine_id=machine, address="1", slots=1)]
    (start,) = h.only(h.said, StartWorker)
    ready = WorkerReady(
        at_s=h.at_s + 20,
        job="job",
        worker=start.worker,
        machine_id=machine,
        microbatches=8,
        steps_total=100,
        state_bytes=1 << 20,
        uncuttable=UNRECORDED,
    )
    if kind == "ready":
        return [ready]
    h.ready(start)
    h.wait(2.0)
    h.committed(1)
    steps = {"steps_total": 100, "loss": 2.0, "step_s": 0.5}
    generation = h.job.layouts.generation
    return [
        Progress(at_s=h.at_s + 5 * n, job="job", generation=generation, step=1 + n, **steps)
        for n in range(1, 10)
    ]


KINDS = ("joined", "came back", "ready", "steps")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("still_s", [61.0, 130.0])
def test_news_that_waited_is_heard_before_the_manager_gives_anything_up(hand, kind, still_s):
    h = hand()
    waiting = news_that_waits(h, kind)
    said, clock = len(h.said), VirtualClock(h.at_s)
    world = world_at(clock)
    world._before_tick = 0

    async def play() -> None:
        clock.advance_to(h.at_s + still_s)
        h.at_s += still_s
        for event in waiting:
            world._queue.put_nowait(("", event))
        while not world._queue.empty():
            h.see(await world.next_event(h.state.wake_at_s))

    asyncio.run(play())
    h.wait(20.0)
    assert not h.only(h.said[said:], (Terminate, StopWorker)), h.words(h.said[said:])
    assert len(h.only(h.said[said:], Regroup)) == (kind == "ready")


@pytest.mark.parametrize("kind", KINDS)
def test_news_that_waited_for_the_next_manager_is_heard_before_it_gives_anything_up(hand, kind):
    h = hand()
    waiting = news_that_waits(h, kind)
    said = len(h.said)
    h.at_s += 130.0
    h.see(ManagerStarted(at_s=h.at_s, epoch=2, settings=h.settings))
    h.wait(1.0)
    for event in waiting:
        h.see(event)
    h.wait(20.0)
    assert not h.only(h.said[said:], (Terminate, StopWorker)), h.words(h.said[said:])
    assert h.job.status != "RECOVERING"


def test_a_manager_that_hears_nothing_after_it_stood_still_gives_up_all_the_same(hand):
    h = hand()
    news_that_waits(h, "joined")
    said = len(h.said)
    for _ in range(20):  # and each of its ticks comes late
        h.at_s = h.state.wake_at_s + 70.0
        h.see(Tick(at_s=h.at_s))
    (end, *_) = h.only(h.said[said:], Terminate)
    assert "did not join within" in end.because
