"""The metadata service of a machine, in the dialects of two clouds.

EC2: instance metadata service version 2; a session token first, and 404 for what does not apply.
Azure: scheduled events; an incarnation number and a list of events, which may be acknowledged.
In both, `/identity?nonce=` answers who the machine is, signed by this cloud for the nonce.
Both give times in whole seconds. They are rounded down here, so that a machine never relies on time
that it does not have.
"""

import json
import math
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any, Protocol
from uuid import NAMESPACE_URL, uuid5

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from cloud.clock import Clock
from cloud.market import Dialect
from cloud.model import Machine, Notice

TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105 - the name of a header
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
TTL_MAX_S = 21_600
TOKENS_MAX = 256
NONCE_MAX = 64
AZURE_API_VERSIONS = ("2019-08-01", "2020-07-01")


class Fate(Protocol):
    """What the cloud knows about one of its machines."""

    def machine(self) -> Machine: ...

    def notice(self) -> Notice | None:
        """Return the notice that the machine will go, if there is one."""
        ...

    def hinted_at_s(self) -> float | None:
        """Return when the cloud first hinted that the machine may go."""
        ...

    def acknowledge(self) -> None:
        """Say that the machine is ready to go, so that the cloud need not wait."""
        ...


def metadata_app(
    dialect: Dialect, fate: Fate, clock: Clock, sign: Callable[[str], str] | None = None
) -> ASGIApp:
    """Return the metadata service of one machine; `sign` says for a nonce who it is."""
    app = _Ec2(fate, clock).app if dialect == "ec2" else _Azure(fate).app
    if sign is not None:
        app.router.routes.append(Route("/identity", _identity(sign)))
    return app


def _identity(sign: Callable[[str], str]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        nonce = request.query_params.get("nonce", "")
        if request.headers.get("metadata", "").lower() != "true" or not 0 < len(nonce) <= NONCE_MAX:
            return PlainTextResponse("", 400)
        return PlainTextResponse(sign(nonce))

    return answer


def _utc(at_s: float) -> datetime:
    return datetime.fromtimestamp(math.floor(at_s), UTC)


def _iso(at_s: float) -> str:
    return _utc(at_s).strftime("%Y-%m-%dT%H:%M:%SZ")


class _Ec2:
    """Instance metadata, for holders of a session token only."""

    def __init__(self, fate: Fate, clock: Clock) -> None:
        self._fate = fate
        self._clock = clock
        self._expiry_s: dict[str, float] = {}
        self.app = Starlette(
            routes=[
                Route("/latest/api/token", self._token, methods=["PUT"]),
                Route("/latest/meta-data/{path:path}", self._meta_data),
            ]
        )

    async def _token(self, request: Request) -> Response:
        ttl = request.headers.get(TTL_HEADER, "")
        if "x-forwarded-for" in request.headers:
            return PlainTextResponse("", 403)
        if not (ttl.isdecimal() and 1 <= int(ttl) <= TTL_MAX_S):
            return PlainTextResponse("", 400)
        if len(self._expiry_s) >= TOKENS_MAX:
            del self._expiry_s[next(iter(self._expiry_s))]
        value = secrets.token_urlsafe(32)
        self._expiry_s[value] = self._clock.now_s() + int(ttl)
        return PlainTextResponse(value, headers={TTL_HEADER: ttl})

    async def _meta_data(self, request: Request) -> Response:
        token = request.headers.get(TOKEN_HEADER, "")
        if self._expiry_s.get(token, 0.0) <= self._clock.now_s():
            return PlainTextResponse("", 401)
        said = self._said(request.path_params["path"])
        return PlainTextResponse("", 404) if said is None else PlainTextResponse(said)

    def _said(self, path: str) -> str | None:
        machine, notice = self._fate.machine(), self._fate.notice()
        hinted_at_s = self._fate.hinted_at_s()
        said = {
            "instance-id": machine.id,
            "instance-type": machine.pool.type,
            "local-ipv4": machine.address,
            "placement/availability-zone": machine.pool.zone,
            "placement/region": machine.pool.region,
        }
        if notice is not None:
            gone = _iso(notice.deadline_s)
            said["spot/instance-action"] = json.dumps({"action": "terminate", "time": gone})
            said["spot/termination-time"] = gone
        if hinted_at_s is not None:
            hint = json.dumps({"noticeTime": _iso(hinted_at_s)})
            said["events/recommendations/rebalance"] = hint
        return said.get(path)


class _Azure:
    """Scheduled events. The incarnation changes whenever the list does."""

    def __init__(self, fate: Fate) -> None:
        self._fate = fate
        self._said: list[dict[str, Any]] = []
        self._incarnation = 1
        self.app = Starlette(
            routes=[
                Route("/metadata/instance/compute", self._compute),
                Route("/metadata/scheduledevents", self._events, methods=["GET", "POST"]),
            ]
        )

    async def _compute(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        machine = self._fate.machine()
        pool = machine.pool
        said = {"name": machine.id, "vmId": machine.id, "vmSize": pool.type}
        return JSONResponse({**said, "location": pool.region, "zone": pool.zone})

    async def _events(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        events = self._list()
        if request.method == "GET":
            self._incarnation += events != self._said
            self._said = events
            return JSONResponse({"DocumentIncarnation": self._incarnation, "Events": events})
        try:
            wanted = {row["EventId"] for row in (await request.json())["StartRequests"]}
        except (ValueError, KeyError, TypeError):
            return JSONResponse({"error": "StartRequests must list objects with an EventId"}, 400)
        if not wanted <= {event["EventId"] for event in events}:
            return JSONResponse({"error": "no such event"}, 400)
        if wanted:
            self._fate.acknowledge()
        return Response(status_code=200)

    def _list(self) -> list[dict[str, Any]]:
        machine, notice = self._fate.machine(), self._fate.notice()
        if notice is None:
            return []
        return [
            {
                "EventId": str(uuid5(NAMESPACE_URL, f"{machine.id}/{notice.deadline_s}")).upper(),
                "EventType": "Preempt",
                "ResourceType": "VirtualMachine",
                "Resources": [machine.id],
                "EventStatus": "Scheduled",
                "NotBefore": format_datetime(_utc(notice.deadline_s), usegmt=True),
                "Description": "",
                "EventSource": "Platform",
                "DurationInSeconds": -1,
            }
        ]

    def _refusal(self, request: Request) -> Response | None:
        if request.headers.get("metadata", "").lower() != "true":
            return JSONResponse(
                {"error": "Bad request. Required metadata header not specified"}, 400
            )
        if request.query_params.get("api-version", "") not in AZURE_API_VERSIONS:
            newest = list(AZURE_API_VERSIONS)
            return JSONResponse(
                {"error": "Bad request. api-version is invalid", "newest-versions": newest}, 400
            )
        return None
