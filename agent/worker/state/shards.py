"""States that lie in the job's store: a worker writes its share there itself, and reads from there.

Writing is paced, because training needs the network: a bucket lets files out at the rate that the
keeper says, and a file is what the bucket yields in a quarter of a second. So a burst is short, and
files are not too many.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from agent.errors import CheckpointError, WireError
from agent.net.link import Link
from agent.protocol import Shards, State, Unread
from agent.store.encoding.format import ALIGN_BYTES, File, Layer, Part, file_of
from agent.store.errors import Damaged
from agent.store.memory import Copying, give_back
from agent.store.places.objects import open_place
from agent.store.places.sinks import Sink
from agent.store.reading import Want
from agent.store.shares import Distant, Gathered, Share, cut_up, whole

BURST_S = 0.25
HASTE = 3.0  # times the seconds that a copy took: the next one may be slower
FILE_BYTES_MIN, FILE_BYTES_MAX = 1 << 20, 1 << 26


class Bucket:
    """Lets bytes out at a rate: who takes some waits until those before have had their time."""

    def __init__(
        self,
        bytes_s: float,
        now_s: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._bytes_s, self._now_s, self._wait = bytes_s, now_s, wait
        self._free_s = 0.0  # when what was taken until now has had its time

    def take(self, count: int) -> None:
        now_s = self._now_s()
        if now_s < self._free_s:
            self._wait(self._free_s - now_s)
        self._free_s = max(now_s, self._free_s) + count / self._bytes_s


def file_bytes(bytes_s: float) -> int:
    """Return how large a file may be at this rate."""
    size = min(FILE_BYTES_MAX, max(FILE_BYTES_MIN, int(bytes_s * BURST_S)))
    return size // ALIGN_BYTES * ALIGN_BYTES


class CopyTime:
    """Says until when a share that is being written can stay where it is.

    Its bytes change at the end of the step, and who changes them copies what is not in the store by
    then. So a copy of the rest begins in time for that, and not before: it takes memory.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._begun_s = self._calm_s = 0.0
        self._s_per_byte: float | None = None

    def begin(self) -> None:
        self._begun_s = self._now_s()

    def end(self) -> None:
        """Take note of how long the state has stayed as it was."""
        self._calm_s = self._now_s() - self._begun_s

    def is_late(self, copying: Copying, wait_s: float) -> bool:
        """Whether the rest would be copied too late if its copy began in `wait_s`."""
        if self._s_per_byte is None:
            return True
        copy_s = self._s_per_byte * copying.left_bytes
        return self._now_s() + wait_s + HASTE * copy_s >= self._begun_s + self._calm_s

    def copy(self, copying: Copying) -> None:
        """Copy the rest now, and take note of how long that takes."""
        copying.begin()
        left, begun_s = copying.left_bytes, self._now_s()
        copying.finish()
        if left:
            self._s_per_byte = (self._now_s() - begun_s) / left


def files(
    share: Share, copying: Copying, forms: Mapping[str, Layer], version: int, size: int
) -> Iterator[File]:
    """Yield a share as files of at most `size` bytes, each when its bytes are copied."""
    end = 0
    for extent, data in cut_up(copying.whole, share.extents):
        for at in range(0, extent.size, size):
            piece = data[at : at + size]
            end += piece.nbytes
            copying.reach(end)
            start = extent.start + at
            yield file_of(forms[extent.layer], version, start, start + piece.nbytes, [piece])


class ShareWriter:
    """Writes one share; what it has written is deleted if the share does not become complete."""

    def __init__(
        self, sink: Sink, shards: Shards, version: int, copy_time: CopyTime | None = None
    ) -> None:
        self._sink, self._version = sink, version + shards.ahead
        self._rate, self._size = shards.bytes_s, file_bytes(shards.bytes_s)
        self._copy_time = copy_time or CopyTime()
        self._written: list[str] = []

    def write(
        self, share: Share, copying: Copying, forms: Mapping[str, Layer], *, once: bool = False
    ) -> Iterator[Part]:
        """Yield each part when it is in the store. With `once`, its memory is given back then."""

        def wait(seconds: float) -> None:
            if self._copy_time.is_late(copying, seconds):
                self._copy_time.copy(copying)
            time.sleep(seconds)

        copying.begin()  # only then it is known how much there is
        wait(0.0)
        bucket, end = Bucket(self._rate, wait=wait), 0
        for file in files(share, copying, forms, self._version, self._size):
            bucket.take(file.part.file_bytes)
            self._written.append(file.part.key)
            self._sink.put(file.part.key, file.pieces)
            first, end = end, end + file.part.end - file.part.start
            if once:
                give_back(copying.whole, first, end)
            yield file.part
        self._sink.settle()

    def undo(self) -> None:
        """Delete what was written. What cannot be deleted is swept when it is old."""
        with suppress(CheckpointError):
            self._sink.delete(self._written)


class Stores:
    """The stores that this worker has opened."""

    def __init__(self) -> None:
        self._open: dict[str, Sink] = {}

    def sink(self, place: str) -> Sink:
        found = self._open.get(place)
        if found is None:
            found = self._open[place] = open_place(place)
        return found

    def gathered(self, state: State, payload: memoryview, link: Link) -> Gathered:
        """Return the state that the keeper has sent, or that lies where it says."""
        if state.stored is not None:
            return _Reading(state, self.sink(state.stored.place), link)
        gathered = Gathered()
        gathered.add(Share(forms=state.layers, extents=whole(state.layers)), payload)
        return gathered


class _Reading(Distant):
    """A worker that cannot read is lost, and the next one tries; of damage the keeper hears."""

    def __init__(self, state: State, sink: Sink, link: Link) -> None:
        assert state.stored is not None
        super().__init__(state.layers, state.stored, sink)
        self._manifest, self._link = state.stored.manifest, link

    def read(self, wants: Iterable[Want]) -> int:
        try:
            with self._link.stuck.aided():  # by the store, which may be slow
                return super().read(wants)
        except CheckpointError as error:
            if isinstance(error, Damaged):
                self._link.send(Unread(manifest=self._manifest, why=str(error)))
            raise WireError(f"the state cannot be read from the store: {error}") from error
