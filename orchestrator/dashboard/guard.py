"""Access to the dashboard, which only this machine's owner may see, in their own browser.

The dashboard listens on loopback, but that alone is no protection: other users of the machine can
connect, and any web site can make the browser connect. So every request needs a Host header that
names this machine by a loopback address (a site that rebinds its name to 127.0.0.1 cannot send
one), a method that only reads, and, for everything but the page's own files, the token as a bearer.

There is no cookie: a browser sends those to every port of an address, so to the pages of other
users of this machine, too. The page keeps the token in the storage of its tab instead, which
belongs to one port, and finds it in the part of its address that a browser sends to nobody.
"""

import hmac
import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloud.private import CHARACTERS_MIN

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Wraps the whole application, so that no route can be forgotten."""

    def __init__(self, app: ASGIApp, token: str, files: Collection[str] = ()) -> None:
        """Guard an application; `files` are the paths that hold nothing of this house."""
        if len(token) < CHARACTERS_MIN:
            raise ValueError(f"the token has {len(token)} characters, not {CHARACTERS_MIN}")
        self._app = app
        self._token = token.encode()
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        answer = self._refusal(scope)
        await (answer or self._app)(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the answer instead of the page, or None if the request may pass."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not _names_this_machine(hosts[0]):
            return PlainTextResponse("Use the address 127.0.0.1 or localhost.\n", 400)
        if scope["method"] not in {"GET", "HEAD"}:
            return PlainTextResponse("This page only shows; it changes nothing.\n", 405)
        if scope["path"] in self._files or self._bearer(headers):
            return None
        return PlainTextResponse(
            "Open the address that `orchestrator tools dashboard` prints: it carries the key.\n",
            401,
            {"WWW-Authenticate": "Bearer"},
        )

    def _bearer(self, headers: Headers) -> bool:
        kind, _, value = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and _same(value.strip(), self._token)


def _same(given: str, expected: bytes) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected)


def _names_this_machine(host: str) -> bool:
    """Return whether the host is localhost or a loopback address, with or without a port."""
    name, _, port = host.rpartition(":") if _has_port(host) else (host, "", "")
    if port and not (port.isascii() and port.isdigit()):
        return False
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def _has_port(host: str) -> bool:
    return ":" in host and not host.endswith("]")


def _with_headers(send: Send) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            extra = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
            kept = [pair for pair in message["headers"] if pair[0] not in dict(extra)]
            message = {**message, "headers": [*kept, *extra]}
        await send(message)

    return guarded
