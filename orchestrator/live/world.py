"""The live world: clouds, Ray, the wall clock, and the inbox.

Everything that takes time runs as a task beside the loop, and its outcome comes back as an event.
Failures of the outside world are never raised into the loop; only a newer manager ends it.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar, assert_never

import msgspec
import redis.asyncio

from agent.keys import EVENTS, GUESTS, INBOX, INBOX_ASIDE, INBOX_READ, INBOX_TRIED, READING, VIEW
from agent.messages import AgentLost, NoticeSeen, WorkerLost
from cloud.clock import Clock, ticks
from cloud.errors import NOT_REACHED, CloudError, Misconfigured, NotOurs, Throttled, Unknown
from cloud.model import Closed, Market, Place, Pool, Quote, Sold
from cloud.provider import Provider
from cloud.ranges import explain, flaw_in
from orchestrator.actions import (
    AnyAction,
    CloseJob,
    KeepQuotes,
    Launch,
    ListMachines,
    Note,
    OpenJob,
    Regroup,
    StartWorker,
    Stop,
    StopWorker,
    Terminate,
    WriteCheckpoint,
)
from orchestrator.brain.handlers import layout_changes
from orchestrator.brain.layouts import layout_choice
from orchestrator.brain.layouts.layout_choice import Question
from orchestrator.brain.sentences import sentence
from orchestrator.door.guests import guests_of
from orchestrator.errors import OrchestratorError
from orchestrator.events import (
    AnyEvent,
    CatalogueSeen,
    EndFailed,
    EventSetAside,
    Launched,
    LaunchFailed,
    Listed,
    ListFailed,
    PlaceClosed,
    QuotesSeen,
    Terminated,
    Tick,
)
from orchestrator.history.meter import is_told, reading_of
from orchestrator.journal import RedisJournal
from orchestrator.live.price_files import QuoteStore
from orchestrator.loop import said_of
from orchestrator.state import State
from orchestrator.validity import conflict_in, flaw_of
from orchestrator.view_builder import view_of

QUOTES_S = 1.0
QUOTES_TOLD_S = 60.0  # the longest time between two events with prices, even without news
CLOSED_S = 600.0
ROOMS_S = 600.0  # the shortest time between two readings of a quota that is full
NOTICES_AGAIN_S = 60.0
UNFORESEEN_MAX = 1000
QUOTES_S_MAX = 60.0
NODES_S = 0.25
ORDER_AGAIN_S = 2.0
VIEW_S = 0.2
READING_S = 1.0  # it names every machine, and so it is made less often than the view
CANCEL_S = 1.0
INBOX_BATCH = 200
INBOX_BLOCK_MS = 1000
EVENTS_KEPT = 10_000
ASIDE_KEPT = 100
ASIDE_BYTES_MAX = 1 << 16  # of one entry; the rest of it is cut off
ENDS_MAX = 2  # of managers, each in the middle of deciding about the same entry
ENDED = f"{ENDS_MAX} managers ended while they decided about it"
TASKS_MAX = 10_000
LEFT_OUT = "NotSold"  # the code of a region that the settings do not have any more

T = TypeVar("T")


EngineAction = OpenJob | CloseJob | StartWorker | StopWorker | Regroup | WriteCheckpoint


class EngineError(OrchestratorError):
    """An agent or the keeper could not be reached."""


class NoAgent(EngineError):  # noqa: N818 - it says what is the case
    """A machine has no agent in this cluster: it has not joined yet, or belonged to an earlier one."""


class Engine(Protocol):
    """What runs the agents and the keeper: Ray in production."""

    async def machines(self) -> set[str]:
        """Return the machines whose node is up, and start the agent of a new one."""
        ...

    async def do(self, action: "EngineAction") -> Awaitable[None]:
        """Send the action to the keeper or the agent, in the order of the calls.

        The awaitable ends when the order was accepted, or raises `EngineError`. Repeating an
        order has no effect.
        """
        ...


class LiveWorld:
    """The world in production: all events through one queue, actions as tasks."""

    def __init__(
        self,
        *,
        store: "redis.asyncio.Redis",
        journal: RedisJournal,
        providers: Mapping[str, Provider],
        engine: Engine,
        clock: Clock,
        quotes: QuoteStore,
    ) -> None:
        self._store = store
        self._journal = journal
        self._providers = providers
        self._engine = engine
        self._clock = clock
        self._quotes = quotes
        self._queue: asyncio.Queue[tuple[str, AnyEvent]] = asyncio.Queue(maxsize=TASKS_MAX)
        self._tasks: set[asyncio.Task[None]] = set()
        self._before_tick = 1  # so many events come before the next tick, also if it is due
        self._shown_at_s = 0.0
        self._metered_at_s = 0.0
        self._newest: State | None = None
        self._shows_later = False
        self._asked: tuple[Question, ...] = ()
        self._foreseeing = False
        self._broken: BaseException | None = None
        self._waited_to = (0, 0)  # the last entry that waited in the inbox when this life began
        self._unforeseen: set[str] = set()
        self._reopened: set[Place] = set()  # what each of them sells is to be told anew
        self._standing: dict[str, OpenJob | CloseJob] = {}  # by job: not taken by the keeper yet

    async def open(self, first: AnyEvent) -> None:
        """Begin to collect events. `first` is the event that a manager's life starts with."""
        self._queue.put_nowait(("", first))
        for provider in self._providers.values():
            self._spawn(self._follow_places(provider))
            self._spawn(self._follow_notices(provider))
        self._spawn(self._follow_nodes())
        self._spawn(self._follow_inbox())

    async def close(self) -> None:
        """Cancel all tasks, again and again until all have ended.

        A task that is just sending to Redis may lose a cancellation.
        """
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=CANCEL_S)

    # --- events -----------------------------------------------------------------------------

    async def next_event(self, by_s: float) -> AnyEvent | None:
        """Return what comes next; `by_s` is when a `Tick` is due.

        A `Tick` that is due goes before what waits, because no other event moves time past it: what
        a manager that stood still hears late would count as earlier than it was. All that waited
        when one had come is before the next one, also if deciding takes longer than their period.
        """
        if self._broken is not None:
            raise self._broken
        patience_s = max(0.0, by_s - self._clock.now_s())
        if not self._before_tick and not patience_s:
            return self._tick()
        try:
            async with asyncio.timeout(patience_s):
                entry, event = await self._queue.get()
        except TimeoutError:
            return self._tick()
        self._journal.inbox_id, self._before_tick = entry, max(0, self._before_tick - 1)
        if entry and _place_of(entry) <= self._waited_to and await self._ended_by(entry):
            event = await self._put_aside(entry, event, ENDED)
        # Senders have different clocks, so an event may claim to be later than now.
        return msgspec.structs.replace(event, at_s=min(event.at_s, self._clock.now_s()))

    def _tick(self) -> Tick:
        self._journal.inbox_id, self._before_tick = "", max(1, self._queue.qsize())
        return Tick(at_s=self._clock.now_s())

    async def _follow_inbox(self) -> None:
        """Read the durable inbox; only the journal entry for an event deletes it there."""
        read: Any = await self._store.get(INBOX_READ)
        after = read.decode() if read else "0"
        newest: Any = await self._store.xrevrange(INBOX, count=1)
        if newest:
            self._waited_to = _place_of(newest[0][0].decode())
        while True:
            answer: Any = await self._store.xread(
                {INBOX: after}, count=INBOX_BATCH, block=INBOX_BLOCK_MS
            )
            for _, rows in answer or []:
                for key, fields in rows:
                    after = key.decode()
                    await self._receive(after, fields)

    async def _receive(self, entry: str, fields: Mapping[bytes, bytes]) -> None:
        """Queue an entry of the inbox; one that is no event, or a flawed one, is set aside."""
        said = fields.get(b"e", b"")
        try:
            event: AnyEvent = msgspec.json.decode(said, type=AnyEvent)
            flaw = conflict_in(event)
        except msgspec.ValidationError as error:
            plain: object = None
            with contextlib.suppress(ValueError, RecursionError):
                plain = msgspec.json.decode(said)  # what comes after the flaw may be no JSON
            flaw = explain(error, plain)
        except (ValueError, RecursionError) as error:
            flaw = f"it cannot be read ({error})"
        await self._queue.put((entry, await self._put_aside(entry, said, flaw) if flaw else event))

    # --- what is set aside ------------------------------------------------------------------

    async def set_aside(self, event: AnyEvent, error: Exception) -> EventSetAside:
        """Set the present event aside, because deciding about it fails."""
        why = f"deciding about it failed twice in {said_of(error)}"
        return await self._put_aside(self._journal.inbox_id, event, why)

    async def _put_aside(self, entry: str, said: AnyEvent | bytes, why: str) -> EventSetAside:
        """Keep what was said where a person finds it, and return the event that says so."""
        kind = "an entry" if isinstance(said, bytes) else type(said).__name__
        data = said if isinstance(said, bytes) else repr(said).encode(errors="backslashreplace")
        fields: Any = {"e": data[:ASIDE_BYTES_MAX], "entry": entry, "why": why}
        await self._store.xadd(INBOX_ASIDE, fields, maxlen=ASIDE_KEPT, approximate=False)
        return EventSetAside(at_s=self._clock.now_s(), kind=kind, entry=entry, why=why)

    async def _ended_by(self, entry: str) -> bool:
        """Note that this entry is tried; return whether managers have ended of it before.

        It waited when this life began, so the manager before may have been killed by it: by too
        much memory, or because it decided without end.
        """
        found: Any = self._store.hmget(INBOX_TRIED, ["entry", "times"])
        tried, times = await found
        before = int(times) if tried == entry.encode() else 0
        noted: Any = self._store.hset(INBOX_TRIED, mapping={"entry": entry, "times": before + 1})
        await noted
        return before >= ENDS_MAX

    async def _follow_places(self, provider: Provider) -> None:
        """Follow every place that is open; ask now and then for those that were closed."""
        followed: set[Place] = set()
        shut: set[Place] = set()
        while True:
            closed_s = CLOSED_S
            try:
                places = await self._heard(provider, provider.places())
            except CloudError as error:
                places = [Closed(Place(provider.name, ""), str(error))]
                closed_s = _again_s(provider, error) or CLOSED_S
            for place in places:
                if isinstance(place, Closed):
                    shut |= followed & {place.place}
                    self._reopened.discard(place.place)
                    await self._tell(PlaceClosed(at_s=self._clock.now_s(), closed=place))
                elif place not in followed:
                    followed.add(place)
                    self._spawn(self._follow_prices(provider, place))
                elif place in shut:
                    shut.remove(place)
                    self._reopened.add(place)
            closed = any(isinstance(place, Closed) for place in places)
            await asyncio.sleep(closed_s if closed else provider.pace.sold_s)

    async def _follow_notices(self, provider: Provider) -> None:
        """Report what a cloud announces beside its machines' own metadata."""
        while True:
            with contextlib.suppress(CloudError):
                notices = aiter(provider.notices())
                while (notice := await self._heard(provider, anext(notices, None))) is not None:
                    await self._tell(NoticeSeen(at_s=self._clock.now_s(), notice=notice))
            await asyncio.sleep(NOTICES_AGAIN_S)

    async def _follow_prices(self, provider: Provider, place: Place) -> None:
        """Report what a place sells, and its prices also while it does not say what it sells."""
        known: set[Quote] = set()
        sold: Sold | None = None
        sold_at_s = quoted_at_s = told_at_s = -math.inf
        pause_s, failing = 0.0, ""
        while True:
            wrong: CloudError | None = None
            try:
                due_s = sold_at_s + _sold_again_s(provider, sold)
                if self._clock.now_s() >= due_s or place in self._reopened:
                    sold = await self._heard(provider, provider.sold(place))
                    sold_at_s = self._clock.now_s()
                    self._reopened.discard(place)
                    await self._tell(
                        CatalogueSeen(
                            at_s=sold_at_s,
                            place=place,
                            sold=sold,
                            traits=provider.traits,
                            pace=provider.pace,
                        )
                    )
            except CloudError as error:
                wrong = error
            try:
                fresh: tuple[Quote, ...] = ()
                if sold is not None and self._clock.now_s() >= quoted_at_s + provider.pace.offers_s:
                    seen = await self._heard(provider, provider.quotes(place))
                    quoted_at_s = self._clock.now_s()
                    quotes = {quote for quote in seen if not flaw_in(quote, Quote)}
                    fresh = tuple(sorted(quotes - known, key=_oldest_first))
                    known = quotes
            except CloudError as error:
                wrong = wrong or error
            else:
                now_s = self._clock.now_s()
                # Without a regular event the prices would be taken for old.
                if sold is not None and (fresh or now_s >= told_at_s + QUOTES_TOLD_S):
                    told_at_s = now_s
                    await self._tell(QuotesSeen(at_s=now_s, place=place, quotes=fresh))
            if wrong is None:
                pause_s, failing = min(provider.pace.offers_s, QUOTES_TOLD_S), ""
            else:
                longer_s = min(max(2 * pause_s, 2 * QUOTES_S), QUOTES_S_MAX)
                pause_s = _again_s(provider, wrong) or longer_s
                if wrong.code != failing:
                    failing = wrong.code
                    why = f"does not say what it sells: {wrong}; asking again and again"
                    await self.perform(Note(who=place.key, because=why))
            await asyncio.sleep(pause_s)

    async def _follow_nodes(self) -> None:
        """Report a machine's agent as lost when its node leaves the cluster."""
        seen: set[str] = set()
        while True:
            now = await self._engine.machines()
            for machine in sorted(seen - now):
                why = "its node left the cluster"
                await self._tell(AgentLost(at_s=self._clock.now_s(), machine_id=machine, why=why))
            seen = now
            await asyncio.sleep(NODES_S)

    # --- actions ----------------------------------------------------------------------------

    async def perform(self, action: AnyAction) -> None:
        line = sentence(action, self._clock.now_s())
        if line is not None:
            fields: Any = {"e": msgspec.json.encode(line)}
            await self._store.xadd(EVENTS, fields, maxlen=EVENTS_KEPT, approximate=True)
        match action:
            case Launch():
                self._spawn(self._launch(action))
            case Terminate():
                self._spawn(self._terminate(action))
            case ListMachines():
                self._spawn(self._list(action.place))
            case KeepQuotes():
                self._spawn(self._keep(action))
            case OpenJob() | CloseJob():
                job = action.order.job if isinstance(action, OpenJob) else action.job
                self._standing[job] = action  # from here on no older one is given again
                self._spawn(self._insist(job, action, await self._engine.do(action)))
            case StartWorker() | StopWorker() | Regroup() | WriteCheckpoint():
                self._spawn(self._outcome(action, await self._engine.do(action)))
            case Note() | Stop():
                pass
            case _:
                assert_never(action)

    async def _launch(self, action: Launch) -> None:
        request = action.request
        try:
            provider = await self._provider(request.pool.cloud)
            machines = await self._heard(provider, provider.launch(request))
        except CloudError as error:
            await self._tell(
                LaunchFailed(
                    at_s=self._clock.now_s(),
                    token=request.token,
                    code=error.code,
                    error=str(error),
                    refusal=error.refusal,
                )
            )
        else:
            for machine in machines:
                at_s = self._clock.now_s()
                await self._tell(Launched(at_s=at_s, token=request.token, machine=machine))

    async def _terminate(self, action: Terminate) -> None:
        """End a machine. After a failed call the brain sees it in the list and asks again."""
        try:
            provider = await self._provider(action.ref.place.cloud)
            ended = await self._heard(provider, provider.end([action.ref]))
        except Throttled:
            return
        except CloudError as error:
            definite = error.refusal is not None and error.code != NOT_REACHED
            refused = definite or isinstance(error, NotOurs)
            at_s, said = self._clock.now_s(), str(error)
            await self._tell(EndFailed(at_s=at_s, ref=action.ref, error=said, refused=refused))
        else:
            for ref in ended:
                await self._tell(Terminated(at_s=self._clock.now_s(), ref=ref))

    async def _list(self, place: Place) -> None:
        asked_at_s = self._clock.now_s()
        try:
            provider = await self._provider(place.cloud)
            listing = await self._heard(provider, provider.list(place))
        except CloudError as error:
            at_s, said = self._clock.now_s(), str(error)
            left_out = place.cloud not in self._providers or error.code == LEFT_OUT
            await self._tell(ListFailed(at_s=at_s, place=place, error=said, left_out=left_out))
        else:
            at_s = self._clock.now_s()
            await self._tell(Listed(at_s=at_s, asked_at_s=asked_at_s, listing=listing))

    async def _provider(self, name: str) -> Provider:
        """Return a cloud; one that is off raises `Misconfigured`, and a person is shown it once.

        The journal may hold machines there, and the other clouds go on without it.
        """
        if (provider := self._providers.get(name)) is not None:
            return provider
        said = (
            f"{name} is off in the settings, so machines that we hold there are neither seen nor "
            "ended, and cost money; turn it on again"
        )
        await self._show_once(name, said, said)
        raise Misconfigured(said, "cloud")

    async def _heard(self, provider: Provider, call: Awaitable[T]) -> T:
        """Return a provider's answer, or raise a `CloudError`: nothing else gets out of a cloud.

        What it does not foresee says nothing about what was done, so it is `Unknown`, and a person
        is shown it once.
        """
        try:
            return await call
        except CloudError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            why = f"{said}: no answer that is known; the next list tells what was done"
            await self._show_once(provider.name, said, why)
            raise Unknown(said) from error

    async def _show_once(self, who: str, said: str, why: str) -> None:
        if said not in self._unforeseen and len(self._unforeseen) < UNFORESEEN_MAX:
            self._unforeseen.add(said)
            await self.perform(Note(who=who, because=why))

    async def _keep(self, action: KeepQuotes) -> None:
        """Keep prices in a thread beside the loop, because the whole history is written."""
        now_s = self._clock.now_s()
        await self._tell(await asyncio.to_thread(self._quotes.keep, action, now_s))

    async def _outcome(self, action: EngineAction, taken: Awaitable[None]) -> None:
        """Report a worker that could not be started; the brain repeats the orders about layouts.

        Where there is no agent, a machine of an earlier cluster is on its way to this one.
        """
        try:
            await taken
        except EngineError as error:
            if not isinstance(action, StartWorker):
                return
            at_s, why = self._clock.now_s(), str(error)
            if isinstance(error, NoAgent):
                await self._tell(AgentLost(at_s=at_s, machine_id=action.machine_id, why=why))
            else:
                await self._tell(
                    WorkerLost(
                        at_s=at_s, job=action.job, worker=action.worker, cause="machine", detail=why
                    )
                )

    async def _insist(self, job: str, action: OpenJob | CloseJob, taken: Awaitable[None]) -> None:
        """Give an order about a job again until the keeper takes it, or a newer one comes.

        Workers of a job that was never opened are turned away, and their machines are paid for.
        """
        while True:
            try:
                await taken
                break
            except EngineError:
                await asyncio.sleep(ORDER_AGAIN_S)
            if self._standing.get(job) is not action:
                return
            taken = await self._engine.do(action)
        if self._standing.get(job) is action:
            del self._standing[job]

    # --- showing ----------------------------------------------------------------------------

    async def show(self, state: State) -> None:
        """Publish now, or in a moment if that was done a moment ago: the newest state is shown."""
        self._newest = state
        wait_s = self._shown_at_s + VIEW_S - self._clock.now_s()
        if not 0 < wait_s <= VIEW_S:
            self._shown_at_s = self._clock.now_s()
            await self.publish(state)
        elif not self._shows_later:
            self._shows_later = True
            self._spawn(self._show_later(wait_s))

    async def _show_later(self, wait_s: float) -> None:
        """Publish what would else wait for the next event: machines wait to be expected."""
        await asyncio.sleep(wait_s)
        self._shows_later = False
        if self._newest is not None:
            self._shown_at_s = self._clock.now_s()
            await self.publish(self._newest)

    async def publish(self, state: State) -> None:
        now_s = self._clock.now_s()
        view = msgspec.structs.replace(view_of(state, now_s), tick_s=ticks())
        said = {VIEW: msgspec.json.encode(view), GUESTS: msgspec.json.encode(guests_of(state))}
        due = is_told(state) and not 0 <= now_s - self._metered_at_s < READING_S
        if due or state.stopped:
            self._metered_at_s = now_s
            said[READING] = msgspec.json.encode(reading_of(state, now_s))
        await self._journal.publish(said)
        asked = layout_changes.questions(state)
        if asked != self._asked and not self._foreseeing:
            self._asked, self._foreseeing = asked, True
            self._spawn(self._foresee(asked))

    async def _foresee(self, asked: tuple[Question, ...]) -> None:
        """Plan layouts beside the loop, so that the layout after a loss is ready."""
        try:
            for question in asked:
                await asyncio.to_thread(layout_choice.foresee, question)
        finally:
            self._foreseeing = False

    # --- tasks ------------------------------------------------------------------------------

    async def _tell(self, event: AnyEvent) -> None:
        if flaw := flaw_of(event):
            event = await self._put_aside("", event, flaw)
        await self._queue.put(("", event))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        """End this manager if a task failed in an unforeseen way; Ray starts the next one."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._broken = task.exception()


def _again_s(provider: Provider, error: CloudError) -> float | None:
    """Return when to ask a cloud again that was not reached; asking one that hears nothing is no burden."""
    return min(provider.pace.offers_s, QUOTES_S_MAX) if error.code == NOT_REACHED else None


def _sold_again_s(provider: Provider, sold: Sold | None) -> float:
    """Return how long what is sold stays true; where a quota is full, room may be made soon.

    It is told also if it has not changed, because what was bought since then is not in it.
    """
    longest_s = provider.pace.sold_s
    if sold is None:
        return longest_s
    families = {"", *(kind.family for kind in sold.types)}
    bounds = (room for room in sold.rooms if room.family in families)
    full = any(room.vcpus_used >= room.vcpus_max for room in bounds)
    return min(longest_s, max(ROOMS_S, provider.pace.offers_s)) if full else longest_s


def _place_of(entry: str) -> tuple[int, int]:
    """Return the place of an entry's id in the order of a stream."""
    at_ms, _, nth = entry.partition("-")
    return int(at_ms), int(nth)


def _oldest_first(quote: Quote) -> tuple[float, Pool, Market]:
    return quote.at_s, quote.pool, quote.market
