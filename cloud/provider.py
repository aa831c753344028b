"""The one interface to every cloud, with seven verbs.

Every implementation passes the same suite, `tests/contract/test_providers.py`. A provider raises
nothing but `cloud.errors`; what it cannot place there is `Unknown`.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from cloud.model import (
    Closed,
    LaunchRequest,
    Listing,
    Machine,
    Notice,
    Pace,
    Place,
    Pool,
    Quote,
    Ref,
    Score,
    Sold,
    Traits,
)


class Provider(Protocol):
    """Machines of one cloud in all its places, as seen by one deployment of ours."""

    @property
    def name(self) -> str:
        """The `cloud` field of its places."""
        ...

    @property
    def traits(self) -> Traits: ...

    @property
    def pace(self) -> Pace: ...

    async def places(self) -> Sequence[Place | Closed]:
        """Return the places that the settings name; a closed one says why in one sentence."""
        ...

    async def sold(self, place: Place) -> Sold:
        """Return the types, pools and quotas of a place, and its recipe as resolved now."""
        ...

    async def quotes(self, place: Place) -> Sequence[Quote]:
        """Return the present price of every pool and market there that has one."""
        ...

    async def launch(self, request: LaunchRequest) -> Sequence[Machine]:
        """Start all machines of the request or none, once per token.

        `Refused` says that none was started; `Unknown` that only the list can tell.
        """
        ...

    async def list(self, place: Place) -> Listing:
        """Return everything of ours in a place: the whole of it or an error, never a part."""
        ...

    async def end(self, refs: Sequence[Ref]) -> Sequence[Ref]:
        """Ask for the end of machines and leftovers; return those that cost nothing any more.

        An ended one is returned, and one that the cloud does not know is left out, because it may
        be too young to be seen. One that is not ours raises `NotOurs`, and then none is ended.
        """
        ...

    def notices(self) -> AsyncIterator[Notice]:
        """Yield what the cloud announces beside its machines' metadata; it may never say anything."""
        ...

    async def close(self) -> None: ...


class Through:
    """A provider that hands every call to another one; what it keeps back, it has itself."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    @property
    def name(self) -> str:
        return self._provider.name

    @property
    def traits(self) -> Traits:
        return self._provider.traits

    @property
    def pace(self) -> Pace:
        return self._provider.pace

    async def places(self) -> Sequence[Place | Closed]:
        return await self._provider.places()

    async def sold(self, place: Place) -> Sold:
        return await self._provider.sold(place)

    async def quotes(self, place: Place) -> Sequence[Quote]:
        return await self._provider.quotes(place)

    async def launch(self, request: LaunchRequest) -> Sequence[Machine]:
        return await self._provider.launch(request)

    async def list(self, place: Place) -> Listing:
        return await self._provider.list(place)

    async def end(self, refs: Sequence[Ref]) -> Sequence[Ref]:
        return await self._provider.end(refs)

    def notices(self) -> AsyncIterator[Notice]:
        return self._provider.notices()

    async def close(self) -> None:
        await self._provider.close()


@runtime_checkable
class Scores(Protocol):
    """What some clouds say besides: how likely spot machines are to be had in a pool."""

    async def scores(self, place: Place) -> Mapping[Pool, Score]:
        """Return what the cloud says of each pool: a number from 1 to 10, or its own word."""
        ...


@runtime_checkable
class Rehearses(Protocol):
    """What some clouds do besides: interrupt a spot machine as they would, to see what happens."""

    async def rehearse(self, refs: Sequence[Ref]) -> float:
        """Have machines of ours interrupted; return the seconds of notice that the cloud gives.

        One that is not ours raises `NotOurs`, and then none is interrupted.
        """
        ...


async def all_machines(provider: Provider) -> Sequence[Machine]:
    """Return what the lists of all open places hold; a place that does not answer raises."""
    places = [place for place in await provider.places() if isinstance(place, Place)]
    return [machine for place in places for machine in (await provider.list(place)).machines]


async def no_notices() -> AsyncIterator[Notice]:
    """Yield nothing: the machines of this cloud read their notices in their metadata."""
    nothing: tuple[Notice, ...] = ()
    for notice in nothing:
        yield notice
