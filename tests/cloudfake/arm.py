"""An Azure account that lies the way Azure does: machines, network interfaces, disks, quotas, prices.

It answers requests as values and does no I/O; `arm_wire` puts it on a socket, or under the SDK
without one. Time is handed in and every draw depends on the seed, so that a delay costs nothing and
a failure happens again. The promises in `PROMISES` are what the provider is built against. A test
breaks each of them, to see that it is noticed.

Where Azure documents nothing, the door takes the course that is worst for its caller.
"""

import heapq
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

import msgspec
from cloudfake.arm_catalogue import DISK_USD_PER_H, REGIONS, SIZES, Size, items, sku
from cloudfake.books import Books, Bucket, Line, draw

from cloud.clock import Clock, VirtualClock
from cloud.model import DEPLOYMENT_TAG

SUBSCRIPTION = "00000000-1111-2222-3333-444444444444"
GROUP = "training"
MANAGER = "manager"
COMPUTE = "Microsoft.Compute"
NETWORK = "Microsoft.Network"
SUBNET = (
    f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/{NETWORK}"
    "/virtualNetworks/net/subnets/machines"
)
IMAGE = (
    f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/{COMPUTE}"
    "/galleries/images/images/instance/versions/1.0.0"
)
IDENTITY = (
    f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/Microsoft.ManagedIdentity"
    "/userAssignedIdentities/machine"
)

PROMISES = (
    "a name is one machine",
    "create-only is honoured",
    "a PUT changes what exists",
    "a failed creation leaves its parts",
    "a failed creation says why",
    "a deletion takes time",
    "a deletion can fail",
    "parts stay without a delete option",
    "lists of interfaces lag",
    "an interface is reserved after a failure",
    "a stopped machine is billed",
    "an eviction follows its policy",
    "quotas are counted",
    "too many calls are refused",
    "keys expire",
    "roles are enforced",
    "lists come in pages",
    "price filters know case",
    "a maximum price is kept",
    "others have machines too",
)

Span = tuple[float, float]
Provisioning = Literal["Creating", "Updating", "Succeeded", "Failed", "Deleting"]


class Dials(msgspec.Struct, frozen=True, kw_only=True):
    """How badly the cloud behaves; shares are of 1, times are in seconds."""

    create_s: Span = (10.0, 40.0)
    delete_s: Span = (30.0, 120.0)
    list_lag_s: float = 0.0
    nic_lag_s: float = 60.0
    reserved_s: float = 180.0
    token_s: float = 3600.0
    refused: float = 0.0
    failed: float = 0.0
    delete_failed: float = 0.0
    stranded: float = 0.5
    stumbles: float = 0.0
    honours_create_only: bool = True
    burst: float = 1500.0
    per_s: float = 500 / 60
    page: int = 50
    capacity: int = 1000
    quotas: Mapping[str, int] = {}


class Answer(msgspec.Struct, frozen=True):
    """What is sent back."""

    status: int
    body: Any = None
    headers: Mapping[str, str] = {}


