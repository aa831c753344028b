"""The machines in processes of their own, with sockets between them.

Each process listens; whoever has something for it connects and sends, so of each pair the messages
stay in order. Rows travel as the payloads of frames, without copies. A node looks for messages
between grains.
"""

import contextlib
import importlib
import itertools
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from agent.errors import AgentError, WireError
from agent.net.front import BACKLOG, Front
from agent.net.handshake import Door
from agent.net.wire import Connection, dial, room
from agent.paramserver import messages
from agent.paramserver.api import Application, checked, even
from agent.paramserver.controller import Controller, Plan
from agent.paramserver.help import Settings
from agent.paramserver.member import Member, join
from agent.paramserver.messages import CONTROLLER, Beat, End, Gone, Leave, Message, Out, Section
from agent.paramserver.server import Server
from agent.paramserver.worker import Bound, Worker
from agent.protocol import AnyMessage, Part, PeerHello
from agent.store.memory import keep_memory
from agent.transport.tcp import Tcp
from agent.transport.transport import Slot

HOST = "127.0.0.1"
BEAT_S = 1.0
LOOK_S = 0.2
FLUSH_S = 2.0  # for what is still to be sent at the end
START_S = 60.0
ROOM_MS = 200
BLOCK_BYTES = 1 << 18  # of rows, from which on they travel as a block


class Book(Message, frozen=True, kw_only=True):
    """To all: where each process listens."""

    addresses: dict[str, str]


class Introduced(Message, frozen=True, kw_only=True):
    """To the controller: where a new process listens."""

    address: str
    pid: int


Said = messages.AnyMessage | Book | Introduced


def _encoded(message: Message) -> tuple[bytes, list[memoryview]]:
    """Return a message as bytes, and its arrays apart."""
    pieces: list[memoryview] = []
    at = 0

    def hook(value: Any) -> Any:
        nonlocal at
        if not isinstance(value, np.ndarray):
            raise NotImplementedError
        array = np.ascontiguousarray(value)
        place = (array.dtype.str, array.shape, at)
        at += array.nbytes
        pieces.append(array.reshape(-1).view(np.uint8).data)
        return place

    return msgspec.msgpack.Encoder(enc_hook=hook).encode(message), pieces


def _decoded(meta: bytes, payload: memoryview) -> Message:
    def hook(kind: type, value: Any) -> Any:  # noqa: ARG001
        dtype, shape, at = value
        count = int(np.prod(shape))
        return np.frombuffer(payload, np.dtype(dtype), count, at).reshape(shape)

    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Said, dec_hook=hook)
    message: Message = decoder.decode(meta)
    return message


class Outbox:
    """What one process is to be sent. A small message leaves at once, where there is room for it.

    A thread sends the rest. A process that reads nothing stops this thread alone, so the others
    are served meanwhile.
    """

    def __init__(self, connect: Callable[[], Connection], failed: Callable[[], None]) -> None:
        self._connect, self._failed = connect, failed
        self._changed = threading.Condition()  # of all below
        self._waiting = deque[tuple[Part, list[memoryview]]]()
        self._rest: list[memoryview] = []  # of the frame that the thread is sending
        self._connection: Connection | None = None
        self._sending = self._ended = self._closed = False
        self._thread = threading.Thread(target=self._run, name="paramserver-out", daemon=True)
        self._thread.start()

    def put(self, part: Part, pieces: list[memoryview]) -> None:
        with self._changed:
            rest = [piece for piece in pieces if piece.nbytes]
            if self._connection is not None and not self._sending and not self._waiting:
                # The thread sees an error when it receives nothing more; here it is only noted.
                with contextlib.suppress(WireError):
                    rest = self._connection.frame(part, rest)
                    if self._connection.send_some(rest):
                        return
                self._sending, self._rest = True, rest
            else:
                self._waiting.append((part, rest))
            self._changed.notify_all()

    def end(self) -> None:
        """Send what waits, and then no more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self, wait_s: float) -> None:
        """Close the connection, after so long at most for what `end` left to be sent."""
        self._thread.join(wait_s)
        with self._changed:
            self._closed = self._ended = True
            self._changed.notify_all()
            if self._connection is not None:
                self._connection.close()

    def _run(self) -> None:
        try:
            connection = self._connect()
            with self._changed:
                self._connection = connection
            while (rest := self._next(connection)) is not None:
                room = select.poll()
                room.register(connection.fileno(), select.POLLOUT)
                while not connection.send_some(rest):
                    room.poll(ROOM_MS)
                with self._changed:
                    self._sending = False
        except (WireError, OSError, ValueError):
            self._failed()
        finally:
            if self._connection is not None:
                self._connection.close()

    def _next(self, connection: Connection) -> list[memoryview] | None:
        """Return what is to be sent next, in pieces; None if there is nothing more to be sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._sending or self._waiting or self._ended)
            if self._closed or not (self._sending or self._waiting):
                return None
            if not self._sending:
                self._rest = connection.frame(*self._waiting.popleft())
                self._sending = True
            return self._rest


