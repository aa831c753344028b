"""One worker in the keeper: its connection, what it holds, and what waits to be sent."""

import contextlib
import queue
import threading
import time

import msgspec

from agent.checksum import Buffer
from agent.errors import WireError
from agent.keeper.proofs import Question
from agent.layout import Layout
from agent.net.link import BEAT_S
from agent.net.wire import Connection
from agent.protocol import STAYS_S, Commit, Dismissal, Held, Hello, Message, Ready

WAITING_MAX = 10_000
SMOOTHING = 0.2  # of a beat


class Outgoing(msgspec.Struct, frozen=True):
    message: Message
    payload: tuple[Buffer, ...]


class Pace:
    """How slowly a periodic thing happens: 1.0 on time, 3.0 at three times `period_s`."""

    def __init__(self, period_s: float) -> None:
        self._period_s, self._came_s = period_s, 0.0
        self.slowness = 1.0

    def come(self, now_s: float) -> None:
        """Note that it has happened now."""
        if self._came_s:
            self.note(now_s - self._came_s - self._period_s)
        self._came_s = now_s

    def note(self, late_s: float) -> None:
        """Note by how much it was late. One delay counts little, a few in a row count fully."""
        slowness = 1.0 + max(0.0, late_s) / self._period_s
        self.slowness += SMOOTHING * (slowness - self.slowness)


class Member:
    """One worker. Sending to it never blocks; one that does not read is found by its silence."""

    def __init__(self, connection: Connection, hello: Hello) -> None:
        self.worker, self.machine_id = hello.worker, hello.machine_id
        self.mesh_address = hello.mesh_address
        self.generation = hello.generation
        self.version = hello.version
        self.held = hello.held  # None is everything
        self._promised = hello.promised
        self.fresh = hello.generation < 0  # its state is the one that the script began with
        self.prover = hello.prover  # it proves a step, and does nothing else: see `trial`
        self.proven = hello.proven  # it was in a step that was committed, or has reproduced one
        self.question: Question | None = None  # the step that it is to reproduce
        self.told = False  # it was reported to the manager as ready
        self.lacks_files = False  # that belong to its state, because they are not stored
        self.goes_s: float | None = None  # when its machine goes, if the cloud has said that
        self.ready: Ready | None = hello.ready
        self.beats = Pace(BEAT_S)
        self.microbatch_s = 0.0
        self.step = -1  # the step in flight
        self.hung_s = 0.0  # how long it has made no progress, by its own heartbeats
        self.heard_bytes = -1
        self.unheard = False  # a message of it is being handled, and none is received meanwhile
        self.heard_s = 0.0
        self.connection = connection
        self._waiting: queue.Queue[Outgoing | None] = queue.Queue(WAITING_MAX)
        self._posting, self._behind = threading.Lock(), 0  # how many are not sent yet
        threading.Thread(target=self._send, name=f"to-{self.worker}", daemon=True).start()

    @property
    def noticed(self) -> bool:
        """Whether its machine will be taken; one that is there long after that stays."""
        return self.goes_s is not None and time.monotonic() < self.goes_s + STAYS_S

    def beat(self, microbatch_s: float, step: int, hung_s: float) -> None:
        """Take a heartbeat. The pace is smoothed, because one step says little about a worker."""
        self.step, self.hung_s = step, hung_s
        self.beats.come(time.monotonic())
        if not self.microbatch_s:
            self.microbatch_s = microbatch_s
        self.microbatch_s += SMOOTHING * (microbatch_s - self.microbatch_s)

    def enters(self, layout: Layout, *, holds: bool) -> None:
        """Note that it gets a layout. It gives its state up only if it gets a different one.

        A holder that is left out keeps it until the others have committed a step.
        """
        self.generation = layout.generation
        if not holds:
            self.version = None
        if layout.owned and not holds:
            self.fresh = False  # it drops its initial state to make room for its own stages

    def holds(self, version: int, held: Held | None) -> None:
        self.version, self.held, self.fresh = version, held, False

    def hears_of_others(self, commit: Commit) -> None:
        """Tell a worker that the layout left out that the job has gone on without what it kept.

        One that was never told of the layout may wait for a commit of its own.
        """
        if self.version is not None and self.generation == commit.generation:
            self.version = None
            self.post(commit)

    def hears_of_commit(self, version: int) -> None:
        """Send the commit of the step for which it was prepared when it came."""
        self.post(Commit(generation=self.generation, version=version))
        self.holds(version, self._promised or self.held)

    def post(self, message: Message, *payload: Buffer) -> None:
        """Send now if nothing waits before it, so that a commit need not wait for a thread."""
        with self._posting:
            if not self._behind and not payload and self.connection.send_now(message):
                return
            try:
                self._waiting.put_nowait(Outgoing(message, payload))
                self._behind += 1
            except queue.Full:
                self.connection.close()  # it has not read for thousands of messages

    def dismiss(self, why: str) -> None:
        """Send the reason, then hang up."""
        self.post(Dismissal(why=why))
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            self.connection.close()

    def close(self) -> None:
        """Hang up, and end the sending thread."""
        self.connection.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)

    def silent_s(self, now_s: float) -> float:
        """Return how long nothing has arrived from it, while it was listened to."""
        if self.unheard or self.connection.bytes_in != self.heard_bytes:
            self.heard_bytes, self.heard_s = self.connection.bytes_in, now_s
        return now_s - self.heard_s

    def _send(self) -> None:
        while (out := self._waiting.get()) is not None:
            try:
                self.connection.send(out.message, *out.payload)
            except WireError:
                break  # the receiving thread sees the same, and notifies the job
            with self._posting:
                self._behind -= 1
        self.connection.close()
