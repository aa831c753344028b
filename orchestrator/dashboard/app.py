"""The dashboard as an application: one page, its files, the view, and a stream of changes."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from importlib.resources import files

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from cloud.http_server import Listener
from orchestrator.dashboard.feed import Feed, FeedSource
from orchestrator.dashboard.guard import Guard

PAGES_MAX = 64
MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def create_app(
    client_factory: Callable[[], FeedSource], token: str, period_s: float = 0.5
) -> Starlette:
    """Return the application.

    `client_factory` connects to the house; it is called again when the connection is lost.
    """
    feed = Feed(client_factory, period_s)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(feed.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    shown = _files()
    guard = Middleware(Guard, token=token, files={route.path for route in shown})
    return Starlette(lifespan=lifespan, middleware=[guard], routes=[*shown, *_feed_routes(feed)])


async def serve(app: Starlette, listening: socket.socket, over: asyncio.Event) -> None:
    """Serve the application on a bound socket until it is over."""
    async with app.router.lifespan_context(app):
        listener = Listener(app)
        listener.listen_on(listening)
        try:
            await over.wait()
        finally:
            listener.close()


def _files() -> list[Route]:
    """Return a route for every file, so that no path in a request can reach other files."""
    routes = []
    for file in sorted(files("orchestrator.dashboard").joinpath("static").iterdir(), key=str):
        suffix = f".{file.name.rpartition('.')[2]}"
        path = "/" if file.name == "index.html" else f"/static/{file.name}"
        routes.append(Route(path, _file(file.read_bytes(), MEDIA[suffix])))
    return routes


def _file(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_: Request) -> Response:
        return Response(content, media_type=media_type)

    return answer


def _feed_routes(feed: Feed) -> list[Route]:
    pages = asyncio.Semaphore(PAGES_MAX)

    async def stream() -> AsyncIterator[bytes]:
        async with pages:
            async for message in feed.messages():
                yield message

    async def view(_: Request) -> Response:
        return Response(feed.message, media_type="application/json")

    async def events(_: Request) -> Response:
        if pages.locked():
            return Response("Too many pages are open; close some.\n", 503)
        return StreamingResponse(stream(), media_type="text/event-stream")

    return [Route("/view", view), Route("/events", events)]
