"""Who is let in at the door: decided from values, without a clock, a socket or a store.

A caller asks for a nonce, and gets it with a ticket: the door's seal over nonce, time and the
caller's address. So a caller who never comes back takes no memory. A nonce is good for a minute and
for one proof. It has ten digits, because Azure signs no longer ones.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from cloud.identity.proof import SIGNATURE_BYTES_MAX, Doubt, Proof, Verifier
from cloud.ranges import Amount
from orchestrator.door.guests import Guest, Guests

NONCE_S = 60.0
PROOFS_MAX = 10_000  # of machines, within `NONCE_S`

Word = Annotated[str, Meta(max_length=256)]
Claim = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Ticket(msgspec.Struct, frozen=True):
    nonce: Word
    made_ms: int
    seal: Word


class Application(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine posts. It draws the claim itself, and by it the machine is known later on.

    `took_s` is the time since its first boot began.
    """

    cloud: Word
    deployment: Word
    ticket: Ticket
    claim: Claim
    proof: Proof
    took_s: Amount = 0.0


class Turned(msgspec.Struct, frozen=True):
    """Turned away, and why."""

    why: str


class Desk:
    """The decision. `verifiers` are by cloud, and the key is known to this process alone."""

    def __init__(self, deployment: str, verifiers: Mapping[str, Verifier]) -> None:
        self._deployment = deployment
        self._verifiers = verifiers
        self._key = secrets.token_bytes(32)
        self._used: dict[str, float] = {}

    def ticket(self, address: str, now_s: float) -> Ticket:
        nonce, made_ms = f"{secrets.randbelow(10**10):010}", int(now_s * 1000)
        return Ticket(nonce, made_ms, self._seal(nonce, made_ms, address))

    def judge(
        self, asked: Application, address: str, guests: Guests, now_s: float
    ) -> Guest | Turned:
        """Return which machine the caller has proved to be, if we expect it from this address."""
        if (why := self._flaw(asked, address, now_s)) is not None:
            return Turned(why)
        identity = self._verifiers[asked.cloud](asked.proof, asked.ticket.nonce, now_s)
        if isinstance(identity, Doubt):
            return Turned(identity.why)
        if identity.place.cloud != asked.cloud:
            return Turned(f"the identity is one of {identity.place.cloud}")
        self._use(asked.ticket.nonce, now_s)
        guest = guests.of(asked.cloud, identity.machine_id)
        if guest is None:
            return Turned(f"no lease expects {identity.machine_id} now")
        for listed in filter(None, (guest.address, identity.address)):
            if listed != address:
                return Turned(f"{identity.machine_id} is listed at {listed}, not at {address}")
        return guest

    def _flaw(self, asked: Application, address: str, now_s: float) -> str | None:
        """Return what is wrong before anybody's signature is looked at, or None."""
        ticket, proof = asked.ticket, asked.proof
        seal = self._seal(ticket.nonce, ticket.made_ms, address)
        sealed = hmac.compare_digest(seal.encode(), ticket.seal.encode(errors="replace"))
        flaws = (
            (not sealed, "the nonce is not one that was given to this address"),
            (not 0 <= now_s - ticket.made_ms / 1000 <= NONCE_S, "the nonce has expired"),
            (ticket.nonce in self._used, "the nonce was used before"),
            (asked.deployment != self._deployment, "this is the door of another deployment"),
            (
                asked.cloud not in self._verifiers,
                f"machines of {asked.cloud} cannot prove here who they are",
            ),
            (
                len(proof.signature) + len(proof.document) > SIGNATURE_BYTES_MAX,
                "the proof is too long",
            ),
        )
        return next((why for is_so, why in flaws if is_so), None)

    def _use(self, nonce: str, now_s: float) -> None:
        """Note that a nonce was used; what has expired need not be known any longer."""
        for old, used_s in list(self._used.items()):
            if now_s - used_s <= NONCE_S and len(self._used) < PROOFS_MAX:
                break
            del self._used[old]
        self._used[nonce] = now_s

    def _seal(self, nonce: str, made_ms: int, address: str) -> str:
        said = f"{nonce} {made_ms} {address}".encode(errors="replace")
        return hmac.new(self._key, said, hashlib.sha256).hexdigest()


def digest_of(claim: str) -> str:
    """Return what is kept of a claim, so that no store holds what opens the door."""
    return hashlib.sha256(claim.encode()).hexdigest()
