"""An IterableDataset in steps: read from its beginning, and cut into batches.

Batches are cut as those of a data set with indices are: see `agent.data.order`.

Reading goes on from step to step. A step that the reader has passed begins the epoch again, so the
samples of the last steps are kept, because a share that changes asks for these again.
"""

from collections.abc import Callable, Iterator
from itertools import chain, islice, pairwise
from typing import Any

import msgspec

from agent.data import random_streams
from agent.data.fetch import ALL, Request
from agent.data.order import number, split, tail
from agent.errors import Misuse

STEPS_KEPT = 4


class Ended(Exception):  # noqa: N818 - it says what happened, and is no error
    """The data set ended before the requested place; it has this many steps."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.steps = steps


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """How a stream of samples is cut; `samples` is None if the data set reports no length."""

    batch_size: int
    microbatches: int
    drop_last: bool
    samples: int | None


class StreamSource:
    """The samples of an IterableDataset. Its random streams are seeded again for each step."""

    def __init__(self, dataset: Any, cut: Cut, seed: int) -> None:
        self._dataset, self._cut, self._seed = dataset, cut, seed
        self._samples: Iterator[Any] | None = None
        self._epoch, self._place = -1, 0
        self._read = self._passed = 0
        # Batches that were read and not cut, because the last two may have to share their samples.
        self._whole: list[list[Any]] = []
        self._kept: dict[tuple[int, int], list[list[Any]]] = {}
        # The length of an epoch, once there was a whole one.
        self._length: int | None = cut.samples

    def samples(self, request: Request, check: Callable[[], None]) -> list[Any]:
        asked = (request.epoch, request.place)
        if asked not in self._kept:
            self._go_to(*asked, check)
        kept = self._kept[asked]
        return [*chain(*kept)] if request.microbatch == ALL else kept[request.microbatch]

    def passed(self) -> int:
        passed, self._passed = self._passed, 0
        return passed

    def count(self) -> int:
        """Read all of an epoch, to know how many steps it has."""
        with random_streams.kept():
            self._open(0)
            try:
                while True:
                    self._cut_next()
            except Ended as end:
                return end.steps

    def _go_to(self, epoch: int, place: int, check: Callable[[], None]) -> None:
        if epoch != self._epoch or place < self._place:
            self._open(epoch)
        while self._place <= place:
            check()
            batch = self._cut_next()
            self._passed += sum(map(len, batch)) if self._place <= place else 0

    def _open(self, epoch: int) -> None:
        self._whole, self._place, self._read = [], 0, 0
        self._epoch = epoch
        random_streams.seed(number(self._seed, "begin", epoch))
        self._samples = iter(self._dataset)

    def _cut_next(self) -> list[list[Any]]:
        """Cut the next batch into microbatches."""
        while len(self._whole) < 2 and self._samples is not None:
            self._read_batch(self._samples)
        if self._place == 0 and len(next(iter(self._whole), [])) < self._cut.microbatches:
            self._refuse(f"has {self._read} samples, too few for a step: pass a smaller batch_size")
        if not self._whole:
            raise Ended(self._place)
        batch = self._whole.pop(0)
        microbatches = [batch[a:b] for a, b in pairwise(split(len(batch), self._cut.microbatches))]
        while len(self._kept) >= STEPS_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[self._epoch, self._place] = microbatches
        self._place += 1
        return microbatches

    def _read_batch(self, samples: Iterator[Any]) -> None:
        size = self._cut.batch_size
        try:
            random_streams.seed(
                number(self._seed, "read", self._epoch, self._place + len(self._whole))
            )
            batch = list(islice(samples, size))
        except Exception as error:
            error.add_note(
                f"session.data: this happened in the samples from {self._read} on, in epoch "
                f"{self._epoch}"
            )
            # A generator that has raised yields nothing more.
            self._epoch = -1
            raise
        self._read += len(batch)
        if batch:
            self._whole.append(batch)
        if len(batch) < size:
            self._samples = None
            self._end(len(batch))

    def _end(self, rest: int) -> None:
        """Handle the data set's end; its last batch has `rest` samples."""
        if self._length is None:
            self._length = self._read
        if self._read != self._length:
            told = f"says that it has {self._length}"
            if self._cut.samples is None:
                told = f"had {self._length} before"
            self._refuse(
                f"gave {self._read} samples in epoch {self._epoch} and {told}: give the same in every epoch"
            )
        if rest and self._cut.drop_last:
            self._whole.pop()
        elif 0 < rest < self._cut.microbatches and len(self._whole) == 2:
            first, _ = tail(self._cut.batch_size, rest, self._cut.microbatches)
            both = [*self._whole[0], *self._whole[1]]
            self._whole = [both[:first], both[first:]]

    def _refuse(self, what: str) -> None:
        self._epoch = -1
        raise Misuse(f"session.data({type(self._dataset).__name__}): the data set {what}")
