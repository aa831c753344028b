"""One checksum for everything that travels or is stored. No torch here."""

from fastcrc import crc32

Buffer = bytes | bytearray | memoryview


def crc32c(crc: int, piece: Buffer) -> int:
    """Return the checksum of the bytes summed so far, followed by `piece`.

    Other threads run meanwhile.
    """
    return crc32.iscsi(piece, crc)
