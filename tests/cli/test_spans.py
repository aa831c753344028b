"""Recoveries reach an OpenTelemetry collector once each, whatever is started again in between."""

import base64
import json
import sys
from pathlib import Path

import msgspec
import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agent.keys import JOURNAL
from orchestrator.history.outside import otlp
from orchestrator.history.outside.otlp import Collector, NotTaken
from orchestrator.history.outside.recoveries import Span
from orchestrator.redis_client import connect

sys.path.insert(0, str(Path(__file__).parents[1] / "orchestrator" / "history"))

from journaled import T0, began, growth, loss, notice

ROOT = Span(trace="0" * 31 + "a", id="0" * 15 + "b", parent="", name="loss", from_s=T0, to_s=T0 + 0.25,
            attributes={"spot.job": "gpt-1", "spot.step": 1 << 60, "spot.pause_s": 0.5})  # fmt: skip


def parsed(body: bytes) -> ExportTraceServiceRequest:
    """Unknown fields fail. OTLP has ids in hexadecimal, where JSON of protobuf has base64."""
    document = json.loads(body)
    for span in document["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for key, size in (("traceId", 16), ("spanId", 8), ("parentSpanId", 8)):
            raw = bytes.fromhex(span[key])
            assert len(raw) == size or (key == "parentSpanId" and not raw)
            span[key] = base64.b64encode(raw).decode()
    return json_format.ParseDict(document, ExportTraceServiceRequest())


def test_a_request_is_what_the_schema_says(receiver):
    waits = list[float]()
    made = Collector(
        receiver.url + "/", "mine", "Authorization=Basic%20abc,x-team = a=b", waits.append
    )
    assert made.send([ROOT]) == 0
    made.close()
    ((path, headers, body),) = receiver.taken
    request = parsed(body)
    assert path == "/v1/traces"
    assert (headers["Authorization"], headers["x-team"]) == ("Basic abc", "a=b")
    assert headers["Content-Type"] == "application/json"
    (told,) = request.resource_spans
    known = {pair.key: pair.value.string_value for pair in told.resource.attributes}
    assert known == {"service.name": "spot-orchestrator", "spot.deployment": "mine"}
    (span,) = told.scope_spans[0].spans
    assert (span.trace_id.hex(), span.span_id.hex()) == (ROOT.trace, ROOT.id)
    assert (span.name, span.kind, span.parent_span_id) == ("loss", span.SPAN_KIND_INTERNAL, b"")
    assert span.start_time_unix_nano == T0 * 1e9
    assert span.end_time_unix_nano - span.start_time_unix_nano == 250_000_000
    values = [pair.value for pair in span.attributes]
    assert [values[0].string_value, values[1].int_value] == ["gpt-1", 1 << 60]
    assert values[2].double_value == 0.5
    assert not waits


def test_a_busy_collector_is_asked_again_and_a_refusal_is_final(receiver):
    waits = list[float]()
    made = Collector(receiver.url, "mine", wait=waits.append)
    receiver.statuses, receiver.says = [503, 429], b'{"partialSuccess": {"rejectedSpans": "3"}}'
    assert made.send([ROOT]) == 3
    assert (receiver.tries, waits) == (3, [1.0, 2.0])
    receiver.statuses, receiver.says = [401], b"who are you?"
    with pytest.raises(NotTaken, match=r"/v1/traces refused a trace: status 401 'who are you\?'$"):
        made.send([ROOT])
    made.close()
    assert receiver.tries == 4


def test_an_absent_collector_is_tried_within_bounds(receiver):
    waits = list[float]()
    made = Collector(receiver.url, "mine", wait=waits.append)
    receiver.close()
    with pytest.raises(NotTaken, match=r"took nothing in 5 tries: .*refused"):
        made.send([ROOT])
    made.close()
    assert waits == [1.0, 2.0, 4.0, 8.0]


@pytest.mark.processes
def test_each_recovery_is_sent_once_through_an_outage_and_more_starts(
    own_house, receiver, until, monkeypatch
):
    """The journal of a real house is read; what a collector did not take is sent by the next start."""
    monkeypatch.setattr(otlp, "FIRST_S", 0.0)
    job = own_house("submit", own_house.script("logs.py"), "--json").json["id"]
    until(lambda: own_house.client().view().jobs[0].status == "SUCCEEDED")
    redis = connect(own_house.client().house().redis_url)

    def write(*entries) -> None:
        for each in entries:
            what, then = msgspec.json.encode(each.event), msgspec.json.encode(each.actions)
            redis.xadd(JOURNAL, {"e": what, "a": then})

    def send(to: str = receiver.url):
        return own_house("tools", "spans", job, "--to", to, "--once", "--json")

    write(*began(job), *loss(job))
    assert send().json == {"job": job, "to": receiver.url, "sent": 2, "rejected": 0}
    followed = own_house("tools", "spans", job, "--to", receiver.url, "--json")
    assert followed.json["sent"] == 0
    write(*growth(job), *notice(job))
    receiver.statuses = [200, 503, 503, 503, 503, 503]
    answer = send()
    assert answer.code == 1
    assert "took nothing in 5 tries: status 503; start this command again" in answer.out
    assert send().json["sent"] == 2
    redis.close()
    spans = [
        span
        for _, _, body in receiver.taken
        for span in parsed(body).resource_spans[0].scope_spans[0].spans
    ]
    roots = [span.name for span in spans if not span.parent_span_id]
    assert roots == ["change", "loss", "change", "change", "notice"]
    answer = own_house("tools", "spans", job, "--to", "localhost:4318")
    assert answer.code == 2
    assert answer.line == (
        "--to localhost:4318: write http://HOST:PORT; collectors listen on port 4318"
    )
