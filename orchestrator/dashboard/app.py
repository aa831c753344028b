"""The dashboard as an application: one page, its files, and the API behind it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.routing import Route

from cloud.errors import CloudError
from cloud.http_server import Listener
from orchestrator.dashboard.api import ANSWERS, REF, Failure, StateOf, answer, router
from orchestrator.dashboard.feed import UNAVAILABLE, Feed, FeedSource
from orchestrator.dashboard.foresight import state_of
from orchestrator.dashboard.guard import Guard
from orchestrator.dashboard.keys import Keys
from orchestrator.dashboard.past import Past
from orchestrator.history.store import Unreadable
from orchestrator.wishes import Refused

PERIOD_S = 1.0
DOCUMENT = "/api/openapi.json"
MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


def create_app(
    client_factory: Callable[[], FeedSource],
    keys: Keys,
    past: Past,
    period_s: float = PERIOD_S,
    state_of: StateOf = state_of,
) -> FastAPI:
    """Return the application.

    `client_factory` connects to the house; it is called again when the connection is lost.
    """
    feed = Feed(client_factory, period_s)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(feed.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    shown = _files()
    app = FastAPI(
        lifespan=lifespan,
        routes=[*shown.values()],
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(Guard, keys=keys, files=shown.keys())
    app.include_router(router(feed, keys, past, state_of))
    _add_document(app)
    _add_failures(app)
    return app


async def serve(app: FastAPI, listening: socket.socket, over: asyncio.Event) -> None:
    """Serve the application on a bound socket until it is over."""
    async with app.router.lifespan_context(app):
        listener = Listener(app)
        listener.listen_on(listening)
        try:
            await over.wait()
        finally:
            listener.close()


def _files() -> dict[str, Route]:
    """Return a route for every file, so that no path in a request can reach other files."""
    routes = {}
    for file in sorted(files("orchestrator.dashboard").joinpath("static").iterdir(), key=str):
        suffix = f".{file.name.rpartition('.')[2]}"
        path = "/" if file.name == "index.html" else f"/static/{file.name}"
        send = _file(file.read_bytes(), MEDIA[suffix])
        routes[path] = Route(path, send, include_in_schema=False)
    return routes


def _file(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def send(_: Request) -> Response:
        return Response(content, media_type=media_type)

    return send


def _add_document(app: FastAPI) -> None:
    """Serve the OpenAPI document, with the types of the view in it."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title="spot-orchestrator", version="1", routes=app.routes)
            _, known = msgspec.json.schema_components(ANSWERS, ref_template=REF)
            made.setdefault("components", {}).setdefault("schemas", {}).update(known)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]

    @app.get(DOCUMENT)
    async def openapi() -> dict[str, Any]:
        """Return this document."""
        return document()


def _add_failures(app: FastAPI) -> None:
    """Answer every failure with one sentence, and nothing that a caller has sent."""

    async def refused(_: Request, error: Exception) -> Response:
        return answer(Failure(error=str(error)), 409)

    async def known(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = answer(Failure(error=str(error.detail)), error.status_code)
        response.headers.update(error.headers or {})  # which methods there are, for one
        return response

    async def malformed(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = error.errors()[0]
        place = ".".join(str(part) for part in found["loc"])
        return answer(Failure(error=f"{place}: {found['msg']}"), 422)

    async def away(_: Request, error: Exception) -> Response:
        return answer(Failure(error=str(error) or type(error).__name__), 503)

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(HTTPException, known)
    app.add_exception_handler(RequestValidationError, malformed)
    for kind in (*UNAVAILABLE, CloudError, Unreadable):
        app.add_exception_handler(kind, away)
