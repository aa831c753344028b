"""Identity documents as AWS and Azure sign them, by keys of a fake's own."""

import base64
import json
from datetime import UTC, datetime, timedelta
from functools import cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import pkcs7
from cryptography.x509.oid import NameOID

AZURE_TIME = "%m/%d/%y %H:%M:%S +0000"
PEM = serialization.Encoding.PEM


@cache
def key(number: int = 0) -> rsa.RSAPrivateKey:
    """A key of 2048 bits, made once a process."""
    return rsa.generate_private_key(65537, 2048)


def certificate(
    name: str,
    own: rsa.RSAPrivateKey,
    issuer: x509.Certificate | None = None,
    by: rsa.RSAPrivateKey | None = None,
    days: tuple[int, int] = (-1, 3650),
    authority: bool = False,
) -> x509.Certificate:
    """A certificate, signed by itself if there is no issuer."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(days=days[0]))
        .not_valid_after(now + timedelta(days=days[1]))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .sign(by or own, hashes.SHA256())
    )


def pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(one.public_bytes(PEM) for one in certificates)


def signed(
    content: bytes,
    signer: x509.Certificate,
    own: rsa.RSAPrivateKey,
    others: tuple[x509.Certificate, ...] = (),
    *options: pkcs7.PKCS7Options,
) -> bytes:
    builder = pkcs7.PKCS7SignatureBuilder().set_data(content)
    builder = builder.add_signer(signer, own, hashes.SHA256())
    for one in others:
        builder = builder.add_certificate(one)
    chosen = [pkcs7.PKCS7Options.Binary, *options]
    return builder.sign(serialization.Encoding.DER, chosen)


class AwsPapers:
    """What /latest/dynamic/instance-identity of a machine answers."""

    def __init__(self) -> None:
        self.certificate = certificate("Amazon Web Services LLC", key())

    def document(self, instance_id: str, region: str, private_ip: str | None) -> str:
        said = {
            "accountId": "111122223333",
            "architecture": "x86_64",
            "availabilityZone": f"{region}a",
            "imageId": "ami-0123456789abcdef0",
            "instanceId": instance_id,
            "instanceType": "g5.xlarge",
            "pendingTime": "2026-11-26T12:00:00Z",
            "privateIp": private_ip,
            "region": region,
            "version": "2017-09-30",
        }
        return json.dumps(said, indent=2)

    def rsa2048(self, document: str) -> str:
        """Base64 in lines, without the lines that say what it is, as AWS answers it."""
        plain = signed(document.encode(), self.certificate, key(), (), NO_CERTIFICATES)
        text = base64.b64encode(plain).decode()
        return "\n".join(text[at : at + 64] for at in range(0, len(text), 64))


NO_CERTIFICATES = pkcs7.PKCS7Options.NoCerts


class AzurePapers:
    """What /metadata/attested/document of a machine answers: a signer that an authority issued."""

    def __init__(self, name: str = "eastus.metadata.azure.com") -> None:
        self.root = certificate("Fake Root", key(1), authority=True)
        self.authority = certificate("Fake Issuing CA", key(2), self.root, key(1), authority=True)
        self.signer = certificate(name, key(3), self.authority, key(2))

    def attested(
        self, vm_id: str, nonce: str, at_s: float, subscription: str, lives_s: float = 21_600.0
    ) -> dict[str, str]:
        """The answer, a JSON object."""
        said = {
            "licenseType": "",
            "nonce": nonce,
            "plan": {"name": "", "product": "", "publisher": ""},
            "sku": "22_04-lts",
            "subscriptionId": subscription,
            "timeStamp": {"createdOn": _azure(at_s), "expiresOn": _azure(at_s + lives_s)},
            "vmId": vm_id,
        }
        message = signed(json.dumps(said).encode(), self.signer, key(3), (self.authority,))
        return {"encoding": "pkcs7", "signature": base64.b64encode(message).decode()}


def _azure(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime(AZURE_TIME)


def with_open_lengths(message: bytes) -> bytes:
    """The same message with indefinite lengths, as AWS writes the outer parts of what it signs."""
    _, seq, _ = _split(message)
    kind, rest = _cut(seq)
    _, explicit, _ = _split(rest)
    _, data, _ = _split(explicit)
    version, rest = _cut(data)
    digests, rest = _cut(rest)
    inner, after = _cut(rest)
    _, inner_body, _ = _split(inner)
    oid, content = _cut(inner_body)
    _, octets, _ = _split(content)
    _, text, _ = _split(octets)
    half = len(text) // 2
    pieces = _open(0x24, _short(text[:half]) + _short(text[half:]))
    opened = _open(0x30, oid + _open(0xA0, pieces))
    return _open(0x30, kind + _open(0xA0, _open(0x30, version + digests + opened + after)))


def _open(tag: int, body: bytes) -> bytes:
    return bytes([tag, 0x80]) + body + b"\0\0"


def _short(text: bytes) -> bytes:
    return b"\x04\x82" + len(text).to_bytes(2, "big") + text


def _split(data: bytes) -> tuple[int, bytes, bytes]:
    """Tag, body and what comes after the first value."""
    length, at = data[1], 2
    if length & 0x80:
        at += length & 0x7F
        length = int.from_bytes(data[2:at], "big")
    return data[0], data[at : at + length], data[at + length :]


def _cut(data: bytes) -> tuple[bytes, bytes]:
    """The first value, whole, and the rest."""
    rest = _split(data)[2]
    return data[: len(data) - len(rest)], rest
