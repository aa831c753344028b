"""What the keeper and the manager must know again after a restart, as it lies in Redis: sealed, so that nothing is gone on
from that a damaged file has made of it. No torch here.
"""

from functools import reduce

from agent.checksum import crc32c
from agent.errors import RecordError

SEAL_CHARS = 8


def seal_of(*parts: bytes) -> bytes:
    """Of what belongs together."""
    return f"{reduce(crc32c, parts, 0):0{SEAL_CHARS}x}".encode()


def seal(data: bytes) -> bytes:
    return seal_of(data) + data


def unseal(key: str, sealed: bytes) -> bytes:
    """What was sealed; earlier versions of the software wrote JSON without."""
    data = sealed if sealed.startswith(b"{") else sealed[SEAL_CHARS:]
    if sealed not in (data, seal(data)):
        raise RecordError(f"{key} in Redis is damaged")
    return data
