"""The SDK in threads: one attempt a call, short time-outs, and nothing raised but `cloud.errors`.

The SDK's own pipeline sends again, follows redirects, registers resource providers and waits between
attempts. The manager decides all that itself, so the pipeline made here only signs and sends. The
SDK is imported by the first call, in a thread: it takes half a second and 48 MB.
"""

import asyncio
import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, TypeVar
from urllib.parse import urlsplit

from cloud import errors
from cloud.azure import refusals
from cloud.azure.settings import AzureSettings
from cloud.model import Market

CONNECT_S = 3.0
READ_S = 15.0
LAUNCH_S = 60.0
THREADS = 4
PAGES_MAX = 2000
CAUSES_MAX = 10
PRICES_VERSION = "2023-01-01-preview"
SCOPE = "https://management.azure.com/.default"
USUAL_PORTS = {"https": ":443", "http": ":80"}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
NO_SDK = (
    "Azure needs packages that are not installed, so nothing is bought there; "
    "run: pip install 'spot-orchestrator[azure]'"
)

_Answer = TypeVar("_Answer")
_log = logging.getLogger("cloud.azure")


def has_sdk() -> bool:
    """Return whether the packages are installed, without importing them."""
    try:
        return all(find_spec(name) is not None for name in ("azure.mgmt.compute", "azure.identity"))
    except ModuleNotFoundError:
        return False


class Connection:
    """Calls to one subscription; each place has its threads, so that none waits for the others.

    `policies` see every request right before it is sent. `session` replaces the SDK's connections.
    """

    def __init__(
        self,
        settings: AzureSettings,
        credential: Any = None,
        policies: Sequence[Any] = (),
        session: Any = None,
    ) -> None:
        self._settings = settings
        self._credential = credential
        self._policies = tuple(policies)
        self._session = session
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._local = threading.local()
        self._lock = threading.Lock()
        self._clients: list[Any] = []

    async def run(
        self, region: str, doing: str, call: Callable[[Any], _Answer], market: Market | None = None
    ) -> _Answer:
        """Make one call in a thread of the region; raise nothing but an error of `cloud.errors`."""
        if region not in self._threads:
            self._threads[region] = ThreadPoolExecutor(THREADS, f"azure-{region}")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads[region], self._called, doing, call, market)

    def key(self) -> str:
        """Get a token, to see that there is a sign-in."""
        return str(self._sign_in().get_token(SCOPE).token)

    def prices(self, filter_: str) -> list[dict[str, Any]]:
        """Return what the public price list says; it gets no token of ours."""
        import requests

        session = self._session or self._thread_session(requests)
        base = self._settings.prices_endpoint
        url = f"{base}/api/retail/prices"
        query: dict[str, str] | None = {"api-version": PRICES_VERSION, "$filter": filter_}
        found: list[dict[str, Any]] = []
        for _ in range(PAGES_MAX):
            _log.debug("Azure, GET %s", urlsplit(url).path)
            response = session.get(
                url, params=query, timeout=(CONNECT_S, READ_S), allow_redirects=False
            )
            if response.status_code != 200:
                raise refusals.error(
                    said_in(response.status_code, response.headers, response.text),
                    doing="price list",
                )
            page = response.json()
            found += page["Items"]
            if not page.get("NextPageLink"):
                return found
            url, query = page["NextPageLink"], None
            must_be(url, base)
        raise errors.Unknown(f"Azure, price list: more than {PAGES_MAX} pages")

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
        for client in self._clients:
            client.close()

    # In a thread

    def _called(self, doing: str, call: Callable[[Any], _Answer], market: Market | None) -> _Answer:
        try:
            return call(self._client())
        except errors.CloudError:
            raise
        except Exception as error:
            raised = error_of(error, doing, market)
        raise raised from None  # the SDK's exception holds the request with all that was sent

    def _client(self) -> Any:
        client = getattr(self._local, "client", None)
        if client is None:
            client = self._local.client = self._new_client()
            with self._lock:
                self._clients.append(client)
        return client

    def _new_client(self) -> Any:
        from azure.core.pipeline import policies
        from azure.core.pipeline.transport import RequestsTransport
        from azure.mgmt.compute import ComputeManagementClient

        credential = self._sign_in()
        transport = RequestsTransport(
            session=self._session,
            session_owner=self._session is None,
            connection_timeout=CONNECT_S,
            read_timeout=READ_S,
        )
        pipeline = [
            policies.RequestIdPolicy(),
            policies.HeadersPolicy(),
            policies.UserAgentPolicy(base_user_agent="spot-orchestrator"),
            policies.ContentDecodePolicy(),
            self._signing(credential),
            _logging(),
            *self._policies,
        ]
        return ComputeManagementClient(
            credential,
            self._settings.subscription,
            base_url=self._settings.endpoint,
            policies=pipeline,
            transport=transport,
        )

    def _signing(self, credential: Any) -> Any:
        """Return the policy that signs: over plain HTTP only towards this machine itself."""
        from azure.core.pipeline.policies import SansIOHTTPPolicy
        from azure.mgmt.core.policies import ARMChallengeAuthenticationPolicy

        endpoint = urlsplit(self._settings.endpoint)
        if endpoint.scheme == "https":
            return ARMChallengeAuthenticationPolicy(credential, SCOPE)
        if endpoint.hostname not in LOOPBACK:
            raise errors.Misconfigured(
                f"azure.endpoint is {self._settings.endpoint}, which would send keys in plain text; "
                "use https",
                "cloud",
            )

        class Signing(SansIOHTTPPolicy):  # type: ignore[misc]
            def on_request(self, request: Any) -> None:
                token = credential.get_token(SCOPE).token
                request.http_request.headers["Authorization"] = f"Bearer {token}"

        return Signing()

    def _sign_in(self) -> Any:
        with self._lock:
            if self._credential is None:
                from azure import identity

                match self._settings.sign_in:
                    case "default":
                        self._credential = identity.DefaultAzureCredential()
                    case "managed":
                        self._credential = identity.ManagedIdentityCredential()
                    case client_id:
                        self._credential = identity.ManagedIdentityCredential(client_id=client_id)
            return self._credential

    def _thread_session(self, requests: Any) -> Any:
        if getattr(self._local, "session", None) is None:
            self._local.session = requests.Session()
        return self._local.session


