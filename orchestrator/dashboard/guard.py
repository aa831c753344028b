"""Access to the dashboard, which only this machine's owner may see, in their own browser.

The dashboard listens on loopback, but that alone is no protection: other users of the machine can
connect, and any web site can make the browser connect. So every request needs

* a Host header that names this machine by a loopback address: a site that rebinds its name to
  127.0.0.1 cannot send one;
* no Origin but the page's own, if it has any: a browser names it whenever a site changes something;
* for everything but the page's own files, a key: as a bearer, from a program, or in the two halves
  of a session, from the page. A browser sends the cookie to every port of an address, so to the
  pages of other users of this machine, and whoever hears it has the half that opens nothing. The
  other half is in a header, which only a script of this port can send: it is the token that guards
  changes against requests of other sites, too;
* for whatever changes something, the role admin;
* to come not more often than a person and a few tools would.
"""

import ipaddress
import time
from collections.abc import Callable, Collection
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.dashboard.keys import Access, Keys, joined

TOKEN_HEADER = "x-page-token"  # noqa: S105 - the name of a header
SESSION_PATH = "/api/session"
READS = {"GET", "HEAD"}
DECIDES = "/what-if"  # takes the processor as long as a decision does
NO_KEY = "Open the address that `orchestrator tools dashboard` prints: it carries the key.\n"
BURST, PER_S = 60.0, 20.0
CHANGE_COST = 10.0
CALLERS_MAX = 1_000
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

    def __init__(self, app: ASGIApp, keys: Keys, files: Collection[str] = ()) -> None:
        """Guard an application; `files` are the paths that hold nothing of this house."""
        self._app = app
        self._keys = keys
        self._files = files
        self._pace = Pace()

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
        if not _from_here(headers, hosts[0]):
            return PlainTextResponse("Another site may ask for nothing here.\n", 403)
        if scope["method"] in READS and scope["path"] in self._files:
            return None
        access = self._access(headers, scope)
        if access is None:
            return PlainTextResponse(NO_KEY, 401, {"WWW-Authenticate": "Bearer"})
        scope.setdefault("state", {})["access"] = access
        return self._bound(access, reads=scope["method"] in READS, path=scope["path"])

    def _bound(self, access: Access, *, reads: bool, path: str) -> Response | None:
        """Return the refusal of a request whose key may not do this, or not so often."""
        if not (reads or path == SESSION_PATH or access.role == "admin"):
            return PlainTextResponse(f"This key is {access.role}; a change needs admin.\n", 403)
        cheap = reads and not path.endswith(DECIDES)
        wait_s = self._pace.wait_s(access.root, 1.0 if cheap else CHANGE_COST)
        if not wait_s:
            return None
        late = {"Retry-After": str(int(wait_s) + 1)}
        return PlainTextResponse("Too many requests with this key; wait.\n", 429, late)

    def _access(self, headers: Headers, scope: Scope) -> Access | None:
        kind, _, value = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            found = self._keys.opened_by(value.strip())
            return None if found is None or found.session else found
        cookie = cookie_of(scope)
        token = headers.get(TOKEN_HEADER, "")
        return self._keys.opened_by(joined(cookie, token)) if cookie and token else None


class Pace:
    """How often each key may ask: so many at once, and so many a second after that."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._left: dict[str, tuple[float, float]] = {}  # by key: what is left, and when

    def wait_s(self, name: str, cost: float) -> float:
        """Return how long the caller has to wait, 0.0 if not; what is granted is taken off."""
        now_s = self._now_s()
        left, at_s = self._left.pop(name, (BURST, now_s))
        left = min(BURST, left + (now_s - at_s) * PER_S)
        granted = left >= cost
        self._left[name] = (left - cost if granted else left, now_s)
        if len(self._left) > CALLERS_MAX:
            del self._left[next(iter(self._left))]
        return 0.0 if granted else (cost - left) / PER_S


def cookie_name(scope: Scope) -> str:
    """Return the cookie's name, with the port: two houses of one address have two cookies."""
    server = scope.get("server")
    return f"page_{server[1] if server else 0}"


def cookie_of(scope: Scope) -> str:
    """Return the cookie that the browser has from this page, or ""."""
    try:
        sent = Headers(scope=scope).get("cookie", "")
        found = SimpleCookie(sent).get(cookie_name(scope))
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _from_here(headers: Headers, host: str) -> bool:
    """Return whether no site but this page has made the browser ask."""
    site = headers.get("sec-fetch-site", "none")
    return headers.get("origin", f"http://{host}") == f"http://{host}" and (
        site in {"none", "same-origin"} or headers.get("sec-fetch-mode") == "navigate"
    )


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
