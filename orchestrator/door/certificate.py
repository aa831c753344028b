"""The door's certificate: signed by itself, made at the first start, and known by its fingerprint.

Machines know the fingerprint from their user data, so nobody else needs to vouch for it. Key and
certificate are one secret file of the state directory: removing it makes a new door, and the
machines of the old one end themselves.
"""

import hashlib
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from cloud import private
from cloud.identity.self_signed import self_signed


def make_if_missing(path: Path) -> str:
    """Return the fingerprint of the certificate in a file, and make both first if need be."""
    if not path.exists():
        private.write(path, b"".join(self_signed("join door")))
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
