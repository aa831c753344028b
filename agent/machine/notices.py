"""The notice watcher of a machine: it asks the metadata service of EC2 or of Azure.

EC2 (instance metadata service version 2): a session token by PUT, then `spot/instance-action` (the
machine goes) and `events/recommendations/rebalance` (it may go); 404 means that there is nothing to
say. Azure (Scheduled Events): a list of events, of which `Preempt` and `Terminate` take the
machine, while `Reboot` and `Redeploy` take what is in its memory, which is all that a worker has;
an event may be acknowledged, and then Azure does not wait for it. Azure names every machine of a
set, so events that do not name this one are left out. Azure switches the service on at the first
call, which then takes up to two minutes, so that call alone has patience.

Both clouds answer at the same address, so the watcher finds out which one it is on. Both give
notices by best effort only. So does the watcher: a service that is silent, slow, refuses or talks
nonsense is counted in `failures` and asked again, and never raises. The guarantee that no work is
lost comes from the commits, not from notices.
"""

import http.client
import os
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from cloud.clock import Clock, SystemClock, utc_s
from cloud.model import Notice, NoticeKind

METADATA_URL = "http://169.254.169.254"
URL_VARIABLE = "SPOT_METADATA_URL"
MACHINE_VARIABLE = "SPOT_MACHINE_ID"
SIGN_VARIABLE = "SPOT_END_SIGN"  # a file that appears when the machine is about to end itself

POLL_S = 1.0
TIMEOUT_S = 1.0
FIRST_AZURE_S = 150.0
ANSWER_BYTES_MAX = 65_536

EC2_TOKEN = "/latest/api/token"  # noqa: S105 - a path
EC2_TOKEN_TTL_S = 21_600
EC2_ACTION = "/latest/meta-data/spot/instance-action"
EC2_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_TAKING = ("Preempt", "Terminate", "Reboot", "Redeploy")

Dialect = Literal["ec2", "azure"]


class _Silence(Exception):  # noqa: N818 - it names what happened
    """No usable answer; the next poll asks again."""


class _NotEc2(_Silence):
    """Something answers at EC2's address and gives no session token."""


class _Action(msgspec.Struct, frozen=True):
    action: str
    time: str = ""


class _Rebalance(msgspec.Struct, frozen=True):
    notice_time: str = msgspec.field(name="noticeTime", default="")


class _Event(msgspec.Struct, frozen=True, rename="pascal"):
    event_id: str
    event_type: str
    resources: tuple[str, ...] = ()
    not_before: str | None = None


class _Events(msgspec.Struct, frozen=True, rename="pascal"):
    events: tuple[_Event, ...]


