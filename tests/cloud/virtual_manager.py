"""The real manager on a virtual clock: its brain, its loop, its live world and a cloud's SDK.

The event loop's time is the clock of the fake cloud, and moves when nothing else is left to do; what
goes to threads is done at once. So minutes of lag and of throttling cost nothing, and every run
with the same seed is the same. Only Redis and Ray are played.
"""

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from agent.keys import INBOX
from cloud.clock import VirtualClock
from cloud.provider import Provider
from orchestrator.brain.holdings import ledger
from orchestrator.events import (
    AnyEvent,
    JobCancelled,
    JobSpec,
    JobSubmitted,
    ManagerStarted,
    QuotesKept,
    ShutdownAsked,
)
from orchestrator.live.world import LiveWorld
from orchestrator.loop import resume, run
from orchestrator.settings import Settings
from orchestrator.state import Lease, State
from orchestrator.world import MemoryJournal

LIVES_S_MAX = 7200.0
BLOCK_S = 1.0
RESOLUTION_S = 1e-3  # seconds since 1970 are no finer than 2e-7 in a float


class Killed(BaseException):
    """The manager's process is gone: nothing in it may handle this."""


class OffClock:
    """The clock of the manager's machine, which may differ from its cloud's."""

    def __init__(self, clock: VirtualClock, off_s: float) -> None:
        self._clock, self._off_s = clock, off_s

    def now_s(self) -> float:
        return self._clock.now_s() + self._off_s


class Doom:
    """Kills the process at its nth point, and keeps it dead."""

    def __init__(self, at: int) -> None:
        self._at, self.dead = at, False
        self.points: list[str] = []

    def point(self, name: str = "") -> None:
        self.points.append(name)
        self.dead = self.dead or len(self.points) == self._at
        if self.dead:
            raise Killed


class _Selector(selectors.SelectSelector):
    """Nothing is ever waited for but time."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found and timeout is None:
            raise RuntimeError("the manager waits for something that never comes")
        if not found and timeout:
            self._clock.advance_to(self._clock.now_s() + timeout)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is a virtual clock's."""

    def __init__(self, clock: VirtualClock) -> None:
        self._virtual = clock
        super().__init__(_Selector(clock))
        self._clock_resolution = RESOLUTION_S

    def time(self) -> float:
        return self._virtual.now_s()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except BaseException as error:
            future.set_exception(error)
        return future


class Store:
    """What the live world needs of Redis: the inbox, and places for what people read."""

    def __init__(self) -> None:
        self.inbox: dict[str, bytes] = {}
        self.lines: list[bytes] = []
        self.shown: dict[str, bytes] = {}
        self._serial = 0

    def post(self, event: AnyEvent) -> None:
        self._serial += 1
        self.inbox[f"{self._serial}-0"] = msgspec.json.encode(event)

    async def xread(self, streams: dict[str, str], **_: Any) -> Any:
        after = int(streams[INBOX].partition("-")[0])
        rows = [
            (key.encode(), {b"e": data})
            for key, data in self.inbox.items()
            if int(key.partition("-")[0]) > after
        ]
        if not rows:
            await asyncio.sleep(BLOCK_S)
        return [(INBOX, rows)] if rows else []

    async def xadd(self, _: str, fields: dict[str, bytes], **__: Any) -> None:
        self.lines.append(fields["e"])

    async def get(self, _: str) -> None:
        return None

    async def xrevrange(self, *_: Any, **__: Any) -> list[Any]:
        return []

    async def hmget(self, *_: Any) -> list[None]:
        return [None, None]

    async def hset(self, *_: Any, **__: Any) -> None:
        return None

    async def set(self, key: str, value: bytes) -> None:
        self.shown[key] = value


