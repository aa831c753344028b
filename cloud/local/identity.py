"""Identities of the local cloud's machines: signed by a key that the cloud makes for itself.

The signed message has the form of the real clouds', so the door reads one format. The key stays
with the cloud, and its certificate lies beside it, for verifiers.
"""

import base64
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs7

from cloud import private
from cloud.identity.proof import Doubt, Identity, Proof
from cloud.identity.self_signed import self_signed
from cloud.identity.signed_message import NotSigned, SignedMessage, from_base64
from cloud.model import Machine, Place

EXPIRES_S = 600.0
KEY, CERTIFICATE = "identity.token", "identity.pem"


class _Document(msgspec.Struct, frozen=True):
    machine_id: str
    region: str
    address: str
    nonce: str
    created_s: float
    expires_s: float


class Signer:
    """The cloud's side: it keeps the key in its folder."""

    def __init__(self, folder: Path) -> None:
        if not (folder / KEY).exists() or not (folder / CERTIFICATE).exists():
            _make(folder)
        key = serialization.load_pem_private_key(private.secret(folder / KEY).encode(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key
        self._certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())

    def sign(self, machine: Machine, nonce: str, now_s: float) -> str:
        """Return what the machine's metadata service answers about who it is, for this nonce."""
        document = _Document(
            machine_id=machine.id,
            region=machine.pool.region,
            address=machine.address,
            nonce=nonce,
            created_s=now_s,
            expires_s=now_s + EXPIRES_S,
        )
        message = (
            pkcs7.PKCS7SignatureBuilder()
            .set_data(msgspec.json.encode(document))
            .add_signer(self._certificate, self._key, hashes.SHA256())
            .sign(serialization.Encoding.DER, [pkcs7.PKCS7Options.Binary])
        )
        return base64.b64encode(message).decode()


def _make(folder: Path) -> None:
    key, certificate = self_signed("local cloud")
    private.write(folder / KEY, key)
    private.write(folder / CERTIFICATE, certificate)


class LocalIdentity:
    """The verifier. It reads the certificate at each proof.

    The cloud writes it when it starts, which may be after the door does, and again if it is gone.
    """

    def __init__(self, folder: Path) -> None:
        self._certificate = folder / CERTIFICATE

    def __call__(self, proof: Proof, nonce: str, now_s: float) -> Identity | Doubt:
        try:
            message = SignedMessage(from_base64(proof.signature))
            document = msgspec.json.decode(message.content, type=_Document)
        except (NotSigned, ValueError) as error:
            return Doubt(f"the signed identity: {error}")
        certificate = x509.load_pem_x509_certificate(self._certificate.read_bytes())
        if not message.is_signed_by(certificate):
            return Doubt("the signed identity is not signed by this local cloud")
        if document.nonce != nonce:
            return Doubt("the signed identity was made for another nonce")
        if not document.created_s - 1.0 <= now_s <= document.expires_s:
            return Doubt("the signed identity has expired")
        return Identity(Place("local", document.region), document.machine_id, document.address)
