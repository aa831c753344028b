"""AWS as a provider: the seven verbs, in values and `cloud.errors`."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from cloud import errors
from cloud.aws import answers
from cloud.aws.calls import Calls
from cloud.aws.drills import interrupt
from cloud.aws.holdings import Holdings
from cloud.aws.launching import run_instances
from cloud.aws.selling import Shop
from cloud.aws.settings import AwsSettings
from cloud.clock import CLOCK, Clock
from cloud.model import (
    COUNT_MAX,
    Closed,
    LaunchRequest,
    Listing,
    Machine,
    Notice,
    NoticeKind,
    Pace,
    Place,
    Pool,
    Quote,
    Ref,
    Score,
    Sold,
    Traits,
)

NAME = "aws"
WARNING_S = 120.0
QUEUE_WAIT_S = 20
TRAITS = Traits(
    billing="aws_today",
    pending_is_free=True,
    bids="optional",
    zone_usd_per_gb=0.02,
    region_usd_per_gb=0.02,
    launch_max=COUNT_MAX,
)
PACE = Pace(list_s=4.0, offers_s=300.0, sold_s=86_400.0, grace_s=120.0, boot_s=600.0)
KINDS: dict[str, NoticeKind] = {
    "EC2 Spot Instance Interruption Warning": "terminate",
    "EC2 Instance Rebalance Recommendation": "rebalance",
}

MOVED = "EC2 Instance State-change Notification"

P = ParamSpec("P")
T = TypeVar("T")


def _in_the_tree(verb: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Turn whatever goes wrong into an error of ours: an odd answer may not end the manager."""

    @wraps(verb)
    async def told(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await verb(*args, **kwargs)
        except errors.CloudError:
            raise
        except Exception as error:
            what = f"AWS, {verb.__name__}: {type(error).__name__} while reading an answer"
            raise errors.Unknown(f"{what}; the list will tell") from None

    return told


class AwsProvider:
    """The EC2 of one account, as one deployment sees it."""

    def __init__(
        self,
        settings: AwsSettings,
        deployment: str,
        calls: Calls | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        self._settings = settings
        self._calls = calls or Calls(settings.endpoint_url)
        self._clock = clock
        self._shops = {x.name: Shop(self._calls, settings, x) for x in settings.regions}
        self._held = {x.name: Holdings(self._calls, x.name, deployment) for x in settings.regions}

    @property
    def name(self) -> str:
        return NAME

    @property
    def traits(self) -> Traits:
        return TRAITS

    @property
    def pace(self) -> Pace:
        return PACE

    @_in_the_tree
    async def places(self) -> Sequence[Place | Closed]:
        """Return the regions; one whose keys are refused is closed. Silence does not close one."""
        found: list[Place | Closed] = []
        for region in self._settings.regions:
            place = Place(NAME, region.name)
            try:
                await self._calls.call(region.name, "sts", "get_caller_identity")
            except (errors.NotAllowed, errors.Misconfigured) as error:
                if error.refusal.scope == "cloud":
                    return [Closed(Place(NAME, ""), str(error))]
                found.append(Closed(place, str(error)))
            except errors.CloudError:
                found.append(place)
            else:
                found.append(place)
        return found

    @_in_the_tree
    async def sold(self, place: Place) -> Sold:
        return await self._known(self._shops, place).sold()

    @_in_the_tree
    async def quotes(self, place: Place) -> Sequence[Quote]:
        return await self._known(self._shops, place).quotes(self._clock.now_s())

    @_in_the_tree
    async def launch(self, request: LaunchRequest) -> Sequence[Machine]:
        place = request.pool.place
        try:
            shop = self._known(self._shops, place)
        except errors.Refused:
            raise errors.Refused(
                "pool", "NotSold", f"{request.pool.key} is not sold here"
            ) from None
        recipe = await shop.recipe_of(request)
        asked = run_instances(request, recipe, self._settings.user_data)
        answer = await self._calls.call(place.region, "ec2", "run_instances", **asked)
        machines = [answers.machine_of(told, place) for told in answer["Instances"]]
        if len(machines) != request.count or any(m.token != request.token for m in machines):
            said = f"AWS, {place.region}, run_instances: {len(machines)} machines in an answer that"
            raise errors.Unknown(f"{said} should have {request.count}; the list will tell")
        return sorted(machines, key=lambda machine: machine.index)

    @_in_the_tree
    async def list(self, place: Place) -> Listing:
        return await self._known(self._held, place).list(self._clock.now_s())

    @_in_the_tree
    async def end(self, refs: Sequence[Ref]) -> Sequence[Ref]:
        """Look everything up first, so that one foreign thing keeps all from being ended."""
        found = [
            (held, await held.looked_up([ref.id for ref in refs if ref.place == place]))
            for place in _places_of(refs)
            for held in [self._known(self._held, place)]
        ]
        return [ref for held, things in found for ref in await held.end(things)]

    async def notices(self) -> AsyncIterator[Notice]:
        """Yield interruptions from the queue that EventBridge fills, if there is one.

        Events that a machine has come to run are taken from there, too: nothing else dates that.
        """
        url = self._settings.queue_url
        region = self._settings.queue_region
        while url is not None:
            try:
                answer = await self._calls.call(
                    region,
                    "sqs",
                    "receive_message",
                    QueueUrl=url,
                    WaitTimeSeconds=QUEUE_WAIT_S,
                    MaxNumberOfMessages=10,
                )
                for message in answer.get("Messages", ()):
                    if (notice := await self._notice(message.get("Body", ""))) is not None:
                        yield notice
                    handle = message.get("ReceiptHandle", "")
                    await self._calls.call(
                        region, "sqs", "delete_message", QueueUrl=url, ReceiptHandle=handle
                    )
            except errors.CloudError:
                await asyncio.sleep(QUEUE_WAIT_S)

    @_in_the_tree
    async def scores(self, place: Place) -> Mapping[Pool, Score]:
        return await self._known(self._shops, place).scores()

    @_in_the_tree
    async def rehearse(self, refs: Sequence[Ref]) -> float:
        """Have EC2 interrupt these by its fault injection, which looks like any interruption."""
        wanted = {place: [x.id for x in refs if x.place == place] for place in _places_of(refs)}
        looked = {place: self._known(self._held, place) for place in wanted}
        for place, held in looked.items():
            await held.looked_up(wanted[place])
        for place, ids in wanted.items():
            await interrupt(self._calls, place.region, self._settings.drill_role, ids)
        return WARNING_S

    async def close(self) -> None:
        await self._calls.close()

    @staticmethod
    def _known(by_region: dict[str, T], place: Place) -> T:
        if place.cloud != NAME or place.region not in by_region:
            said = f"{place.key} is not among aws.regions; add it there, or use one that is"
            raise errors.Refused("place", "NotSold", said)
        return by_region[place.region]

    async def _notice(self, body: str) -> Notice | None:
        """Return what an event says of a machine of ours; anything else is nothing."""
        try:
            event = json.loads(body)
            machine_id = event["detail"]["instance-id"]
            at_s = datetime.fromisoformat(event["time"]).timestamp()
            held = self._held[event["region"]]
            if event["detail-type"] == MOVED and event["detail"]["state"] == "running":
                held.note_began(machine_id, at_s)
            kind = KINDS[event["detail-type"]]
        except (ValueError, KeyError, TypeError):
            return None
        if not await held.has(machine_id):
            return None
        warned_s = WARNING_S if kind == "terminate" else 0.0
        return Notice(machine_id=machine_id, kind=kind, deadline_s=at_s + warned_s)


def _places_of(refs: Sequence[Ref]) -> Sequence[Place]:
    return sorted({ref.place for ref in refs})
