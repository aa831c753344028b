"""One checksum for whatever travels or is stored. No torch here."""

from fastcrc import crc32

Buffer = bytes | bytearray | memoryview


def crc32c(crc: int, piece: Buffer) -> int:
    """Of what was summed so far and `piece` behind it. Other threads go on meanwhile."""
    return crc32.iscsi(piece, crc)
