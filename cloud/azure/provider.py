"""Azure as a provider: launches under names, asks for deletions, and believes only lists."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from cloud import errors
from cloud.azure import calls, machines, offers, refusals
from cloud.azure.connection import NO_SDK, Connection, has_sdk
from cloud.azure.settings import AzureSettings
from cloud.clock import CLOCK, Clock
from cloud.model import (
    Closed,
    LaunchRequest,
    Leftover,
    Listing,
    Machine,
    Market,
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
from cloud.provider import no_notices

NAME = "azure"
WARNING_S = 30.0
DELETE = {"disk": calls.delete_disk, "nic": calls.delete_nic}
ENDED_LISTED_S = 600.0
"""How long a list has a machine that we have ended, with the date that Azure gives for it."""
VIEWS_A_LIST = 8
"""Machines whose power is looked at in one list: a list holds no power, and a look is a call."""
SLOW_S = 120.0
"""How long only what is needed is called for, after a call was refused for its number."""

_Answer = TypeVar("_Answer")


class _End(msgspec.Struct):
    """A deletion that we asked for, and the machine as it was listed last."""

    operation: str
    asked_at_s: float
    machine: Machine | None = None
    at_s: float | None = None


class AzureProvider:
    """The machines of one deployment in one resource group.

    `credential`, `policies` and `session` are handed to the SDK; tests use them.
    """

    def __init__(
        self,
        settings: AzureSettings,
        deployment: str,
        clock: Clock = CLOCK,
        **sdk: Any,
    ) -> None:
        self._settings = settings
        self._deployment = deployment
        self._clock = clock
        self._group = settings.resource_group
        self._connection = Connection(settings, **sdk)
        self._open: set[str] = set()
        self._views: dict[str, dict[str, tuple[float, machines.View]]] = {}
        self._seen_s: dict[str, float] = {}
        self._slow_until_s: dict[str, float] = {}
        self._listed: dict[str, dict[str, Mapping[str, Any]]] = {}
        self._ends: dict[str, _End] = {}

    @property
    def name(self) -> str:
        return NAME

    @property
    def traits(self) -> Traits:
        """Return Azure's rules: no hour is refunded, and zones exchange bytes for nothing."""
        return Traits(
            billing="azure",
            pending_is_free=True,
            bids="optional",
            zone_usd_per_gb=0.0,
            region_usd_per_gb=0.02,
        )

    @property
    def pace(self) -> Pace:
        lag_s = self._settings.lists_lag_s
        return Pace(list_s=10.0, offers_s=3600.0, sold_s=86_400.0, grace_s=lag_s, boot_s=600.0)

    async def places(self) -> Sequence[Place | Closed]:
        everywhere = Place(NAME, "")
        if not has_sdk():
            return [Closed(everywhere, NO_SDK)]
        return await asyncio.gather(*(self._place(region) for region in self._settings.regions))

    async def sold(self, place: Place) -> Sold:
        skus, prices = await self._skus_and_prices(place)
        region = place.region
        usages = await self._run(region, "quotas", lambda c: calls.list_quotas(c, region))
        return _read(
            "types",
            lambda: Sold(
                types=offers.types_of(skus, prices),
                pools=offers.pools_of(skus, place, prices),
                rooms=offers.rooms_of(usages, skus, place),
                recipe=machines.recipe_of(self._settings, place.region),
            ),
        )

    async def quotes(self, place: Place) -> Sequence[Quote]:
        skus, prices = await self._skus_and_prices(place)
        return offers.quotes_of(skus, place, prices)

    async def scores(self, place: Place) -> Mapping[Pool, Score]:
        """Return Azure's word for each pool of a size that is sold as spot."""
        region = place.region
        listed = await self._run(region, "sizes", lambda c: calls.list_sizes(c, region))
        skus = _read("sizes", lambda: offers.wanted(listed, self._settings.types))
        pools = offers.spot_pools(skus, place)
        sizes, zonal = sorted({x.type for x in pools}), any(x.zone != region for x in pools)
        told = await self._run(
            region, "scores", lambda c: calls.spot_scores(c, region, sizes, zonal=zonal)
        )
        return _read("scores", lambda: offers.scores_of(told, pools))

    async def launch(self, request: LaunchRequest) -> Sequence[Machine]:
        """Start all machines or none: look for the names first, and create only what is missing.

        If one of several is refused, the others are given back. If even that is unsure, it is
        `Unknown`, and the list will show what there is.
        """
        self._check(request)
        region, names = request.pool.region, machines.names_of(request)
        standing = await asyncio.gather(*(self._get(region, name) for name in names))
        found = [vm for vm in standing if vm is not None]
        self._must_match(found, request)
        made = await _settled(self._create(request, index, vm) for index, vm in enumerate(standing))
        failed = [one for one in made if isinstance(one, BaseException)]
        if not failed:
            return [one for one in made if isinstance(one, Machine)]
        unsure = [one for one in failed if not isinstance(one, errors.Refused)]
        if not unsure and len(names) > 1:
            refs = [one.ref for one in made if isinstance(one, Machine)]
            unsure = [x for x in await _settled([self.end(refs)]) if isinstance(x, BaseException)]
        raise (unsure or failed)[0]

    async def list(self, place: Place) -> Listing:
        """Return all that is ours in a region: machines, and the disks and interfaces left over."""
        region = place.region
        vms, disks, nics = await asyncio.gather(
            self._call(region, "list of machines", calls.list_vms, self._deployment),
            self._call(region, "list of disks", calls.list_disks, self._deployment),
            self._call(region, "list of interfaces", calls.list_nics, self._deployment),
        )
        ours = _read("list of machines", lambda: self._ours(vms, region))
        self._listed[region] = {str(one["name"]): one for one in vms if _region(one) == region}
        views = await self._look(region, ours)
        found = _read(
            "list of machines",
            lambda: [machines.machine_of(vm, views.get(vm.properties.vm_id)) for vm in ours],
        )
        ended = await self._ended(region, {machine.id: machine for machine in found})
        return _read(
            "list",
            lambda: Listing(
                place=place,
                machines=(*found, *ended),
                leftovers=self._leftovers(region, disks, nics),
            ),
        )

    async def end(self, refs: Sequence[Ref]) -> Sequence[Ref]:
        """Ask for deletions; only what is gone already is returned, as a deletion can fail.

        A machine is looked at first: it has to carry our tag. A disk or an interface has our mark
        in its name.
        """
        standing = await asyncio.gather(*(self._standing(ref) for ref in refs))
        for ref, answer in zip(refs, standing, strict=True):
            self._must_be_ours(ref, answer)
        done = await _settled(
            self._delete(ref, answer) for ref, answer in zip(refs, standing, strict=True)
        )
        for one in done:
            if isinstance(one, BaseException):
                raise one
        return [ref for ref, gone in zip(refs, done, strict=True) if gone is True]

    async def rehearse(self, refs: Sequence[Ref]) -> float:
        """Have Azure evict these as it would by itself: a notice, and the end half a minute later."""
        for ref in refs:
            self._must_be_ours(ref, await self._standing(ref))
        for ref in refs:
            doing = f"simulated eviction of {ref.id}"
            await self._call(ref.place.region, doing, calls.simulate_eviction, ref.id)
        return WARNING_S

    def notices(self) -> AsyncIterator[Notice]:
        return no_notices()

    async def close(self) -> None:
        await asyncio.to_thread(self._connection.close)

    # Places and what they sell

    async def _place(self, region: str) -> Place | Closed:
        """Return the place; it is closed if we are refused at its door, and open if in doubt."""
        place = Place(NAME, region)
        if region in self._open:
            return place
        if not self._settings.subnets.get(region):
            return Closed(place, f"azure.subnets names no subnet in {region}; add its id")
        try:
            await self._run(region, "sign in", lambda _: self._connection.key())
        except (errors.NotAllowed, errors.Misconfigured) as error:
            return Closed(place, str(error))
        except errors.CloudError:
            return place
        self._open.add(region)
        return place

    async def _skus_and_prices(self, place: Place) -> tuple[Sequence[offers.Sku], offers.Prices]:
        region = place.region
        listed = await self._run(region, "sizes", lambda c: calls.list_sizes(c, region))
        skus = _read("sizes", lambda: offers.wanted(listed, self._settings.types))
        pages = await asyncio.gather(*(self._price_pages(region, sku.name) for sku in skus))
        items = [item for page in pages for item in page]
        now_s = self._clock.now_s()
        return skus, _read("price list", lambda: offers.read_prices(items, now_s))

    async def _price_pages(self, region: str, size: str) -> Sequence[Mapping[str, Any]]:
        wanted = offers.price_filter(region, size)
        return await self._run(region, "price list", lambda _: self._connection.prices(wanted))

    # Machines

    def _check(self, request: LaunchRequest) -> None:
        """Raise if the settings have changed since the request was made."""
        region = request.pool.region
        if request.pool.cloud != NAME or region not in self._settings.regions:
            raise errors.Refused(
                "pool",
                "NotSold",
                f"{request.pool.key} is not sold here: azure.subnets has no such region",
            )
        recipe = machines.recipe_of(self._settings, region).digest
        if request.recipe not in ("", recipe):
            raise errors.Refused(
                "request",
                "RecipeChanged",
                f"recipe {request.recipe} is no longer how machines are made in {region}",
            )
        if not self._settings.subnets.get(region):
            raise errors.Misconfigured(f"azure.subnets names no subnet in {region}; add its id")

    def _must_match(self, found: Sequence[Mapping[str, Any]], request: LaunchRequest) -> None:
        if not machines.same_request(found, request):
            raise errors.TokenMismatch(
                f"token {request.token} names a machine of another request, or a foreign one"
            )
        if any(x["properties"].get("provisioningState") == "Deleting" for x in found):
            raise errors.TokenSpent(f"the machine of token {request.token} is being deleted")

    async def _create(
        self, request: LaunchRequest, index: int, standing: Mapping[str, Any] | None
    ) -> Machine:
        region, name = request.pool.region, machines.names_of(request)[index]
        if standing is None:
            body = machines.body_of(request, index, self._settings, self._deployment)
            try:
                standing = await self._run(
                    region,
                    "launch",
                    lambda client: calls.put_vm(client, self._group, name, body),
                    request.market,
                )
            except errors.TokenMismatch:
                standing = await self._get(region, name)
                if standing is None:
                    raise
                self._must_match([standing], request)
        answer = standing
        return _read("launch", lambda: machines.machine_of(machines.read_vm(answer), None))

    async def _get(self, region: str, name: str) -> calls.Answer | None:
        return await self._call(region, f"look at {name}", calls.get_vm, name)

    def _ours(self, vms: Iterable[Mapping[str, Any]], region: str) -> Sequence[machines.Vm]:
        return [machines.read_vm(answer) for answer in vms if _region(answer) == region]

    async def _look(self, region: str, ours: Sequence[machines.Vm]) -> dict[str, machines.View]:
        """Return how machines run: of all failed ones, and of a few others in turn."""
        before = self._views.get(region, {})
        known = {x.properties.vm_id: before.get(x.properties.vm_id) for x in ours}
        failed = [x for x in ours if x.properties.provisioning_state == "Failed"]
        others = [x for x in ours if x.properties.provisioning_state in ("Succeeded", "Updating")]
        others.sort(key=lambda x: (known[x.properties.vm_id] or (0.0,))[0])
        looked = [*failed, *others[:VIEWS_A_LIST]]
        now_s = self._clock.now_s()
        if self._is_slow(region):
            looked = []
        answers = await asyncio.gather(*(self._view(region, vm.name) for vm in looked))
        for vm, view in zip(looked, answers, strict=True):
            if view is not None:
                known[vm.properties.vm_id] = (now_s, view)
        self._views[region] = {key: kept for key, kept in known.items() if kept is not None}
        return {key: view for key, (_, view) in self._views[region].items()}

    async def _view(self, region: str, name: str) -> machines.View | None:
        """Return how a machine runs; what only adds to a list waits where calls are refused."""
        try:
            return await self._call(region, f"state of {name}", calls.view_vm, name)
        except errors.Throttled:
            return None

    async def _ended(self, region: str, listed: Mapping[str, Machine]) -> Sequence[Machine]:
        """Return machines that we have ended lately: a list has them no more, the deletion a date."""
        found = []
        for name, end in list(self._ends.items()):
            end.machine = machine = listed.get(name) or end.machine
            if name in listed or machine is None or machine.pool.region != region:
                continue
            if end.at_s is None:
                end.at_s = await self._date(region, name, end.operation)
            if self._clock.now_s() > (end.at_s or end.asked_at_s) + ENDED_LISTED_S:
                del self._ends[name]
            elif end.at_s is not None:
                over = {"state": "terminated", "ended_at_s": end.at_s, "ended_by": "user"}
                found.append(replace(machine, **over))
        return found

    async def _date(self, region: str, name: str, operation: str) -> float | None:
        """Return when a deletion came to its end; what only adds to a list waits."""
        if not operation or self._is_slow(region):
            return None
        with suppress(errors.CloudError):
            doing = f"end of {name}"
            return await self._run(region, doing, lambda c: calls.ended_at_s(c, operation))
        return None

    def _is_slow(self, region: str) -> bool:
        return self._clock.now_s() < self._slow_until_s.get(region, 0.0)

    def _leftovers(
        self, region: str, disks: Sequence[Mapping[str, Any]], nics: Sequence[Mapping[str, Any]]
    ) -> tuple[Leftover, ...]:
        found = []
        for kind, answers in zip(machines.KINDS, (disks, nics), strict=True):
            for answer in answers:
                if _region(answer) != region:
                    continue
                key = f"{kind}/{answer.get('name')}"
                seen_s = self._seen_s.setdefault(key, self._clock.now_s())
                left = machines.leftover_of(kind, answer, self._deployment, seen_s)
                if left is None:
                    del self._seen_s[key]
                else:
                    found.append(left)
        return tuple(found)

    # Ends

    async def _standing(self, ref: Ref) -> Mapping[str, Any] | None:
        """Return a machine as it is now, or where calls are refused, as the newest list had it."""
        kind, name = machines.kind_of(ref)
        region = ref.place.region
        known = self._listed.get(region, {}).get(name) if self._is_slow(region) else None
        return None if kind else known or await self._get(region, name)

    def _must_be_ours(self, ref: Ref, answer: Mapping[str, Any] | None) -> None:
        kind, name = machines.kind_of(ref)
        if kind is not None:
            ours = machines.part_pattern(self._deployment).fullmatch(name) is not None
        else:
            ours = answer is None or machines.is_ours(answer, self._deployment)
        if not ours:
            raise errors.NotOurs(
                f"{ref.id} does not carry orchestrator-deployment={self._deployment}, so it is "
                "never touched"
            )

    async def _delete(self, ref: Ref, answer: Mapping[str, Any] | None) -> bool:
        """Ask for a deletion; return whether a disk or an interface was gone already.

        A machine that is not found may be too young, so the list has to say that it is gone.
        """
        kind, name = machines.kind_of(ref)
        if kind is None and answer is None:
            return False
        if answer is not None and answer["properties"].get("provisioningState") == "Deleting":
            return False
        try:
            if kind is not None:
                return await self._call(ref.place.region, f"end of {name}", DELETE[kind], name)
            return await self._delete_vm(ref.place.region, name)
        except errors.CloudError as error:
            if any(code in str(error) for code in refusals.NOT_YET):
                return False
            raise

    async def _delete_vm(self, region: str, name: str) -> bool:
        """Ask for a deletion, and keep where its end can be asked for; False if it has begun."""
        operation = await self._call(region, f"end of {name}", calls.delete_vm, name)
        if operation is not None:
            known = self._ends.get(name)
            machine = None if known is None else known.machine
            self._ends[name] = _End(operation, self._clock.now_s(), machine)
        return operation is None

    async def _call(
        self, region: str, doing: str, call: Callable[..., _Answer], *words: str
    ) -> _Answer:
        """Make a call about the resource group."""
        return await self._run(region, doing, lambda client: call(client, self._group, *words))

    async def _run(
        self, region: str, doing: str, call: Callable[[Any], _Answer], market: Market | None = None
    ) -> _Answer:
        try:
            return await self._connection.run(region, doing, call, market)
        except errors.Throttled:
            self._slow_until_s[region] = self._clock.now_s() + SLOW_S
            raise


def _read(doing: str, read: Callable[[], _Answer]) -> _Answer:
    """Read an answer; one that is not what Azure documents is `Unknown`."""
    try:
        return read()
    except errors.CloudError:
        raise
    except Exception as error:
        raise errors.Unknown(
            f"Azure, {doing}: not the answer that was expected ({type(error).__name__})"
        ) from None


async def _settled(calls: Iterable[Awaitable[_Answer]]) -> Sequence[_Answer | BaseException]:
    """Wait for all of them, also when some fail, and return what each came to."""
    return await asyncio.gather(*calls, return_exceptions=True)


def _region(answer: Mapping[str, Any]) -> str:
    return str(answer.get("location", "")).lower().replace(" ", "")
