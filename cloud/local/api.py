"""The API of the local cloud: JSON over HTTP, a bearer token, and error codes as in EC2.

    GET  /places   GET /sold?region=   GET /quotes?region=   GET /machines?deployment=&region=
    POST /launch   POST /terminate     GET /bill?deployment=
    POST /drill    POST /faults

`/drill` takes machines away as the market would. `/faults` is for tests: it switches on failures of
a real cloud for the next calls.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloud import errors
from cloud.local.service import LocalCloud
from cloud.model import DEPLOYMENT_TAG, LaunchRequest, Machine, Place, Quote, Sold

BODY_BYTES_MAX = 65_536

CODES = {
    "NoCapacity": "InsufficientInstanceCapacity",
    "PriceAboveBid": "SpotMaxPriceTooLow",
    "QuotaExceeded": "MaxSpotInstanceCountExceeded",
    "NotSold": "Unsupported",
    "Misconfigured": "InvalidParameterValue",
    "TokenMismatch": "IdempotentParameterMismatch",
    "TokenSpent": "IdempotentInstanceTerminated",
    "NotOurs": "UnauthorizedOperation",
    "NotAllowed": "AuthFailure",
    "Throttled": "RequestLimitExceeded",
    "Unknown": "InternalError",
}
STATUS = {
    "AuthFailure": 401,
    "UnauthorizedOperation": 403,
    "RequestLimitExceeded": 503,
    "InternalError": 500,
}


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    error: str


class Termination(msgspec.Struct, frozen=True, kw_only=True):
    machine_ids: tuple[str, ...]
    deployment: str


class Drill(msgspec.Struct, frozen=True, kw_only=True):
    """A request to take a number of spot machines, the oldest first, or only to hint at it."""

    warning_s: float
    nodes: int | Literal["all"]
    deployment: str
    only_hint: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.warning_s <= 86_400:
            raise ValueError(f"warning_s must be from 0 to 86400, not {self.warning_s}")
        if self.nodes != "all" and self.nodes < 1:
            raise ValueError(f'nodes must be "all" or at least 1, not {self.nodes}')


class Faults(msgspec.Struct, kw_only=True):
    """The faults that are switched on.

    Each call that a fault spoils lowers the fault's count; times stay until they are reset.
    """

    lose_launch_answers: int = 0
    refuse_launches: int = 0
    refuse_code: str = "InsufficientInstanceCapacity"
    throttle_calls: int = 0
    answer_delay_s: float = 0.0
    listing_lag_s: float = 0.0


class _Spoken(errors.CloudError):
    """An error that a test switched on, by the code that clients read."""

    def __init__(self, code: str, said: str) -> None:
        super().__init__(said)
        self._code = code

    @property
    def code(self) -> str:
        return self._code


Handler = Callable[[Request], Awaitable[Any]]


class Api:
    """The routes over one cloud."""

    def __init__(self, service: LocalCloud, token: str) -> None:
        self._service = service
        self._core = service.core
        self._token = token
        self._faults = Faults()
        handlers: list[tuple[str, str, Handler]] = [
            ("GET", "/places", self._places),
            ("GET", "/sold", self._sold),
            ("GET", "/quotes", self._quotes),
            ("GET", "/machines", self._machines),
            ("GET", "/bill", self._bill),
            ("POST", "/launch", self._launch),
            ("POST", "/terminate", self._terminate),
            ("POST", "/drill", self._drill),
            ("POST", "/faults", self._set_faults),
        ]
        self.app = Starlette(
            routes=[
                Route(path, self._endpoint(handler), methods=[method])
                for method, path, handler in handlers
            ]
        )

    def _endpoint(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                self._admit(request)
                await asyncio.sleep(self._faults.answer_delay_s)
                said = await handler(request)
                self._service.record_ends()
                return _json(said, 200)
            except errors.CloudError as error:
                code = CODES.get(error.code, error.code)
                return _json(Refusal(code=code, error=str(error)), STATUS.get(code, 400))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                return _json(Refusal(code="InvalidParameterValue", error=str(error)), 400)

        return answer

    def _admit(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise errors.NotAllowed("the bearer token is missing or wrong")
        if int(request.headers.get("content-length", "0")) > BODY_BYTES_MAX:
            raise errors.Misconfigured(f"a request has at most {BODY_BYTES_MAX} bytes")
        if self._faults.throttle_calls > 0 and request.url.path != "/faults":
            self._faults.throttle_calls -= 1
            raise errors.Throttled("slow down")

    def _now_s(self) -> float:
        return self._service.clock.now_s()

    async def _places(self, _: Request) -> list[Place]:
        return self._core.places()

    async def _sold(self, request: Request) -> Sold:
        sold = self._core.sold(self._place(request))
        return msgspec.structs.replace(sold, recipe=self._service.recipe)

    async def _quotes(self, request: Request) -> list[Quote]:
        return self._core.quotes(self._now_s(), self._place(request))

    def _place(self, request: Request) -> Place:
        region = request.query_params.get("region", "")
        place = Place(self._core.market.catalogue.cloud, region)
        if place not in self._core.places():
            raise errors.Misconfigured(f"there is no region {region!r}")
        return place

    async def _machines(self, request: Request) -> list[Machine]:
        known_s = self._now_s() - self._faults.listing_lag_s
        deployment = request.query_params.get("deployment", "")
        listed = self._core.machines(deployment, self._place(request).region)
        return [_as_of(known_s, machine) for machine in listed if machine.launched_at_s <= known_s]

    async def _bill(self, request: Request) -> dict[str, float]:
        return self._core.bill(self._now_s(), request.query_params.get("deployment", ""))

    async def _launch(self, request: Request) -> list[Machine]:
        wanted = msgspec.json.decode(await request.body(), type=LaunchRequest)
        if self._faults.refuse_launches > 0:
            self._faults.refuse_launches -= 1
            raise _Spoken(self._faults.refuse_code, "refused on purpose")
        if wanted.recipe not in ("", self._service.recipe.digest):
            said = f"recipe {wanted.recipe} is not {self._service.recipe.digest}, which holds now"
            raise errors.Refused("place", "RecipeChanged", said, 1.0)
        machines = self._core.launch_all(wanted, self._now_s())
        self._enter_into_books(machines)
        self._service.nudge()
        if self._faults.lose_launch_answers > 0:
            self._faults.lose_launch_answers -= 1
            raise errors.Unknown("the answer was lost on purpose")
        return machines

    def _enter_into_books(self, machines: list[Machine]) -> None:
        """Write a launch into the books, or undo it, because a restart would not know of it."""
        try:
            self._service.record()
        except OSError as error:
            own = machines[0].tags.get(DEPLOYMENT_TAG, "")
            self._core.terminate([machine.id for machine in machines], self._now_s(), own)
            said = f"the books cannot be written: {error}"
            raise errors.Refused("pool", "NoCapacity", said) from error

    async def _terminate(self, request: Request) -> list[str]:
        wanted = msgspec.json.decode(await request.body(), type=Termination)
        known = self._core.terminate(wanted.machine_ids, self._now_s(), wanted.deployment)
        self._service.end(wanted.machine_ids)
        return known

    async def _drill(self, request: Request) -> list[str]:
        wanted = msgspec.json.decode(await request.body(), type=Drill)
        at_once = wanted.warning_s == 0 and not wanted.only_hint
        running = sorted(
            (noticed, machine.launched_at_s, machine.id)  # a machine that goes anyway comes last
            for machine in self._core.machines(wanted.deployment)
            if machine.state == "running" and machine.market == "spot"
            for noticed in [self._core.notice(machine.id) is not None]
            if at_once or not noticed
        )
        count = len(running) if wanted.nodes == "all" else wanted.nodes
        taken = [machine_id for _, _, machine_id in running[:count]]
        if wanted.only_hint:
            self._core.hint(taken, self._now_s())
        else:
            self._core.revoke(taken, self._now_s(), wanted.warning_s)
        self._service.nudge()
        return taken

    async def _set_faults(self, request: Request) -> Faults:
        wanted = msgspec.json.decode(await request.body(), type=Faults)
        if wanted.refuse_code not in CODES.values():
            raise errors.Misconfigured(f"refuse_code must be one of {sorted(CODES.values())}")
        self._faults = wanted
        return wanted


def _as_of(known_s: float, machine: Machine) -> Machine:
    """Return the machine as a lagging list shows it, without an end after `known_s`."""
    if machine.ended_at_s is None or machine.ended_at_s <= known_s:
        return machine
    return msgspec.structs.replace(machine, state="running", ended_at_s=None, ended_by=None)


def _json(value: object, status: int) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