def _logging() -> Any:
    """Return the policy that logs each request, without its body and its headers."""
    from azure.core.pipeline.policies import SansIOHTTPPolicy

    class Logging(SansIOHTTPPolicy):  # type: ignore[misc]
        def on_request(self, request: Any) -> None:
            asked = request.http_request
            _log.debug("Azure, %s %s", asked.method, urlsplit(asked.url).path)

    return Logging()


def must_be(url: str, base: str) -> None:
    """Raise unless a link leads to where the first answer came from; Azure adds the usual port."""
    with contextlib.suppress(ValueError):  # it is no address
        if _origin(url) == _origin(base):
            return
    raise errors.Unknown(f"Azure: a next page is not at {base}, so it is not asked for")


def _origin(url: str) -> tuple[str, str]:
    """Return what two addresses of one server have in common; a user's name in it stays in it."""
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.lower().removesuffix(USUAL_PORTS.get(parts.scheme, ""))


def said_in(status: int, headers: Mapping[str, str], text: str) -> refusals.Said:
    """Return the error that an answer's body holds, whatever it looks like."""
    code, said = "", text[: refusals.SAID_MAX]
    try:
        body = json.loads(text)
        inner = body.get("error", body)
        code, said = str(inner.get("code") or ""), str(inner.get("message") or "")
        said += _looked_at(inner)
    except (ValueError, AttributeError, TypeError, LookupError, RecursionError):
        pass  # a proxy's page or nothing at all: the status alone has to do
    return refusals.Said(status=status, code=code, text=said, retry_s=_retry_s(headers))


def _looked_at(error: Mapping[str, Any]) -> str:
    """Return which properties of a request a policy looked at: the message need not name them."""
    names = [
        str(one.get("path") or one.get("expression"))
        for violation in error.get("additionalInfo") or ()
        if violation.get("type") == "PolicyViolation"
        for one in violation["info"]["evaluationDetails"]["evaluatedExpressions"]
    ]
    return f" (it looked at {', '.join(dict.fromkeys(names))})" if names else ""


def error_of(error: Exception, doing: str, market: Market | None = None) -> errors.CloudError:
    """Turn whatever the SDK raised into one of our errors; done nowhere else."""
    if isinstance(error, ImportError):
        return errors.Misconfigured(NO_SDK, "cloud")
    from azure.core import exceptions

    response = getattr(error, "response", None)
    if isinstance(error, exceptions.HttpResponseError) and response is not None:
        try:
            text = response.text()
        except Exception:
            text = ""
        headers = getattr(response, "headers", {})
        return refusals.error(said_in(int(response.status_code), headers, text), market, doing)
    if isinstance(error, exceptions.ClientAuthenticationError):
        return errors.NotAllowed(
            f"Azure, {doing}: there is no sign-in ({_line(error)}); run `az login`, or give this "
            "machine a managed identity and set azure.sign_in",
            "cloud",
        )
    return errors.Unknown(f"Azure, {doing}: {type(error).__name__}{_why(error)}")


def _why(error: BaseException | None) -> str:
    """Return the system's own word for what failed, if there is one.

    The text of an exception may hold the request with all that was sent, so it is not passed on.
    """
    for _ in range(CAUSES_MAX):
        if isinstance(error, OSError) and error.errno is not None:
            return f": {os.strerror(error.errno)}"
        error = error and (error.__cause__ or error.__context__)
    return ""


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[: refusals.SAID_MAX]


def _retry_s(headers: Mapping[str, str]) -> float | None:
    text = headers.get("Retry-After") or headers.get("retry-after")
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds <= 86_400 else None
