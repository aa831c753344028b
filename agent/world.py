"""The workers that train together, as a session sees them: many, or this one alone."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

import msgspec

from agent.messages import NanPolicy
from agent.net.beside import Beside
from agent.output.folder import Output
from agent.proof.turns import Shown
from agent.replica import Replica
from agent.tensors.metrics import Numbers
from agent.tensors.partial_sum import Partial
from agent.tensors.sums import Sum, Summed

if TYPE_CHECKING:
    from agent.proof.evidence import Evidence
    from agent.protocol import Reached


class Interrupted(Exception):  # noqa: N818 - it says what happened, and is no error
    """The layout changed while a step was in flight, so the step goes on in the new one."""


class Abandoned(Exception):  # noqa: N818
    """The job went on without this worker, so its step in flight has no meaning any more."""


class Left(BaseException):
    """The others' scripts left their loops where this worker came in, so it has no step to do."""


class Facts(msgspec.Struct, frozen=True):
    """What the other workers need to know about a session."""

    microbatches: int
    steps_total: int


class Beginning(Protocol):
    """The last microbatch of a share, inside of which its gradients are taken as they come."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def add(self, microbatch: int, numbers: Numbers, first: int, count: int) -> bool:
        """Add what is left of it. Return False if the whole share has to be computed again."""


class Work(Protocol):
    """The microbatches of a share that this worker computes, one after the other."""

    def __iter__(self) -> Iterator[int]: ...

    @property
    def is_last(self) -> bool:
        """Whether the share is complete with the microbatch that came last."""


class Own:
    """All that is missing of a share, done by this worker."""

    def __init__(self, missing: Sequence[int]) -> None:
        self._left = deque(missing)

    def __iter__(self) -> Iterator[int]:
        while self._left:
            yield self._left.popleft()

    @property
    def is_last(self) -> bool:
        return not self._left


Compute = Callable[[range], Sum]


class World(Protocol):
    """The workers that train together. A version is a count of commits."""

    nan: NanPolicy
    stop_at: int
    """The loop ends after so many steps, however many the script asks for; 0 is no bound."""
    evidence: "Evidence"
    """The samples that this worker can show of its steps."""
    output: Output
    """The files and numbers that the script writes and logs."""

    @property
    def beside(self) -> Beside | None:
        """Where samples are made beside the script's thread; None makes them on it."""

    @property
    def proves(self) -> bool:
        """Whether this step was done by the job already and is repeated only for a proof."""

    @property
    def state_shown(self) -> Shown:
        """How much of the state that this step begins with is shown to others."""

    @property
    def batch_shown(self) -> Shown:
        """How much is shown of a microbatch that this worker computes in this step."""

    def arrived(self, reached: "Reached") -> None:
        """Take note of the state that the script's step begins with; perhaps on another thread."""

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a step if the others know it, else 0."""

    @property
    def leader(self) -> bool: ...

    @property
    def notice_s(self) -> float | None: ...

    def boundary(self, replica: Replica, facts: Facts) -> None:
        """Return when `replica.version` is the version that every worker goes on from."""

    def bind(self, replica: Replica, facts: Facts) -> bool:
        """Join as in `boundary`, from within the first step.

        Only then has the script said how many microbatches it has. Return False if the job is past
        that step; then what the script does until its next step counts for nothing.
        """

    def logged(self, version: int) -> Summed | None:
        """Return the sum of a commit that was made already, to be applied again."""

    def asked(self, phase: int) -> int | None:
        """Return the microbatch by which this worker proves that it computes as the job does."""

    def share(self) -> tuple[int, int]:
        """Return the first of this worker's microbatches, and their number."""

    @property
    def twice(self) -> int | None:
        """A microbatch of another worker that this one computes as well, for comparison."""

    @property
    def deep(self) -> bool:
        """Whether chains of several workers compute a microbatch."""

    def play(self, version: int, microbatches: Sequence[object]) -> Summed:
        """Compute the share and sum it over all workers, where the layout is deep."""

    def fetch(self) -> None:
        """Get the layers that are not here from workers that have them, for the script to use."""

    def check(self) -> None:
        """Raise `Interrupted` if the step cannot go on as it began."""

    def work(
        self, version: int, partial: Partial, shown: Collection[int], compute: Compute
    ) -> Work:
        """Return what this worker computes of its share, of which it has `shown` some to others.

        `compute` returns the sum of microbatches of other workers, in host memory.
        """

    def early(
        self, version: int, partial: Partial, total: Sum, microbatch: int
    ) -> "Beginning | None":
        """Return what adds the last microbatch of a share while its backward runs, if anything."""

    def all_reduce(self, version: int, partial: Partial, total: Sum) -> None:
        """Sum over all workers into `total`."""

    def promise(self, version: int, summed: Summed) -> None:
        """Tell the others that this worker has the sum, and can apply it."""

    def commit(self, version: int) -> None:
        """Return when it is committed; from then on no worker goes back before it."""

    def unaided(self) -> AbstractContextManager[None]:
        """Return a context in which no other worker is needed, and no code of the script runs."""

    def end_step(self, step: int) -> None:
        """Take note that the script's code of this step is finished; none of it will be undone."""

    def settle(self) -> None:
        """Return when the state is not being read, so that the script or a load may change it."""

    def finish(self, replica: Replica, facts: Facts) -> bool:
        """Store the final state safely, as the loop is over.

        Return False if this worker was sent back instead, because state that only other workers had
        was lost with them; then its last steps are to be done again.
        """


