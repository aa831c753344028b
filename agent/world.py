"""Those who train together, as a session sees them: many, or nobody else."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import msgspec

from agent.messages import NanPolicy
from agent.tensors.partial import Partial
from agent.tensors.sums import Sum, Summed

if TYPE_CHECKING:
    from agent.session import Session


class Interrupted(Exception):  # noqa: N818 - it says what happened, and is no error
    """The layout changed while a step was in flight: the step goes on under the new one."""


class Abandoned(Exception):  # noqa: N818
    """The job went on without this worker: the step in flight here has no meaning any more."""


class Left(BaseException):
    """The others' scripts have left their loops where this worker came in: it has no step to do."""


class Facts(msgspec.Struct, frozen=True):
    """What the others need to know about a session."""

    microbatches: int
    steps_total: int


class World(Protocol):
    """Those who train together. A version is a count of committed steps."""

    nan: NanPolicy

    @property
    def leader(self) -> bool: ...

    @property
    def notice_s(self) -> float | None: ...

    @property
    def generation(self) -> int:
        """Of the layout that this worker is in."""

    def boundary(self, session: "Session", facts: Facts) -> None:
        """Return when `session.version` is the version that everyone goes on from."""

    def logged(self, step: int) -> Summed | None:
        """The sum of a step that is committed already, to be applied again."""

    def share(self) -> tuple[int, int]:
        """The first and the number of this worker's microbatches."""

    @property
    def deep(self) -> bool:
        """Whether chains of several workers compute a microbatch."""

    def play(self, step: int, batches: Sequence[object]) -> Summed:
        """All of the microbatches and `gather` in one, where the layout is deep."""

    def fetch(self) -> None:
        """Get the layers that are not here from those who have them, for the script to use."""

    def check(self) -> None:
        """Raise `Interrupted` if the step cannot go on as it began."""

    def gather(self, step: int, partial: Partial, total: Sum) -> None:
        """Sum over everyone into `total`."""

    def commit(self, step: int, summed: Summed) -> None:
        """Return when the step is committed: from here on nobody goes back behind it."""

    def unaided(self) -> AbstractContextManager[None]:
        """Inside nobody else is needed, and nothing of the script's is done."""

    def settle(self) -> None:
        """Return when nobody reads the state any more: the script is about to change it, or it is loaded."""

    def finish(self, session: "Session", facts: Facts) -> bool:
        """The loop is over: put the final state into safe hands. False if the session was sent back instead, for what
        only others had was lost with them: its last steps are to be done again."""


class Alone:
    """A world of one: nothing to agree on."""

    nan: NanPolicy = "fail"
    leader = True
    generation = -1
    notice_s = None
    deep = False

    def boundary(self, session: "Session", facts: Facts) -> None:  # noqa: ARG002
        self._microbatches = facts.microbatches

    def logged(self, step: int) -> None:  # noqa: ARG002 - nothing is ever replayed alone
        return None

    def share(self) -> tuple[int, int]:
        return 0, self._microbatches

    def play(self, step: int, batches: Sequence[object]) -> Summed:
        raise NotImplementedError  # nobody is deep alone

    def fetch(self) -> None:
        return None

    def check(self) -> None:
        return None

    def gather(self, step: int, partial: Partial, total: Sum) -> None:  # noqa: ARG002
        (whole,) = partial.nodes(0, self._microbatches)
        total.copy_(whole)

    def commit(self, step: int, summed: Summed) -> None:  # noqa: ARG002
        return None

    def unaided(self) -> AbstractContextManager[None]:
        return nullcontext()

    def settle(self) -> None:
        return None

    def finish(self, session: "Session", facts: Facts) -> bool:  # noqa: ARG002
        return True
