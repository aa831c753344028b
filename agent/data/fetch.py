"""Fetch one microbatch, its samples and their collation, in the same way in every process."""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from agent.data import random_streams
from agent.data.order import Rows, number

Collate = Callable[[list[Any]], Any]
ALL = -1  # in place of a microbatch: all of the step in one


class Request(NamedTuple):
    """What is to be fetched. `rows` are empty for a data set with its own order."""

    epoch: int
    place: int
    step: int
    microbatch: int
    rows: Rows
    # The turn of the process that fetches ahead: see `agent.data.prefetch`.
    turn: int = 0


class DataOver(Exception):  # noqa: N818 - it says what happened, and is no error
    """What was asked for is not needed any more."""


class SampleSource(Protocol):
    """Where samples come from."""

    def samples(self, request: Request, check: Callable[[], None]) -> list[Any]:
        """Return the samples of a microbatch, and leave the streams seeded.

        `check` raises `DataOver` if they are not needed any more.
        """

    def passed(self) -> int:
        """Return how many samples were read and skipped since the last call."""


class MapSource:
    """A data set with indices. Streams are seeded before the samples of a microbatch."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def samples(self, request: Request, check: Callable[[], None]) -> list[Any]:
        random_streams.seed(
            number(self._seed, "samples", request.epoch, request.place, request.microbatch)
        )
        if callable(several := getattr(self._dataset, "__getitems__", None)):
            with noted(f"samples {_some(request.rows)}", request):
                return list(several(list(request.rows)))
        return [self._one(row, request, check) for row in request.rows]

    def passed(self) -> int:
        return 0

    def _one(self, row: int, request: Request, check: Callable[[], None]) -> Any:
        check()
        with noted(f"sample {row}", request):
            return self._dataset[row]


class Fetch(Dataset[Any]):
    """A data set of microbatches, with requests as its indices."""

    def __init__(self, source: SampleSource, collate: Collate, seed: int) -> None:
        self.source = source
        self._collate, self._seed = collate, seed
        self._process = os.getpid()

    def __getitem__(self, request: Request) -> Any:
        return self.get(request, lambda: None)

    def get(self, request: Request, check: Callable[[], None]) -> Any:
        place = (request.epoch, request.place, request.microbatch)
        with random_streams.kept():
            samples = self.source.samples(request, check)
            random_streams.seed(number(self._seed, "collate", *place))
            with noted("collate_fn", request):
                fetched = self._collate(samples)
        if self._process == os.getpid():
            return fetched
        return pytree.tree_map_only(torch.Tensor, _kept_apart, fetched)  # to be sent


class noted:  # noqa: N801 - used as a function
    """Add to an error of the person's own code what was being fetched."""

    def __init__(self, what: str, request: Request) -> None:
        self._what, self._request = what, request

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if error is None or not isinstance(error, Exception):
            return
        microbatch = self._request.microbatch
        where = f"step {self._request.step}" + (
            "" if microbatch == ALL else f", microbatch {microbatch}"
        )
        error.add_note(f"session.data: this happened at {self._what} of the data set ({where})")
        if isinstance(error, StopIteration):
            # It would look as if there were no more data.
            raise RuntimeError("the data set raised StopIteration") from error  # noqa: TRY004


def say(text: str) -> None:
    sys.stderr.write(f"session.data: {text}\n")


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def as_it_is(fetched: Any) -> Any:
    """Return it unchanged, because it is collated already."""
    return fetched


class OneByOne(Iterator[Request]):
    """The sampler of a loader that fetches what it is asked for, when it is asked."""

    asked: Request

    def __next__(self) -> Request:
        return self.asked


class Direct:
    """Fetches in this process, at once."""

    def __init__(self, fetch: Fetch, *, pin: bool) -> None:
        self._asked = OneByOne()
        loader = torch.utils.data.DataLoader(
            fetch,
            batch_size=None,
            sampler=self._asked,
            collate_fn=as_it_is,
            pin_memory=pin,
            # Torch draws a number for each pass, which the script's stream must not miss.
            generator=torch.Generator(),
        )
        self._fetched = iter(loader)

    def get(self, request: Request) -> Any:
        self._asked.asked = request
        return next(self._fetched)


def _kept_apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor to be sent, a copy if its data set may have it, too.

    What is sent is moved to memory that both processes have, so a data set that fills one buffer for
    every sample would change what it has sent. What torch collates lies in such memory already.
    """
    apart = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if not apart or tensor.is_nested or tensor.requires_grad:
        return tensor
    shared: bool = tensor.is_shared()  # type: ignore[no-untyped-call]
    return tensor if shared else tensor.clone()


def _some(rows: Rows) -> str:
    return ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
