"""The present, kept up to date by one reader for any number of open pages."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec
import redis

from agent.profile import Profile
from agent.timeline import Timeline
from orchestrator.client import Checkpoint, House, NotRunning
from orchestrator.dashboard.summary import Summary, summary_of
from orchestrator.events import AnyEvent
from orchestrator.view import View

SILENCE_S_MAX = 3.0
PING_S = 10.0
SILENT = "Redis does not answer; the page shows what was last seen."
UNAVAILABLE = (NotRunning, redis.RedisError, OSError, msgspec.DecodeError)


class FeedSource(Protocol):
    """The part of `orchestrator.client.Client` that the page needs."""

    def view(self) -> View | None: ...

    def house(self) -> House: ...

    def post(self, event: AnyEvent) -> None: ...

    def has_script(self, sha: str) -> bool: ...

    def checkpoints(self, job: str) -> list[Checkpoint]: ...

    def ask_timeline(self, job: str) -> None: ...

    def timeline(self, job: str) -> Timeline | None: ...

    def profile(self, job: str) -> Profile | None: ...

    def last_lines(self, job: str, before: str, count: int) -> list[tuple[str, str, str]]: ...


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One message to the page."""

    view: View | None
    summary: Summary | None = None
    away: str = ""


class Feed:
    """Reads the view again and again, and sends every change to every open page."""

    def __init__(self, client_factory: Callable[[], FeedSource], period_s: float = 0.5) -> None:
        self._connect = client_factory
        self._period_s = period_s
        self.view: View | None = None
        self.away = ""
        self.source: FeedSource | None = None
        self._message = _encode(Snapshot(view=None))
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Read until cancelled; if a read hangs, wait for it instead of starting a second one."""
        while True:
            try:
                self.source = await asyncio.to_thread(self._connect)
                while True:
                    await self._read(self.source)
                    await asyncio.sleep(self._period_s)
            except UNAVAILABLE as error:
                self.away, self.source = str(error) or type(error).__name__, None
                await self._show(self.away)
            await asyncio.sleep(self._period_s)

    async def _read(self, source: FeedSource) -> None:
        reading = asyncio.create_task(asyncio.to_thread(source.view))
        done, _ = await asyncio.wait({reading}, timeout=SILENCE_S_MAX)
        if not done:
            await self._show(self.away or SILENT)
        self.view = await reading
        self.away = ""
        await self._show("")

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield server-sent events: the present data, every change, and pings in between."""
        shown = b""
        while True:
            if self._message != shown:
                shown = self._message
                yield b"data: " + shown + b"\n\n"
            try:
                async with asyncio.timeout(PING_S), self._changed:
                    while self._message == shown:
                        await self._changed.wait()
            except TimeoutError:
                yield b": still here\n\n"

    @property
    def message(self) -> bytes:
        return self._message

    async def _show(self, away: str) -> None:
        snapshot = Snapshot(
            view=self.view,
            summary=None if self.view is None else summary_of(self.view),
            away=away,
        )
        async with self._changed:
            self._message = _encode(snapshot)
            self._changed.notify_all()


def _encode(snapshot: Snapshot) -> bytes:
    return msgspec.json.encode(snapshot)
