"""One checksum for whatever travels or is stored. No torch here."""

import google_crc32c
import numpy as np

Buffer = bytes | bytearray | memoryview


def crc32c(crc: int, piece: Buffer) -> int:
    view = np.frombuffer(piece, dtype=np.uint8)
    view.flags.writeable = False  # the extension takes read-only buffers without copying them
    return int(google_crc32c.extend(crc, view)) if view.size else crc
