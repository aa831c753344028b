"""Those who train together, as a session sees them: many, or nobody else."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from agent.messages import NanPolicy
from agent.output.folder import Output
from agent.proof.turns import Shown
from agent.replica import Replica
from agent.tensors.partial import Partial
from agent.tensors.sums import Sum, Summed

if TYPE_CHECKING:
    from agent.proof.evidence import Evidence
    from agent.protocol import Reached


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
    """Those who train together. A version is a count of commits."""

    nan: NanPolicy
    stop_at: int
    """The loop ends behind so many steps, however many the script asks for; 0 is no bound."""
    evidence: "Evidence"
    """What this worker can show of its steps."""
    output: Output
    """What the script writes and logs."""

    @property
    def proves(self) -> bool:
        """Whether this is a step that the job has done, and that is done again for nothing but a proof."""

    @property
    def state_shown(self) -> Shown:
        """How much of the state that this step begins with is shown to others."""

    @property
    def batch_shown(self) -> Shown:
        """How much is shown of a microbatch that this worker computes in this step."""

    def arrived(self, reached: "Reached") -> None:
        """Hear what state the script's step begins with."""

    @property
    def microbatches(self) -> int:
        """Of how many microbatches a step is made, if the others know; else 0."""

    @property
    def leader(self) -> bool: ...

    @property
    def notice_s(self) -> float | None: ...

    def boundary(self, replica: Replica, facts: Facts) -> None:
        """Return when `replica.version` is the version that everyone goes on from."""

    def bind(self, replica: Replica, facts: Facts) -> bool:
        """As `boundary`, from within the first step: only now the script has said how many microbatches it has.

        False if the job is further than that: what the script does until its next step counts for nothing.
        """

    def logged(self, version: int) -> Summed | None:
        """The sum of a commit that was made already, to be applied again."""

    def asked(self, phase: int) -> int | None:
        """The microbatch by which this worker has to prove that it computes what the job computes."""

    def share(self) -> tuple[int, int]:
        """The first and the number of this worker's microbatches."""

    @property
    def twice(self) -> int | None:
        """A microbatch of another worker that this one computes as well in this step, to be compared."""

    @property
    def deep(self) -> bool:
        """Whether chains of several workers compute a microbatch."""

    def play(self, version: int, microbatches: Sequence[object]) -> Summed:
        """Compute the share and sum it over everyone, where the layout is deep."""

    def fetch(self) -> None:
        """Get the layers that are not here from those who have them, for the script to use."""

    def check(self) -> None:
        """Raise `Interrupted` if the step cannot go on as it began."""

    def all_reduce(self, version: int, partial: Partial, total: Sum) -> None:
        """Sum over everyone into `total`."""

    def promise(self, version: int, summed: Summed) -> None:
        """Say that this worker has the sum, and can apply it."""

    def commit(self, version: int) -> None:
        """Return when it is committed: from here on nobody goes back behind it."""

    def unaided(self) -> AbstractContextManager[None]:
        """Inside nobody else is needed, and nothing of the script's is done."""

    def end_step(self, step: int) -> None:
        """The script's code of this step is through, and nothing of it is undone."""

    def settle(self) -> None:
        """Return when nobody reads the state any more: the script is about to change it, or it is loaded."""

    def finish(self, replica: Replica, facts: Facts) -> bool:
        """The loop is over: put the final state into safe hands.

        False if this worker was sent back instead, because what only others had was lost with them: its last
        steps are to be done again.
        """


class Alone:
    """A world of one: nothing to agree on."""

    nan: NanPolicy = "fail"
    evidence: "Evidence"
    state_shown: Shown = "nothing"
    batch_shown: Shown = "nothing"
    proves = False
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
        raise NotImplementedError  # nobody is deep alone

    def fetch(self) -> None:
        return None

    def check(self) -> None:
        return None

    def all_reduce(self, version: int, partial: Partial, total: Sum) -> None:  # noqa: ARG002
        (whole,) = partial.nodes(*self._share)
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
