"""The door of the fake EC2: who may enter, at which pace, and what boto3 hears.

`Ec2Door.answer` takes one HTTP request and gives one HTTP answer, without a socket. `served` puts it
on loopback, for `endpoint_url`. boto3's own parser checks each answer, and its validator each request.
"""

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

import msgspec
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from cloudfake import ec2_drills, ec2_policy, ec2_reads, wire
from cloudfake.books import Bucket, draw
from cloudfake.ec2_account import ACCOUNT, Account, Refused
from cloudfake.ec2_actions import HANDLERS, only_asked
from cloudfake.serving import serving

from cloud.clock import Clock

assert ec2_reads  # they enter their calls into HANDLERS
assert ec2_drills

SKEW_MAX_S = 300.0
SCOPE = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/\d+/([^/]+)/([^/]+)/aws4_request, *"
    r"SignedHeaders=([^,]+), *Signature=([0-9a-f]+)"
)
MUTATING = ("Run", "Terminate", "Create", "Delete", "Cancel", "Modify")
GARBLED: tuple[tuple[int, bytes], ...] = (
    (200, b""),
    (200, b"<html>busy</html>"),
    (200, b"<RunInstancesResponse><instancesSet><item>"),
    (502, b"Bad Gateway"),
    (500, b"\xff\xfe\x00"),
    (302, b""),
    (204, b""),
)


class Key(msgspec.Struct, kw_only=True):
    """Keys of somebody; `policy` of None allows everything, as the account's owner is allowed."""

    secret: str
    who: str = "somebody"
    session: str | None = None
    expires_s: float | None = None
    policy: Mapping[str, Any] | None = None


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Sent(NamedTuple):
    method: str
    url: str
    headers: Mapping[str, str]
    text: str


class Lost(Exception):  # noqa: N818 - it names what happened
    """The connection breaks; whether the call took effect, only the books know."""


Fault = Callable[[str, int], str | None]
"""What goes wrong with the nth call of an action: 'before', 'after', 'throttle', 'broken', ..."""


class _Call:
    def __init__(self, door: "Ec2Door", key: Key, region: str, params: dict[str, Any]) -> None:
        self.account, self.region, self.params = door.account, region, params
        self.at_s = door.clock.now_s()
        self.who, self.policy = key.who, key.policy
        self._key, self._asked = key, door.asked

    def need(self, action: str, resource: str, context: Mapping[str, Any]) -> None:
        self._asked[action] += 1
        if self._key.policy is None:
            return
        if not ec2_policy.allows([self._key.policy], action, resource, context):
            who = f"arn:aws:iam::{ACCOUNT}:user/{self.who}"
            raise Refused(
                "UnauthorizedOperation",
                f"You are not authorized to perform this operation. User: {who} is not authorized "
                f"to perform: {action} on resource: {resource} because no identity-based policy "
                f"allows the {action} action",
                403,
            )