class Alone:
    """A world of one worker, which has nothing to agree on."""

    nan: NanPolicy = "fail"
    evidence: "Evidence"
    state_shown: Shown = "nothing"
    batch_shown: Shown = "nothing"
    proves = False
    beside = None
    microbatches = stop_at = 0
    leader = True
    notice_s = None
    deep = False
    twice = None

    def __init__(self) -> None:
        self.output = Output(Path("output"))

    def boundary(self, replica: Replica, facts: Facts) -> None:
        self.bind(replica, facts)

    def bind(self, replica: Replica, facts: Facts) -> bool:  # noqa: ARG002
        self._share = (0, facts.microbatches)
        return True

    def arrived(self, reached: "Reached") -> None:  # noqa: ARG002
        return None

    def logged(self, version: int) -> None:  # noqa: ARG002 - nothing is ever replayed alone
        return None

    def asked(self, phase: int) -> None:  # noqa: ARG002
        return None

    def share(self) -> tuple[int, int]:
        return self._share

    def play(self, version: int, microbatches: Sequence[object]) -> Summed:
        raise NotImplementedError  # a world of one is never deep

    def fetch(self) -> None:
        return None

    def check(self) -> None:
        return None

    def work(
        self,
        version: int,  # noqa: ARG002
        partial: Partial,
        shown: Collection[int],  # noqa: ARG002
        compute: Compute,  # noqa: ARG002
    ) -> Work:
        return Own(partial.missing(*self.share()))

    def early(self, version: int, partial: Partial, total: Sum, microbatch: int) -> None:  # noqa: ARG002
        return None

    def all_reduce(self, version: int, partial: Partial, total: Sum) -> None:  # noqa: ARG002
        (whole,) = partial.sums(*self._share)
        total.copy_(whole)

    def promise(self, version: int, summed: Summed) -> None:  # noqa: ARG002
        return None

    def commit(self, version: int) -> None:  # noqa: ARG002
        return None

    def unaided(self) -> AbstractContextManager[None]:
        return nullcontext()

    def end_step(self, step: int) -> None:
        self.output.scan(step, leads=True)

    def settle(self) -> None:
        return None

    def finish(self, replica: Replica, facts: Facts) -> bool:  # noqa: ARG002
        return True
