"""Processes that fetch ahead what a worker will probably need next.

They are the worker processes of a torch `DataLoader`, which stay for the job. Its sampler gives out
a plan: the microbatches of a share, step after step. Results are taken in the order of the plan. A
changed plan begins a new turn. Requests of the turn before are not fetched any more, so the change
waits for at most one sample per process.

The processes are forked on Linux for three reasons: they have the data set without a copy of it,
lambdas work as they do in torch, and the script needs no `if __name__ == "__main__"`. Two processes
that are forked have their first sample after 0.05 s; spawned, or forked by a server, after 2.0 to
2.8 s (two cores, with torch in the page cache), since they import torch and the script first. What
is dangerous in a fork of this process is taken away: connections are closed in the child
(`agent.net.wire`), torch computes on one thread there, and output goes to the process's own
streams, whose locks no thread of the session holds. A script that has called
`torch.multiprocessing.set_start_method` gets what it asked for.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import msgspec
import torch
from torch.utils.data import DataLoader, Dataset

from agent.data.fetch import DataOver, Fetch, Request, as_it_is, first_line, say
from agent.data.iterable import Ended
from agent.data.own_places import places, take_own_places
from agent.data.unlocked import Context
from agent.errors import Misuse
from agent.machine.parent_death import tie

MICROBATCHES_MAX = 64  # ahead, because each tensor from another process is an open file
LOSSES_MAX = 3
FORK = "fork"
WITHOUT_COPY = (torch.Tensor, torch.nn.Parameter, torch.UntypedStorage, torch.TypedStorage)

Key = tuple[int, int]


class Answer(NamedTuple):
    """What has become of a request."""

    fetched: Any = None
    passed: int = 0
    # How many steps the data set has, if the request was for one after its end.
    steps: int | None = None
    # An error of the person's own code, which the training process meets as well.
    failure: str = ""
    # A refusal by our own code, which the training process may not meet.
    refusal: str = ""


class FetchShare(msgspec.Struct, frozen=True):
    """The microbatches expected in each step, and the step before which training ends."""

    first: int
    count: int
    end: int | None


class FetchPlan(Iterator[Request]):
    """The sampler of the loader. It keeps `depth` requests under way."""

    def __init__(self) -> None:
        self.coming: Iterator[Request] = iter(())
        self.sent: dict[Key, None] = {}
        self.depth = 0
        self.next_step = 0

    def __next__(self) -> Request:
        if len(self.sent) >= self.depth:
            raise StopIteration
        request = next(self.coming)
        self.sent[request.step, request.microbatch] = None
        self.next_step = request.step
        return request


class Guarded(Dataset[Answer | None]):
    """The data set in another process. Errors are sent back as answers."""

    def __init__(self, fetch: Fetch, turn: torch.Tensor) -> None:
        self._fetch, self._turn = fetch, turn

    def __getitem__(self, request: Request) -> Answer | None:
        def check() -> None:
            if self._turn.item() != request.turn:
                raise DataOver

        try:
            check()
            fetched = self._fetch.get(request, check)
            _Trial().dump(fetched)
            return Answer(fetched, self._fetch.source.passed())
        except DataOver:
            return None
        except Ended as end:
            return Answer(steps=end.steps)
        except Misuse as error:
            return Answer(refusal=str(error))
        except Exception as error:
            return Answer(failure=first_line(error))


class _Trial(ForkingPickler):
    """Sends something nowhere, as a process would send it, but copies and shares no tensor.

    What cannot be sent would end its process. Where torch sends it by its own means, a thread of it
    would only print the error, and the training process wait in vain.
    """

    def __init__(self) -> None:
        super().__init__(_Nowhere(), pickle.HIGHEST_PROTOCOL, True, lambda _: None)

    def reducer_override(self, value: Any) -> Any:
        if type(value) in WITHOUT_COPY:
            if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
                raise TypeError("a tensor with a graph behind it cannot leave its process")
            return int, ()
        return NotImplemented


class _Nowhere:
    def write(self, data: bytes) -> int:
        return len(data)


class Ahead:
    """What is fetched ahead, within about two steps of a share.

    Call it from one thread, which stays, because the system ends the processes when the thread that
    made them ends.
    """

    def __init__(
        self, fetch: Fetch, request: Callable[[int, int], Request], workers: int, *, pin: bool
    ) -> None:
        self._request, self._workers, self._pin = request, workers, pin
        turn = torch.zeros(1, dtype=torch.int64)
        self._turn: torch.Tensor = turn.share_memory_()  # type: ignore[no-untyped-call]
        self._guarded, self._plan = Guarded(fetch, self._turn), FetchPlan()
        self._share: FetchShare | None = None
        self._step = 0
        self._stored: dict[Key, Answer | None] = {}
        self._loader: DataLoader[Any] | None = None
        self._answers: Iterator[Answer | None] | None = None
        self._losses = 0

    def expect(self, step: int, share: FetchShare) -> None:
        """Fetch this share of `step` and of the next steps, and nothing else."""
        followed = self._step <= step <= self._plan.next_step + 1
        self._step = step
        self._stored = {key: one for key, one in self._stored.items() if self._wanted(key, share)}
        if share != self._share or not followed or self._answers is None:
            self._share = share
            if share.count == 0 and self._answers is None:
                return
            self._begin(self._requests(step, share))

    def take(self, step: int, microbatch: int) -> Answer | None:
        """Return what was fetched ahead, or None if no process fetches it."""
        asked = (step, microbatch)
        while asked in self._plan.sent:
            self._receive()
        return self._stored.pop(asked, None)

    def insist(self, request: Request) -> Answer | None:
        """Have a request fetched before anything else; None if there is no process to do it."""

        def requests() -> Iterator[Request]:
            yield request._replace(turn=int(self._turn.item()))
            if self._share is not None:
                yield from self._requests(request.step, self._share)

        self._begin(requests())
        return self.take(request.step, request.microbatch)

    def close(self) -> None:
        """End the processes."""
        self._turn += 1
        self._plan.sent.clear()
        self._answers = self._loader = None

    def _wanted(self, key: Key, share: FetchShare) -> bool:
        step, microbatch = key
        return step >= self._step and share.first <= microbatch < share.first + share.count

    def _requests(self, step: int, share: FetchShare) -> Iterator[Request]:
        turn = int(self._turn.item())
        while share.count and (share.end is None or step < share.end):
            for microbatch in range(share.first, share.first + share.count):
                if (step, microbatch) not in self._stored and (
                    step,
                    microbatch,
                ) not in self._plan.sent:
                    yield self._request(step, microbatch)._replace(turn=turn)
            step += 1

    def _begin(self, requests: Iterator[Request]) -> None:
        """Begin a turn, and forget what is under way."""
        if self._losses >= LOSSES_MAX:
            return
        self._turn += 1
        plan, count = self._plan, 0 if self._share is None else self._share.count
        plan.sent.clear()
        plan.coming = requests
        plan.next_step = self._step
        plan.depth = min(max(2 * count, self._workers), MICROBATCHES_MAX)
        try:
            self._answers = iter(self._loader) if self._loader is not None else self._start()
        except Misuse:
            raise
        except Exception as error:
            self._lose(error)

    def _start(self) -> Iterator[Answer | None]:
        method = _method()
        forks = method == FORK and sys.platform == "linux"
        self._loader = DataLoader(
            self._guarded,
            batch_size=None,
            sampler=self._plan,
            num_workers=self._workers,
            collate_fn=as_it_is,
            pin_memory=self._pin,
            persistent_workers=True,
            # Room for the most that may ever be under way; the plan decides how much is.
            prefetch_factor=-(-max(MICROBATCHES_MAX, self._workers) // self._workers),
            generator=torch.Generator(),
            multiprocessing_context=Context(method) if sys.platform == "linux" else method,
            worker_init_fn=partial(
                _begin_process, os.getpid() if forks else None, places() if forks else {}
            ),
        )
        try:
            with _signals_kept(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Got pickle error")
                return iter(self._loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self.close()
            raise Misuse(
                f"session.data(num_workers={self._workers}): a process that is started by "
                f"{method!r} cannot be given the data set or collate_fn ({error}): define what is "
                "named there in a module, or use 'fork'"
            ) from error

    def _receive(self) -> None:
        """Store what comes next, if it is wanted."""
        key = next(iter(self._plan.sent))
        del self._plan.sent[key]
        assert self._answers is not None
        try:
            answer = next(self._answers)
        except Exception as error:
            self._lose(error)
            return
        self._stored[key] = answer
        while len(self._stored) > self._plan.depth:
            del self._stored[next(iter(self._stored))]

    def _lose(self, error: Exception) -> None:
        """Go on without these processes, because the training process can fetch everything too."""
        self.close()
        self._losses += 1
        after = "are started again" if self._losses < LOSSES_MAX else "are not started again"
        say(f"the processes that fetch ahead are lost and {after} ({first_line(error)})")


def _method() -> str | None:
    """Return how processes are started: as the script has asked for, else by fork on Linux.

    Python's own way, which is no fork from 3.14 on, is set by whatever uses processes first.
    """
    asked = torch.multiprocessing.get_start_method(allow_none=True)
    own = multiprocessing.get_all_start_methods()[0]
    return FORK if sys.platform == "linux" and asked in (None, own) else asked


def _begin_process(training: int | None, places: Mapping[int, int], _: int) -> None:
    """Have this process end with the training process, however that ends.

    It goes on in open files from these `places` on. `training` is its pid if it has forked this one.
    The pipe that tells otherwise of its end is then open in all that were forked later, too.
    """
    if sys.platform == "linux":
        tie(training or os.getppid())
    parent = multiprocessing.parent_process()
    if training is None and (parent is None or not parent.is_alive()):
        os._exit(1)
    take_own_places(places)


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep the script's handler of SIGCHLD.

    Torch's handler raises an error anywhere in the script when a process is lost; here the next
    answer shows it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGCHLD, before)
