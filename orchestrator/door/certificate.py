"""The door's certificate: signed by itself, made at the first start, and known by its fingerprint.

Machines know the fingerprint from their user data, so nobody else needs to vouch for it. Key and
certificate are one secret file of the state directory: removing it makes a new door, and the
machines of the old one end themselves.
"""

import hashlib
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cloud import private

YEARS = 10


def make_if_missing(path: Path) -> str:
    """Return the fingerprint of the certificate in a file, and make both first if need be."""
    if not path.exists():
        private.write(path, _made())
    certificate = x509.load_pem_x509_certificate(private.secret(path).encode())
    der = certificate.public_bytes(serialization.Encoding.DER)
    return hashlib.sha256(der).hexdigest()


def context(path: Path) -> ssl.SSLContext:
    """Return what serves with the key and the certificate in a file."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.num_tickets = 0  # nobody comes back often enough to need them
    made.load_cert_chain(path)
    return made


def _made() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "join door")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=365 * YEARS))
        .sign(key, hashes.SHA256())
    )
    plain, pem = serialization.NoEncryption(), serialization.Encoding.PEM
    own = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    return own + certificate.public_bytes(pem)