class Journal(MemoryJournal):
    """A journal that a dead manager cannot write, and that takes what it has from the inbox."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.inbox_id = ""
        self.doom: Doom | None = None

    async def append(self, event: AnyEvent, actions: Any) -> None:
        if self.doom is not None and self.doom.dead:
            raise Killed
        await super().append(event, actions)
        if self.inbox_id:
            self._store.inbox.pop(self.inbox_id, None)

    async def publish(self, shown: dict[str, bytes]) -> None:
        self._store.shown |= shown


class Engine:
    """No machine ever joins: it is bought, watched and given back all the same."""

    async def machines(self) -> set[str]:
        return set()

    async def do(self, action: Any) -> Awaitable[None]:
        """A life may end before it awaits the answer, which a coroutine would complain of."""
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(None)
        return answer


class History:
    """No prices are kept."""

    def keep(self, action: Any, now_s: float) -> QuotesKept:
        return QuotesKept(at_s=now_s)


class VirtualManager:
    """Lives of a manager, one after the other, over one journal and one inbox."""

    def __init__(
        self,
        clock: VirtualClock,
        deployment: str,
        machines: int = 3,
        disk_usd_per_h: float = 0.0,
        off_s: float = 0.0,
        salt: str = "",
    ) -> None:
        self.clock, self.wall = clock, OffClock(clock, off_s)
        self.state = State()
        self.store = Store()
        self.journal = Journal(self.store)
        self._settings = Settings(
            deployment=deployment,
            control_period_s=5.0,
            rethink_s=5.0,
            disk_usd_per_h=disk_usd_per_h,
        )
        self._epoch, self._salt = 0, salt
        self._cancel_at_s: float | None = None
        spec = JobSpec(
            job="job", script="train.py", script_sha="0" * 64, slots_max=machines, haste=1000.0
        )
        self.store.post(JobSubmitted(at_s=clock.now_s(), spec=spec))

    @property
    def spent_usd(self) -> float:
        """Return all that was charged, by the newest life."""
        return ledger.spent_usd(self.state.account, self.clock.now_s())

    @property
    def leases(self) -> list[Lease]:
        """Return every machine that the newest life knows of."""
        return [*self.state.ended_leases.values(), *self.state.leases.values()]

    def cancel(self, at_s: float) -> None:
        """Have the job cancelled at a time of the next life."""
        self._cancel_at_s = at_s

    def live(
        self,
        provider: Provider | Sequence[Provider],
        stops_at_s: float,
        doom: Doom | None = None,
        beside: "Sequence[tuple[VirtualManager, Sequence[Provider]]]" = (),
    ) -> bool:
        """Live one life until everything is given back; return False if it was killed.

        Managers `beside` it, each with its providers, live and end at the same time.
        """
        loop = VirtualLoop(self.clock)
        own = provider if isinstance(provider, Sequence) else [provider]
        lives = [self._live(own, stops_at_s, doom)]
        lives += [other._live(others, stops_at_s, None) for other, others in beside]

        async def together() -> None:
            await asyncio.wait_for(asyncio.gather(*lives), LIVES_S_MAX)

        try:
            loop.run_until_complete(together())
        except Killed:
            return False
        finally:
            loop.close()
        return True

    async def _live(
        self, providers: Sequence[Provider], stops_at_s: float, doom: Doom | None
    ) -> None:
        self._epoch += 1
        self.journal.doom = doom
        parts: dict[str, Any] = {"store": self.store, "journal": self.journal}
        world = LiveWorld(
            **parts,
            providers={provider.name: provider for provider in providers},
            engine=Engine(),
            clock=self.wall,
            quotes=History(),  # type: ignore[arg-type]
        )
        self.state = state = await resume(self.journal)
        stop = asyncio.create_task(self._stop(stops_at_s))
        await world.open(
            ManagerStarted(
                at_s=self.wall.now_s(),
                epoch=self._epoch,
                settings=self._settings,
                salt=f"s{self._salt}{self._epoch}",
            )
        )
        try:
            await run(world, self.journal, state, world.set_aside)
        finally:
            stop.cancel()
            await world.close()
            if doom is None or not doom.dead:
                await asyncio.gather(*(provider.close() for provider in providers))

    async def _stop(self, at_s: float) -> None:
        """Ask for the end at its time, once."""
        if self._cancel_at_s is not None:
            await asyncio.sleep(max(0.0, self._cancel_at_s - self.clock.now_s()))
            self.store.post(JobCancelled(at_s=self.clock.now_s(), job="job", by="the test"))
            self._cancel_at_s = None
        await asyncio.sleep(max(0.0, at_s - self.clock.now_s()))
        if not any(isinstance(x.event, ShutdownAsked) for x in self.journal.entries):
            self.store.post(ShutdownAsked(at_s=self.clock.now_s(), by="the test"))
