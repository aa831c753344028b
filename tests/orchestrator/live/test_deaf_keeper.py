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
        self.given, self.taken = 0, list[Any]()

    async def do(self, action: Any) -> Any:
        self.given += 1
        return self._take(action, self.given)

    async def _take(self, action: Any, nth: int) -> None:
        if nth <= 3:
            raise EngineError("the keeper did not take the order")
        self.taken.append(action)


class Store:
    async def xadd(self, *_: Any, **__: Any) -> None:
        """Nobody reads what is written for people."""


@pytest.mark.parametrize("orders", [(OPENS,), (OPENS, CLOSES), (CLOSES, OPENS)])
def test_the_newest_order_to_open_or_close_a_job_is_given_until_it_is_taken(
    orders: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
):
    """Of a job that was never opened, every worker was turned away, and its machines were paid for."""
    monkeypatch.setattr(world, "ORDER_AGAIN_S", 0.001)

    async def play() -> list[Any]:
        deaf = Deaf()
        parts: dict[str, Any] = {"journal": None, "quotes": None, "engine": deaf, "store": Store()}
        living = LiveWorld(providers={}, clock=VirtualClock(1.0), **parts)
        for action in orders:
            await living.perform(action)
        async with asyncio.timeout(20):
            while living._tasks:
                await asyncio.wait(living._tasks)
        assert living._broken is None
        return deaf.taken

    assert asyncio.run(play()) == [orders[-1]]
