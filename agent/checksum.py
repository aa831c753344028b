"""One checksum for everything that travels or is stored, and seals of records. No torch here.

With a seal, a record that a damaged file has changed is noticed and not used. The keeper and the
manager seal what they need of Redis after a restart, and the keeper how far tables have come.
"""

from functools import reduce

from fastcrc import crc32

from agent.errors import RecordError

Buffer = bytes | bytearray | memoryview

SEAL_CHARS = 8


def crc32c(crc: int, piece: Buffer) -> int:
    """Return the checksum of the bytes summed so far, followed by `piece`.

    Other threads run meanwhile.
    """
    return crc32.iscsi(piece, crc)


def seal_of(*parts: bytes) -> bytes:
    """Return a checksum of parts that belong together."""
    return f"{reduce(crc32c, parts, 0):0{SEAL_CHARS}x}".encode()


def seal(data: bytes) -> bytes:
    return seal_of(data) + data


def unseal(where: str, sealed: bytes) -> bytes:
    """Return what was sealed. Earlier versions of the software wrote JSON without a seal."""
    data = sealed if sealed.startswith(b"{") else sealed[SEAL_CHARS:]
    if sealed not in (data, seal(data)):
        raise RecordError(f"{where} is damaged")
    return data
