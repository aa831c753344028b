"""What `session.data(...)` returns: steps, each a sequence of microbatches.

    data = session.data(dataset, batch_size=256, microbatches=8, num_workers=2)
    for epoch in session.epochs(10):
        for microbatches in data:
            session.backward(loss_of, microbatches)

Everything is a function of (seed, epoch, step, microbatch): which samples a microbatch has, in
their order, and what the data set and `collate_fn` draw from torch's, NumPy's and Python's streams.
So a microbatch has the same bits on every worker, in every process, ahead of time or on demand, and
a job that resumes goes on in the middle of its epoch. A generator that the data set makes itself
(`numpy.random.default_rng(0)` in `__init__`) is not seeded here; make it where it is used, from
`torch.initial_seed()`.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol, TypedDict, Unpack, overload

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, default_collate

from agent.data.attributes import Attributes, attributes, changed
from agent.data.batch import Parts
from agent.data.fetch import ALL, Collate, Direct, Fetch, MapSource, Request, SampleSource, say
from agent.data.iterable import Cut, Ended, StreamSource
from agent.data.order import Batches, Draws, Order, OwnBatches, Rows
from agent.data.prefetch import Ahead, Answer, FetchShare
from agent.data.samplers import Chosen, OwnOrder, order_of
from agent.errors import Misuse

STEPS_KEPT = 4
NAMED_MAX = 4
OF_SAMPLER = 2**31  # the size of batches that a sampler of the script makes
INSTEAD = {
    "sampler": (
        "order=, a function from the epoch to the indices of its samples, or nothing for a "
        "DistributedSampler, because workers share the samples out"
    ),
    "batch_sampler": (
        "the DataLoader that has it; or order=, a function from the epoch to indices, and batch_size="
    ),
    "prefetch_factor": "nothing: two steps are fetched ahead",
    "persistent_workers": "nothing: processes stay",
    "pin_memory": "nothing: memory is pinned where there is an accelerator",
    "generator": "seed=",
    "worker_init_fn": (
        "nothing: streams are seeded before each microbatch; what a process opens for itself belongs "
        "into __getitem__, at its first call"
    ),
    "timeout": "nothing: a process that is lost is noticed",
}


class Owner(Protocol):
    """A session's loop, as its data sees it."""

    @property
    def seed(self) -> int: ...

    def steps_of_epoch(self, length: int) -> Iterator[int]:
        """Go through the steps of the epoch that the script is in, which has so many."""


class Options(TypedDict, total=False):
    """The options of `session.data` besides the sizes."""

    shuffle: bool
    drop_last: bool
    num_workers: int
    collate_fn: Collate | None
    seed: int | None
    # The indices of an epoch, instead of all in shuffled order: for weighted or grouped samples.
    order: Callable[[int], Sequence[int]] | Draws | None


