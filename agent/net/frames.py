"""Frames as bytes: a head, a small message, its payload, and tags that only their sender can make.

    frame = meta bytes (u32) | payload bytes (u64) | tag of the payload | tag of all before and meta
            | meta | payload

A tag is an AES-GMAC under a key that belongs to one direction of one connection, and to the number
of the frame in it. So a frame that is changed, invented, repeated, left out or moved has a wrong
tag. The tag of the head is verified before any memory is taken for the payload. Until both sides
have proved that they know the secret, the key is a public one, and tags are mere checksums.

GMAC is used because it costs little more than a checksum: see docs/security.md.
"""

import hmac
import struct

from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext, Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from agent.checksum import Buffer

PUBLIC_KEY = bytes(32)
TAG_BYTES = 16
NO_PAYLOAD = bytes(TAG_BYTES)  # stands where the payload's tag would
ONE_CALL_BYTES = 1 << 18  # what is not longer is summed in one call, which is cheaper to set up
CALL_BYTES_MAX = 1 << 30  # OpenSSL counts the bytes of a call as a signed number of 32 bits

_LENGTHS = struct.Struct("<IQ16s")  # the part of the head that its tag covers
_NONCE = struct.Struct("<QI")
HEAD_BYTES = _LENGTHS.size + TAG_BYTES


class PayloadTag:
    """The tag of one payload, made while its pieces pass by and without a copy of them."""

    def __init__(self, key: bytes, nonce: bytes) -> None:
        mode = GCM(nonce)
        context = Cipher(AES(key), mode).encryptor()
        self._context: AEADEncryptionContext = context

    def add(self, piece: Buffer) -> None:
        """Add the next bytes, however many. Other threads run meanwhile."""
        view = memoryview(piece).cast("B")
        for start in range(0, view.nbytes, CALL_BYTES_MAX):
            self._context.authenticate_additional_data(view[start : start + CALL_BYTES_MAX])

    def result(self) -> bytes:
        self._context.finalize()
        return self._context.tag


class Tags:
    """The tags of one direction of a connection, in the order of its frames."""

    def __init__(self, key: bytes = PUBLIC_KEY, frame: int = 0) -> None:
        self._key, self._aead, self._frame = key, AESGCM(key), frame

    def next_frame(self) -> None:
        """Go on to the next frame, because the present one was sent or has come."""
        self._frame += 1

    def payload(self) -> PayloadTag:
        """Begin the tag of the present frame's payload."""
        return PayloadTag(self._key, self._nonce(1))

    def of_pieces(self, pieces: list[memoryview]) -> bytes:
        """Return the tag of the present frame's payload, which lies in memory already."""
        if not pieces:
            return NO_PAYLOAD
        if sum(piece.nbytes for piece in pieces) <= ONE_CALL_BYTES:
            whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            return self._aead.encrypt(self._nonce(1), b"", whole)
        tag = self.payload()
        for piece in pieces:
            tag.add(piece)
        return tag.result()

    def head(self, meta: bytes, pieces: list[memoryview]) -> bytes:
        """Return the head of the present frame."""
        count = sum(piece.nbytes for piece in pieces)
        lengths = _LENGTHS.pack(len(meta), count, self.of_pieces(pieces))
        return lengths + self._of_head(lengths, meta)

    def frame(self, meta: bytes) -> bytes:
        """Return a whole frame without a payload."""
        return self.head(meta, []) + meta

    def is_genuine(self, head: Buffer, meta: Buffer) -> bool:
        """Whether the present frame's head and meta are as the other side has made them."""
        lengths, tag = bytes(head[: _LENGTHS.size]), bytes(head[_LENGTHS.size :])
        return hmac.compare_digest(tag, self._of_head(lengths, meta))

    def _of_head(self, lengths: bytes, meta: Buffer) -> bytes:
        return self._aead.encrypt(self._nonce(0), b"", lengths + meta)

    def _nonce(self, part: int) -> bytes:
        return _NONCE.pack(self._frame, part)


def lengths_of(head: Buffer) -> tuple[int, int, bytes]:
    """Return what a head announces: bytes of meta, bytes of payload, and the payload's tag."""
    return _LENGTHS.unpack(head[: _LENGTHS.size])
