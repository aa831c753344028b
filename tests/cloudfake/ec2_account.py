"""An account of the fake EC2: what runs in it, what becomes of it, and when a caller may see that.

Time is handed in. Everything that is to happen waits in one heap, and each call first works off what
is due. What a caller reads lags what is true, by a time drawn for each machine (`Dials`).
"""

import heapq
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from cloudfake.books import Books, By, Line, draw
from cloudfake.ec2_types import KINDS

from cloud.clock import HOUR_S

ACCOUNT = "111122223333"
GIB_USD_PER_H = 0.08 / 730
ADDRESS_USD_PER_H = 0.005
MINIMUM_S = 60.0  # of a machine that has run

State = Literal["pending", "running", "shutting-down", "terminated", "stopping", "stopped"]
CODES = {
    "pending": 0,
    "running": 16,
    "shutting-down": 32,
    "terminated": 48,
    "stopping": 64,
    "stopped": 80,
}
MESSAGES = {
    "Client.UserInitiatedShutdown": "User initiated shutdown",
    "Client.InstanceInitiatedShutdown": "Instance initiated shutdown",
    "Server.SpotInstanceTermination": "Spot instance termination",
    "Server.InsufficientInstanceCapacity": "Insufficient capacity to launch the instance",
    "Client.VolumeLimitExceeded": "Volume limit exceeded",
    "Client.InternalError": "Client error on launch",
    "Client.InvalidKMSKey.InvalidState": "The KMS key provided is in an incorrect state",
}


class Refused(Exception):  # noqa: N818 - it names what happened
    """AWS says no, with a code."""

    def __init__(self, code: str, said: str, status: int = 400) -> None:
        super().__init__(f"{code}: {said}")
        self.code, self.said, self.status = code, said, status


class Dials(msgspec.Struct, kw_only=True):
    """How badly the cloud behaves; the shares are probabilities of a case."""

    seed: int = 0
    startup_s: float = 45.0
    ending_s: float = 30.0
    ended_listed_s: float = HOUR_S
    young_s: float = 0.0  # a new id is not found for at most this long
    lag_s: float = 0.0  # what lists say is at most this old
    tags_lag_s: float = 0.0  # tags of CreateTags are seen this much later
    fails_after_share: float = 0.0  # of launches that fail although they were answered
    fails_after_s: float = 4.0
    page: int = 1000  # most entries of one answer
    describe_burst: float = 100.0
    describe_per_s: float = 20.0
    mutate_burst: float = 1000.0
    mutate_per_s: float = 5.0
    machines_burst: float = 1000.0
    machines_per_s: float = 2.0


class Instance:
    """One machine, with everything that it ever was."""

    def __init__(self, instance_id: str, request: dict[str, Any], at_s: float) -> None:
        self.id = instance_id
        self.request = request
        self.launched_s = at_s
        self.visible_s = at_s
        self.lag_s = 0.0
        self.region = self.zone = self.type = self.token = self.subnet = self.address = ""
        self.market: Literal["spot", "on-demand"] = "on-demand"
        self.index = 0
        self.reservation = ""
        self.spot_request: str | None = None
        self.volumes: dict[str, str] = {}  # by device
        self.nic = ""
        self.tags: list[tuple[float, str, str]] = []  # since when, name, value
        self.states: list[tuple[float, State, str]] = [(at_s, "pending", "")]
        self.notice_deadline_s: float | None = None

    @property
    def state(self) -> State:
        return self.states[-1][1]

    @property
    def done(self) -> bool:
        return self.state in ("shutting-down", "terminated")

    def seen(self, at_s: float) -> tuple[float, State, str]:
        """Return the state that a reader sees at this moment."""
        return next((s for s in reversed(self.states) if s[0] <= at_s - self.lag_s), self.states[0])

    def marks(self) -> set[tuple[str, str]]:
        return {(name, value) for _, name, value in self.tags}

    def tags_at(self, at_s: float) -> dict[str, str]:
        return {name: value for since_s, name, value in self.tags if since_s <= at_s}


class Volume(msgspec.Struct, kw_only=True):
    id: str
    zone: str
    gib: int
    instance: str | None
    goes_along: bool
    created_s: float
    tags: dict[str, str]
    gone: bool = False


class Nic(msgspec.Struct, kw_only=True):
    id: str
    zone: str
    instance: str | None
    goes_along: bool
    created_s: float
    tags: dict[str, str]
    gone: bool = False


class SpotRequest(msgspec.Struct, kw_only=True):
    id: str
    region: str
    instance: str | None
    state: str
    status: str
    created_s: float
    updated_s: float
    tags: dict[str, str]


def iso(at_s: float) -> datetime:
    return datetime.fromtimestamp(at_s, UTC)