class Data:
    """The steps of an epoch of one data set.

    `batch_size` is that of a whole step, all microbatches together. With drop_last=False the last
    batch of an epoch may be short; it has as many microbatches, of sizes that differ by one at
    most. The gradient of a step is the mean over microbatches, which is the mean over samples only
    if all microbatches are equally large: if that matters, pass drop_last=True and a batch_size
    that the microbatches divide, or weight the loss in `loss_of`.

    Where data is `whole`, a step is one batch, as `collate_fn` returns it, and each worker loads all
    of it.

    `order(epoch)` may choose the samples of an epoch itself, as a function of the epoch; its random
    streams are seeded.

    `num_workers` processes fetch what this worker will probably need next, within about two steps.
    An IterableDataset is read by each worker from its beginning, in its own order and by one
    process at most; the number of samples that are only passed over is printed.
    """

    def __init__(
        self,
        owner: Owner,
        dataset: Any,
        *,
        batch_size: int,
        microbatches: int,
        whole: bool = False,
        **options: Unpack[Options],
    ) -> None:
        _check(dataset, batch_size, microbatches, dict(options))
        self._owner, self._dataset, self._whole = owner, dataset, whole
        self.batch_size, self.microbatches = batch_size, microbatches
        seed = options.get("seed")
        self._seed = owner.seed if seed is None else seed
        self._workers = options.get("num_workers", 0)
        self._collate = options.get("collate_fn") or default_collate
        self._samples = _length(dataset)
        self._order: Order | None = None
        self._cut: Cut | None = None
        self._steps: int | None = None
        drop_last = options.get("drop_last", False)
        if _is_stream(dataset):
            self._open_stream(drop_last, options)
        else:
            self._open_map(drop_last, options)
        self._direct: Direct | None = None
        self._ahead: Ahead | None = None
        # Those of the data set and its transforms when its processes were begun.
        self._attributes: Attributes = []
        self._rows: dict[int, list[Rows]] = {}
        self._current: Microbatches | None = None
        # What the last whole batch is made of, if it is a list of tensors with a row per sample.
        self.given: Parts | None = None
        # Whether the script takes a microbatch of a step more than once.
        self.repeats = False
        self._said: set[str] = set()

    @property
    def dataset(self) -> Any:
        """The data set, as of a `DataLoader`: scripts print its length."""
        return self._dataset

    def __len__(self) -> int:
        """Return the number of steps in an epoch."""
        if self._steps is None:
            say(
                f"{self._name} has no length and is read once to its end, to count it; give it "
                "__len__ to save that, and if it has no end, loop over session.steps(n) with "
                "data.at(step)"
            )
            source = self._source()
            assert isinstance(source, StreamSource)
            self._steps = source.count()
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        """Go through the steps of the epoch that the session is in."""
        return map(self.at, self._owner.steps_of_epoch(len(self)))

    def at(self, step: int) -> Any:
        """Return the microbatches of a step, counted through all epochs. None is fetched yet.

        If data is whole, return the batch.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise Misuse(
                f"data.at({step!r}): a step is a number from 0 on, as session.steps(n) counts"
            )
        if (now := _length(self._dataset)) != self._samples:
            raise Misuse(
                f"session.data({self._name}): the data set has {now} samples in step {step} and "
                f"had {self._samples} before; its length may not change, because the order of "
                "samples is made from it"
            )
        if self._order is not None and self._steps is not None:
            self._order.begin(step // self._steps)
        self._follow_changes(step)
        if self._whole:
            self.expect(step, ALL, 1)
            batch, parts = self.fetch(step, ALL), None
            if (found := Parts.of(batch)) is not None:
                rows = len(self._request(step, ALL).rows) or self.batch_size
                parts = found if found.have(rows) else None
            self.given = parts
            return batch
        if self._current is None or self._current.step != step:
            if self._current is not None:
                self._current.forget()
            self._current = Microbatches(self, step)
        return self._current

    def expect(self, step: int, first: int, count: int, end: int | None = None) -> None:
        """Have this share of `step` and the next steps, before `end`, fetched; drop the rest."""
        if self._workers == 0:
            return
        if self._ahead is None:
            workers = 1 if self._cut is not None else self._workers
            fetch = Fetch(self._source(), self._collate, self._seed)
            self._attributes = self._settings()
            self._ahead = Ahead(fetch, self._request, workers, pin=_pinned())
        self._ahead.expect(step, FetchShare(first, count, end))

    def _follow_changes(self, step: int) -> None:
        """Have processes begun again if the script has changed the data set since they began.

        What a stream is read with counts from its next epoch on.
        """
        midway = self._cut is not None and step % (self._steps or step + 1) > 0
        if self._ahead is None or midway:
            return
        if names := changed(self._settings(), self._attributes):
            self.close()
            self._say(
                f"{self._name} was changed by the script ({', '.join(names[:NAMED_MAX])}), so processes that "
                "fetch begin again"
            )

    def _settings(self) -> Attributes:
        return attributes(self._dataset, self._collate)

    def close(self) -> None:
        """End the processes that fetch ahead."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def fetch(self, step: int, microbatch: int) -> Any:
        """Return a microbatch, which was fetched ahead or is fetched now."""
        answer = self._from_ahead(step, microbatch)
        if answer is not None and answer.steps is not None:
            self._steps = answer.steps
            answer = self._from_ahead(step, microbatch)
        if answer is not None and answer.refusal:
            raise Misuse(answer.refusal)
        if answer is not None and not answer.failure and answer.steps is None:
            self._say_passed(answer.passed, step)
            return answer.fetched
        fetched = self._now(step, microbatch)
        if answer is not None and answer.failure:
            self._say(
                f"a process that fetches ahead failed where this one did not ({answer.failure})"
            )
        return fetched

    def _from_ahead(self, step: int, microbatch: int) -> Answer | None:
        if self._ahead is None:
            return None
        answer = self._ahead.take(step, microbatch)
        # A stream is read by one process only: it still has the samples of the last steps.
        if self._cut is not None and (answer is None or answer.steps is not None):
            answer = self._ahead.insist(self._request(step, microbatch))
        return answer

    def _now(self, step: int, microbatch: int) -> Any:
        if self._direct is None:
            self._own = self._source()
            self._direct = Direct(Fetch(self._own, self._collate, self._seed), pin=_pinned())
        before = self._settings() if self._ahead is not None else None
        try:
            fetched = self._direct.get(self._request(step, microbatch))
        except Ended as end:
            if self._steps is not None:
                raise Misuse(
                    f"session.data({self._name}): the data set ended after {end.steps} steps and "
                    f"had {self._steps} before: give the same samples in every epoch"
                ) from None
            self._steps = end.steps
            fetched = self._direct.get(self._request(step, microbatch))
        self._say_passed(self._own.passed(), step)
        # What a data set notes for itself as it is read, each process notes for itself.
        if before is not None and not changed(before, self._attributes):
            self._attributes = self._settings()
        return fetched

    def _request(self, step: int, microbatch: int) -> Request:
        # A stream whose length is not known yet is in its first epoch until it ends.
        epoch, place = (0, step) if self._steps is None else divmod(step, self._steps)
        if self._order is None:
            return Request(epoch, place, step, microbatch, ())
        if step not in self._rows:
            while len(self._rows) >= STEPS_KEPT:
                del self._rows[next(iter(self._rows))]
            self._rows[step] = self._order.rows(epoch, place)
        rows = self._rows[step]
        chosen = tuple(chain(*rows)) if microbatch == ALL else rows[microbatch]
        return Request(epoch, place, step, microbatch, chosen)

    def _source(self) -> SampleSource:
        """Return the samples from their beginning, because every process reads for itself."""
        if self._cut is not None:
            return StreamSource(self._dataset, self._cut, self._seed)
        return MapSource(self._dataset, self._seed)

    def _open_map(self, drop_last: bool, options: Options) -> None:
        assert self._samples is not None
        given, count = options.get("order"), self._samples
        chosen: Chosen | Draws | None = None
        if isinstance(given, Draws):
            chosen, count = given, given.count
        elif given is not None:
            chosen = Chosen(given, self._seed, count)
            count = len(chosen(0))
        batches: Batches | OwnBatches
        if isinstance(chosen, Chosen) and chosen.batched:
            batches = OwnBatches(count, self.microbatches)
        else:
            batches = Batches(
                samples=count,
                batch_size=self.batch_size,
                microbatches=self.microbatches,
                drop_last=drop_last,
            )
        shuffle = options.get("shuffle", True)
        self._order = Order(batches, shuffle=shuffle, seed=self._seed, chosen=chosen)
        self._steps = batches.steps

    def _open_stream(self, drop_last: bool, options: Options) -> None:
        if options.get("order") is not None:
            raise Misuse(
                f"session.data({self._name}, order=...): an IterableDataset has an order of its "
                "own; leave `order` out"
            )
        if options.get("shuffle", True):
            say(f"{self._name} is read in its own order: shuffle has no part in that")
        self._cut = Cut(
            batch_size=self.batch_size,
            microbatches=self.microbatches,
            drop_last=drop_last,
            samples=self._samples,
        )
        if self._samples is not None:
            self._steps = Batches(
                samples=self._samples,
                batch_size=self.batch_size,
                microbatches=self.microbatches,
                drop_last=drop_last,
            ).steps

    def _say_passed(self, passed: int, step: int) -> None:
        if passed:
            say(
                f"{passed} samples of {self._name} were read and passed over to come to step {step}"
            )

    def _say(self, text: str) -> None:
        if text not in self._said and len(self._said) < STEPS_KEPT:
            self._said.add(text)
            say(text)

    @property
    def _name(self) -> str:
        return type(self._dataset).__name__


