"""The local cloud as a provider: HTTP in, values and `cloud.errors` out."""

import builtins
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

import httpx
import msgspec

from cloud import errors, private
from cloud.model import (
    Billing,
    Closed,
    LaunchRequest,
    Listing,
    Machine,
    Notice,
    Pace,
    Place,
    Quote,
    Ref,
    Sold,
    Traits,
)
from cloud.provider import no_notices

TIMEOUT_S = 10.0
NOT_REACHED_S = 1.0

ERRORS: dict[str, Callable[[str], errors.CloudError]] = {
    "InsufficientInstanceCapacity": partial(errors.Refused, "pool", "NoCapacity"),
    "SpotMaxPriceTooLow": partial(errors.Refused, "pool", "PriceAboveBid"),
    "MaxSpotInstanceCountExceeded": partial(errors.Refused, "family", "QuotaExceeded"),
    "Unsupported": partial(errors.Refused, "pool", "NotSold"),
    "InvalidParameterValue": errors.Misconfigured,
    "IdempotentParameterMismatch": errors.TokenMismatch,
    "IdempotentInstanceTerminated": errors.TokenSpent,
    "UnauthorizedOperation": errors.NotOurs,
    "AuthFailure": errors.NotAllowed,
    "RequestLimitExceeded": errors.Throttled,
    "InternalError": errors.Unknown,
}
"""What each code of this cloud means, and how far it reaches; any other one is `Unknown`."""

Nodes = int | Literal["all"]
_Answer = TypeVar("_Answer")


class _Refusal(msgspec.Struct, frozen=True):
    code: str
    error: str


class LocalProvider:
    """The local cloud at `url`, as one deployment sees it."""

    def __init__(
        self,
        url: str,
        token: str,
        deployment: str,
        timeout_s: float = TIMEOUT_S,
        billing: Billing = "local",
    ) -> None:
        self._deployment = deployment
        self._billing = billing
        self._own = urlencode({"deployment": deployment})
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=timeout_s,
            trust_env=False,
        )

    @classmethod
    def at(
        cls,
        directory: Path,
        deployment: str,
        timeout_s: float = TIMEOUT_S,
        billing: Billing = "local",
    ) -> "LocalProvider":
        """Return the provider of the local cloud that keeps its books in `directory`."""
        url = msgspec.json.decode((directory / "cloud.json").read_bytes())["url"]
        return cls(url, private.secret(directory / "token"), deployment, timeout_s, billing)

    @property
    def name(self) -> str:
        return "local"

    @property
    def traits(self) -> Traits:
        return Traits(billing=self._billing)

    @property
    def pace(self) -> Pace:
        return Pace(list_s=1.0, offers_s=1.0, sold_s=3600.0, grace_s=1.0, boot_s=1.0)

    async def places(self) -> Sequence[Place | Closed]:
        try:
            return await self._call("GET", "/places", list[Place])
        except errors.Refused as error:
            if error.code == errors.NOT_REACHED:
                raise
            return [Closed(Place(self.name, ""), str(error))]

    async def sold(self, place: Place) -> Sold:
        return await self._call("GET", f"/sold?{_of(place)}", Sold)

    async def quotes(self, place: Place) -> Sequence[Quote]:
        return await self._call("GET", f"/quotes?{_of(place)}", list[Quote])

    async def launch(self, request: LaunchRequest) -> Sequence[Machine]:
        return await self._call("POST", "/launch", list[Machine], request)

    async def list(self, place: Place) -> Listing:
        wanted = f"/machines?{self._own}&{_of(place)}"
        machines = await self._call("GET", wanted, tuple[Machine, ...])
        return Listing(place=place, machines=machines)

    async def end(self, refs: Sequence[Ref]) -> Sequence[Ref]:
        wanted = {"machine_ids": [ref.id for ref in refs], "deployment": self._deployment}
        known = await self._call("POST", "/terminate", set[str], wanted)
        return [ref for ref in refs if ref.id in known]

    def notices(self) -> AsyncIterator[Notice]:
        return no_notices()

    async def bill(self) -> dict[str, float]:
        """Return what every machine has cost by the cloud's bill, in US dollars."""
        return await self._call("GET", f"/bill?{self._own}", dict[str, float])

    async def drill(
        self, *, warning_s: float, nodes: Nodes, only_hint: bool = False
    ) -> "builtins.list[str]":
        """Have running spot machines taken away as the market would; return which."""
        wanted = {
            "warning_s": warning_s,
            "nodes": nodes,
            "deployment": self._deployment,
            "only_hint": only_hint,
        }
        return await self._call("POST", "/drill", list[str], wanted)

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(
        self, method: str, path: str, answer: type[_Answer], body: Any = None
    ) -> _Answer:
        content = None if body is None else msgspec.json.encode(body)
        try:
            response = await self._http.request(method, path, content=content)
            if response.is_success:
                return msgspec.json.decode(response.content, type=answer)
        except (httpx.HTTPError, ValueError) as error:
            reason = f"local cloud, {path}: {str(error) or type(error).__name__}"
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                # No connection came about, so nobody has heard what was asked for.
                raise errors.Refused(
                    "place", errors.NOT_REACHED, reason, retry_s=NOT_REACHED_S
                ) from error
            raise errors.Unknown(reason) from error
        raise _error(response, path)


def _of(place: Place) -> str:
    return urlencode({"region": place.region})


def _error(response: httpx.Response, path: str) -> errors.CloudError:
    """Turn the cloud's refusal into one of our errors; done nowhere else."""
    try:
        refusal = msgspec.json.decode(response.content, type=_Refusal)
    except ValueError:
        refusal = _Refusal(f"HTTP {response.status_code}", response.text[:200])
    kind = ERRORS.get(refusal.code, errors.Unknown)
    return kind(f"local cloud, {path}: {refusal.code}: {refusal.error}")