class Post:
    """Sends to processes by name, and puts what comes into one queue.

    The rows of large messages travel as blocks of the transport that sums of gradients use, and
    the message says where to expect them. The end of a connection comes through the queue as well:
    the name, and nothing.
    """

    def __init__(self, name: str, secret: str) -> None:
        self.name, self._secret = name, secret
        self.inbox: queue.SimpleQueue[tuple[str, Message | None]] = queue.SimpleQueue()
        self.book: dict[str, str] = {}
        self._out: dict[str, Outbox] = {}
        self._lock = threading.Lock()
        self._landed = threading.Condition()
        self._flows = Tcp(name, secret, self._landed, lambda _: None)
        self._blocks = itertools.count(1)
        self.bytes_out = 0
        listener = socket.create_server((HOST, 0), backlog=BACKLOG)
        self.address = self._flows.address = f"{HOST}:{listener.getsockname()[1]}"
        self._front = Front(listener, Door(name, lambda _: secret), self._receive)

    def send(self, target: str, message: Message) -> None:
        """Send, or do nothing if the other process is gone: the controller says so to all."""
        if target == self.name:
            self.inbox.put((self.name, message))
            return
        with self._lock:
            outbox = self._out.get(target)
            if outbox is None:
                if target not in self.book:
                    return
                outbox = self._out[target] = self._outbox(target, self.book[target])
            # All but the rows is copied here, because the sender goes on to change it.
            meta, pieces = _encoded(message)
            size = sum(piece.nbytes for piece in pieces)
            self.bytes_out += size
            block = 0
            if size >= BLOCK_BYTES:
                block = next(self._blocks)
                self._flows.meet(target, self.book[target].encode())
                self._flows.push(target, _slot(block), pieces)
                pieces, meta = [], msgspec.msgpack.encode((size, self.address, meta))
            outbox.put(Part(generation=0, step=block, tag="said", extra=meta), pieces)

    def learn(self, addresses: dict[str, str]) -> None:
        with self._lock:
            self.book.update(addresses)

    def drop(self, target: str, wait_s: float = 0.0) -> None:
        """Send a process no more: what it has not taken after `wait_s` is thrown away."""
        with self._lock:
            self.book.pop(target, None)
            outbox = self._out.pop(target, None)
        if outbox is not None:
            outbox.end()
            outbox.close(wait_s)
        self._flows.forget(target)

    def close(self) -> None:
        """Close all connections, with a bounded wait for what is still to be sent."""
        self._front.close()
        with self._lock:
            outboxes, self._out, self.book = list(self._out.values()), {}, {}
        for outbox in outboxes:
            outbox.end()
        until_s = time.monotonic() + FLUSH_S
        for outbox in outboxes:
            outbox.close(max(0.0, until_s - time.monotonic()))
        self._flows.close()

    def _outbox(self, target: str, address: str) -> Outbox:
        hello = PeerHello(worker=self.name, serial=1)

        def failed() -> None:
            with self._lock:
                if self._out.get(target) is outbox:
                    del self._out[target]
                    self.book.pop(target, None)

        outbox = Outbox(lambda: dial(address, self._secret, hello, to=target), failed)
        return outbox

    def _receive(self, connection: Connection, hello: AnyMessage) -> None:
        if not isinstance(hello, PeerHello):
            self._flows.welcome(connection, hello)
            return
        try:
            while True:
                part, payload = connection.receive()
                if isinstance(part, Part):
                    self.inbox.put((hello.worker, self._whole(hello.worker, part, payload)))
        except WireError:
            pass  # the usual end
        finally:
            connection.close()
            self.inbox.put((hello.worker, None))

    def _whole(self, sender: str, part: Part, payload: memoryview) -> Message:
        """Return a message with its rows, which may come as a block."""
        if not part.step:
            return _decoded(part.extra, payload)
        size, address, meta = msgspec.msgpack.decode(part.extra, type=tuple[int, str, bytes])
        into = room(size)
        ticket = self._flows.land(sender, _slot(part.step), into)
        self._flows.meet(sender, address.encode())
        with self._landed:
            self._landed.wait_for(lambda: ticket.done or ticket.failed)
        if ticket.failed:
            raise WireError(ticket.failed)
        return _decoded(meta, into)


def _slot(block: int) -> Slot:
    return Slot(0, block, "rows", 0)


