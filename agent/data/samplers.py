"""The order that a script or its sampler gives the samples of an epoch, as a function of the epoch.

A sampler draws from the streams of its epoch, which are seeded, and a `generator` of its own is
seeded with them. One that comes to something else when it is gone through again (it shuffles a list
in place, counts its epochs, or has a generator of another kind) is gone through from its first epoch
on, on a copy, so that a worker that joins late comes to the same.
"""

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from agent.data import random_streams
from agent.data.attributes import attributes, changed
from agent.data.order import Draws, number
from agent.errors import Misuse

SAMPLES_MAX = 10**8  # the numbers of an epoch that are listed, of a sampler of the script's
PASSES_KEPT = 2
Listed = Sequence[Any]  # of the indices of an epoch, or of those of its batches
Seed = Callable[[int], None]


class OwnOrder:
    """What the sampler of a loader gives for each epoch; `batched` if it makes the batches."""

    def __init__(self, loader: DataLoader[Any], *, batched: bool) -> None:
        self.batched = batched
        self._sampler: Any = loader.batch_sampler if batched else loader.sampler
        self._dataset = loader.dataset

    def __call__(self, epoch: int) -> Listed:
        return self._pass(self._sampler, epoch)

    def begun(self, seed: Seed) -> Callable[[int], Listed]:
        """Return this order, or that of its passes if a sampler that can be copied changes itself."""
        try:
            first = self._copied(self._sampler)
        except Exception:
            return self
        passes: list[Listed] = []
        for _ in range(2):
            with _seeded(seed, 0):
                passes.append(self._pass(first, 0))
        return self if passes[0] == passes[1] else self._in_passes(seed)

    def _in_passes(self, seed: Seed) -> Callable[[int], Listed]:
        first = self._copied(self._sampler)
        begun = [*vars(self._sampler).items()]
        kept: dict[int, Listed] = {}
        present, coming = self._copied(first), 0

        def order(epoch: int) -> Listed:
            nonlocal present, coming
            if names := changed([*vars(self._sampler).items()], begun):
                raise Misuse(
                    f"session.data(DataLoader(...)): its {type(self._sampler).__name__} changes itself when it is gone through, "
                    f"and the script changes it as well ({', '.join(names)}): give session.data(loader.dataset, order=...) a "
                    "function of the epoch"
                )
            if epoch in kept:
                return kept[epoch]
            if epoch < coming:
                present, coming = self._copied(first), 0
            while coming <= epoch:
                with _seeded(seed, coming):
                    found = self._pass(present, coming)
                coming += 1
            while len(kept) >= PASSES_KEPT:
                del kept[next(iter(kept))]
            kept[epoch] = found
            return found

        return order

    def _copied(self, sampler: Any) -> Any:
        """Return a copy; samplers know their data set, which is not copied, nor what it holds."""
        held = [self._dataset, *(value for _, value in attributes(self._dataset))]
        return copy.deepcopy(sampler, {id(each): each for each in held})

    def _pass(self, sampler: Any, epoch: int) -> Listed:
        """Go through a sampler, which is told its epoch and draws from the present streams."""
        for each in _with_inner(sampler):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
            if isinstance(own := getattr(each, "generator", None), torch.Generator):
                own.manual_seed(torch.initial_seed())
        if self.batched:
            return [_indices(batch, sampler) for batch in sampler]
        return _indices(sampler, sampler)


class Chosen:
    """The person's own order, checked, with its random streams seeded by the epoch."""

    def __init__(self, order: Callable[[int], Sequence[Any]], seed: int, samples: int) -> None:
        self._order, self._seed, self._samples = order, seed, samples
        self.batched = isinstance(order, OwnOrder) and order.batched
        if isinstance(order, OwnOrder):
            self._order = order.begun(self._seed_for)
        if not np.array_equal(self(0), self(0)):
            raise Misuse(
                "session.data(order=...): order(0) gave other samples when asked again; it has to "
                "be a function of the epoch, because every worker asks for itself: make its "
                "generator inside, from the epoch"
            )

    def __call__(self, epoch: int) -> np.ndarray:
        with _seeded(self._seed_for, epoch):
            listed = self._order(epoch)
        if self.batched:
            return np.fromiter((self._checked(epoch, batch) for batch in listed), object)
        return np.asarray(self._checked(epoch, listed))

    def _seed_for(self, epoch: int) -> None:
        random_streams.seed(number(self._seed, "chosen", epoch))

    def _checked(self, epoch: int, listed: Iterable[Any]) -> tuple[int, ...]:
        chosen = _indices(listed, self._order)
        wrong = next((each for each in chosen if not 0 <= each < self._samples), None)
        if wrong is not None or not chosen:
            what = "no samples" if wrong is None else f"sample {wrong}"
            raise Misuse(
                f"session.data(order=...): order({epoch}) has {what}; give indices from 0 to "
                f"{self._samples - 1}"
            )
        return chosen


def _indices(listed: Iterable[Any], of: object) -> tuple[int, ...]:
    """Return whole numbers as Python has them, of those that a sampler or an order gives."""
    given, found = [*listed], list[int]()
    try:
        found.extend(map(operator.index, given))
    except TypeError:
        other = given[len(found)]  # those before it are found
        name = getattr(of, "__name__", type(of).__name__)
        raise Misuse(
            f"session.data(...): {name} gives {str(other)[:40]!r} for a sample, and a whole number is needed: let the data set draw "
            "what else it depends on"
        ) from None
    return tuple(found)


def order_of(loader: DataLoader[Any]) -> OwnOrder | Draws | None:
    """Return the order of a loader's own sampler; None if it goes through all samples once."""
    batched = loader.batch_sampler is not None and loader.batch_size is None  # it was given one
    sampler: Any = loader.batch_sampler if batched else loader.sampler
    if not batched and _is_plain(loader):
        return None
    if type(sampler) is RandomSampler and sampler.replacement:
        return Draws(len(loader.dataset), sampler.num_samples)  # type: ignore[arg-type]
    for each in _with_inner(sampler):
        if getattr(each, "num_replicas", 1) > 1:
            raise Misuse(
                f"session.data(DataLoader(...)): its {type(each).__name__} takes a share of the samples, but shares are the "
                "session's: leave it out"
            )
    count = len(sampler) if hasattr(sampler, "__len__") else 0
    if count > SAMPLES_MAX:
        raise Misuse(
            f"session.data(DataLoader(...)): its {type(sampler).__name__} draws {count} samples for an epoch, and at most "
            f"{SAMPLES_MAX} are listed: give session.data(loader.dataset, batch_size=..., order=...) a function from the epoch "
            "to indices, as lambda epoch: torch.randint(len(dataset), (len(dataset),))"
        )
    return OwnOrder(loader, batched=batched)


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Return whether it goes through all samples once, in their order or shuffled."""
    sampler = loader.sampler
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    return isinstance(sampler, SequentialSampler)


@contextmanager
def _seeded(seed: Seed, epoch: int) -> Iterator[None]:
    with random_streams.kept():
        seed(epoch)
        yield


def _with_inner(sampler: Any) -> Iterator[Any]:
    """Yield a sampler, and the one whose samples it batches."""
    yield sampler
    if hasattr(sampler, "sampler"):
        yield sampler.sampler
