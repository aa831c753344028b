"""What a deployment holds in one region, and how it is given back."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from cloud import errors
from cloud.aws import answers
from cloud.aws.calls import Calls, matching
from cloud.aws.codes import GONE, NOT_YET
from cloud.model import DEPLOYMENT_TAG, Leftover, LeftoverKind, Listing, Place, Ref

LEFTOVERS_S = 60.0
EVENTS_MAX = 5000
AT_ONCE = 100  # ids in one call


class Thing(NamedTuple):
    """A kind of thing that a launch makes: how it is listed, and how it is dropped."""

    prefix: str
    operation: str
    field: str
    id_field: str
    filter: str
    kind: LeftoverKind
    free: tuple[str, str]  # the filter that picks those that nothing uses
    drop: str = ""
    drop_field: str = ""


DISKS = Thing(
    "vol-",
    "describe_volumes",
    "Volumes",
    "VolumeId",
    "volume-id",
    "disk",
    ("status", "available"),
    "delete_volume",
    "VolumeId",
)
NICS = Thing(
    "eni-",
    "describe_network_interfaces",
    "NetworkInterfaces",
    "NetworkInterfaceId",
    "network-interface-id",
    "nic",
    ("status", "available"),
    "delete_network_interface",
    "NetworkInterfaceId",
)
REQUESTS = Thing(
    "sir-",
    "describe_spot_instance_requests",
    "SpotInstanceRequests",
    "SpotInstanceRequestId",
    "spot-instance-request-id",
    "spot_request",
    ("state", "open"),
    "cancel_spot_instance_requests",
    "SpotInstanceRequestIds",
)
THINGS = (DISKS, NICS, REQUESTS)


class Holdings:
    """Machines and leftovers of one region."""

    def __init__(self, calls: Calls, region: str, deployment: str) -> None:
        self._calls = calls
        self._place = Place("aws", region)
        self._deployment = deployment
        self._leftovers: tuple[Leftover, ...] = ()
        self._looked_at_s: float | None = None
        self._ended: dict[str, float] = {}
        self._began: dict[str, float] = {}
        self.ours: frozenset[str] = frozenset()

    def note_began(self, machine_id: str, at_s: float) -> None:
        """Note what an event says of a machine, ours or not: no list may have shown it yet."""
        self._began.setdefault(machine_id, at_s)
        while len(self._began) > EVENTS_MAX:
            del self._began[next(iter(self._began))]

    async def list(self, now_s: float) -> Listing:
        """Return all machines of ours; what outlived its machine is looked for once a minute."""
        told = answers.instances_of(
            await self._list(
                "describe_instances", "Reservations", Filters=[self._tagged()], MaxResults=1000
            )
        )
        told = [x for x in told if answers.is_ours(x, self._deployment)]
        # A place that is throttled still gives its machines: what only adds to them waits its turn.
        with suppress(errors.Throttled, errors.Unknown):
            await self._learn_ends(told, now_s)
            if self._looked_at_s is None or now_s >= self._looked_at_s + LEFTOVERS_S:
                self._looked_at_s = now_s
                self._leftovers = await self._look_around()
        machines = tuple(answers.machine_of(x, self._place, self._ended, self._began) for x in told)
        self.ours = frozenset(machine.id for machine in machines)
        return Listing(place=self._place, machines=machines, leftovers=self._leftovers)

    async def looked_up(self, ids: Sequence[str]) -> Sequence[dict[str, Any]]:
        """Return what exists of these ids, each with its id as `_id`; a foreign one is NotOurs.

        Machines that the newest list showed as ours are not asked for again: where reads are
        throttled, the lists themselves would keep a machine from ever being ended.
        """
        known: Sequence[dict[str, Any]] = [
            {"_id": x, "InstanceId": x, "State": {"Name": "running"}} for x in ids if x in self.ours
        ]
        found: Sequence[dict[str, Any]] = [
            dict(x) | {"_id": x["InstanceId"]}
            for some in _batches([x for x in ids if x.startswith("i-") and x not in self.ours])
            for x in answers.instances_of(
                await self._list(
                    "describe_instances", "Reservations", Filters=[matching("instance-id", some)]
                )
            )
        ]
        for thing in THINGS:
            for some in _batches([x for x in ids if x.startswith(thing.prefix)]):
                told = await self._list(
                    thing.operation, thing.field, Filters=[matching(thing.filter, some)]
                )
                found = [*found, *(dict(x) | {"_id": x[thing.id_field]} for x in told)]
        for x in found:
            if not answers.is_ours(x, self._deployment):
                said = f"AWS, {self._place.region}: {x['_id']} was not made by a launch of ours"
                raise errors.NotOurs(
                    f"{said} ({DEPLOYMENT_TAG}={self._deployment}), so nothing was ended"
                )
        return [*known, *found]

    async def has(self, machine_id: str) -> bool:
        """Return whether a machine is ours, also one that no list has shown yet."""
        try:
            return bool(await self.looked_up([machine_id]))
        except errors.NotOurs:
            return False

    async def end(self, found: Sequence[dict[str, Any]]) -> Sequence[Ref]:
        """End what `looked_up` returned; return what costs nothing any more."""
        machines = [x for x in found if "InstanceId" in x and x["_id"].startswith("i-")]
        ended = [x["_id"] for x in machines if not _alive(x)]
        for some in _batches([x["_id"] for x in machines if _alive(x)]):
            answer = await self._call("terminate_instances", InstanceIds=list(some))
            ended += [
                x["InstanceId"]
                for x in answer["TerminatingInstances"]
                if answers.STATES[x["CurrentState"]["Name"]] == "terminated"
            ]
        for thing in THINGS:
            for x in found:
                if x["_id"].startswith(thing.prefix) and await self._drop(thing, x["_id"]):
                    ended.append(x["_id"])
        return [Ref(self._place, name) for name in ended]

    def _tagged(self) -> dict[str, Any]:
        return matching(f"tag:{DEPLOYMENT_TAG}", [self._deployment])

    async def _call(self, operation: str, **params: Any) -> dict[str, Any]:
        return await self._calls.call(self._place.region, "ec2", operation, **params)

    async def _list(self, operation: str, field: str, **params: Any) -> Sequence[Any]:
        return await self._calls.pages(self._place.region, "ec2", operation, field, **params)

    async def _look_around(self) -> tuple[Leftover, ...]:
        """Return what no machine uses; young ones may still be on their way to theirs."""
        found: tuple[Leftover, ...] = ()
        for thing in THINGS:
            free = [self._tagged(), matching(thing.free[0], [thing.free[1]])]
            told = await self._list(thing.operation, thing.field, Filters=free)
            found += tuple(
                answers.leftover_of(x, thing.kind, thing.id_field, self._place)
                for x in told
                if answers.is_ours(x, self._deployment)
            )
        return found

    async def _learn_ends(self, told: Sequence[Any], now_s: float) -> None:
        """Learn when spot machines were taken: their list does not say it, their requests do."""
        taken = {
            x["SpotInstanceRequestId"]
            for x in told
            if x.get("SpotInstanceRequestId") and not _alive(x)
        }
        self._ended = {name: at_s for name, at_s in self._ended.items() if name in taken}
        for some in _batches(sorted(taken - set(self._ended))):
            requests = await self._list(
                REQUESTS.operation, REQUESTS.field, Filters=[matching(REQUESTS.filter, some)]
            )
            said = {
                x["SpotInstanceRequestId"]: x["Status"]["UpdateTime"].timestamp()
                for x in requests
                if x["State"] != "active"
            }
            self._ended |= dict.fromkeys(some, now_s) | said

    async def _drop(self, thing: Thing, name: str) -> bool:
        """End a leftover; False where that can be done later only."""
        told: Any = [name] if thing is REQUESTS else name
        try:
            await self._call(thing.drop, **{thing.drop_field: told})
        except errors.Unknown as error:
            if any(words in str(error) for words in NOT_YET):
                return False
            if not any(code in str(error) for code in GONE):
                raise
        self._leftovers = tuple(x for x in self._leftovers if x.ref.id != name)
        return True


def _batches(ids: Sequence[str]) -> list[Sequence[str]]:
    return [ids[first : first + AT_ONCE] for first in range(0, len(ids), AT_ONCE)]


def _alive(told: dict[str, Any]) -> bool:
    return answers.STATES[told["State"]["Name"]] != "terminated"
