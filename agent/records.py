"""What the keeper must know again of a job after a restart, as it lies in Redis: sealed, so that nothing is gone on from
that a damaged file has made of it. No torch here.
"""

from agent.checksum import crc32c
from agent.errors import RecordError

SEAL_CHARS = 8


def seal(data: bytes) -> bytes:
    return f"{crc32c(0, data):0{SEAL_CHARS}x}".encode() + data


def unseal(key: str, sealed: bytes) -> bytes:
    """What was sealed; earlier versions of the software wrote JSON without."""
    data = sealed if sealed.startswith(b"{") else sealed[SEAL_CHARS:]
    if sealed not in (data, seal(data)):
        raise RecordError(f"{key} in Redis is damaged")
    return data