class Refusal(Exception):  # noqa: N818 - it names what happened
    """An answer that is an error, with Azure's code."""

    def __init__(
        self, status: int, code: str, said: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(said)
        self.answer = Answer(status, {"error": {"code": code, "message": said}}, headers or {})


class Part(msgspec.Struct, kw_only=True):
    """A disk or a network interface."""

    kind: Literal["disk", "nic"]
    name: str
    region: str
    tags: dict[str, str]
    goes: bool
    born_s: float
    machine: str | None
    reserved_until_s: float = 0.0
    gone_s: float | None = None


class Vm(msgspec.Struct, kw_only=True):
    """A virtual machine; `line` is its line in the books."""

    name: str
    body: dict[str, Any]
    born_s: float
    line: str
    disk: str
    nic: str
    state: Provisioning = "Creating"
    power: str = ""
    failure: tuple[str, str] | None = None
    told_s: float = 0.0  # when its creation came to its end
    notice_deadline_s: float | None = None

    @property
    def region(self) -> str:
        return str(self.body["location"])

    @property
    def size(self) -> str:
        return str(self.body["properties"]["hardwareProfile"]["vmSize"])

    @property
    def spot(self) -> bool:
        return self.body["properties"].get("priority") == "Spot"

    @property
    def tags(self) -> dict[str, str]:
        return dict(self.body.get("tags") or {})

    @property
    def max_price(self) -> float:
        """Return the bid as Azure takes it: cut to five decimals."""
        bid = float((self.body["properties"].get("billingProfile") or {}).get("maxPrice", -1))
        return int(round(bid * 1e5, 3)) / 1e5


class ArmDoor:
    """One subscription with one resource group."""

    def __init__(
        self,
        clock: Clock | None = None,
        dials: Dials | None = None,
        seed: int = 0,
        broken: str = "",
    ) -> None:
        assert not broken or broken in PROMISES
        self.clock = clock or VirtualClock(1_800_000_000.0)
        self.dials = dials or Dials()
        self.seed = seed
        self.books = Books()
        self.called: list[str] = []
        self.allowed: Callable[[str], bool] = lambda action: True
        self.machine_allowed: Callable[[str], bool] = lambda action: False
        self.speaker = ""
        self.more_identities = False  # a policy gives each machine another one
        self.clock_off_s = 0.0
        self.rules: list[dict[str, Any]] = [dict(x) for x in RULES]
        self.subnet: dict[str, Any] = dict(SUBNET_SAYS)
        self.images = {"1.0.0": list(REGIONS)}  # the regions of each version
        self.role: list[str] = ["*"]
        self.prices = {name: (size.spot, size.on_demand) for name, size in SIZES.items()}
        self.priced_s: dict[str, float] = {}  # since when a price holds that has moved
        self.vms: dict[str, Vm] = {}
        self.parts: dict[tuple[str, str], Part] = {}
        self.operations: dict[str, dict[str, Any]] = {}
        self._broken = broken
        self._serial = 0
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._tokens: dict[str, float] = {}
        self._weak: set[str] = set()
        self._caller_is_machine = False
        self.lock = threading.RLock()
        self._bucket = Bucket(self.dials.burst, self.dials.per_s)
        if self._keeps("others have machines too"):
            self.plant("web-1", {DEPLOYMENT_TAG: "theirs"})
            self.plant("by-hand", {})

    # What a test does that no caller may

    def plant(self, name: str, tags: dict[str, str], region: str = "eastus") -> Vm:
        """Put a running machine into the group, with its disk and its interface."""
        body = vm_body(name, region=region, tags=tags)
        with self.lock:
            vm = self._make(body, name)
            self._work_off(self.now_s)
            vm.state, vm.power = "Succeeded", "running"
            self.books.price(vm.line, self.now_s, self._usd_per_h(vm))
            return vm

    def shut_down(self, name: str) -> None:
        """Power a machine off from inside: it goes on holding its place, and costs the same."""
        vm = self.vms[name.lower()]
        vm.power = "stopped"
        if not self._keeps("a stopped machine is billed"):
            self.books.price(vm.line, self.now_s, 0.0)

    def evict(self, name: str, warning_s: float = 0.0) -> None:
        """Take a spot machine away."""
        vm = self.vms[name.lower()]
        vm.notice_deadline_s = self.now_s + warning_s if warning_s else None
        self.later(warning_s, lambda at_s: self.evicted(vm, at_s))
        self._work_off(self.now_s)

    def reprice(self, size: str, spot_usd_per_h: float, at_s: float | None = None) -> None:
        """Move the spot price of a size; machines with a lower maximum are evicted."""
        at_s = self.now_s if at_s is None else at_s
        self.prices[size] = (spot_usd_per_h, self.prices[size][1])
        self.priced_s[size] = at_s
        for vm in list(self.vms.values()):
            if not vm.spot or vm.size != size:
                continue
            if vm.power in ("running", "stopped"):
                self.books.price(vm.line, at_s, spot_usd_per_h)
            if 0 < vm.max_price < spot_usd_per_h and self._keeps("a maximum price is kept"):
                self.evicted(vm, at_s)

    def restrict(self, actions: Iterable[str]) -> None:
        """Let the manager do no more than this."""
        self.role = list(actions)
        self.allowed = set(self.role).__contains__

    def pass_s(self, seconds: float) -> None:
        """Let time pass, and what is due come about."""
        assert isinstance(self.clock, VirtualClock)
        self.clock.advance_to(self.clock.now_s() + seconds)
        with self.lock:
            self._work_off(self.now_s)

    def new_token(self) -> tuple[str, float]:
        """Issue a bearer token; return it with the time at which it expires."""
        token = f"token-{self.seed}-{self._next()}"
        self._tokens[token] = self.now_s + self.dials.token_s
        return token, self._tokens[token]

    def bearer(self) -> dict[str, str]:
        """Issue a token as a metadata service answers it."""
        token, until_s = self.new_token()
        left_s = max(0, int(until_s - self.now_s))
        return {
            "access_token": token,
            "expires_in": str(left_s),
            "expires_on": str(int(until_s)),
            "token_type": "Bearer",
        }

    def machine_token(self, name: str) -> dict[str, str] | None:
        """Issue a token of the identity that a machine was given; None if it has none."""
        if not self.vms[name.lower()].body.get("identity"):
            return None
        told = self.bearer()
        self._weak.add(told["access_token"])
        return told

    def bill(self, owner: str | None = None) -> float:
        return sum(self.books.bill(self.now_s, owner).values())

    def work_off(self, at_s: float) -> None:
        """Let what is due by now come about."""
        with self.lock:
            self._work_off(at_s)

    @property
    def now_s(self) -> float:
        return self.clock.now_s()

    # Requests

    def call(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> Answer:
        """Answer one request. Some answers fail, and of these some come after the effect."""
        headers = {name.lower(): value for name, value in headers.items()}
        with self.lock:
            self._work_off(self.now_s)
            lot = draw(self.seed, "stumble", self._next())
            if lot < self.dials.stumbles / 2:
                return Refusal(503, "ServerBusy", "The server is busy.").answer
            try:
                answer = self._route(method, url, headers, json.loads(body) if body else None)
            except Refusal as refusal:
                return refusal.answer
            if lot < self.dials.stumbles:
                return Refusal(500, "InternalServerError", "An unexpected error occurred.").answer
            return answer

    def _route(self, method: str, url: str, headers: Mapping[str, str], body: Any) -> Answer:
        parts = urlsplit(url)
        query = {name.lower(): values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path == "/api/retail/prices":
            return self._prices(query, f"{parts.scheme}://{parts.netloc}")
        if parts.path.startswith("/metadata/"):
            return self._metadata(parts.path, headers, query.get("msi_res_id", ""))
        self._authenticate(headers)
        if not self._bucket.take(self.now_s) and self._keeps("too many calls are refused"):
            raise Refusal(429, "TooManyRequests", "Slow down.", {"Retry-After": "17"})
        if "api-version" not in query:
            raise Refusal(400, "MissingApiVersionParameter", "The api-version is missing.")
        for pattern, name, action in ROUTES:
            if match := re.fullmatch(pattern, parts.path, re.IGNORECASE):
                verb = {"GET": "read", "PUT": "write", "DELETE": "delete", "POST": "action"}[method]
                self._allow(action.format(verb=verb))
                found = {key: value for key, value in match.groupdict().items() if value}
                self._same_account(found)
                handler = getattr(self, f"_{method.lower()}_{name}", None)
                if handler is not None:
                    origin = f"{parts.scheme}://{parts.netloc}"
                    return handler(found, {**query, "origin": origin}, headers, body)
        raise Refusal(404, "InvalidResourceType", f"There is no {method} {parts.path}.")

    def _metadata(self, path: str, headers: Mapping[str, str], identity: str) -> Answer:
        """Answer as the metadata service of the machine `self.speaker`, which may be the manager's."""
        if self.speaker == MANAGER and path == "/metadata/identity/oauth2/token":
            token, until_s = self.new_token()
            known = {"access_token": token, "expires_on": str(int(until_s)), "token_type": "Bearer"}
            return Answer(200, {**known, "expires_in": "3600", "resource": "arm"})
        vm = self.vms.get(self.speaker)
        if vm is None or headers.get("metadata") != "true":
            raise Refusal(400, "BadRequest", "Required metadata header not specified")
        if path == "/metadata/instance/compute":
            return Answer(200, {"resourceId": vm_resource(vm.name), "name": vm.name})
        if path == "/metadata/identity/oauth2/token":
            given = (vm.body.get("identity") or {}).get("userAssignedIdentities") or {}
            if identity not in given if identity else self.more_identities:
                said = "Multiple user assigned identities exist, please specify the clientId"
                return Answer(400, {"error": "invalid_request", "error_description": said})
            token = self.machine_token(vm.name)
            if token is not None:
                return Answer(200, token)
        raise Refusal(404, "NotFound", "Identity not found")

    def _authenticate(self, headers: Mapping[str, str]) -> None:
        token = headers.get("authorization", "").removeprefix("Bearer ")
        if token not in self._tokens:
            raise Refusal(401, "AuthenticationFailed", "Authentication failed.")
        if self._tokens[token] <= self.now_s and self._keeps("keys expire"):
            raise Refusal(401, "ExpiredAuthenticationToken", "The access token expired.")
        self._caller_is_machine = token in self._weak

    def _allow(self, action: str) -> None:
        self.called.append(action)
        allowed = self.machine_allowed if self._caller_is_machine else self.allowed
        if not allowed(action) and self._keeps("roles are enforced"):
            raise Refusal(
                403,
                "AuthorizationFailed",
                "The client '5e1f' with object id '5e1f' does not have authorization to perform "
                f"action '{action}' over scope '/subscriptions/{SUBSCRIPTION}'.",
            )

    def _same_account(self, found: Mapping[str, str]) -> None:
        if found["subscription"] != SUBSCRIPTION:
            raise Refusal(404, "SubscriptionNotFound", "The subscription could not be found.")
        if found.get("group", GROUP).lower() != GROUP:
            raise Refusal(
                404, "ResourceGroupNotFound", f"Resource group '{found['group']}' not found."
            )

    # Machines

    def _put_vm(self, found: Mapping[str, str], query: Any, headers: Any, body: Any) -> Answer:
        name = found["name"]
        for action in (
            f"{NETWORK}/networkInterfaces/write",
            f"{NETWORK}/networkInterfaces/join/action",
            f"{NETWORK}/virtualNetworks/subnets/join/action",
            f"{COMPUTE}/disks/write",
            f"{COMPUTE}/galleries/images/versions/read",
        ):
            self._allow(action)
        if body.get("identity"):
            self._allow("Microsoft.ManagedIdentity/userAssignedIdentities/assign/action")
        standing = self.vms.get(name.lower())
        if standing is not None and self._keeps("a name is one machine"):
            return self._put_again(standing, headers, body, query)
        self._refuse(body)
        vm = self._make(body, name)
        lot = draw(self.seed, "creation", vm.line)
        fails = lot < self.dials.failed
        delay_s = self._span(self.dials.create_s, vm.line)
        self.later(delay_s, lambda at_s: self._created(vm, at_s, fails))
        headers = self._operation(vm, query, lambda: _outcome(vm))
        return Answer(201, self._described(vm), headers)

    def _put_again(self, vm: Vm, headers: Any, body: Any, query: Any) -> Answer:
        honours = self.dials.honours_create_only and self._keeps("create-only is honoured")
        if headers.get("if-none-match") == "*" and honours:
            raise Refusal(412, "PreconditionFailed", f"The resource {vm.name} already exists.")
        if vm.state == "Deleting":
            raise Refusal(409, "Conflict", f"The machine {vm.name} is being deleted.")
        if not self._keeps("a PUT changes what exists"):
            return Answer(200, self._described(vm))
        properties = body["properties"]
        for key, before in (
            ("location", vm.region),
            ("zones", vm.body.get("zones")),
            ("priority", vm.body["properties"].get("priority")),
        ):
            now = body.get(key) if key != "priority" else properties.get("priority")
            if now != before:
                raise Refusal(
                    409, "PropertyChangeNotAllowed", f"Changing property '{key}' is not allowed."
                )
        vm.body = {**vm.body, "tags": body.get("tags"), "properties": properties}
        if vm.power == "running":
            self.books.price(vm.line, self.now_s, self._usd_per_h(vm))
        return Answer(200, self._described(vm), self._operation(vm, query, lambda: _outcome(vm)))

    def _refuse(self, body: Any) -> None:
        """Refuse a new machine before anything is made, as far as Azure does that."""
        vm = Vm(name="", body=body, born_s=0, line="", disk="", nic="")
        size = SIZES.get(vm.size)
        properties = body["properties"]
        if size is None or vm.region not in REGIONS or not size.sold(vm.region, zone_of(body)):
            raise Refusal(409, "SkuNotAvailable", f"{vm.size} is not available in {vm.region}.")
        nic = properties["networkProfile"]["networkInterfaceConfigurations"][0]["properties"]
        if nic["ipConfigurations"][0]["properties"]["subnet"]["id"] != SUBNET:
            raise Refusal(404, "ResourceNotFound", "The subnet was not found.")
        if properties["storageProfile"]["imageReference"] != {"id": IMAGE}:
            raise Refusal(404, "PlatformImageNotFound", "The image was not found.")
        if vm.spot and not size.low_priority:
            raise Refusal(
                400, "AzureSpotIsNotSupportedForThisVMSize", f"{vm.size} is not sold as Spot."
            )
        if not vm.spot and properties.get("evictionPolicy"):
            raise Refusal(
                400,
                "EvictionPolicyCanBeSetOnlyOnAzureSpotVirtualMachines",
                "Eviction policy can be set only on Azure Spot Virtual Machines.",
            )
        spot_usd = self.prices[vm.size][0]
        if vm.spot and 0 < vm.max_price < spot_usd and self._keeps("a maximum price is kept"):
            raise Refusal(
                409,
                "SpotPriceGreaterThanProvidedMaxPrice",
                f"The provided max price '{vm.max_price} USD' is lower than the current spot price "
                f"'{spot_usd} USD/h' for Azure Spot VM size '{vm.size}'.",
            )
        self._refuse_over_quota(vm, size)
        if vm.spot and draw(self.seed, "refused", self._next()) < self.dials.refused:
            raise Refusal(409, "SkuNotAvailable", f"{vm.size} is not available in {vm.region}.")

    def _refuse_over_quota(self, vm: Vm, size: Size) -> None:
        alike = [x for x in self.vms.values() if _kin(x) == _kin(vm)]
        if len(alike) >= self.dials.capacity:
            raise Refusal(409, "SkuNotAvailable", f"{vm.size} is not available in {vm.region}.")
        if not self._keeps("quotas are counted"):
            return
        for name in ["lowPriorityCores"] if vm.spot else [size.family, "cores"]:
            used, limit = self._used(vm.region, name), self._limit(name)
            if used + size.vcpus > limit:
                said = "Total Regional" if name == "cores" else name
                raise Refusal(
                    409,
                    "OperationNotAllowed",
                    "Operation could not be completed as it results in exceeding approved "
                    f"{said} Cores quota. Additional details - Deployment Model: Resource Manager, "
                    f"Location: {vm.region}, Current Limit: {limit}, Current Usage: {used}, "
                    f"Additional Required: {size.vcpus}, (Minimum) New Limit Required: "
                    f"{used + size.vcpus}.",
                )

    def _make(self, body: dict[str, Any], name: str) -> Vm:
        nth, now_s = self._next(), self.now_s
        properties = body["properties"]
        disk = properties["storageProfile"]["osDisk"]
        nic = properties["networkProfile"]["networkInterfaceConfigurations"][0]
        vm = Vm(
            name=name,
            body=body,
            born_s=now_s,
            line=f"{name}#{nth}",
            disk=disk.get("name") or f"{name}_OsDisk_1_{nth:08x}",
            nic=f"{nic['name']}-{nth:08x}",
        )
        owner, kept = vm.tags.get(DEPLOYMENT_TAG, ""), []
        for kind, part, options in (("disk", vm.disk, disk), ("nic", vm.nic, nic["properties"])):
            goes = options.get("deleteOption") == "Delete"
            if not goes and not self._keeps("parts stay without a delete option"):
                goes = True
            made = Part(
                kind=kind,  # type: ignore[arg-type]
                name=part,
                region=vm.region,
                tags={},
                goes=goes,
                born_s=now_s,
                machine=vm.name,
            )
            self.parts[kind, part.lower()] = made
            kept.append(made)
            self.books.open(
                Line(id=f"{kind}/{part}", kind=kind, owner=owner, token=name, began_s=now_s)  # type: ignore[arg-type]
            )
        self.books.open(Line(id=vm.line, kind="machine", owner=owner, token=name, began_s=now_s))
        self.books.price(f"disk/{vm.disk}", now_s, DISK_USD_PER_H)
        for free in (f"nic/{vm.nic}", vm.line):
            self.books.price(free, now_s, 0.0)
        self.vms[name.lower()] = vm
        return vm

    def _created(self, vm: Vm, at_s: float, fails: bool) -> None:
        if vm.state != "Creating":
            return
        vm.told_s = at_s
        if not fails:
            vm.state, vm.power = "Succeeded", "running"
            self.books.price(vm.line, at_s, self._usd_per_h(vm))
            return
        lot = draw(self.seed, "failure", vm.line)
        vm.state, vm.failure = "Failed", FAILURES[int(lot * len(FAILURES))]
        if vm.failure[0] == "OSProvisioningTimedOut":
            vm.power = "running"
            self.books.price(vm.line, at_s, self._usd_per_h(vm))
        if not self._keeps("a failed creation leaves its parts"):
            self._deleted(vm, at_s, fails=False)
            return
        stranded = draw(self.seed, "stranded", vm.line) < self.dials.stranded
        for part in self._parts_of(vm):
            part.goes = part.goes and not stranded
            if part.kind == "nic" and self._keeps("an interface is reserved after a failure"):
                part.reserved_until_s = at_s + self.dials.reserved_s

    def _get_vm(self, found: Mapping[str, str], *_: Any) -> Answer:
        return Answer(200, self._described(self._vm(found)))

    def _get_view(self, found: Mapping[str, str], *_: Any) -> Answer:
        vm = self._vm(found)
        state = f"ProvisioningState/{vm.state.lower()}"
        status = {"code": state, "level": "Info", "displayStatus": vm.state}
        if vm.failure and self._keeps("a failed creation says why"):
            code, said = vm.failure
            status = {"code": f"{state}/{code}", "level": "Error", "message": said}
        if vm.told_s:
            status["time"] = _iso(vm.told_s)
        statuses = [status]
        if vm.power:
            statuses.append({"code": f"PowerState/{vm.power}", "level": "Info"})
        return Answer(200, {"statuses": statuses})

    def _get_vms(self, found: Mapping[str, str], query: Any, *_: Any) -> Answer:
        shown = [
            self._described(vm)
            for vm in self.vms.values()
            if vm.born_s + self.dials.list_lag_s <= self.now_s or vm.state == "Succeeded"
        ]
        return self._paged(shown, query, "virtualMachines", COMPUTE)

    def _delete_vm(self, found: Mapping[str, str], query: Any, *_: Any) -> Answer:
        vm = self.vms.get(found["name"].lower())
        if vm is None:
            return Answer(204)
        if vm.state != "Deleting":
            before, vm.state = vm.state, "Deleting"
            nth = self._next()
            fails = draw(self.seed, "deletion", nth) < self.dials.delete_failed
            fails = fails and self._keeps("a deletion can fail")
            delay_s = self._span(self.dials.delete_s, f"deletion {nth}")
            if not self._keeps("a deletion takes time"):
                delay_s = 0.0
            self.later(delay_s, lambda at_s: self._deleted(vm, at_s, fails, before))
        headers = self._operation(vm, query, lambda: self._deletion(vm))
        return Answer(202, None, headers)

    def _deletion(self, vm: Vm) -> dict[str, Any]:
        """Return how a deletion stands: Azure dates its end."""
        ended_s = self.books.lines[vm.line].ended_s
        if ended_s is not None:
            return {"status": "Succeeded", "endTime": _iso(ended_s)}
        return {"status": "InProgress" if vm.state == "Deleting" else "Failed"}

    def _deleted(
        self, vm: Vm, at_s: float, fails: bool, before: Provisioning = "Succeeded"
    ) -> None:
        if self.vms.get(vm.name.lower()) is not vm:
            return
        if fails:
            vm.state = "Failed"
            vm.failure = vm.failure or (
                "InternalExecutionError",
                "An internal execution error occurred. Please retry later.",
            )
            return
        self._gone(vm, at_s, "user")

    def _gone(self, vm: Vm, at_s: float, by: Literal["user", "provider"]) -> None:
        del self.vms[vm.name.lower()]
        self.books.close(vm.line, at_s, by)
        for part in self._parts_of(vm):
            part.machine = None
            if part.goes:
                self._drop(part, at_s, by)

    def _drop(self, part: Part, at_s: float, by: Literal["user", "provider"]) -> None:
        part.gone_s = at_s
        self.books.close(f"{part.kind}/{part.name}", at_s, by)

    def _post_evict(self, found: Mapping[str, str], *_: Any) -> Answer:
        vm = self._vm(found)
        if not vm.spot:
            raise Refusal(409, "OperationNotAllowed", f"{vm.name} is not a Spot machine.")
        self.later(30.0, lambda at_s: self.evicted(vm, at_s))
        return Answer(204)

    def evicted(self, vm: Vm, at_s: float) -> None:
        if self.vms.get(vm.name.lower()) is not vm:
            return
        policy = vm.body["properties"].get("evictionPolicy", "Deallocate")
        if policy == "Delete" or not self._keeps("an eviction follows its policy"):
            self._gone(vm, at_s, "provider")
            return
        vm.power = "deallocated"
        self.books.price(vm.line, at_s, 0.0)

    # Parts, quotas, types, prices

    def _get_disks(self, found: Mapping[str, str], query: Any, *_: Any) -> Answer:
        return self._listed("disk", query, "disks", COMPUTE)

    def _get_nics(self, found: Mapping[str, str], query: Any, *_: Any) -> Answer:
        return self._listed("nic", query, "networkInterfaces", NETWORK)

    def _listed(self, kind: str, query: Any, word: str, maker: str) -> Answer:
        lags = kind == "nic" and self._keeps("lists of interfaces lag")
        lag_s = self.dials.nic_lag_s if lags else 0.0
        shown = []
        for part in self.parts.values():
            if part.kind != kind or (part.gone_s is not None and part.gone_s + lag_s <= self.now_s):
                continue
            using = part.machine and _id(f"virtualMachines/{part.machine}", COMPUTE)
            one: dict[str, Any] = {
                "id": _id(f"{word}/{part.name}", maker),
                "name": part.name,
                "location": part.region,
                "tags": part.tags,
                "properties": {"provisioningState": "Succeeded"},
            }
            if kind == "disk":
                one["properties"]["timeCreated"] = _iso(part.born_s)
                one["managedBy"] = using
            elif using:
                one["properties"]["virtualMachine"] = {"id": using}
            shown.append(one)
        return self._paged(shown, query, word, maker)

    def _delete_disk(self, found: Mapping[str, str], *_: Any) -> Answer:
        return self._delete_part("disk", found["name"])

    def _delete_nic(self, found: Mapping[str, str], *_: Any) -> Answer:
        return self._delete_part("nic", found["name"])

    def _delete_part(self, kind: str, name: str) -> Answer:
        part = self.parts.get((kind, name.lower()))
        if part is None or part.gone_s is not None:
            return Answer(204)
        if part.machine is not None:
            code = "NicInUse" if kind == "nic" else "OperationNotAllowed"
            raise Refusal(409, code, f"{part.name} is attached to {part.machine}.")
        if part.reserved_until_s > self.now_s:
            raise Refusal(
                400,
                "NicReservedForAnotherVm",
                f"{part.name} is reserved for another machine for 180 seconds.",
            )
        self._drop(part, self.now_s, "user")
        return Answer(202)

    def _get_usages(self, found: Mapping[str, str], query: Any, *_: Any) -> Answer:
        region = found["region"].lower()
        names = ["cores", "lowPriorityCores", *sorted({size.family for size in SIZES.values()})]
        usages = [
            {
                "unit": "Count",
                "currentValue": self._used(region, name),
                "limit": self._limit(name),
                "name": {"value": name, "localizedValue": name},
            }
            for name in names
        ]
        return Answer(200, {"value": usages})

    def _post_scores(self, found: Mapping[str, str], query: Any, _: Any, body: Any) -> Answer:
        """Say how likely each size is in each region or zone, by what is free of it."""
        if len(body["desiredSizes"]) > 5:
            raise Refusal(400, "InvalidParameter", "At most 5 sizes can be asked for at once.")
        scores = []
        for region in body["desiredLocations"]:
            zones = (REGIONS[region] if body["availabilityZones"] else ()) or ("",)
            for size in (SIZES[x["sku"]] for x in body["desiredSizes"]):
                for zone in zones:
                    kin = (region, zone, size.name, True)
                    free = self.dials.capacity - sum(_kin(x) == kin for x in self.vms.values())
                    word = "High" if free >= 10 else "Medium" if free > 0 else "Low"
                    sold = size.sold(region, zone) and size.low_priority
                    score = {
                        "sku": size.name,
                        "region": region,
                        "score": word if sold else "RestrictedSkuNotAvailable",
                        "isQuotaAvailable": True,
                    }
                    scores.append({**score, "availabilityZone": zone} if zone else score)
        return Answer(200, {**body, "placementScores": scores})

    def _get_skus(self, found: Mapping[str, str], query: Any, *_: Any) -> Answer:
        wanted = re.fullmatch(r"location eq '(\w+)'", query.get("$filter", ""))
        regions = [wanted[1]] if wanted else list(REGIONS)
        return Answer(
            200, {"value": [sku(size, region) for region in regions for size in SIZES.values()]}
        )

    def _get_group(self, found: Mapping[str, str], *_: Any) -> Answer:
        return Answer(200, {"id": _id(""), "name": GROUP, "location": "eastus"})

    def _get_permissions(self, *_: Any) -> Answer:
        return Answer(200, {"value": [{"actions": self.role, "notActions": []}]})

    def _get_network(self, found: Mapping[str, str], *_: Any) -> Answer:
        subnet = {"name": "machines", "id": SUBNET, "properties": self.subnet}
        region = "northcentralus" if found["name"].endswith("northcentralus") else "eastus"
        told = {"name": found["name"], "location": region, "properties": {"subnets": [subnet]}}
        return Answer(200, told)

    def _get_security(self, *_: Any) -> Answer:
        rules = [{"name": f"rule-{nth}", "properties": x} for nth, x in enumerate(self.rules)]
        return Answer(200, {"name": "machines", "properties": {"securityRules": rules}})

    def _get_versions(self, *_: Any) -> Answer:
        return Answer(200, {"value": [{"name": version} for version in self.images]})

    def _get_version(self, found: Mapping[str, str], *_: Any) -> Answer:
        if found["name"] not in self.images:
            raise Refusal(404, "GalleryImageNotFound", f"There is no version {found['name']}.")
        targets = [{"name": region} for region in self.images[found["name"]]]
        properties = {
            "provisioningState": "Succeeded",
            "publishingProfile": {"targetRegions": targets},
        }
        return Answer(200, {"name": found["name"], "properties": properties})

    def _get_operation(self, found: Mapping[str, str], *_: Any) -> Answer:
        outcome = self.operations.get(found["name"])
        if outcome is None:
            raise Refusal(404, "NotFound", "The operation was not found.")
        return Answer(200, outcome["look"]())

    def _prices(self, query: Mapping[str, str], origin: str) -> Answer:
        """Answer the public price list: no token, and pages whose links name the port, too."""
        wanted = dict(re.findall(r"(\w+) eq '([^']*)'", query.get("$filter", "")))
        if not self._keeps("price filters know case"):
            wanted = {name: value.lower() for name, value in wanted.items()}
        shown = []
        since = {size: _iso(at_s) for size, at_s in self.priced_s.items()}
        for item in items(self.prices, since):
            known = item
            if not self._keeps("price filters know case"):
                known = {name: str(value).lower() for name, value in item.items()}
            names = {"priceType": "type"}
            if all(known.get(names.get(name, name)) == value for name, value in wanted.items()):
                shown.append(item)
        start = int(query.get("$skip", "0"))
        size = self.dials.page if self._keeps("lists come in pages") else len(shown)
        after = start + size
        port = ":443" if origin.startswith("https:") and origin.count(":") == 1 else ""
        filter_ = query.get("$filter", "")
        more = f"{origin}{port}/api/retail/prices?$filter={filter_}&$skip={after}"
        page = {"Items": shown[start:after], "NextPageLink": more if after < len(shown) else None}
        return Answer(200, page)

    # Small things

    def _vm(self, found: Mapping[str, str]) -> Vm:
        vm = self.vms.get(found["name"].lower())
        if vm is None:
            raise Refusal(404, "ResourceNotFound", f"The machine {found['name']} was not found.")
        return vm

    def _parts_of(self, vm: Vm) -> list[Part]:
        return [self.parts["disk", vm.disk.lower()], self.parts["nic", vm.nic.lower()]]

    def _described(self, vm: Vm) -> dict[str, Any]:
        properties = dict(vm.body["properties"])
        properties.pop("userData", None)
        properties.pop("osProfile", None)
        return {
            **vm.body,
            "id": _id(f"virtualMachines/{vm.name}", COMPUTE),
            "name": vm.name,
            "properties": {
                **properties,
                "provisioningState": vm.state,
                "timeCreated": _iso(vm.born_s),
                "vmId": vm.line,
            },
        }

    def _paged(self, shown: list[Any], query: Mapping[str, str], word: str, maker: str) -> Answer:
        start = int(query.get("$skiptoken", "0"))
        size = self.dials.page if self._keeps("lists come in pages") else len(shown)
        answer: dict[str, Any] = {"value": shown[start : start + size]}
        if start + size < len(shown):
            path = _id(word, maker)
            version = query["api-version"]
            answer["nextLink"] = (
                f"{query['origin']}{path}?api-version={version}&$skiptoken={start + size}"
            )
        return Answer(200, answer)

    def _operation(
        self, vm: Vm, query: Mapping[str, str], look: Callable[[], Any]
    ) -> dict[str, str]:
        name = f"op-{self._next()}"
        self.operations[name] = {"look": look}
        url = (
            f"{query['origin']}/subscriptions/{SUBSCRIPTION}/providers/{COMPUTE}/locations/"
            f"{vm.region}/operations/{name}?api-version=2026-04-01"
        )
        return {"Azure-AsyncOperation": url, "Retry-After": "10"}

    def _usd_per_h(self, vm: Vm) -> float:
        spot, on_demand = self.prices[vm.size]
        return spot if vm.spot else on_demand

    def _used(self, region: str, name: str) -> int:
        used = 0
        for vm in self.vms.values():
            size = SIZES[vm.size]
            names = ["lowPriorityCores"] if vm.spot else [size.family, "cores"]
            if vm.region == region and name in names and vm.power != "deallocated":
                used += size.vcpus
        return used

    def _limit(self, name: str) -> int:
        return self.dials.quotas.get(name, 10_000)

    def _keeps(self, promise: str) -> bool:
        assert promise in PROMISES, promise
        return promise != self._broken

    def _span(self, span: Span, key: str) -> float:
        return span[0] + (span[1] - span[0]) * draw(self.seed, "span", key)

    def _next(self) -> int:
        self._serial += 1
        return self._serial

    def later(self, delay_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._due, (self.now_s + delay_s, self._next(), act))

    def _work_off(self, until_s: float) -> None:
        while self._due and self._due[0][0] <= until_s:
            at_s, _, act = heapq.heappop(self._due)
            act(at_s)


RULES: tuple[dict[str, Any], ...] = (
    {"priority": 200, "direction": "Inbound", "access": "Deny", "sourceAddressPrefix": "*"},
    {
        "priority": 100,
        "direction": "Inbound",
        "access": "Allow",
        "sourceAddressPrefix": "VirtualNetwork",
    },
)
SUBNET_SAYS: dict[str, Any] = {
    "addressPrefix": "10.40.0.0/16",
    "networkSecurityGroup": {
        "id": f"{SUBNET.partition('/virtualNetworks')[0]}/networkSecurityGroups/machines"
    },
    "serviceEndpoints": [{"service": "Microsoft.Storage"}],
}
FAILURES = (
    ("AllocationFailed", "Allocation failed. We do not have sufficient capacity."),
    ("ZonalAllocationFailed", "Allocation failed in the requested zone."),
    ("OverconstrainedAllocationRequest", "The request is overconstrained."),
    ("OSProvisioningTimedOut", "OS Provisioning did not finish in the allotted time."),
)
_GROUP = r"/subscriptions/(?P<subscription>[^/]+)/resourceGroups/(?P<group>[^/]+)"
_ACCOUNT = r"/subscriptions/(?P<subscription>[^/]+)/providers/Microsoft\.Compute"
_VM = _GROUP + r"/providers/Microsoft\.Compute/virtualMachines"
_DISK = _GROUP + r"/providers/Microsoft\.Compute/disks"
_NIC = _GROUP + r"/providers/Microsoft\.Network/networkInterfaces"
_NETWORKS = _GROUP + r"/providers/Microsoft\.Network"
_VERSIONS = _GROUP + r"/providers/Microsoft\.Compute/galleries/[^/]+/images/[^/]+/versions"
ROUTES = (
    (
        _GROUP + r"/providers/Microsoft\.Authorization/permissions",
        "permissions",
        "Microsoft.Authorization/permissions/{verb}",
    ),
    (
        _NETWORKS + "/virtualNetworks/(?P<name>[^/]+)",
        "network",
        f"{NETWORK}/virtualNetworks/{{verb}}",
    ),
    (
        _NETWORKS + "/networkSecurityGroups/(?P<name>[^/]+)",
        "security",
        f"{NETWORK}/networkSecurityGroups/{{verb}}",
    ),
    (_VERSIONS, "versions", f"{COMPUTE}/galleries/images/versions/{{verb}}"),
    (
        _VERSIONS + "/(?P<name>[^/]+)",
        "version",
        f"{COMPUTE}/galleries/images/versions/{{verb}}",
    ),
    (_VM, "vms", f"{COMPUTE}/virtualMachines/{{verb}}"),
    (_VM + "/(?P<name>[^/]+)", "vm", f"{COMPUTE}/virtualMachines/{{verb}}"),
    (
        _VM + "/(?P<name>[^/]+)/instanceView",
        "view",
        f"{COMPUTE}/virtualMachines/instanceView/{{verb}}",
    ),
    (
        _VM + "/(?P<name>[^/]+)/simulateEviction",
        "evict",
        f"{COMPUTE}/virtualMachines/simulateEviction/{{verb}}",
    ),
    (_DISK, "disks", f"{COMPUTE}/disks/{{verb}}"),
    (_DISK + "/(?P<name>[^/]+)", "disk", f"{COMPUTE}/disks/{{verb}}"),
    (_NIC, "nics", f"{NETWORK}/networkInterfaces/{{verb}}"),
    (_NIC + "/(?P<name>[^/]+)", "nic", f"{NETWORK}/networkInterfaces/{{verb}}"),
    (_GROUP, "group", "Microsoft.Resources/subscriptions/resourceGroups/{verb}"),
    (_ACCOUNT + "/skus", "skus", f"{COMPUTE}/skus/{{verb}}"),
    (
        _ACCOUNT + "/locations/(?P<region>[^/]+)/usages",
        "usages",
        f"{COMPUTE}/locations/usages/{{verb}}",
    ),
    (
        _ACCOUNT + "/locations/(?P<region>[^/]+)/placementScores/spot/generate",
        "scores",
        f"{COMPUTE}/locations/placementScores/generate/{{verb}}",
    ),
    (
        _ACCOUNT + "/locations/(?P<region>[^/]+)/operations/(?P<name>[^/]+)",
        "operation",
        f"{COMPUTE}/locations/operations/{{verb}}",
    ),
)


def vm_body(name: str, region: str = "eastus", tags: dict[str, str] | None = None) -> Any:
    """Return what a person who makes machines by hand would send."""
    ip = {"name": "ip", "properties": {"subnet": {"id": SUBNET}}}
    nic = {"name": f"{name}-nic", "properties": {"ipConfigurations": [ip]}}
    return {
        "location": region,
        "tags": tags or {},
        "properties": {
            "hardwareProfile": {"vmSize": "Standard_D4s_v5"},
            "storageProfile": {
                "imageReference": {"id": IMAGE},
                "osDisk": {"createOption": "FromImage"},
            },
            "networkProfile": {"networkInterfaceConfigurations": [nic]},
        },
    }


def vm_resource(name: str) -> str:
    """Return the id of a machine as Azure writes it."""
    return _id(f"virtualMachines/{name}", COMPUTE)


def zone_of(body: Mapping[str, Any]) -> str:
    zones = body.get("zones") or [""]
    return str(zones[0])


def _kin(vm: Vm) -> tuple[str, str, str, bool]:
    return vm.region, zone_of(vm.body), vm.size, vm.spot


def _outcome(vm: Vm) -> dict[str, Any]:
    """Return how the operation stands; a failed one is an HTTP 200 that holds an error."""
    if vm.failure:
        code, said = vm.failure
        return {"status": "Failed", "error": {"code": code, "message": said}}
    return {"status": "InProgress" if vm.state == "Creating" else "Succeeded"}


def _id(rest: str, maker: str = "") -> str:
    group = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}"
    return f"{group}/providers/{maker}/{rest}" if maker else group


def _iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat()
