"""Which samples a microbatch is made of, as a function of the seed and the step alone.

Equations (n samples, B the batch of a step, M microbatches, r = n mod B):

    steps per epoch      S = floor(n / B) if drop_last, else ceil(n / B)
    batch of place p     the samples [p B, (p + 1) B) of the epoch's order; r in the last, if r > 0
    microbatch i of b    b // M samples, and one more if i < b mod M

If 0 < r < M the last batch could not fill its microbatches, so the last two batches share their B +
r samples evenly. Then no microbatch is empty, none is larger than usual, and S stays the same.
"""

import functools
import hashlib
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from agent.errors import Misuse

EPOCHS_KEPT = 2
Rows = tuple[int, ...]


def number(seed: int, *words: object) -> int:
    """Return 64 random bits for a purpose and a place, the same in every process."""
    text = " ".join(map(str, ("data", seed, *words)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def split(count: int, parts: int) -> list[int]:
    """Return the bounds of `parts` pieces of `count` things, as even as can be."""
    least, more = divmod(count, parts)
    if more and least:
        say_unlike(parts)
    return [i * least + min(i, more) for i in range(parts + 1)]


@functools.cache
def say_unlike(parts: int) -> None:
    """Say once that the mean over microbatches is not that over samples."""
    sys.stderr.write(
        f"Session: a batch that {parts} does not divide makes {parts} microbatches which differ by a sample and count alike in "
        f"the mean: for the mean over samples, as without microbatches, take batch sizes that {parts} divides, and "
        "drop_last=True\n"
    )


def tail(batch_size: int, rest: int, microbatches: int) -> tuple[int, int]:
    """Return the sizes of the last two batches of an epoch, if the last has `rest` samples."""
    if rest >= microbatches:
        return batch_size, rest
    last = (batch_size + rest) // 2
    if last < microbatches:
        raise Misuse(
            f"session.data(batch_size={batch_size}, microbatches={microbatches}): an epoch ends "
            f"with {rest} samples, too few for the microbatches of a step: pass drop_last=True, "
            "or a batch_size that divides the data set"
        )
    return batch_size + rest - last, last


class Batches(msgspec.Struct, frozen=True, kw_only=True):
    """Where the batches of an epoch, and their microbatches, begin and end."""

    samples: int
    batch_size: int
    microbatches: int
    drop_last: bool

    def __post_init__(self) -> None:
        whole, rest = divmod(self.samples, self.batch_size)
        if self.samples == 0:
            raise Misuse("session.data: the data set is empty; check where its samples come from")
        if whole == 0 and (self.drop_last or rest < self.microbatches):
            raise Misuse(
                f"session.data(batch_size={self.batch_size}, microbatches={self.microbatches}, "
                f"drop_last={self.drop_last}): no step can be made of {self.samples} samples: "
                "pass a smaller batch_size"
            )
        if rest and whole and not self.drop_last:
            tail(self.batch_size, rest, self.microbatches)

    @property
    def steps(self) -> int:
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def bounds(self, place: int) -> list[int]:
        """Return where each microbatch of the batch at `place` begins, and the last one's end."""
        begin, end = self._begin(place), self._begin(place + 1)
        return [begin + bound for bound in split(end - begin, self.microbatches)]

    def _begin(self, place: int) -> int:
        whole, rest = divmod(self.samples, self.batch_size)
        if self.drop_last or place < whole or not rest:
            return place * self.batch_size
        if place > whole:
            return self.samples
        last = tail(self.batch_size, rest, self.microbatches)[1] if whole else rest
        return self.samples - last


class Order:
    """The samples of each microbatch. The order of an epoch is a function of seed and epoch.

    `chosen`, if given, chooses the samples of an epoch itself; some may come twice, others never.
    """

    def __init__(
        self,
        batches: Batches,
        *,
        shuffle: bool,
        seed: int,
        chosen: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        self.batches = batches
        self._shuffle, self._seed, self._chosen = shuffle, seed, chosen
        self._kept: dict[int, np.ndarray] = {}
        # The epoch that the script is in, and those whose order a person's function gave before.
        self._begun = 0
        self._ahead: set[int] = set()

    def rows(self, epoch: int, place: int) -> list[Rows]:
        """Return the samples of each microbatch of a step."""
        bounds = self.batches.bounds(place)
        if self._chosen is None and not self._shuffle:
            return [tuple(range(begin, end)) for begin, end in pairwise(bounds)]
        of_epoch = self._of_epoch(epoch)
        return [tuple(of_epoch[begin:end].tolist()) for begin, end in pairwise(bounds)]

    def begin(self, epoch: int) -> None:
        """Refuse an order that was asked for ahead and is another one now that its epoch begins."""
        self._begun = epoch
        if epoch not in self._ahead:
            return
        self._ahead.discard(epoch)
        if epoch in self._kept and not np.array_equal(self._ordered(epoch), self._kept[epoch]):
            raise Misuse(
                f"session.data(order=...): order({epoch}) gave other samples when it was asked ahead of its epoch, for "
                "num_workers: let it go by the epoch alone; or keep what else it goes by in session.state, changed between "
                "epochs only, and give num_workers=0"
            )

    def _of_epoch(self, epoch: int) -> np.ndarray:
        if epoch not in self._kept:
            while len(self._kept) >= EPOCHS_KEPT:
                del self._kept[next(iter(self._kept))]
            if self._chosen is not None and epoch > self._begun:
                self._ahead.add(epoch)
            self._kept[epoch] = self._ordered(epoch)
        return self._kept[epoch]

    def _ordered(self, epoch: int) -> np.ndarray:
        count = self.batches.samples
        if self._chosen is None:
            stream = np.random.Generator(np.random.PCG64(number(self._seed, "order", epoch)))
            return stream.permutation(np.arange(count, dtype=np.min_scalar_type(count)))
        chosen = np.asarray(self._chosen(epoch))
        if len(chosen) != count:
            raise Misuse(
                f"session.data(order=...): order({epoch}) has {len(chosen)} samples and order(0) "
                f"has {count}: give every epoch as many, because steps are counted by them"
            )
        return chosen