class Ec2Door:
    """One account as the world sees it. `clock` is the cloud's; `clock_off_s` sets its dates apart."""

    def __init__(self, account: Account, clock: Clock) -> None:
        self.account, self.clock = account, clock
        self.clock_off_s = 0.0
        self.keys = {"AKIDTEST": Key(secret="secret")}
        self.fault: Fault = lambda action, nth: None
        self.calls: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()  # permissions that calls needed
        self.flaws: set[str] = set()  # what botocore's models have against what was asked and told
        self.silent: set[str] = set()  # regions that do not answer
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self._served = 0
        self.lock = threading.RLock()

    def answer(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> Answer:
        with self.lock:
            return self._answer(method, url, headers, body)

    def _answer(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> Answer:
        self._served += 1
        of = f"req-{self._served:08d}"
        scope = SCOPE.match(headers.get("Authorization", ""))
        if scope is None:
            body_told = wire.refusal_body("ec2", "MissingAuthenticationToken", "No token", of)
            return Answer(403, self._headers("text/xml"), body_told.encode())
        service = scope.group(3).replace("servicequotas", "service-quotas")
        try:
            if scope.group(2) in self.silent or scope.group(2) not in self.account.regions:
                raise Lost  # a region that is none has no address
            key = self._checked(scope, method, url, headers, body)
            sent = Sent(method, url, headers, body.decode())
            return self._told(service, key, scope.group(2), sent, of)
        except Refused as refusal:
            status, code, said = refusal.status, refusal.code, refusal.said
        except wire.Malformed as error:
            status, code, said = 400, "UnknownParameter", str(error)
        body_told = wire.refusal_body(service, code, said, of)
        return Answer(status, self._headers("text/xml"), body_told.encode())

    def _told(self, service: str, key: Key, region: str, sent: "Sent", of: str) -> Answer:
        if wire.is_query(service):
            operation, params = wire.read_query(service, sent.text)
        elif wire.is_rest(service):
            operation, params = wire.read_rest(service, sent.method, sent.url, sent.text)
        else:
            operation, params = wire.read_json(
                service, sent.headers.get("X-Amz-Target", ""), sent.text
            )
        self.calls[operation.name] += 1
        self.flaws.update(wire.flaws(operation.input_shape, params, operation.name))
        told = self._done(service, operation.name, key, region, params)
        if isinstance(told, Answer):
            return told
        self.flaws.update(wire.flaws(operation.output_shape, told, operation.name))
        if wire.is_query(service):
            return self._ok(wire.write_query(service, operation, told, of), "text/xml")
        return self._ok(wire.write_json(told), wire.JSON_TYPE)

    def _done(
        self, service: str, name: str, key: Key, region: str, params: dict[str, Any]
    ) -> dict[str, Any] | Answer:
        fault = self.fault(name, self.calls[name])
        if fault == "before":
            raise Lost
        if fault == "throttle":
            raise Refused("RequestLimitExceeded", "Request limit exceeded.", 503)
        if fault == "broken":
            raise Refused("InternalError", "An internal error has occurred", 500)
        at_s = self.clock.now_s()
        self.account.advance(at_s)
        if service == "ec2":
            self._pace(name, region, params, at_s)
        handler = HANDLERS.get((service, name))
        if handler is None:
            raise Refused("InvalidAction", f"The action {name} is not valid for this web service")
        call = _Call(self, key, region, params)
        told = handler(call)
        if service == "ec2" and not name.startswith(MUTATING):
            only_asked(call)
        self.account.advance(at_s)
        if fault == "after":
            raise Lost
        if fault == "broken after":
            raise Refused("InternalError", "An internal error has occurred", 500)
        if fault is not None and fault.startswith("garbled"):
            status, body = GARBLED[int(fault.removeprefix("garbled"))]
            return Answer(status, self._headers("text/xml"), body)
        return told

    def _pace(self, name: str, region: str, params: Mapping[str, Any], at_s: float) -> None:
        dials = self.account.dials
        mutating = name.startswith(MUTATING)
        request = Bucket(
            *(dials.mutate_burst, dials.mutate_per_s)
            if mutating
            else (dials.describe_burst, dials.describe_per_s)
        )
        bucket = self._buckets.setdefault((region, name if mutating else "reads"), request)
        if not bucket.take(at_s):
            raise Refused("RequestLimitExceeded", "Request limit exceeded.", 503)
        if name == "RunInstances":
            machines = Bucket(dials.machines_burst, dials.machines_per_s)
            bucket = self._buckets.setdefault((region, "machines"), machines)
            if not bucket.take(at_s, params.get("MaxCount", 1)):
                raise Refused("RequestLimitExceeded", "Request limit exceeded.", 503)

    def _checked(
        self,
        scope: re.Match[str],
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
    ) -> Key:
        """Return the caller's keys after their signature, its date and their end were checked."""
        key_id, _, service, _, signature = scope.groups()
        key = self.keys.get(key_id)
        if key is None:
            if service == "sts":
                said = "The security token included in the request is invalid."
                raise Refused("InvalidClientTokenId", said, 403)
            raise Refused("AuthFailure", "AWS was not able to validate the access credentials", 401)
        stamp = headers["X-Amz-Date"]
        signed_s = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
        now_s = datetime.now(UTC).timestamp() + self.clock_off_s
        if abs(now_s - signed_s) > SKEW_MAX_S:
            if service == "sts":
                raise Refused("SignatureDoesNotMatch", f"Signature expired: {stamp}", 403)
            raise Refused("RequestExpired", "Request has expired.", 400)
        if signature != _signature(key, scope, method, url, headers, body):
            raise Refused("SignatureDoesNotMatch", "The request signature does not match", 403)
        if key.expires_s is not None and self.clock.now_s() >= key.expires_s:
            code = "ExpiredToken" if service == "sts" else "RequestExpired"
            raise Refused(code, "The security token included in the request is expired", 400)
        return key

    def _headers(self, kind: str) -> dict[str, str]:
        at_s = datetime.now(UTC).timestamp() + self.clock_off_s
        return {"Content-Type": kind, "Date": formatdate(at_s, usegmt=True)}

    def _ok(self, body: str, kind: str) -> Answer:
        return Answer(200, self._headers(kind), body.encode())


def _signature(
    key: Key, scope: re.Match[str], method: str, url: str, headers: Mapping[str, str], body: bytes
) -> str:
    """Compute what the signature has to be, with botocore's own signer."""
    _, region, service, signed, _ = scope.groups()
    names = signed.split(";")
    told = {name.lower(): value for name, value in headers.items()}
    request = AWSRequest(
        method=method, url=url, data=body, headers={n: told[n] for n in names if n in told}
    )
    request.context["timestamp"] = told["x-amz-date"]
    request.context["payload_signing_enabled"] = True
    signer = SigV4Auth(Credentials("any", key.secret, key.session), service, region)
    signer.credentials.access_key = scope.group(1)
    canonical = signer.canonical_request(request)
    return str(signer.signature(signer.string_to_sign(request, canonical), request))


def drawn_faults(seed: int, share: float, kinds: tuple[str, ...]) -> Fault:
    """Return faults that hit this share of all calls, by a seed."""

    def fault(action: str, nth: int) -> str | None:
        if draw(seed, "fault", action, nth) >= share:
            return None
        return kinds[int(draw(seed, "which", action, nth) * len(kinds))]

    return fault


@contextmanager
def served(door: Ec2Door) -> Iterator[str]:
    """Serve the door on loopback; the value is its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 65536  # head and body in one segment

        def do_GET(self) -> None:
            self.do_POST()

        def do_DELETE(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            url = f"http://{self.headers['Host']}{self.path}"
            try:
                told = door.answer(self.command, url, dict(self.headers.items()), body)
            except Lost:
                self.close_connection = True
                return
            self.send_response_only(told.status)
            for name, value in (told.headers | {"Content-Length": str(len(told.body))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(told.body)

        def log_message(self, *words: Any) -> None:
            """Nobody reads a log of the fake."""

    with serving(Handler) as url:
        yield url
