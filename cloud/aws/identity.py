"""Verify a machine's identity on EC2: the instance identity document with its RSA-2048 signature.

The machine reads both under /latest/dynamic/instance-identity. AWS signs no nonce and no time of
asking, and every process on a machine can read the document for ever. So it is worth no more than
"this is, or was, a process of that machine"; the door adds that a machine joins once, and that the
caller has the address that the list shows.
"""

from collections.abc import Sequence

import msgspec
from cryptography import x509

from cloud.identity.proof import Doubt, Identity, Proof
from cloud.identity.signed_message import NotSigned, SignedMessage, from_base64
from cloud.model import Place


class _Document(msgspec.Struct, frozen=True, rename="camel"):
    instance_id: str
    region: str
    private_ip: str | None = None


class AwsIdentity:
    """The verifier. `certificates` are AWS's, of every region that machines are in."""

    def __init__(self, certificates: Sequence[x509.Certificate]) -> None:
        self._certificates = certificates

    def __call__(self, proof: Proof, nonce: str, now_s: float) -> Identity | Doubt:  # noqa: ARG002
        try:
            message = SignedMessage(from_base64(proof.signature), proof.document.encode())
        except NotSigned as error:
            return Doubt(f"the identity document: {error}")
        if not any(message.is_signed_by(one) for one in self._certificates):
            return Doubt("the identity document is not signed by a certificate of aws.certificates")
        try:
            document = msgspec.json.decode(message.content, type=_Document)
        except ValueError as error:
            return Doubt(f"the identity document: {error}")
        return Identity(
            Place("aws", document.region), document.instance_id, document.private_ip or None
        )
