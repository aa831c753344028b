"""Whatever a provider raises: the manager's world goes on, and a person is shown it once."""

import asyncio
import contextlib
from typing import Any

import pytest
from msgspec.structs import replace

from cloud.clock import VirtualClock
from cloud.errors import Misconfigured, NotAllowed, Refused, Unknown
from cloud.local.provider import LocalProvider
from cloud.market import LOCAL, SpotMarket
from cloud.model import Closed, LaunchRequest, Listing, Pace, Place, Ref, Room, Sold
from cloud.simulated import SimulatedCloud, SimulatedProvider
from orchestrator.actions import Launch, ListMachines, Terminate
from orchestrator.brain.decide import decide
from orchestrator.events import (
    CatalogueSeen,
    EndFailed,
    LaunchFailed,
    ListFailed,
    PlaceClosed,
    QuotesSeen,
    Terminated,
)
from orchestrator.live import world
from orchestrator.live.world import QUOTES_TOLD_S, ROOMS_S, LiveWorld
from orchestrator.state import State

WEST = Place("local", "local-west")


CLOUD = SimulatedCloud(SpotMarket(LOCAL, tempo=0), "ours")
POOL = CLOUD.sold(WEST).pools[0]
REQUEST = LaunchRequest(token="t", pool=POOL, market="spot", bid_usd_per_h=None, tags={})


def living(clock: VirtualClock, *providers: Any) -> LiveWorld:
    """A manager's world that has these clouds, or none."""
    parts: dict[str, Any] = {"journal": None, "engine": None, "quotes": None}
    named = dict(zip(("local",), providers, strict=False))
    return LiveWorld(store=Store(), providers=named, clock=clock, **parts)


class Errant(SimulatedProvider):
    """One region sells; of the other, and of every call, the SDK knows nothing good."""

    error: Exception = KeyError("Reservations")

    async def places(self) -> Any:
        return [*await super().places(), Closed(Place("local", "local-north"), "no key for it")]

    async def list(self, place: Place) -> Listing:
        raise self.error

    async def launch(self, request: LaunchRequest) -> Any:
        raise self.error


