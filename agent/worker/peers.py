"""A worker's place among others, and its one way to wait for them."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from agent.errors import Misuse, WireError
from agent.layout import Layout
from agent.net.link import Link
from agent.net.mesh import Mesh
from agent.net.wire import Connection
from agent.proof.evidence import Evidence
from agent.protocol import Computed, Enter, Part
from agent.replica import Replica
from agent.world import Interrupted, Left

T = TypeVar("T")

ENDS = (
    "step {}: the scripts of others have left their loop over session.steps(...) here, and that of this worker goes on. "
    "Whether it stops has to be the same on every worker: session.leader may not decide that, and what is counted for "
    "it from step to step, a best loss for one, belongs into Session(model, optimizer, ...)"
)


class PeerWorker:
    """What the parts of a worker share; all belongs to the script's thread, with exceptions.

    The exceptions are `link`, `order` and the mesh, whose threads wake the script's thread.
    """

    me: str
    code = ""  # the checksum of the job's files
    link: Link
    evidence: Evidence  # of the session, once its loop has begun
    reproduced: tuple[Computed, ...] = ()  # of a step that others have committed, as computed here
    order: Enter | None = None  # the newest layout that is known
    entered: Enter | None = None  # the layout that this worker is in
    over: int | None = None  # the version with which others have left their loops
    _mesh: Mesh
    _replica: Replica | None = None

    def __init__(self) -> None:
        self._changed = threading.Condition()

    @property
    def replica(self) -> Replica:
        assert self._replica is not None
        return self._replica

    @property
    def layout(self) -> Layout:
        assert self.entered is not None
        return self.entered.layout

    @property
    def generation(self) -> int:
        return self.entered.layout.generation if self.entered is not None else -1

    def superseded(self, generation: int | None = None) -> bool:
        """Return whether a newer layout is known than `generation`, by default the entered one."""
        order = self.order
        since = self.generation if generation is None else generation
        return order is not None and order.layout.generation > since

    def go_on(self, generation: int | None = None) -> None:
        """Return if this worker can go on, else raise why not.

        `Interrupted` means that there is a newer layout. If the others have left their loops here,
        it is `Left` for a worker that has not done the step before, else `Misuse`.
        """
        if self.over is not None and self.over <= self.link.step:
            if self.replica.played:
                raise Misuse(ENDS.format(self.over))
            raise Left
        if self.superseded(generation):
            raise Interrupted

    def send(self, peer: str, part: Part, pieces: list[memoryview]) -> None:
        while True:
            connection: Connection = self.wait(
                lambda: self._mesh.connection(peer), generation=part.generation
            )
            try:
                with self.link.stuck.aided():
                    connection.send(part, *pieces)
            except WireError:
                self._mesh.drop(peer, connection)
            else:
                return

    def unaided(self) -> AbstractContextManager[None]:
        """Return a context in which no other worker is needed, except to wait or send.

        See `agent.net.watchdog`.
        """
        return self.link.stuck.unaided()

    @property
    def lock(self) -> threading.Condition:
        """The lock that is held while an arriving message is taken in."""
        return self._changed

    def wake(self) -> None:
        """Make the script's thread look again."""
        with self._changed:
            self._changed.notify_all()

    def has(self, peer: str, step: int, tag: str) -> bool:
        """Return whether `take` would return without waiting."""
        return (peer, self.generation, step, tag) in self._mesh.mailbox

    def take(
        self, peer: str, step: int, tag: str, generation: int | None = None
    ) -> tuple[bytes, memoryview]:
        key = (peer, self.generation if generation is None else generation, step, tag)
        return self.wait(lambda: self._mesh.mailbox.pop(key, None), generation=generation)

    def wait(
        self,
        look: Callable[[], T | None],
        *,
        interruptible: bool = True,
        generation: int | None = None,
    ) -> T:
        """Wait until `look` finds something; the only place where the script's thread waits."""
        while True:
            found = self._wait(look, interruptible, generation, None)
            if found:
                return found

    def wait_until(self, look: Callable[[], T | None], until_s: float) -> T | None:
        """Wait until `look` finds something, but no longer than to this moment."""
        return self._wait(look, True, None, until_s)

    def _wait(
        self,
        look: Callable[[], T | None],
        interruptible: bool,
        generation: int | None,
        until_s: float | None,
    ) -> T | None:
        with self.link.stuck.aided(), self._changed:
            while True:
                found = look()
                if found:
                    return found
                if interruptible and self.entered is not None:
                    self.go_on(generation)
                left_s = None if until_s is None else until_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return None
                self._changed.wait(left_s)
