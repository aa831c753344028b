"""A file that holds the newest output of processes, and never more than two halves of a bound."""

import os
from contextlib import suppress
from pathlib import Path

HALF_BYTES = 8 << 20


class BoundedFile:
    """What is written here is in `path`, and what was written before in `path`.1.

    It is said nowhere that a disk is full, as there is nobody who could make room meanwhile.
    """

    def __init__(self, path: Path, half_bytes: int = HALF_BYTES) -> None:
        self._path, self._half = path, half_bytes
        self._handle = self._open()
        self._size = os.fstat(self._handle).st_size

    def write(self, data: bytes) -> None:
        with suppress(OSError):
            if self._size and self._size + len(data) > self._half:
                self._turn()
            self._size += os.write(self._handle, data[-self._half :])

    def close(self) -> None:
        os.close(self._handle)

    def _turn(self) -> None:
        self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        os.close(self._handle)
        self._handle, self._size = self._open(), 0

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(self._path, flags, 0o600)
