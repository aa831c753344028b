"""The dashboard as an application: one page, its files, the view, and a stream of changes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from importlib.resources import files

from fastapi import FastAPI
from starlette.responses import Response, StreamingResponse

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

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, token=token)
    _add_files(app)
    _add_feed(app, feed)
    return app


def _add_files(app: FastAPI) -> None:
    """Add a separate route for every file, so that no path in a request can reach other files."""
    for file in sorted(files("orchestrator.dashboard").joinpath("static").iterdir(), key=str):
        suffix = f".{file.name.rpartition('.')[2]}"
        path = "/" if file.name == "index.html" else f"/static/{file.name}"
        app.get(path)(_file(file.read_bytes(), MEDIA[suffix]))


def _file(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return Response(content, media_type=media_type)

    return answer


def _add_feed(app: FastAPI, feed: Feed) -> None:
    pages = asyncio.Semaphore(PAGES_MAX)

    async def stream() -> AsyncIterator[bytes]:
        async with pages:
            async for message in feed.messages():
                yield message

    @app.get("/view")
    async def view() -> Response:
        return Response(feed.message, media_type="application/json")

    @app.get("/events")
    async def events() -> Response:
        if pages.locked():
            return Response("Too many pages are open; close some.\n", 503)
        return StreamingResponse(stream(), media_type="text/event-stream")
