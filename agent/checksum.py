"""One checksum for whatever travels or is stored. No torch here."""

import google_crc32c
import numpy as np

Buffer = bytes | bytearray | memoryview

PIECE_BYTES = 1 << 23  # the extension lets no other thread run meanwhile: a millisecond's worth


def crc32c(crc: int, piece: Buffer) -> int:
    view = np.frombuffer(piece, dtype=np.uint8)
    view.flags.writeable = False  # the extension takes read-only buffers without copying them
    for start in range(0, view.size, PIECE_BYTES):
        crc = int(google_crc32c.extend(crc, view[start : start + PIECE_BYTES]))
    return crc