class Store:
    """What the world writes for people; nothing else of Redis is reached here."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    async def xadd(self, _: str, fields: dict[str, bytes], **__: Any) -> None:
        self.lines.append(fields["e"])


@pytest.mark.parametrize(
    "error", [KeyError("Reservations"), TypeError("x"), OSError("ssl"), Unknown("no answer")]
)
def test_an_exception_that_nobody_foresaw_is_an_unknown_outcome(error):
    """Lists fail, launches are unknown, closed places are said, and what works goes on."""

    async def play() -> None:
        clock = VirtualClock(1.0)
        provider = Errant(CLOUD, clock)
        provider.error = error
        world, follow = following(provider, clock)
        for _ in range(3):
            await world.perform(Launch(request=REQUEST, because="a test"))
            await world.perform(ListMachines(place=WEST, because="a test"))
        await world.perform(Terminate(ref=Ref(WEST, "i-1"), because="a test"))
        found: list[Any] = []
        async with asyncio.timeout(10):
            while sum(isinstance(event, (LaunchFailed, ListFailed)) for event in found) < 6:
                found.append((await world._queue.get())[1])
            while not {CatalogueSeen, PlaceClosed} <= {type(event) for event in found}:
                found.append((await world._queue.get())[1])
        follow.cancel()
        await world.close()
        assert world._broken is None
        assert not [event for event in found if isinstance(event, Terminated)]
        assert not any(event.refused for event in found if isinstance(event, EndFailed))
        failed = [event for event in found if isinstance(event, LaunchFailed)]
        assert {(one.code, one.refusal) for one in failed} == {("Unknown", None)}
        said = [line for line in world._store.lines if b"no answer that is known" in line]
        assert len(said) == (0 if isinstance(error, Unknown) else 1)

    asyncio.run(play())


class Away(SimulatedProvider):
    """Nobody listens there, as while a cloud is started again."""

    times = 2
    pace = Pace(list_s=1.0, offers_s=0.01, sold_s=3600.0, grace_s=1.0, boot_s=1.0)  # type: ignore[assignment]

    async def places(self) -> Any:
        if self.times:
            self.times -= 1
            return await LocalProvider("http://127.0.0.1:1", "token", "ours").places()
        return await super().places()


def test_a_cloud_that_was_not_reached_is_asked_again_at_once():
    """A manager that starts while its cloud is away sees what is sold as soon as it is back."""

    async def play() -> None:
        clock = VirtualClock(1.0)
        world, follow = following(Away(CLOUD, clock), clock)
        async with asyncio.timeout(20):
            while not isinstance((await world._queue.get())[1], CatalogueSeen):
                pass
        follow.cancel()
        await world.close()

    asyncio.run(play())


class Shop(SimulatedProvider):
    """One region, asked often, whose keys, catalogue and quota are as a test says."""

    pace = Pace(list_s=1.0, offers_s=0.01, sold_s=3600.0, grace_s=1.0, boot_s=1.0)  # type: ignore[assignment]
    rooms: tuple[Room, ...] = ()
    keeps_quiet = False  # of what it sells
    quoted = 0
    closed = False

    async def places(self) -> Any:
        closed = Closed(WEST, "ExpiredToken: the keys have expired")
        return [closed if self.closed and x == WEST else x for x in await super().places()]

    async def quotes(self, place: Place) -> Any:
        self.quoted += place == WEST
        return await super().quotes(place)

    async def sold(self, place: Place) -> Sold:
        if self.keeps_quiet:
            raise NotAllowed("AccessDeniedException: list_service_quotas")
        return replace(await super().sold(place), rooms=self.rooms)


def following(provider: Any, clock: VirtualClock) -> tuple[LiveWorld, "asyncio.Task[None]"]:
    world = living(clock, provider)
    return world, asyncio.create_task(world._follow_places(provider))


@pytest.mark.parametrize("full", [True, False])
def test_a_quota_that_is_full_is_read_again_within_minutes(full):
    """What others end, and a quota that was raised, is not waited for until the next day."""

    async def play() -> None:
        clock = VirtualClock(1.0)
        provider = Shop(CLOUD, clock)
        provider.rooms = (
            Room(place=WEST, market="spot", vcpus_max=4, vcpus_used=4 if full else 3),
        )
        world, follow = following(provider, clock)
        told = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                while told < 3:
                    event = (await world._queue.get())[1]
                    if isinstance(event, CatalogueSeen) and event.place == WEST:
                        told += 1
                        clock.advance_to(clock.now_s() + ROOMS_S)
        follow.cancel()
        await world.close()
        assert told == (3 if full else 1)

    asyncio.run(play())


def test_prices_are_followed_while_a_place_does_not_say_what_it_sells(monkeypatch):
    """A permission that is taken away freezes neither bills nor the prices at which is bought."""
    monkeypatch.setattr(world, "QUOTES_S", 0.005)
    monkeypatch.setattr(world, "QUOTES_S_MAX", 0.01)

    async def play() -> None:
        clock = VirtualClock(1.0)
        provider = Shop(CLOUD, clock)
        lives, follow = following(provider, clock)
        async with asyncio.timeout(20):
            while not isinstance((await lives._queue.get())[1], QuotesSeen):
                pass
            provider.keeps_quiet = True
            clock.advance_to(clock.now_s() + provider.pace.sold_s)
            before, told = provider.quoted, 0
            while provider.quoted < before + 3 or told < 3:
                event = (await lives._queue.get())[1]
                told += isinstance(event, QuotesSeen) and event.place == WEST
                clock.advance_to(clock.now_s() + QUOTES_TOLD_S)
        follow.cancel()
        await lives.close()
        said = [line for line in lives._store.lines if WEST.key.encode() in line]
        assert len([line for line in said if b"does not say what it sells" in line]) == 1

    asyncio.run(play())


def test_a_region_that_opens_again_is_bought_from_again(monkeypatch):
    """Keys had expired and were renewed; what it sells is what it was."""
    monkeypatch.setattr(world, "CLOSED_S", 0.01)

    async def play() -> None:
        clock = VirtualClock(1.0)
        provider = Shop(CLOUD, clock)
        provider.pace = replace(provider.pace, sold_s=0.02)
        lives, follow = following(provider, clock)
        state, was = State(), []
        async with asyncio.timeout(20):
            while len(was) < 3:
                event = (await lives._queue.get())[1]
                state, _ = decide(state, event)
                here = state.places.get(WEST.key)
                if here is not None and bool(here.closed) == (len(was) == 1):
                    was.append(here.closed)
                    provider.closed = len(was) == 1
        follow.cancel()
        await lives.close()
        assert "ExpiredToken" in was[1]

    asyncio.run(play())


def test_what_nobody_heard_was_refused_and_not_perhaps_done():
    """Else it would be waited for until a list shows that it never started."""

    async def play() -> None:
        provider = LocalProvider("http://127.0.0.1:1", "token", "ours")
        with pytest.raises(Refused) as raised:
            await provider.launch(REQUEST)
        await provider.close()
        assert raised.value.refusal.scope == "place"
        assert raised.value.refusal.retry_s == 1.0

    asyncio.run(play())


def test_a_refusal_reaches_the_brain_as_the_cloud_gave_it():
    async def play() -> None:
        clock = VirtualClock(1.0)
        provider = Errant(CLOUD, clock)
        provider.error = Refused("market", "OperationNotAllowed", "low priority cores", 3600.0)
        world = living(clock, provider)
        await world.perform(Launch(request=REQUEST, because="a test"))
        async with asyncio.timeout(10):
            _, event = await world._queue.get()
        await world.close()
        assert (event.refusal.scope, event.refusal.retry_s) == ("market", 3600.0)

    asyncio.run(play())


def test_an_account_that_is_blocked_is_not_left_out_of_the_settings():
    """Machines may be held there, so `down` does not take what it knows for all."""

    async def play(error: Exception | None) -> bool:
        clock = VirtualClock(1.0)
        provider = Errant(CLOUD, clock)
        provider.error = error or provider.error
        world = living(clock, *([provider] if error else []))
        await world.perform(ListMachines(place=WEST, because="a test"))
        async with asyncio.timeout(10):
            _, event = await world._queue.get()
        await world.close()
        assert isinstance(event, ListFailed)
        return event.left_out

    assert not asyncio.run(play(Misconfigured("Blocked: ask the support")))
    assert asyncio.run(play(Refused("place", "NotSold", "not among the regions")))
    assert asyncio.run(play(None))


def test_a_cloud_that_was_switched_off_ends_no_manager():
    """Its machines are in the journal still: what is asked of it fails, and is said once."""

    async def play() -> None:
        world = living(VirtualClock(1.0))
        await world.perform(Terminate(ref=Ref(WEST, "i-1"), because="a test"))
        await world.perform(ListMachines(place=WEST, because="a test"))
        await world.perform(Launch(request=REQUEST, because="a test"))
        async with asyncio.timeout(10):
            found = [(await world._queue.get())[1] for _ in range(3)]
        await world.close()
        assert world._broken is None
        assert {type(event) for event in found} == {EndFailed, ListFailed, LaunchFailed}
        assert len([line for line in world._store.lines if b"off in the settings" in line]) == 1

    asyncio.run(play())