class Folder:
    """The store of committed clocks: a file for each partition and clock."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def write(self, partition: int, clock: int, sections: list[Section]) -> None:
        arrays = {}
        for section in sections:
            arrays[f"keys {section.table}"] = section.keys
            arrays[f"rows {section.table}"] = section.values
        path = self._path(partition, clock)
        part = path.with_suffix(f".{os.getpid()}")
        with part.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # the name is on the disk as well, before it counts as saved
        finally:
            os.close(folder)

    def read(self, partition: int, clock: int) -> list[Section]:
        with np.load(self._path(partition, clock)) as found:
            names = [name.removeprefix("keys ") for name in found if name.startswith("keys ")]
            return [Section(one, found[f"keys {one}"], found[f"rows {one}"]) for one in names]

    def drop(self, partition: int, before: int) -> None:
        for path in self._folder.glob(f"{partition}-*"):
            clock = path.stem.partition("-")[2]
            if clock.isdigit() and int(clock) < before:
                path.unlink(missing_ok=True)

    def _path(self, partition: int, clock: int) -> Path:
        return self._folder / f"{partition}-{clock}.npz"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What every process of a job needs to know."""

    module: str
    kind: str
    folder: str  # of the module
    arguments: dict[str, Any] = {}
    blocks: int = 12
    grains: int = 20
    batches: int = 1
    partitions: int = 4
    expected: int = 2
    slack: int | None = 0
    help_size: int = 0
    save_every: int = 1
    store: str = ""
    dead_s: float = 5.0  # without a sign of life
    stuck_s: float = 600.0  # in one call of the application, after which there is none
    grain_s: float = 0.0  # of sleep, in place of computing that other processes would be slowed by

    def application(self) -> Application:
        if self.folder not in sys.path:
            sys.path.insert(0, self.folder)
        made: Application = getattr(importlib.import_module(self.module), self.kind)(
            **self.arguments
        )
        checked(made)
        return made

    def plan(self, application: Application) -> Plan:
        return Plan(
            work=even(application.items, self.blocks, self.grains, self.batches),
            stop=application.stop,
            partitions=self.partitions,
            expected=self.expected,
            help_size=self.help_size,
            save_every=self.save_every,
            dead_s=self.dead_s,
        )


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What one node is given on its standard input."""

    job: Job
    name: str
    secret: str
    controller: str
    reliable: bool
    allocation: str
    slow: float = 1.0


class Node:
    """One process: a worker and a server, and the loop that runs them."""

    def __init__(self, start: Start) -> None:
        self._start, job = start, start.job
        application = job.application()
        tables, plan = checked(application), job.plan(application)
        worker = Worker(
            start.name, application, plan.work, Bound(job.slack), Settings(size=job.help_size),
            job.partitions,
        )  # fmt: skip
        server = Server(start.name, tables, job.partitions, Folder(job.store))
        self._member = Member(worker, server)
        self._post = Post(start.name, start.secret)
        self._post.book[CONTROLLER] = start.controller
        self._turned_s = time.monotonic()
        self._over = False
        self._ended = threading.Event()

    def run(self) -> None:
        start = self._start
        threading.Thread(target=self._beat, name="paramserver-beat", daemon=True).start()
        hello = Introduced(address=self._post.address, pid=os.getpid())
        self._post.send(CONTROLLER, hello)
        self._say(join(start.reliable, start.name, start.allocation))
        worker = self._member.worker
        while not self._over:
            self._turned_s = time.monotonic()
            run, out = worker.next_run(time.time())
            self._say(self._member.marked(out))
            if run is None:
                self._read(LOOK_S)
            else:
                begun_s = time.time()
                grains = 1 if worker.application.grainwise or self._start.job.grain_s else 4
                grains = min(grains, run.span.last - run.span.first)
                if start.job.grain_s:
                    time.sleep(start.job.grain_s * grains * start.slow)
                out = worker.finish(run, grains, time.time() - begun_s, time.time())
                self._say(self._member.marked(out))
                self._read(0.0)
        self._ended.set()
        self._post.close()

    def _read(self, wait_s: float) -> None:
        """Take all that has come, waiting a little for the first."""
        try:
            while not self._over:
                sender, message = (
                    self._post.inbox.get(timeout=wait_s)
                    if wait_s
                    else (self._post.inbox.get_nowait())
                )
                wait_s = 0.0
                self._take(sender, message)
        except queue.Empty:
            return

    def _take(self, sender: str, message: Message | None) -> None:
        self._turned_s = time.monotonic()
        if message is None:
            self._over = sender == CONTROLLER
        elif isinstance(message, Book):
            self._post.learn(message.addresses)
        elif isinstance(message, End | Leave):
            self._over = True
        else:
            if isinstance(message, Gone):
                for name in message.nodes:
                    self._post.drop(name)
            self._say(self._member.handle(sender, message, time.time()))

    def _say(self, out: Out) -> None:
        for target, message in out:
            self._post.send(target, message)

    def _beat(self) -> None:
        """Give signs of life, in a thread, because the loop may compute or load for long."""
        job = self._start.job
        while not self._ended.wait(min(BEAT_S, job.dead_s / 4)):
            if time.monotonic() - self._turned_s < job.stuck_s:
                self._post.send(CONTROLLER, Beat())


class Spawned(NamedTuple):
    process: subprocess.Popen[bytes]
    reliable: bool


class House:
    """The controller in this process, and nodes in others, all on this machine."""

    def __init__(self, job: Job, secret: str = "") -> None:
        self.job, self._secret = job, secret or os.urandom(16).hex()
        self.controller = Controller(job.plan(job.application()))
        self.nodes: dict[str, Spawned] = {}
        self.closed_s: list[float] = []
        self._post = Post(CONTROLLER, self._secret)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread = threading.Thread(
            target=self._run, name="paramserver-controller", daemon=True
        )
        self._thread.start()

    def start(
        self, name: str, reliable: bool, allocation: str = "first", slow: float = 1.0
    ) -> None:
        """Start a node."""
        start = Start(
            job=self.job,
            name=name,
            secret=self._secret,
            controller=self._post.address,
            reliable=reliable,
            allocation=allocation,
            slow=slow,
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "agent.paramserver.processes"], stdin=subprocess.PIPE
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(start))
        process.stdin.close()
        self.nodes[name] = Spawned(process, reliable)

    def kill(self, names: Iterable[str]) -> None:
        """End nodes as a machine ends that is taken away without a word of warning."""
        for name in names:
            self.nodes[name].process.send_signal(signal.SIGKILL)

    def stop(self, names: Iterable[str]) -> None:
        for name in names:
            self.nodes[name].process.send_signal(signal.SIGSTOP)

    def go_on(self, names: Iterable[str]) -> None:
        for name in names:
            self.nodes[name].process.send_signal(signal.SIGCONT)

    def evict(self, names: Iterable[str], warning_s: float) -> None:
        with self._changed:
            self._say(self.controller.evicted(names, warning_s, time.monotonic()))

    def wait(self, until: Callable[[Controller], object], limit_s: float = 120.0) -> None:
        """Wait until something is true of the controller, or raise."""
        with self._changed:
            if not self._changed.wait_for(lambda: until(self.controller), limit_s):
                raise AgentError(f"it did not happen within {limit_s:g} s: {self.controller.notes}")

    def result(self, limit_s: float = 300.0) -> dict[str, Any]:
        """Wait for the end, and return the tables as the store has them."""
        self.wait(lambda controller: controller.ended, limit_s)
        folder, clock = Folder(self.job.store), self.controller.saved
        found: dict[str, Any] = {}
        application = self.job.application()
        for table in application.tables:
            found[table.name] = np.zeros((table.keys, table.columns), table.dtype)
        for partition in range(self.job.partitions):
            for section in folder.read(partition, clock):
                found[section.table][section.keys] = section.values
        return found

    def close(self) -> None:
        for spawned in self.nodes.values():
            spawned.process.kill()
            spawned.process.wait()
        self._post.inbox.put((CONTROLLER, None))
        self._thread.join(START_S)
        self._post.close()

    def _run(self) -> None:
        while True:
            came = self._all_that_came()
            if (CONTROLLER, None) in came:
                return
            with self._changed:
                for sender, message in came:
                    self._take(sender, message)
                self._say(self.controller.tick(time.monotonic()))
                self._changed.notify_all()

    def _all_that_came(self) -> list[tuple[str, Message | None]]:
        """Return all that waits, because nobody is silent whose signs of life are among it."""
        try:
            first = self._post.inbox.get(timeout=LOOK_S)
        except queue.Empty:
            return []
        return [first, *(self._post.inbox.get() for _ in range(self._post.inbox.qsize()))]

    def _take(self, sender: str, message: Message | None) -> None:
        now_s, brain = time.monotonic(), self.controller
        if message is None:
            self._post.drop(sender)
            self._say(brain.lost([sender], now_s))
        elif isinstance(message, Introduced):
            self._post.learn({sender: message.address})
            book = Book(addresses=dict(self._post.book))
            for name in list(self._post.book):
                self._post.send(name, book)
        else:
            self._say(brain.handle(sender, message, now_s))
        while len(self.closed_s) <= brain.ledger.closed:
            self.closed_s.append(now_s)

    def _say(self, out: Out) -> None:
        for target, message in out:
            self._post.send(target, message)


def main() -> None:
    """Run one node, as its standard input says."""
    keep_memory()
    Node(msgspec.convert(json.load(sys.stdin), Start)).run()


if __name__ == "__main__":
    main()