class Watcher:
    """What the cloud announces about one machine.

    `machine_id` is the cloud's name for the machine (on Azure its VM name). The file `sign` is the
    announcement of the machine itself, which ends because no manager is there. Only one thread at
    a time may use a watcher.
    """

    def __init__(
        self,
        machine_id: str,
        base_url: str = METADATA_URL,
        *,
        clock: Clock | None = None,
        timeout_s: float = TIMEOUT_S,
        sign: Path | None = None,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{URL_VARIABLE} must look like http://host:port, not {base_url!r}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._machine_id = machine_id
        self._clock = clock or SystemClock()
        self._timeout_s = timeout_s
        self._sign = sign
        self._token = ""
        self._told: dict[NoticeKind, str] = {}
        self._event_id = ""
        self._acknowledged_id = ""
        self.dialect: Dialect | None = None
        self.failures = 0

    @classmethod
    def of_this_machine(cls, environment: Mapping[str, str] = os.environ) -> "Watcher":
        """Return the watcher of the machine that this process runs on."""
        url = environment.get(URL_VARIABLE) or METADATA_URL
        sign = environment.get(SIGN_VARIABLE)
        machine_id = environment.get(MACHINE_VARIABLE, "")
        return cls(machine_id, url, sign=Path(sign) if sign else None)

    def poll(self) -> Notice | None:
        """Return a new notice, or a new deadline of an earlier one; never raise.

        `failures` counts the polls without a usable answer since the last one that had it.
        """
        if self._sign is not None and self._sign.exists():
            return self._news("terminate", "by itself", None)
        try:
            notice = self._ask()
        except _Silence:
            self.failures += 1
            return None
        self.failures = 0
        return notice

    def watch(
        self,
        tell: Callable[[Notice], None],
        stop: threading.Event,
        poll_s: float = POLL_S,
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        """Poll until `stop` is set; end within a poll and its time-outs after that.

        A machine that is announced to go and is `idle` is given up at once, if the cloud takes
        acknowledgements.
        """
        while not stop.is_set():
            if (notice := self.poll()) is not None:
                tell(notice)
            elif self._event_id not in ("", self._acknowledged_id) and idle():
                self.acknowledge()
            stop.wait(poll_s)

    def acknowledge(self) -> bool:
        """Tell the cloud that the machine is ready to go now; return whether it accepted.

        Only Azure takes acknowledgements.
        """
        if not self._event_id:
            return False
        body = msgspec.json.encode({"StartRequests": [{"EventId": self._event_id}]})
        try:
            status, _ = self._call("POST", AZURE_EVENTS, {"Metadata": "true"}, body)
        except _Silence:
            return False
        if status == 200:
            self._acknowledged_id = self._event_id
        return status == 200

    # How the service is asked

    def _ask(self) -> Notice | None:
        if self.dialect is None:
            self.dialect = self._find_dialect()
        return self._ask_ec2() if self.dialect == "ec2" else self._ask_azure()

    def _find_dialect(self) -> Dialect:
        """Return which cloud this is: EC2 gives a token, Azure refuses and has Azure's path."""
        patience_s = self._timeout_s
        try:
            self._renew_token()
        except _Silence as silence:
            if isinstance(silence, _NotEc2):
                patience_s = max(patience_s, FIRST_AZURE_S)
            status, _ = self._call("GET", AZURE_EVENTS, {"Metadata": "true"}, None, patience_s)
            if status != 200:
                raise _Silence(f"no cloud that we know: HTTP {status}") from None
            return "azure"
        return "ec2"

    def _ask_ec2(self) -> Notice | None:
        if (said := self._ec2(EC2_ACTION)) is not None:
            action = _decode(said, _Action)
            return self._news("terminate", action.time, _iso_s(action.time))
        if (said := self._ec2(EC2_REBALANCE)) is not None:
            hint = _decode(said, _Rebalance)
            return self._news("rebalance", hint.notice_time, _iso_s(hint.notice_time))
        return None

    def _ec2(self, path: str) -> bytes | None:
        """Return the answer of a path, or None for nothing to say; renew an expired token once."""
        for _ in range(2):
            status, said = self._call("GET", path, {"X-aws-ec2-metadata-token": self._token})
            if status == 200:
                return said
            if status == 404:
                return None
            if status != 401:
                break
            self._renew_token()
        raise _Silence(f"HTTP {status} for {path}")

    def _renew_token(self) -> None:
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(EC2_TOKEN_TTL_S)}
        status, token = self._call("PUT", EC2_TOKEN, ttl)
        if status != 200 or not token.isascii() or not token:
            raise _NotEc2(f"HTTP {status} for a session token")
        self._token = token.decode().strip()

    def _ask_azure(self) -> Notice | None:
        status, said = self._call("GET", AZURE_EVENTS, {"Metadata": "true"})
        if status != 200:
            raise _Silence(f"HTTP {status} for the scheduled events")
        events = _decode(said, _Events).events
        ours = [
            x for x in events if x.event_type in AZURE_TAKING and self._machine_id in x.resources
        ]
        first = min(ours, key=_due_s, default=None)
        self._event_id = "" if first is None else first.event_id
        if first is None:
            return None
        key = f"{first.event_id} {first.not_before}"
        return self._news("terminate", key, _http_s(first.not_before or ""))

    def _news(self, kind: NoticeKind, key: str, deadline_s: float | None) -> Notice | None:
        """Return a notice if it is new; without a readable time, its deadline is now."""
        if self._told.get(kind) == key:
            return None
        self._told[kind] = key
        known_s = self._clock.now_s() if deadline_s is None else deadline_s
        return Notice(machine_id=self._machine_id, kind=kind, deadline_s=known_s)

    def _call(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, bytes]:
        """Send one request, never through a proxy, as the metadata service is local."""
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        connection = http.client.HTTPConnection(self._host, self._port, timeout=wait_s)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read(ANSWER_BYTES_MAX)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise _Silence(str(error) or type(error).__name__) from error
        finally:
            connection.close()


def _decode(said: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(said, type=kind)
    except ValueError as error:
        raise _Silence(f"not the JSON that was expected: {error}") from error


def _iso_s(text: str) -> float | None:
    try:
        return utc_s(datetime.fromisoformat(text))
    except ValueError:
        return None


def _http_s(text: str) -> float | None:
    try:
        return utc_s(parsedate_to_datetime(text))
    except ValueError:
        return _iso_s(text)


def _due_s(event: _Event) -> float:
    """Return when an event begins; one that has begun has no time."""
    return _http_s(event.not_before or "") or 0.0
