"""Signed messages of clouds: the part of PKCS #7 that identity documents need.

`cryptography` writes such messages and verifies none. This reads one signer's message with its
content inside or apart, in definite or indefinite lengths (AWS uses the latter), and compares the
signature with the key of a certificate that the caller trusts or has examined. SHA-1 and whatever
else is not known is refused. A message comes from a stranger, so length and depth are bounded.
"""

import base64
import hmac
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa

from cloud import plain_file

BYTES_MAX = 65_536
DEPTH_MAX = 16

SIGNED_DATA = bytes.fromhex("2a864886f70d010702")
MESSAGE_DIGEST = bytes.fromhex("2a864886f70d010904")
DIGESTS: dict[bytes, hashes.HashAlgorithm] = {
    bytes.fromhex("608648016503040201"): hashes.SHA256(),
    bytes.fromhex("608648016503040202"): hashes.SHA384(),
    bytes.fromhex("608648016503040203"): hashes.SHA512(),
}
OCTETS, OID, SEQUENCE, SET, FIELD_0 = 0x04, 0x06, 0x30, 0x31, 0xA0
CONSTRUCTED = 0x20  # the bit of a tag: the value has parts
OPEN = 0x80  # the length of a value that ends with two zeros


class NotSigned(Exception):  # noqa: N818 - it names what happened
    """These bytes are no message that one signer has signed."""


class _Node:
    """One value of ASN.1 with its tag; `whole` is the value with its tag and length."""

    def __init__(self, tag: int, whole: bytes, body: bytes, parts: "list[_Node]") -> None:
        self.tag, self.whole, self.body, self.parts = tag, whole, body, parts

    def part(self, index: int, tag: int) -> "_Node":
        if len(self.parts) <= index or self.parts[index].tag != tag:
            raise NotSigned(f"a part {index} with tag {tag:#x} is missing in the message")
        return self.parts[index]

    def octets(self) -> bytes:
        """Return the bytes of a string, which may come in pieces."""
        return b"".join(part.octets() for part in self.parts) if self.parts else self.body


class SignedMessage:
    """A message whose form is right; only `is_signed_by` says whether its signature is."""

    def __init__(self, data: bytes, apart: bytes = b"") -> None:
        """Read a message; `apart` is its content, if that is not in the message itself."""
        if len(data) > BYTES_MAX:
            raise NotSigned(f"the message has more than {BYTES_MAX} bytes")
        node, end = _read(data, 0, len(data))
        if end != len(data) or node.tag != SEQUENCE or node.part(0, OID).body != SIGNED_DATA:
            raise NotSigned("this is no signed message")
        signed = node.part(1, FIELD_0).part(0, SEQUENCE)
        inside = signed.part(2, SEQUENCE).parts[1:]
        self.content = inside[0].part(0, _string(inside[0])).octets() if inside else apart
        later = signed.parts[3:]
        self._encoded = [p.whole for n in later if n.tag == FIELD_0 for p in n.parts]
        signers = [part for node in later if node.tag == SET for part in node.parts]
        if len(signers) != 1:
            raise NotSigned(f"the message has {len(signers)} signers, not one")
        self._read_signer(signers[0])

    def _read_signer(self, signer: _Node) -> None:
        digest = DIGESTS.get(signer.part(2, SEQUENCE).part(0, OID).body)
        if digest is None:
            raise NotSigned("the message is signed with a digest that is not taken")
        self._digest = digest
        with_attributes = len(signer.parts) > 3 and signer.parts[3].tag == FIELD_0
        attributes = signer.parts[3] if with_attributes else None
        self._signature = signer.part(4 if attributes is None else 5, OCTETS).octets()
        self._signed = self.content
        if attributes is not None:
            self._compare(attributes)
            # The signature is over the attributes as a set, not as a field.
            self._signed = bytes([SET]) + attributes.whole[1:]

    def _compare(self, attributes: _Node) -> None:
        """Raise if the signed digest is not that of the content."""
        if attributes.whole[1] == OPEN:
            raise NotSigned("the signed attributes have no definite length")
        hasher = hashes.Hash(self._digest)
        hasher.update(self.content)
        found = [a.part(1, SET) for a in attributes.parts if a.part(0, OID).body == MESSAGE_DIGEST]
        if len(found) != 1 or not hmac.compare_digest(
            found[0].part(0, OCTETS).body, hasher.finalize()
        ):
            raise NotSigned("the signature is of other content")

    def certificates(self) -> list[x509.Certificate]:
        """Return the certificates that came with the message; nothing is known of them."""
        try:
            return [x509.load_der_x509_certificate(one) for one in self._encoded]
        except ValueError as error:
            raise NotSigned(f"a certificate in the message cannot be read: {error}") from error

    def is_signed_by(self, certificate: x509.Certificate) -> bool:
        key = certificate.public_key()
        try:
            if isinstance(key, rsa.RSAPublicKey):
                key.verify(self._signature, self._signed, padding.PKCS1v15(), self._digest)
            elif isinstance(key, ec.EllipticCurvePublicKey):
                key.verify(self._signature, self._signed, ec.ECDSA(self._digest))
            else:
                return False
        except InvalidSignature:
            return False
        return True


