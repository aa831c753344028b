"""What the keeper holds of a job in memory: version B of its state, and the sums of every commit since.

State and sums are plain bytes here. They arrive in slices, each from the worker that owns it, and land at
their place without being copied. `B + sums` is the newest committed version: newcomers who find nobody
to take it from load B and apply the sums again.
"""

import msgspec
import numpy as np

from agent.errors import WireError

PAYLOAD_BYTES_MAX = 1 << 36


class LoggedSum(msgspec.Struct, frozen=True):
    """The summed gradients of one committed step."""

    step: int
    present: bytes
    body: memoryview


class Backup(msgspec.Struct, frozen=True, kw_only=True):
    """A whole state: `header + body` are a safetensors file."""

    generation: int
    version: int
    header: bytes
    body: memoryview

    @property
    def state_bytes(self) -> int:
        return len(self.header) + self.body.nbytes


class Assembly:
    """Slices that become a whole."""

    def __init__(self, total: int) -> None:
        if not 0 <= total <= PAYLOAD_BYTES_MAX:
            raise WireError(f"a whole of {total} bytes is beyond the bounds")
        self.body = np.empty(total, dtype=np.uint8).data
        self._taken: dict[int, int] = {}
        self._bytes = 0

    @property
    def total(self) -> int:
        return self.body.nbytes

    @property
    def whole(self) -> bool:
        return self._bytes == self.total

    def place(self, offset: int, size: int) -> memoryview | None:
        """Where a slice belongs; None if it is there already."""
        if offset < 0 or offset + size > self.total:
            raise WireError(f"a slice of {size} bytes at {offset} of {self.total}")
        return None if offset in self._taken else self.body[offset : offset + size]

    def take(self, offset: int, data: memoryview) -> None:
        """A slice has arrived, in its place or elsewhere. The same slice twice counts once."""
        place = self.place(offset, data.nbytes)
        if place is None or not data.nbytes:
            return
        if _address(data) != _address(place):
            place[:] = data
        self._taken[offset] = data.nbytes
        self._bytes += data.nbytes


class StateAssembly:
    """A state in the making, of which the header comes with the slice at offset 0."""

    def __init__(self, generation: int, version: int, *, final: bool) -> None:
        self.generation, self.version, self.final = generation, version, final
        self._header = b""
        self._assembly: Assembly | None = None

    def place(self, offset: int, size: int, total: int, header: int) -> memoryview | None:
        return None if header else self._of(total).place(offset, size)

    def take(self, offset: int, payload: memoryview, total: int, header: int) -> None:
        if header:
            self._header = bytes(payload[:header])
        self._of(total).take(offset, payload[header:])

    def whole(self) -> Backup | None:
        if not self._header or self._assembly is None or not self._assembly.whole:
            return None
        return Backup(
            generation=self.generation,
            version=self.version,
            header=self._header,
            body=self._assembly.body,
        )

    def _of(self, total: int) -> Assembly:
        if self._assembly is None:
            self._assembly = Assembly(total)
        if self._assembly.total != total:
            raise WireError(f"a state of {total} bytes, but others say {self._assembly.total}")
        return self._assembly


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
