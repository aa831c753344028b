"""The join door, as a machine calls it: TLS with the certificate that the user data names."""

import contextlib
import hashlib
import hmac
import http.client
import json
import ssl
from typing import Any

ANSWER_BYTES_MAX = 65_536


class NoAnswer(Exception):  # noqa: N818 - it names what happened
    """The door did not answer, or something else answered in its place; ask again."""


class TurnedAway(Exception):  # noqa: N818 - it names what happened
    """The door has refused; it says why, and may think otherwise later."""


class Door:
    """The door at HOST:PORT. `source` is the machine's own address; empty for any."""

    def __init__(self, address: str, fingerprint: str, source: str = "") -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._fingerprint = bytes.fromhex(fingerprint)
        self._source = (source, 0) if source else None
        # The fingerprint is compared before a byte is sent, so no authority and no name matters.
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._tls.check_hostname = False
        self._tls.verify_mode = ssl.CERT_NONE
        self.own_address = source

    def call(self, method: str, path: str, body: Any, timeout_s: float) -> Any:
        """Return the door's answer to one request; each step of it has so much time."""
        said = None if body is None else json.dumps(body).encode()
        try:
            with contextlib.closing(
                http.client.HTTPSConnection(
                    self._host,
                    self._port,
                    timeout=timeout_s,
                    source_address=self._source,
                    context=self._tls,
                )
            ) as connection:
                connection.connect()
                self._examine(connection.sock)
                connection.request(method, path, said, {"Connection": "close"})
                response = connection.getresponse()
                answer = json.loads(response.read(ANSWER_BYTES_MAX))
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise NoAnswer(f"{method} {path}: {error or type(error).__name__}") from error
        if response.status == 403:
            raise TurnedAway(str(answer.get("why")))
        if response.status != 200:
            raise NoAnswer(f"{method} {path}: HTTP {response.status}")
        return answer

    def _examine(self, sock: ssl.SSLSocket) -> None:
        """Raise if this is not the door whose fingerprint we know."""
        shown = hashlib.sha256(sock.getpeercert(binary_form=True) or b"").digest()
        if not hmac.compare_digest(shown, self._fingerprint):
            raise NoAnswer("what answers has not the certificate that the user data names")
        self.own_address = sock.getsockname()[0]
