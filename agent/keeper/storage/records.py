"""Seals of the records in Redis that the keeper and the manager need after a restart.

With a seal, a record that a damaged file has changed is noticed and not used. No torch here.
"""

from functools import reduce

from agent.checksum import crc32c
from agent.errors import RecordError

SEAL_CHARS = 8


def seal_of(*parts: bytes) -> bytes:
    """Return a checksum of parts that belong together."""
    return f"{reduce(crc32c, parts, 0):0{SEAL_CHARS}x}".encode()


def seal(data: bytes) -> bytes:
    return seal_of(data) + data


def unseal(key: str, sealed: bytes) -> bytes:
    """Return what was sealed. Earlier versions of the software wrote JSON without a seal."""
    data = sealed if sealed.startswith(b"{") else sealed[SEAL_CHARS:]
    if sealed not in (data, seal(data)):
        raise RecordError(f"{key} in Redis is damaged")
    return data