def from_base64(text: str) -> bytes:
    """Return the bytes of a message as metadata services write it, in lines or in one."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise NotSigned(f"the message is not base64: {error}") from error


def read_certificates(path: Path) -> list[x509.Certificate]:
    """Return the certificates of a file; raises ValueError if there are none to be read."""
    try:
        return x509.load_pem_x509_certificates(plain_file.read(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path} holds no certificates that can be read ({error})") from error


def is_issued(
    leaf: x509.Certificate,
    others: Sequence[x509.Certificate],
    trusted: Sequence[x509.Certificate],
    now_s: float,
) -> bool:
    """Return whether a chain of valid certificates leads from the leaf to a trusted one."""
    certificate, left = leaf, list(others)
    while _is_valid(certificate, now_s):
        if any(_issued(certificate, one) and _is_valid(one, now_s) for one in trusted):
            return True
        above = next(
            (one for one in left if _is_authority(one) and _issued(certificate, one)), None
        )
        if above is None:
            return False
        left.remove(above)
        certificate = above
    return False


def _issued(certificate: x509.Certificate, by: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(by)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def _is_valid(certificate: x509.Certificate, now_s: float) -> bool:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return begins.timestamp() <= now_s <= ends.timestamp()


def _string(field: _Node) -> int:
    """Return the tag of the string in a field: whole, or in pieces."""
    pieces = bool(field.parts) and field.parts[0].tag & CONSTRUCTED
    return OCTETS | CONSTRUCTED if pieces else OCTETS


def _read(data: bytes, at: int, end: int, depth: int = 0) -> tuple[_Node, int]:
    """Return the value that begins at a place, and the place after it."""
    if depth > DEPTH_MAX:
        raise NotSigned("the message is nested too deeply")
    if end - at < 2 or data[at] & 0x1F == 0x1F:
        raise NotSigned("the message ends too early, or has a tag that is not known")
    tag, length, begin = data[at], data[at + 1], at + 2
    if length == OPEN:
        return _read_open(data, at, end, depth)
    if length > OPEN:
        begin += length & 0x7F
        if begin > min(at + 6, end):
            raise NotSigned("a length in the message cannot be")
        length = int.from_bytes(data[at + 2 : begin], "big")
    after = begin + length
    if after > end:
        raise NotSigned("the message is cut off")
    parts = []
    place = begin if tag & CONSTRUCTED else after
    while place < after:
        part, place = _read(data, place, after, depth + 1)
        parts.append(part)
    return _Node(tag, data[at:after], data[begin:after], parts), after


def _read_open(data: bytes, at: int, end: int, depth: int) -> tuple[_Node, int]:
    """Read a value of indefinite length: parts until two zeros."""
    if not data[at] & CONSTRUCTED:
        raise NotSigned("a length in the message cannot be")
    parts, place = [], at + 2
    while data[place : min(place + 2, end)] != b"\0\0":
        part, place = _read(data, place, end, depth + 1)
        parts.append(part)
    return _Node(data[at], data[at : place + 2], data[at + 2 : place], parts), place + 2
