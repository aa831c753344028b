"""A keeper that starts again, or whose Redis gives no answer, takes no order for a while."""

import asyncio
from typing import Any

import pytest

from agent.messages import JobOrder
from cloud.clock import VirtualClock
from orchestrator.actions import CloseJob, OpenJob
from orchestrator.live import world
from orchestrator.live.world import EngineError, LiveWorld

OPENS = OpenJob(order=JobOrder(job="job", script="train.py", script_sha=""), because="a test")
CLOSES = CloseJob(job="job", because="a test")


class Deaf:
    """Takes no order before it has been given three."""

    def __init__(self) -> None:
        self.given, self.taken = list[Any](), list[Any]()

    async def do(self, action: Any) -> Any:
        self.given.append(action)
        return self._take(action, len(self.given))

    async def _take(self, action: Any, nth: int) -> None:
        if nth <= 3:
            raise EngineError("the keeper did not take the order")
        self.taken.append(action)


class Store:
    async def xadd(self, *_: Any, **__: Any) -> None:
        """Nobody reads what is written for people."""


def played(orders: tuple[Any, ...], turns_between: int) -> Deaf:
    """The keeper that these orders were for, once nothing is on its way to it any more."""

    async def play() -> Deaf:
        deaf = Deaf()
        parts: dict[str, Any] = {"journal": None, "quotes": None, "engine": deaf, "store": Store()}
        living = LiveWorld(providers={}, clock=VirtualClock(1.0), **parts)
        for action in orders:
            await living.perform(action)
            for _ in range(turns_between):
                await asyncio.sleep(0)
        async with asyncio.timeout(20):
            while living._tasks:
                await asyncio.wait(living._tasks)
        assert living._broken is None
        return deaf

    return asyncio.run(play())


@pytest.mark.parametrize("orders", [(OPENS,), (OPENS, CLOSES), (CLOSES, OPENS)])
def test_the_newest_order_to_open_or_close_a_job_is_given_until_it_is_taken(
    orders: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
):
    """Of a job that was never opened, every worker was turned away, and its machines were paid for."""
    monkeypatch.setattr(world, "ORDER_AGAIN_S", 0.001)
    assert played(orders, 0).taken == [orders[-1]]


@pytest.mark.parametrize("turns_between", range(8))
def test_an_order_is_not_given_again_after_a_newer_one(
    turns_between: int, monkeypatch: pytest.MonkeyPatch
):
    """The job was opened for ever if its end came in the moment in which it was to be opened again."""
    monkeypatch.setattr(world, "ORDER_AGAIN_S", 0.0)
    given = played((OPENS, CLOSES), turns_between).given
    assert OPENS not in given[given.index(CLOSES) :]
