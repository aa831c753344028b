"""The metadata service of a fake account's machine: who it is, signed, and who it may be elsewhere.

Notices and session tokens are the local cloud's, which speaks both dialects; this adds what a machine
of a real cloud finds beside them. Identity documents and tokens are given to every process on it.
"""

from typing import Any

from cloudfake.account.cores import ArmCore, Core, Ec2Core
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from cloud.clock import Clock
from cloud.local.metadata import TOKEN_HEADER, Fate, _Azure, _Ec2


def imds(core: Core, fate: Fate, clock: Clock) -> ASGIApp:
    """Return the metadata service of one machine."""
    if isinstance(core, ArmCore):
        return _AzureMachine(core, fate, clock).app
    assert isinstance(core, Ec2Core)
    return _Ec2Machine(core, fate, clock).app


class _Ec2Machine(_Ec2):
    def __init__(self, core: Ec2Core, fate: Fate, clock: Clock) -> None:
        super().__init__(fate, clock)
        self._core = core
        path = "/latest/dynamic/instance-identity/{path:path}"
        self.app.router.routes.insert(0, Route(path, self._identity))

    async def _identity(self, request: Request) -> Response:
        token = request.headers.get(TOKEN_HEADER, "")
        if self._expiry_s.get(token, 0.0) <= self._clock.now_s():
            return PlainTextResponse("", 401)
        machine_id, path = self._fate.machine().id, request.path_params["path"]
        said = self._core.papers(machine_id, path, "", self._clock.now_s())
        return PlainTextResponse("", 404) if said is None else PlainTextResponse(said)


class _AzureMachine(_Azure):
    def __init__(self, core: ArmCore, fate: Fate, clock: Clock) -> None:
        super().__init__(fate)
        self._core, self._clock = core, clock
        own = [
            Route("/metadata/attested/document", self._attested),
            Route("/metadata/instance/compute", self._who),
            Route("/metadata/identity/oauth2/token", self._token),
        ]
        self.app.router.routes[:0] = own

    async def _attested(self, request: Request) -> Response:
        if request.headers.get("metadata", "").lower() != "true":
            return _refused()
        machine_id, nonce = self._fate.machine().id, request.query_params.get("nonce", "")
        if not (nonce.isdecimal() and len(nonce) <= 10):  # as Azure says in its documents
            return JSONResponse({"error": "Bad request. nonce is invalid"}, 400)
        papers: Any = self._core.papers(machine_id, "attested/document", nonce, self._clock.now_s())
        return JSONResponse(papers)

    async def _who(self, request: Request) -> Response:
        if request.headers.get("metadata", "").lower() != "true":
            return _refused()
        return JSONResponse(self._core.compute(self._fate.machine().id))

    async def _token(self, request: Request) -> Response:
        """Give a token of the machine's identity, which may delete machines and nothing else."""
        if request.headers.get("metadata", "").lower() != "true":
            return _refused()
        said = self._core.token_of(self._fate.machine().id)
        if said is None:
            return JSONResponse(
                {"error": "invalid_request", "error_description": "no identity"}, 400
            )
        return JSONResponse(said)


def _refused() -> Response:
    return JSONResponse({"error": "Bad request. Required metadata header not specified"}, 400)
