"""Who a machine is, as its cloud has signed it. Each cloud has a verifier in its own room.

A verifier is a pure function: what the machine handed in, the nonce that it was asked with, and the
time go in; an `Identity` comes out, or a `Doubt` that says what is wrong.
"""

from typing import Protocol

import msgspec

from cloud.model import Place
from cloud.ranges import Name

SIGNATURE_BYTES_MAX = 32_768


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine hands in: a signed message in base64, and what it signs if that is apart."""

    signature: str
    document: str = ""


class Identity(msgspec.Struct, frozen=True):
    """A machine, by the name that its cloud signs, with its address if the cloud signs that, too.

    A place without a region means that the cloud does not sign where the machine is.
    """

    place: Place
    machine_id: Name
    address: str | None = None


class Doubt(msgspec.Struct, frozen=True):
    """The machine has not proved who it is."""

    why: str


class Verifier(Protocol):
    def __call__(self, proof: Proof, nonce: str, now_s: float) -> Identity | Doubt: ...
