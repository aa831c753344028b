"""Sending traces to an OpenTelemetry collector: OTLP over HTTP, in its JSON form.

A trace that was sent twice is the same one, because its ids are its own. So whatever may have got
lost is sent again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import msgspec

from orchestrator.errors import OrchestratorError
from orchestrator.history.outside.recoveries import Span

PATH = "/v1/traces"
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"  # NAME=VALUE,NAME=VALUE, as all exporters read it
TRIES_MAX = 5
FIRST_S = 1.0  # between two tries, twice as long each time
ANSWER_S_MAX = 10.0
AGAIN = (429, 502, 503, 504)  # the statuses after which the protocol has a client try again
INTERNAL = 1  # the kind of a span that is neither a server's nor a client's


class NotTaken(OrchestratorError):  # noqa: N818 - it names what is the case
    """A collector cannot be reached, or refuses every trace."""


class Collector:
    """Sends traces to `http://HOST:4318`, one in a request, each tried a few times."""

    def __init__(
        self,
        url: str,
        deployment: str,
        headers: str = "",
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raise ValueError for what is no address."""
        at = urlsplit(url)
        if at.scheme not in ("http", "https") or not at.hostname or at.port == 0:
            raise ValueError("write http://HOST:PORT; collectors listen on port 4318")
        self._url, self._deployment, self._wait = url.rstrip("/") + PATH, deployment, wait
        given = headers_of(headers) | {"Content-Type": "application/json"}
        self._client = httpx.Client(timeout=ANSWER_S_MAX, headers=given)

    def close(self) -> None:
        self._client.close()

    def send(self, spans: Sequence[Span]) -> int:
        """Return how many spans of a trace the collector rejected; it has the others.

        Raises `NotTaken` if it has none of them.
        """
        body, why = encode(spans, self._deployment), ""
        for tried in range(TRIES_MAX):
            if tried:
                self._wait(FIRST_S * 2 ** (tried - 1))
            try:
                answer = self._client.post(self._url, content=body)
            except httpx.HTTPError as error:
                why = str(error) or type(error).__name__
                continue
            if answer.is_success:
                return _rejected(answer.content)
            why = f"status {answer.status_code}"
            if answer.status_code not in AGAIN:
                raise NotTaken(f"{self._url} refused a trace: {why} {answer.text[:200]!r}")
        raise NotTaken(f"{self._url} took nothing in {TRIES_MAX} tries: {why}")


def _rejected(answer: bytes) -> int:
    try:
        found: Any = msgspec.json.decode(answer)
        return int(found["partialSuccess"]["rejectedSpans"])
    except (ValueError, KeyError, TypeError):
        return 0  # it says nothing about any


def headers_of(text: str) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in text.split(",") if "=" in pair)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}


def encode(spans: Sequence[Span], deployment: str) -> bytes:
    """Return a request: ids are hexadecimal, 64-bit integers are text, as OTLP has it in JSON."""
    resource = {"service.name": "spot-orchestrator", "spot.deployment": deployment}
    scope = {"scope": {"name": "orchestrator"}, "spans": [_span(span) for span in spans]}
    told = {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}
    return msgspec.json.encode({"resourceSpans": [told]})


def _span(span: Span) -> dict[str, Any]:
    return {
        "traceId": span.trace,
        "spanId": span.id,
        "parentSpanId": span.parent,
        "name": span.name,
        "kind": INTERNAL,
        "startTimeUnixNano": _nanoseconds(span.from_s),
        "endTimeUnixNano": _nanoseconds(span.to_s),
        "attributes": _attributes(span.attributes),
    }


def _nanoseconds(at_s: float) -> str:
    return str(round(at_s * 1e6) * 1000)  # a time as a float is not more exact


def _attributes(values: Mapping[str, str | int | float]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: str | int | float) -> dict[str, Any]:
    match value:
        case str():
            return {"stringValue": value}
        case int():
            return {"intValue": str(value)}
        case _:
            return {"doubleValue": value}
