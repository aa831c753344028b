"""The handshake before the first message: both sides prove that they know the same secret.

    called -> caller    Challenge   a nonce
    caller -> called    Proof       the job's name, a nonce, and a MAC that needs the secret
    called -> caller    Accepted    a MAC that needs the secret, and why the caller is refused, if so
    caller -> called    its hello   the first frame under the keys of this connection

The MACs cover both nonces, the roles, and the name of whoever is called, so nothing that was
recorded, reflected, or carried to a different door is believed. The keys of the connection follow
from the secret and both nonces. Nothing here has a socket.
"""

import hashlib
import hmac
import os
import struct
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from agent.errors import Refused, WireError
from agent.net.frames import HEAD_BYTES, Tags, lengths_of
from agent.protocol import Accepted, AnyMessage, Challenge, Hello, Message, Proof

KEEPER = "keeper"  # the name under which the keeper is called; workers have theirs
META_BYTES_MAX = 1 << 10  # of a message from somebody who has proved nothing
HELLO_BYTES_MAX = 1 << 20

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(AnyMessage).decode


def job_secret(secret: str, job: str) -> str:
    """Return the secret of one job, derived from the deployment's: its workers know no other."""
    return hmac.new(secret.encode(), f"job {job}".encode(), hashlib.sha256).hexdigest()


def job_of(hello: AnyMessage | Message) -> str:
    """Return the job whose secret a caller proves to know; empty if it is not a job's worker."""
    return hello.job if isinstance(hello, Hello) else ""


class Talk(NamedTuple):
    """What both sides of one handshake have said and meant."""

    secret: str
    called: str
    job: str
    challenge: bytes
    nonce: bytes

    def mac(self, role: str, *more: str) -> bytes:
        texts = (role, self.called, self.job, *more)
        parts = (*(text.encode() for text in texts), self.challenge, self.nonce)
        # Lengths are covered as well, so that bytes cannot move from one part to the next.
        covered = b"".join(struct.pack("<I", len(part)) + part for part in parts)
        return hmac.digest(self.secret.encode(), covered, "sha256")

    def tags(self, role: str) -> Tags:
        """Return the tags of what this side sends on the connection."""
        return Tags(self.mac(f"key of the {role}"))

    def proof(self) -> Proof:
        return Proof(job=self.job, nonce=self.nonce, mac=self.mac("caller"))

    def verify_accepted(self, answer: AnyMessage, address: str) -> None:
        """Raise unless the answer proves that the called side knows the secret, too."""
        if not isinstance(answer, Accepted) or not hmac.compare_digest(
            answer.mac, self.mac("called", answer.refusal)
        ):
            raise WireError(f"{address} does not know the job's secret")
        if answer.refusal:
            raise Refused(f"{address} refused us: {answer.refusal}")


class Door(NamedTuple):
    """What a called side lets in: its own name, its secrets, and whom it refuses, in words."""

    name: str
    secret_of: Callable[[str], str]  # by the job; of the empty name, the secret for other callers
    refusal: Callable[[str], str] = lambda _: ""


class Examination:
    """The called side of one handshake: it is given bytes, and answers with bytes."""

    def __init__(self, door: Door) -> None:
        self._door, self._challenge = door, os.urandom(16)
        self.first = Tags().frame(encode(Challenge(nonce=self._challenge)))
        self.incoming, self.outgoing = Tags(), Tags()
        self._talk: Talk | None = None
        self._head, self._meta, self._meta_bytes = bytearray(), bytearray(), 0
        self.refusal = ""  # of a caller that has proved to know the secret
        self.hello: AnyMessage | None = None  # once all is proved and said

    @property
    def needs(self) -> int:
        """How many bytes are to come next; what comes after the hello is not for us."""
        lacking = HEAD_BYTES - len(self._head)
        return lacking or self._meta_bytes - len(self._meta)

    def take(self, data: bytes) -> bytes:
        """Take what has come, at most as much as is needed, and return what to answer."""
        if len(self._head) < HEAD_BYTES:
            self._head += data
            if len(self._head) == HEAD_BYTES:
                self._bound()
            return b""
        self._meta += data
        if len(self._meta) < self._meta_bytes:
            return b""
        if not self.incoming.is_genuine(self._head, self._meta):
            raise WireError("the caller's frame is damaged or forged")
        self.incoming.next_frame()
        try:
            message = decode(self._meta)
        except ValueError as error:
            raise WireError(f"what the caller says makes no sense: {error}") from error
        self._head, self._meta = bytearray(), bytearray()
        if self._talk is not None:
            self._hear(self._talk, message)
            return b""
        return self._examine(message)

    def _bound(self) -> None:
        self._meta_bytes, payload_bytes, _ = lengths_of(self._head)
        bound = META_BYTES_MAX if self._talk is None else HELLO_BYTES_MAX
        if payload_bytes or not 0 < self._meta_bytes <= bound:
            what = f"a frame of {self._meta_bytes} + {payload_bytes} bytes"
            raise WireError(f"{what} is beyond the bounds of a handshake")

    def _examine(self, proof: AnyMessage) -> bytes:
        if not isinstance(proof, Proof):
            raise WireError(f"the caller sent {type(proof).__name__} instead of its proof")
        secret = self._door.secret_of(proof.job)
        talk = Talk(secret, self._door.name, proof.job, self._challenge, proof.nonce)
        if not hmac.compare_digest(proof.mac, talk.mac("caller")):
            raise WireError("the caller does not know the job's secret")
        self.refusal = self._door.refusal(proof.job)
        mac = talk.mac("called", self.refusal)
        answer = encode(Accepted(mac=mac, refusal=self.refusal))
        self._talk = talk
        self.incoming, self.outgoing = talk.tags("caller"), talk.tags("called")
        return Tags(frame=1).frame(answer)

    def _hear(self, talk: Talk, hello: AnyMessage) -> None:
        if job_of(hello) != talk.job:
            raise WireError(f"the caller is of job {talk.job!r} and says {job_of(hello)!r}")
        self.hello = hello
