"""The fake Azure where a client can reach it: on a loopback socket, or under `requests` itself.

The second way saves the sockets of ten thousand cases; the SDK builds and parses the same bytes.
"""

import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from typing import Any

import requests
from cloudfake.arm import Answer, ArmDoor
from cloudfake.serving import serving
from requests.adapters import HTTPAdapter
from urllib3 import HTTPResponse

ENDPOINT = "http://127.0.0.1:1"


def written(answer: Answer, off_s: float = 0.0) -> tuple[int, dict[str, str], bytes]:
    """Return an answer as it goes over the wire; a body of bytes is sent unchanged."""
    if isinstance(answer.body, bytes):
        body = answer.body
    else:
        body = b"" if answer.body is None else json.dumps(answer.body).encode()
    date = formatdate(time.time() + off_s, usegmt=True)
    headers = {"Content-Type": "application/json; charset=utf-8", "Date": date, **answer.headers}
    return answer.status, headers, body


@contextmanager
def listening(door: ArmDoor) -> Iterator[str]:
    """Serve the door on a loopback port; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            sent = self.rfile.read(length)
            url = f"http://{self.headers['host']}{self.path}"
            status, headers, body = written(
                door.call(self.command, url, self.headers, sent), door.clock_off_s
            )
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815 - names of the base class

        def log_message(self, *_: object) -> None:
            """Nothing is logged."""

    with serving(Handler) as url:
        yield url


class _Adapter(HTTPAdapter):
    def __init__(self, door: Any) -> None:
        super().__init__()
        self._door = door

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        sent = request.body.encode() if isinstance(request.body, str) else request.body
        status, headers, body = written(
            self._door.call(request.method, request.url, dict(request.headers), sent),
            getattr(self._door, "clock_off_s", 0.0),
        )
        raw = HTTPResponse(io.BytesIO(body), headers=headers, status=status, preload_content=False)
        return self.build_response(request, raw)


def session(door: Any) -> requests.Session:
    """Return a session of `requests` whose every call is answered by the door."""
    made = requests.Session()
    made.trust_env = False
    for prefix in ("http://", "https://"):
        made.mount(prefix, _Adapter(door))
    return made


class Key:
    """A credential that the door issues, kept until shortly before it expires."""

    def __init__(self, door: ArmDoor) -> None:
        self._door = door
        self._token, self._until_s = door.new_token()

    def get_token(self, *_: str, **__: Any) -> Any:
        from azure.core.credentials import AccessToken

        if self._door.now_s > self._until_s - 300:
            self._token, self._until_s = self._door.new_token()
        return AccessToken(self._token, int(self._until_s))