class Microbatches(Sequence[Any]):
    """The microbatches of one step, each fetched when it is asked for.

    A script that takes one twice in a step, as phases do, gets it from memory from then on.
    """

    def __init__(self, data: Data, step: int) -> None:
        self._data, self.step = data, step
        self._given: set[int] = set()
        self._kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return self._data.microbatches

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        places = range(len(self))[index]
        return [self._one(i) for i in places] if isinstance(places, range) else self._one(places)

    def __repr__(self) -> str:
        return f"<{len(self)} microbatches of step {self.step}>"

    def expect(self, first: int, count: int, end: int | None = None) -> None:
        """Have this share of the step, and of the next steps before `end`, fetched ahead."""
        self._data.expect(self.step, first, count, end)

    def forget(self) -> None:
        """Drop what is kept, because the step is over."""
        self._kept.clear()

    def _one(self, index: int) -> Any:
        if index in self._kept:
            return self._kept[index]
        if index in self._given:
            self._data.repeats = True
        fetched = self._data.fetch(self.step, index)
        self._given.add(index)
        if self._data.repeats:
            self._kept[index] = fetched
        return fetched


def _check(dataset: Any, batch_size: int, microbatches: int, options: dict[str, Any]) -> None:
    _check_names(options)
    if microbatches == 0:
        raise Misuse(
            "session.data(...): it is not known how many microbatches a step has: Session(..., microbatches=8) to be "
            "given whole batches, session.data(..., microbatches=8) for sequences of microbatches"
        )
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("microbatches", microbatches, 1),
        ("num_workers", options.get("num_workers", 0), 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise Misuse(f"session.data({name}={value!r}): give a whole number, at least {least}")
    if batch_size < microbatches:
        raise Misuse(
            f"session.data(batch_size={batch_size}, microbatches={microbatches}): a microbatch "
            "needs a sample; batch_size counts the samples of a whole step, all microbatches "
            "together"
        )
    if not isinstance(seed := options.get("seed"), int | None):
        raise Misuse(
            f"session.data(seed={seed!r}): give a whole number, or leave it out for the session's"
        )
    for name in ("collate_fn", "order"):
        value = options.get(name)
        if value is not None and not callable(value) and not isinstance(value, Draws):
            raise Misuse(f"session.data({name}=...): a {type(value).__name__} cannot be called")
    if not _is_stream(dataset) and _length(dataset) is None:
        raise Misuse(
            f"session.data({type(dataset).__name__}): a data set has __len__ and __getitem__, or "
            "is an IterableDataset whose __iter__ begins at the first sample each time"
        )


def opened(dataset: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Take a DataLoader apart into data set and options; the session makes its own loader."""
    if isinstance(dataset, DataLoader):
        loader = dataset
        order = None if _is_stream(loader.dataset) or "order" in options else order_of(loader)
        batched = isinstance(order, OwnOrder) and order.batched
        if loader.batch_size is None and not batched:
            raise Misuse(
                "session.data(DataLoader(...)): it has no batch_size. Where its data set gives ready batches, each is a "
                "microbatch: session.data(loader.dataset, batch_size=8, microbatches=8, collate_fn=lambda ready: ready[0])"
            )
        # Torch calls it in processes only; most seed streams there, as the session does anyway.
        if loader.worker_init_fn is not None and options.get("num_workers", loader.num_workers):
            say(
                "worker_init_fn of the DataLoader is not called: streams are seeded before each microbatch, and what a process "
                "opens for itself belongs into the data set's __getitem__, at its first call"
            )
        known: dict[str, Any] = {
            "batch_size": loader.batch_size or OF_SAMPLER,
            "shuffle": isinstance(loader.sampler, RandomSampler),
            "drop_last": loader.drop_last,
            "num_workers": loader.num_workers,
            "collate_fn": loader.collate_fn,
        }
        if order is not None:
            known["order"] = order
        dataset, options = loader.dataset, {**known, **options}
    if "batch_size" not in options:
        raise Misuse(
            "session.data(dataset, ...): give batch_size=..., the samples of a whole step, all microbatches together"
        )
    return dataset, options


def _check_names(options: dict[str, Any]) -> None:
    for name in options.keys() - Options.__annotations__.keys():
        instead = INSTEAD.get(name, f"one of {', '.join(Options.__annotations__)}")
        raise Misuse(f"session.data({name}=...): there is no such option; give {instead}")


def _is_stream(dataset: Any) -> bool:
    if isinstance(dataset, IterableDataset):
        return True
    kind = type(dataset)
    return (
        hasattr(kind, "__iter__")
        and not hasattr(kind, "__getitem__")
        and not isinstance(dataset, Iterator)
    )


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        # It has no length, or says so in the way that torch's own data sets do.
        return None


def _pinned() -> bool:
    """Return whether copies to the accelerator are quicker from memory that is pinned."""
    if not torch.accelerator.is_available():
        return False
    try:
        return torch.empty(1).pin_memory().is_pinned()
    except (RuntimeError, NotImplementedError):
        return False
