"""One worker as the keeper knows it: its connection, what it holds, and what waits to be sent to it."""

import contextlib
import queue
import threading
import time

import msgspec

from agent.checksum import Buffer
from agent.errors import WireError
from agent.layout import Layout
from agent.net.link import BEAT_S
from agent.net.wire import Connection
from agent.protocol import Commit, Dismissal, Held, Hello, Message, Ready
from agent.reliable.proofs import Question

WAITING_MAX = 10_000
SMOOTHING = 0.2  # of a beat


class Outgoing(msgspec.Struct, frozen=True):
    message: Message
    payload: tuple[Buffer, ...]


class Pace:
    """How slowly things happen: 1.0 if what is due every `period_s` comes on time, 3.0 if it takes three times that."""

    def __init__(self, period_s: float) -> None:
        self._period_s, self._came_s = period_s, 0.0
        self.slowness = 1.0

    def come(self, now_s: float) -> None:
        """Note that it has come now."""
        if self._came_s:
            self.note(now_s - self._came_s - self._period_s)
        self._came_s = now_s

    def note(self, late_s: float) -> None:
        """Note that it came late by so much. One late coming says little, a few in a row say all."""
        slowness = 1.0 + max(0.0, late_s) / self._period_s
        self.slowness += SMOOTHING * (slowness - self.slowness)


class Member:
    """Sending never blocks the keeper: a worker that does not read is found by its silence."""

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
        self.question: Question | None = None  # what it is to reproduce
        self.told = False  # the manager knows that it is ready
        self.noticed = False  # the cloud has said that its machine goes
        self.ready: Ready | None = hello.ready
        self.beats = Pace(BEAT_S)
        self.microbatch_s = 0.0
        self.step = -1  # that it is in the middle of
        self.hung_s = 0.0  # while it says that it is alive
        self.heard_bytes = -1
        self.unheard = False  # what it said last is seen to, and nobody listens meanwhile
        self.heard_s = 0.0
        self.connection = connection
        self._waiting: queue.Queue[Outgoing | None] = queue.Queue(WAITING_MAX)
        self._posting, self._behind = threading.Lock(), 0  # how many are not sent yet
        threading.Thread(target=self._send, name=f"to-{self.worker}", daemon=True).start()

    def beat(self, microbatch_s: float, step: int, hung_s: float) -> None:
        """Smoothed: a single step says little about how fast a worker is."""
        self.step, self.hung_s = step, hung_s
        self.beats.come(time.monotonic())
        if not self.microbatch_s:
            self.microbatch_s = microbatch_s
        self.microbatch_s += SMOOTHING * (microbatch_s - self.microbatch_s)

    def enters(self, layout: Layout, *, holds: bool) -> None:
        """It is told of a layout, and gives its own state up only when it has another."""
        self.generation = layout.generation
        if not holds or self.worker not in layout.workers:
            self.version = None
        if layout.owned and not holds:
            self.fresh = False  # of what it began with it makes room for its own stages

    def holds(self, version: int, held: Held | None) -> None:
        self.version, self.held, self.fresh = version, held, False

    def hears_of_commit(self, version: int) -> None:
        """Of the step for which it was prepared when it came."""
        self.post(Commit(generation=self.generation, version=version))
        self.holds(version, self._promised or self.held)

    def post(self, message: Message, *payload: Buffer) -> None:
        """On this thread if nothing is before it: a commit does not wait for another one to wake."""
        with self._posting:
            if not self._behind and not payload and self.connection.send_now(message):
                return
            try:
                self._waiting.put_nowait(Outgoing(message, payload))
                self._behind += 1
            except queue.Full:
                self.connection.close()  # it has not read for thousands of messages

    def dismiss(self, why: str) -> None:
        """Say so, then hang up."""
        self.post(Dismissal(why=why))
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            self.connection.close()

    def close(self) -> None:
        """Hang up, and let the thread that sends end."""
        self.connection.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)

    def silent_s(self, now_s: float) -> float:
        """How long nothing at all has arrived from it, as far as anybody has listened."""
        if self.unheard or self.connection.bytes_in != self.heard_bytes:
            self.heard_bytes, self.heard_s = self.connection.bytes_in, now_s
        return now_s - self.heard_s

    def _send(self) -> None:
        while (out := self._waiting.get()) is not None:
            try:
                self.connection.send(out.message, *out.payload)
            except WireError:
                break  # the thread that receives sees the same, and tells the job
            with self._posting:
                self._behind -= 1
        self.connection.close()
