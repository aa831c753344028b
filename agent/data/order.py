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
from collections.abc import Callable
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

    @property
    def listed(self) -> int:
        """How many numbers the order of an epoch has."""
        return self.samples

    def cut(self, of_epoch: np.ndarray, place: int) -> list[Rows]:
        """Return the samples of each microbatch of the batch at `place`."""
        bounds = self.bounds(place)
        return [tuple(of_epoch[begin:end].tolist()) for begin, end in pairwise(bounds)]


class OwnBatches(msgspec.Struct, frozen=True):
    """Batches that a sampler of the script makes, of any sizes; the order of an epoch lists them."""

    steps: int
    microbatches: int

    @property
    def listed(self) -> int:
        return self.steps

    def cut(self, of_epoch: np.ndarray, place: int) -> list[Rows]:
        """Return the samples of each microbatch of the batch at `place`."""
        batch: Rows = of_epoch[place]
        if len(batch) < self.microbatches:
            raise Misuse(
                f"session.data(DataLoader(...)): its batch sampler makes a batch of {len(batch)}, which cannot be cut into "
                f"{self.microbatches} microbatches: let it make larger ones, or give fewer microbatches"
            )
        return [batch[begin:end] for begin, end in pairwise(split(len(batch), self.microbatches))]


class Draws(msgspec.Struct, frozen=True):
    """Epochs of `count` draws with replacement from so many samples. None of them is listed.

    Draw i of an epoch is floor(samples u), where u is number i in [0, 1) of the epoch's stream.
    """

    samples: int
    count: int

    def between(self, stream: int, begin: int, end: int) -> np.ndarray:
        """Return these draws of an epoch, whose stream has this seed."""
        bits = np.random.PCG64(stream).advance(begin)
        drawn = np.floor(np.random.Generator(bits).random(end - begin) * self.samples)
        # The product of a number next to 1 may round up.
        return np.minimum(drawn, self.samples - 1).astype(np.int64)


class Order:
    """The samples of each microbatch. The order of an epoch is a function of seed and epoch.

    `chosen`, if given, chooses the samples of an epoch itself; some may come twice, others never.
    """

    def __init__(
        self,
        batches: Batches | OwnBatches,
        *,
        shuffle: bool,
        seed: int,
        chosen: Callable[[int], np.ndarray] | Draws | None = None,
    ) -> None:
        self.batches = batches
        self._shuffle, self._seed, self._chosen = shuffle, seed, chosen
        self._kept: dict[int, np.ndarray] = {}
        # The epoch that the script is in, and those whose order a person's function gave before.
        self._begun = 0
        self._ahead: set[int] = set()

    def rows(self, epoch: int, place: int) -> list[Rows]:
        """Return the samples of each microbatch of a step."""
        batches, chosen = self.batches, self._chosen
        listed = not isinstance(chosen, Draws) and (self._shuffle or chosen is not None)
        if listed or isinstance(batches, OwnBatches):
            return batches.cut(self._of_epoch(epoch), place)
        bounds = pairwise(batches.bounds(place))
        if chosen is None:
            return [tuple(range(begin, end)) for begin, end in bounds]
        assert isinstance(chosen, Draws)
        stream = number(self._seed, "order", epoch)
        return [tuple(chosen.between(stream, begin, end).tolist()) for begin, end in bounds]

    def begin(self, epoch: int) -> None:
        """Refuse an order that was asked for ahead and is another one now that its epoch begins."""
        self._begun = epoch
        if epoch not in self._ahead:
            return
        self._ahead.discard(epoch)
        if epoch in self._kept and not np.array_equal(self._ordered(epoch), self._kept[epoch]):
            raise Misuse(
                f"session.data(order=...): order({epoch}) gave other samples when it was asked ahead of its epoch, for "
                "num_workers: let it depend on the epoch alone; or keep what else it needs in session.state, change that between "
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
        count = self.batches.listed
        assert not isinstance(self._chosen, Draws)
        if self._chosen is None:
            stream = np.random.Generator(np.random.PCG64(number(self._seed, "order", epoch)))
            return stream.permutation(np.arange(count, dtype=np.min_scalar_type(count)))
        chosen = self._chosen(epoch)
        if len(chosen) != count:
            what = "samples" if isinstance(self.batches, Batches) else "batches"
            raise Misuse(
                f"session.data(order=...): order({epoch}) has {len(chosen)} {what} and order(0) "
                f"has {count}: give every epoch as many, because steps are counted by them"
            )
        return chosen
