"""The local cloud as a provider: HTTP in, values and `cloud.errors` out."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

import httpx
import msgspec

from cloud import errors
from cloud.model import InstanceType, LaunchRequest, Machine, Pool, Quote

TIMEOUT_S = 10.0

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


class _Sold(msgspec.Struct, frozen=True):
    types: tuple[InstanceType, ...]
    pools: tuple[Pool, ...]


class _Refusal(msgspec.Struct, frozen=True):
    code: str
    error: str


class LocalProvider:
    """The local cloud at `url`, as one deployment sees it."""

    def __init__(self, url: str, token: str, deployment: str, timeout_s: float = TIMEOUT_S) -> None:
        self._deployment = deployment
        self._own = urlencode({"deployment": deployment})
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=timeout_s,
            trust_env=False,
        )

    @classmethod
    def at(cls, directory: Path, deployment: str, timeout_s: float = TIMEOUT_S) -> "LocalProvider":
        """Return the provider of the local cloud that keeps its books in `directory`."""
        url = msgspec.json.decode((directory / "cloud.json").read_bytes())["url"]
        return cls(url, (directory / "token").read_text().strip(), deployment, timeout_s)

    @property
    def name(self) -> str:
        return "local"

    async def catalogue(self) -> tuple[Sequence[InstanceType], Sequence[Pool]]:
        sold = await self._call("GET", "/catalogue", _Sold)
        return sold.types, sold.pools

    async def quotes(self) -> Sequence[Quote]:
        return await self._call("GET", "/quotes", list[Quote])

    async def launch(self, request: LaunchRequest) -> Machine:
        return await self._call("POST", "/launch", Machine, request)

    async def machines(self) -> Sequence[Machine]:
        return await self._call("GET", f"/machines?{self._own}", list[Machine])

    async def terminate(self, machine_ids: Sequence[str]) -> None:
        wanted = {"machine_ids": list(machine_ids), "deployment": self._deployment}
        await self._call("POST", "/terminate", type(None), wanted)

    async def bill(self) -> dict[str, float]:
        """Return what every machine has cost by the cloud's bill, in US dollars."""
        return await self._call("GET", f"/bill?{self._own}", dict[str, float])

    async def drill(self, *, warning_s: float, nodes: Nodes, only_hint: bool = False) -> list[str]:
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
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            reason = str(error) or type(error).__name__
            raise errors.Unknown(f"local cloud, {path}: {reason}") from error
        raise _error(response, path)


def _error(response: httpx.Response, path: str) -> errors.CloudError:
    """Turn the cloud's refusal into one of our errors; done nowhere else."""
    try:
        refusal = msgspec.json.decode(response.content, type=_Refusal)
    except msgspec.DecodeError:
        refusal = _Refusal(f"HTTP {response.status_code}", response.text[:200])
    kind = ERRORS.get(refusal.code, errors.Unknown)
    return kind(f"local cloud, {path}: {refusal.code}: {refusal.error}")
