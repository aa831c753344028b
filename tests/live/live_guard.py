"""What stands between a test and an account that costs money: a cap, a line for each call, a sweep.

A scene of the contract suite uses fixed tokens and one tag. On a real account a token lives for a
day, and others may run the same scenes; so each run has its own tokens and its own tag, and the scene
does not see it.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec.structs import replace

from cloud.model import (
    DEPLOYMENT_TAG,
    Closed,
    LaunchRequest,
    Listing,
    Machine,
    Place,
    Quote,
    Ref,
    Sold,
)
from cloud.provider import Provider, Rehearses, Through

HELD_H = 1.0  # each machine is counted for a whole hour on demand, so that the cap is one
SCENES_TAG = "ours"


class CapReached(AssertionError):  # noqa: N818 - it names what happened
    """The next call could cost more than is left, so it was not made."""


class Guard(Through):
    """A provider of a run; it never lets a machine start that the run could not end."""

    def __init__(
        self,
        provider: Provider,
        run: str,
        deployment: str,
        cap_usd: float,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(provider)
        self._run, self._deployment = run, deployment
        self._say = say
        self.left_usd = cap_usd
        self._usd_per_h: dict[str, float] = {}

    async def places(self) -> Sequence[Place | Closed]:
        self._say("places")
        return await self._provider.places()

    async def sold(self, place: Place) -> Sold:
        self._say(f"sold {place.key}")
        sold = await self._provider.sold(place)
        self._usd_per_h |= {kind.name: kind.on_demand_usd_per_h for kind in sold.types}
        return sold

    async def quotes(self, place: Place) -> Sequence[Quote]:
        self._say(f"quotes {place.key}")
        return await self._provider.quotes(place)

    async def launch(self, request: LaunchRequest) -> Sequence[Machine]:
        assert request.tags.get(DEPLOYMENT_TAG) == SCENES_TAG, "nothing could end this machine"
        if request.pool.type not in self._usd_per_h:
            await self.sold(request.pool.place)
        usd = self._usd_per_h.get(request.pool.type, 0.0) * request.count * HELD_H
        what = f"launch {request.count} x {request.pool.key} {request.market} as {request.token}"
        if usd > self.left_usd:
            raise CapReached(f"{what}: at most ${usd:.2f}, and ${self.left_usd:.2f} are left")
        self.left_usd -= usd
        self._say(f"{what}: at most ${usd:.2f}, then ${self.left_usd:.2f} are left")
        ours = replace(
            request,
            token=f"{self._run}-{request.token}",
            tags=request.tags | {DEPLOYMENT_TAG: self._deployment},
        )
        return [self._seen(machine) for machine in await self._provider.launch(ours)]

    async def list(self, place: Place) -> Listing:
        self._say(f"list {place.key}")
        listing = await self._provider.list(place)
        return replace(listing, machines=tuple(self._seen(one) for one in listing.machines))

    async def end(self, refs: Sequence[Ref]) -> Sequence[Ref]:
        self._say(f"end {', '.join(ref.id for ref in refs)}")
        return await self._provider.end(refs)

    async def rehearse(self, refs: Sequence[Ref]) -> float:
        self._say(f"interrupt {', '.join(ref.id for ref in refs)}")
        assert isinstance(self._provider, Rehearses)
        return await self._provider.rehearse(refs)

    async def swept(self, at_most_s: float, wait: Callable[[], Awaitable[None]]) -> None:
        """End everything of this run, and look until the account lists nothing of it."""
        until_s = time.monotonic() + at_most_s
        places = [place for place in await self.places() if isinstance(place, Place)]
        while True:
            listings = [await self._provider.list(place) for place in places]
            refs: list[Ref] = []
            for listing in listings:
                refs += [one.ref for one in listing.machines if not one.gone]
                refs += [one.ref for one in listing.leftovers]
            if not refs:
                return
            assert time.monotonic() < until_s, f"still there, end them by hand: {refs}"
            await self.end(refs)
            await wait()

    def _seen(self, machine: Machine) -> Machine:
        tags: dict[str, Any] = dict(machine.tags)
        if tags.get(DEPLOYMENT_TAG) == self._deployment:
            tags[DEPLOYMENT_TAG] = SCENES_TAG
        return replace(machine, token=machine.token.removeprefix(f"{self._run}-"), tags=tags)