class Account:
    """All regions of one account. Every method takes the time first worked off by `advance`."""

    def __init__(
        self,
        dials: Dials | None = None,
        regions: dict[str, tuple[str, ...]] | None = None,
        kinds: tuple[str, ...] = ("g5.xlarge", "g5.12xlarge", "m7i.xlarge", "c7i.large"),
        room: int = 8,
    ) -> None:
        self.dials = dials or Dials()
        self.regions = regions or {"us-east-1": ("us-east-1a", "us-east-1b")}
        self.region_of = {zone: name for name, zones in self.regions.items() for zone in zones}
        self.kinds = {name: KINDS[name] for name in kinds}
        self.books = Books(refund=_free_first_hour, minimum_s=MINIMUM_S)
        self.instances: dict[str, Instance] = {}
        self.volumes: dict[str, Volume] = {}
        self.nics: dict[str, Nic] = {}
        self.spot_requests: dict[str, SpotRequest] = {}
        self.tokens: dict[tuple[str, str, str], tuple[str, list[str], float]] = {}
        self.images = {f"ami-{name}": name for name in self.regions}
        self.images_hidden = set[str]()  # disabled, or shared no more: left out of the answer
        self.image_says: dict[str, dict[str, Any]] = {}
        self.experiments: dict[str, Any] = {}
        self.drills: dict[str, list[str]] = {}  # what each experiment will say of itself
        self.drill_fails = ""  # why the next experiments fail after they were accepted
        self.role_path = "/"  # of roles whose keys have a policy
        self.drill_role = f"arn:aws:iam::{ACCOUNT}:role/drill"
        self.rules: dict[str, list[dict[str, Any]]] = {}  # of a group, in place of the usual one
        self.groups = {f"sg-{name}": name for name in self.regions}
        self.subnets = {f"subnet-{zone}": zone for zone in self.region_of}
        self.free_addresses = dict.fromkeys(self.subnets, 250)
        self.profiles = {"workers"}
        self.endpoints = {name: f"com.amazonaws.{name}.s3" for name in self.regions}
        self.endpoint_routes = ["rtb-1"]  # the route tables that lead to them
        self.quota: dict[tuple[str, str], int] = {}  # vCPUs by group and market, as ever applied
        self.default_quota: dict[tuple[str, str], int] = {}  # as AWS gives it to everybody
        self.room: dict[tuple[str, str, str], int] = {}  # zone, type, market
        self.usual_room = room
        self.prices: dict[tuple[str, str], list[tuple[float, float]]] = {}
        self.queue: list[dict[str, Any]] = []
        self.address_of: Callable[[Instance], str] | None = None  # None: private ones, not real
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._pushes = self._made = 0

    # Time

    def advance(self, at_s: float) -> None:
        while self._heap and self._heap[0][0] <= at_s:
            due_s, _, act = heapq.heappop(self._heap)
            act(due_s)

    def push(self, at_s: float, act: Callable[[float], None]) -> None:
        self._pushes += 1
        heapq.heappush(self._heap, (at_s, self._pushes, act))

    def new_id(self, kind: str) -> str:
        self._made += 1
        return f"{kind}-{int(draw(self.dials.seed, kind, self._made) * (1 << 56)):017x}"

    # Prices

    def price_steps(self, zone: str, type_name: str) -> list[tuple[float, float]]:
        """Return (since, USD per hour) of the spot price; a third of the price unless it was set."""
        return self.prices.setdefault(
            (zone, type_name), [(0.0, round(self.kinds[type_name].usd_per_h * 0.35, 6))]
        )

    def spot_price(self, zone: str, type_name: str, at_s: float) -> float:
        return [usd for since_s, usd in self.price_steps(zone, type_name) if since_s <= at_s][-1]

    def reprice(self, zone: str, type_name: str, usd_per_h: float, at_s: float) -> None:
        self.price_steps(zone, type_name).append((at_s, usd_per_h))
        for x in self.instances.values():
            if (x.zone, x.type, x.market, x.state) == (zone, type_name, "spot", "running"):
                self.books.price(x.id, at_s, usd_per_h)

    # What is used

    def alive(self) -> Iterator[Instance]:
        return (x for x in self.instances.values() if not x.done)

    def vcpus(self, region: str, group: str, market: str) -> int:
        return sum(
            self.kinds[x.type].vcpus
            for x in self.alive()
            if x.region == region
            and x.market == market
            and self.kinds[x.type].group == group
            and x.state not in ("stopping", "stopped")
        )

    def free(self, zone: str, type_name: str, market: str) -> int:
        held = sum((x.zone, x.type, x.market) == (zone, type_name, market) for x in self.alive())
        usual = self.usual_room if market == "spot" else 1_000_000
        return self.room.get((zone, type_name, market), usual) - held

    # What becomes of a machine

    def move(self, x: Instance, at_s: float, state: State, code: str = "") -> None:
        x.states.append((at_s, state, code))

    def run(self, x: Instance, at_s: float) -> None:
        if x.state == "pending":
            self.move(x, at_s, "running")
            self.tell("EC2 Instance State-change Notification", x, at_s, state="running")
            spot = x.market == "spot"
            usd = self.spot_price(x.zone, x.type, at_s) if spot else self.kinds[x.type].usd_per_h
            self.books.price(x.id, at_s, usd)

    def end(self, x: Instance, at_s: float, code: str, by: By) -> None:
        """Let a machine go: it is paid for no more, and what does not go with it stays."""
        if x.done:
            return
        self.move(x, at_s, "shutting-down", code)
        self.books.close(x.id, at_s, by)
        if x.spot_request:
            request = self.spot_requests[x.spot_request]
            request.state, request.updated_s = "closed", at_s
            request.status = {
                "Client.UserInitiatedShutdown": "instance-terminated-by-user",
                "Server.SpotInstanceTermination": "instance-terminated-no-capacity",
            }.get(code, "bad-parameters")
        self.push(at_s + self.dials.ending_s, lambda due_s: self._gone(x, due_s, code))

    def _gone(self, x: Instance, at_s: float, code: str) -> None:
        self.move(x, at_s, "terminated", code)
        self.free_addresses[x.subnet] += 1
        for volume in (self.volumes[name] for name in x.volumes.values()):
            volume.instance = None
            if volume.goes_along:
                self.drop_volume(volume, at_s, "provider")
        nic = self.nics[x.nic]
        nic.instance = None
        if nic.goes_along:
            self.drop_nic(nic, at_s, "provider")
        self.push(at_s + self.dials.ended_listed_s, lambda _: self._forget(x))

    def _forget(self, x: Instance) -> None:
        del self.instances[x.id]

    def drop_volume(self, volume: Volume, at_s: float, by: By) -> None:
        volume.gone = True
        self.books.close(volume.id, at_s, by)

    def drop_nic(self, nic: Nic, at_s: float, by: By) -> None:
        nic.gone = True
        self.books.close(nic.id, at_s, by)

    def fail(self, x: Instance, at_s: float, code: str) -> None:
        """Let a launch fail after it was answered."""
        if x.state == "pending":
            self.end(x, at_s, code, "provider")

    def shut_down(self, instance_id: str, at_s: float) -> None:
        """Do what `shutdown` on the machine does: end it, or only stop it, as its launch said."""
        x = self.instances[instance_id]
        code = "Client.InstanceInitiatedShutdown"
        if x.request.get("InstanceInitiatedShutdownBehavior", "stop") == "terminate":
            self.end(x, at_s, code, "user")
        else:
            self.move(x, at_s, "stopped", code)
            self.books.price(x.id, at_s, 0.0)

    def interrupt(self, instance_id: str, at_s: float, warning_s: float = 120.0) -> None:
        """Take a spot machine, with a warning that goes to its metadata and to the queue."""
        x = self.instances[instance_id]
        x.notice_deadline_s = at_s + warning_s
        if warning_s:
            detail = {"instance-action": "terminate"}
            self.tell("EC2 Spot Instance Interruption Warning", x, at_s, **detail)
        self.push(
            at_s + warning_s,
            lambda due_s: self.end(x, due_s, "Server.SpotInstanceTermination", "provider"),
        )
        self.advance(at_s)

    def tell(self, what: str, x: Instance, at_s: float, **more: str) -> None:
        """Put an event on the queue, as EventBridge does."""
        detail = {"instance-id": x.id} | more
        event = {
            "id": self.new_id("event"),
            "detail-type": what,
            "source": "aws.ec2",
            "account": ACCOUNT,
            "time": iso(at_s).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "region": x.region,
            "resources": [f"arn:aws:ec2:{x.zone}:instance/{x.id}"],
            "detail": detail,
        }
        self.queue.append(event)

    # What a test puts there

    def own(
        self, line_id: str, kind: Any, owner: str, at_s: float, usd_per_h: float, **more: Any
    ) -> None:
        """Write a new line into the books."""
        self.books.open(Line(id=line_id, kind=kind, owner=owner, began_s=at_s, **more))
        self.books.price(line_id, at_s, usd_per_h)


def _free_first_hour(line: Line) -> bool:
    """A spot machine that EC2 takes within its first hour costs nothing."""
    if line.market != "spot" or line.ended_by != "provider" or not line.steps:
        return False
    return (line.ended_s or 0.0) - line.steps[0][0] < HOUR_S
