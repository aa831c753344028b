"""Messages between the processes of a parameter server.

What is said to one process before `flush` travels in one frame, so that a turn of a machine costs
one send for each other one. Each process listens; whoever has something for it connects and sends,
so of each pair the messages stay in order. The rows of large messages travel as blocks of the
transport that sums of gradients use, and the message says where to expect them.
"""

import contextlib
import itertools
import math
import os
import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from agent.errors import Refused, WireError
from agent.net.forks import let_go_in_forks
from agent.net.front import BACKLOG, Front
from agent.net.handshake import Door
from agent.net.wire import Connection, dial, room
from agent.paramserver import messages
from agent.paramserver.messages import Message
from agent.protocol import AnyMessage, Lying, Part, PeerHello, Segment
from agent.transport.segment import Own, Theirs
from agent.transport.tcp import Tcp
from agent.transport.transport import Slot, Ticket

FLUSH_S = 2.0  # for what is still to be sent at the end
DIAL_S = 8.0  # the time in which a dialled process must answer
DIAL_WAIT_S = 0.05
ROOM_MS = 200
SLOTS = 48  # of memory for rows that others read; they hold some until a clock is closed
PATIENCE_S = 0.1  # of what is in no hurry
COMMITS_MAX = 64  # that wait for something to go with
FREED_MAX = 4  # of these, until they are said without anything else
BLOCK_BYTES = 1 << 18  # of rows, from which on they travel as a block
NOTHING = memoryview(b"")


class Book(Message, frozen=True, kw_only=True):
    """To all: where each process listens."""

    addresses: dict[str, str]


class Introduced(Message, frozen=True, kw_only=True):
    """To the controller: where a new process listens."""

    address: str
    pid: int


class Broken(Message, frozen=True, kw_only=True):
    """To the controller: the connection to this process has broken, and is not made again."""

    peer: str


Said = messages.AnyMessage | Book | Introduced | Broken


class Entry(NamedTuple):
    """One message of a frame: its rows are in the payload, or come as a block, or lie `there`."""

    meta: bytes
    size: int
    block: int = 0
    there: Lying | None = None


class Letter(NamedTuple):
    """What a frame says, and where its sender listens.

    The first to a process also says which memory of the sender's it may read; once it `reads` that,
    it says so with everything. Of what lies there, it says what it has `freed`.
    """

    address: str
    entries: list[Entry]
    segment: Segment | None = None
    reads: bool = False
    freed: tuple[Lying, ...] = ()


class Writing:
    """A frame that is being put together; it may wait a little while nothing in it is urgent.

    A commit is one of all clocks before it, too, so only the newest waits, and not for ever: who
    has nothing else to hear keeps what it has said until then.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.pieces: list[memoryview] = []
        self.waits = True
        self._until_s = time.monotonic() + PATIENCE_S
        self._commit: int | None = None  # which of the entries is the newest one
        self._commits = 0

    def add(self, message: Message, entry: Entry, pieces: list[memoryview]) -> None:
        if isinstance(message, messages.Committed):
            self._commits += 1
            self.waits &= self._commits < COMMITS_MAX
            if self._commit is not None:
                self.entries[self._commit] = entry
                return
            self._commit = len(self.entries)
        else:
            self.waits &= getattr(message, "waits", False)
        self.entries.append(entry)
        self.pieces += pieces

    def is_due(self, now_s: float) -> bool:
        return not self.waits or now_s >= self._until_s


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

    return msgspec.msgpack.encode(message, enc_hook=hook), pieces


class Reading:
    """Decodes what comes on one connection; a decoder is dear to make."""

    def __init__(self) -> None:
        self._rows = NOTHING
        self._letters = msgspec.msgpack.Decoder(Letter)
        self._messages: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            Said, dec_hook=self._array
        )

    def letter(self, extra: bytes) -> Letter:
        return self._letters.decode(extra)

    def message(self, meta: bytes, rows: memoryview) -> Message:
        self._rows = rows
        message: Message = self._messages.decode(meta)
        self._rows = NOTHING  # or these would be freed only when the next message comes
        return message

    def _array(self, kind: type, value: Any) -> Any:  # noqa: ARG002 - there are arrays only
        dtype, shape, at = value
        count = math.prod(shape)
        return np.frombuffer(self._rows, np.dtype(dtype), count, at).reshape(shape)


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
        if threading.current_thread() is not self._thread:
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


Route = Callable[[Part, list[memoryview]], None]


class Letters:
    """Puts what is said to one process into one frame, and what comes into one queue.

    `routes` carry the frames.
    """

    def __init__(self, name: str) -> None:
        self.name, self.address = name, ""
        self.inbox: queue.SimpleQueue[tuple[str, Message | None]] = queue.SimpleQueue()
        self.routes: dict[str, Route] = {}
        self._lock = threading.Lock()
        self._writing: dict[str, Writing] = {}
        self.bytes_out = 0

    def send(self, target: str, message: Message) -> None:
        """Send with the next `flush`, or do nothing if the other process is gone.

        The controller says to all who is gone.
        """
        if target == self.name:
            self.inbox.put((self.name, message))
            return
        with self._lock:
            if not self._knows(target):
                return
            writing = self._writing.setdefault(target, Writing())
            # All but the rows is copied here, because the sender goes on to change it.
            meta, pieces = _encoded(message)
            size = sum(piece.nbytes for piece in pieces)
            self.bytes_out += size
            apart = self._apart(target, pieces) if size >= BLOCK_BYTES else None
            block, there = apart or (0, None)
            entry, inside = Entry(meta, size, block, there), pieces if apart is None else []
            writing.add(message, entry, inside)

    def flush(self) -> None:
        """Send what has been said since the last time.

        That a clock is committed only saves memory, and a receipt may be of no hurry: these wait a
        little for something to go with.
        """
        with self._lock:
            if not self._writing:
                return
            now_s = time.monotonic()
            due = {to: one for to, one in self._writing.items() if one.is_due(now_s)}
            for target, writing in due.items():
                del self._writing[target]
                route = self._route(target)
                if route is not None:
                    extra = msgspec.msgpack.encode(self._letter(target, writing.entries))
                    route(Part(generation=0, step=0, tag="said", extra=extra), writing.pieces)

    def open(self, sender: str, reading: Reading, part: Part, payload: memoryview) -> None:
        """Put the messages of a frame into the queue."""
        for meta, rows, block in _entries(reading.letter(part.extra), payload):
            if block is not None:
                raise WireError(f"{sender} sent rows apart, which is not a way to here")
            self.put(sender, reading.message(meta, rows))

    def put(self, sender: str, message: Message | None) -> None:
        """Put a message into the queue, on any thread."""
        self.inbox.put((sender, message))

    def _knows(self, target: str) -> bool:
        return target in self.routes

    def _route(self, target: str) -> Route | None:
        return self.routes.get(target)

    def _letter(self, target: str, entries: list[Entry]) -> Letter:  # noqa: ARG002
        return Letter(self.address, entries)

    def _apart(self, target: str, pieces: list[memoryview]) -> tuple[int, Lying | None] | None:  # noqa: ARG002
        """Send rows as a block, or put them where they can be read; None if there is no way."""
        return None


def _entries(
    letter: Letter, payload: memoryview
) -> Iterator[tuple[bytes, memoryview, Entry | None]]:
    """Yield each message of a letter with its rows, or with its entry if they are not in it."""
    at = 0
    for entry in letter.entries:
        if entry.block or entry.there is not None:
            yield entry.meta, payload[:0], entry
        else:
            yield entry.meta, payload[at : at + entry.size], None
            at += entry.size


class Wake:
    """Wakes the thread that polls; the transport takes it for the condition that it notifies."""

    def __init__(self) -> None:
        self._open = threading.Lock()  # a number that is closed may soon be of another file
        self.number = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None:
        with self._open:
            if self.number >= 0:
                os.eventfd_write(self.number, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.number)

    def close(self) -> None:
        with self._open:
            self.let_go()

    def let_go(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)


class Coming(NamedTuple):
    """A message that may wait for rows which come as a block."""

    meta: bytes
    rows: memoryview
    ticket: Ticket | None


class Inlet:
    """A connection on which another process sends, and what of it waits for rows."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name, self.connection = name, connection
        self.reading = Reading()
        self.coming = deque[Coming]()


class Post(Letters):
    """Letters on sockets, which the thread that `take`s them reads itself, so none is handed on.

    The first connection with a process that breaks is the end of all of them, because what was on
    its way is lost. It comes through the queue, once: the name, and nothing.
    """

    def __init__(self, name: str, secret: str, host: str = "127.0.0.1") -> None:
        super().__init__(name)
        self._secret = secret
        self.book: dict[str, str] = {}
        self._out: dict[str, Outbox] = {}
        self._parted: set[str] = set()  # whom nothing is sent any more; names are not used twice
        self._wake, self._poll = Wake(), select.epoll()
        self._poll.register(self._wake.number, select.EPOLLIN)
        self._inlets: dict[int, Inlet] = {}  # by the number of the file
        self._flows = Tcp(name, secret, self._wake, self._break)
        self._blocks = itertools.count(1)
        self._closed = False
        # Rows for processes of this host lie in memory that they read; without it they are blocks.
        self._own: Own | None = None
        with contextlib.suppress(OSError):
            self._own = Own(SLOTS, spares=SLOTS)
        self._told, self._readers = set[str](), set[str]()
        self._theirs: dict[str, Theirs] = {}
        self._freed: dict[str, deque[Lying]] = {}
        listener = socket.create_server((host, 0), backlog=BACKLOG)
        self.address = self._flows.address = f"{host}:{listener.getsockname()[1]}"
        let_go_in_forks(self)
        self._front = Front(listener, Door(name, lambda _: secret), self._receive)

    def _knows(self, target: str) -> bool:
        known = target in self.book and target not in self._parted
        return known or super()._knows(target)

    def _route(self, target: str) -> Route | None:
        if target in self.routes or target not in self.book:
            return super()._route(target)
        outbox = self._out.get(target)
        if outbox is None:
            outbox = self._out[target] = self._outbox(target, self.book[target])
        return outbox.put

    def _letter(self, target: str, entries: list[Entry]) -> Letter:
        if target in self.routes:
            return Letter(self.address, entries)
        told, freed = target in self._told, self._freed.get(target, deque())
        self._told.add(target)
        return Letter(
            self.address,
            entries,
            None if told or self._own is None else self._own.said,
            target in self._theirs,
            tuple(freed.popleft() for _ in range(len(freed))),
        )

    def _apart(self, target: str, pieces: list[memoryview]) -> tuple[int, Lying | None] | None:
        if target in self.routes:
            return None
        if target in self._readers and self._own is not None:
            there = self._own.put(target, pieces, next(self._blocks))
            if there is not None:
                return 0, there
        block = next(self._blocks)
        self._flows.meet(target, self.book[target].encode())
        self._flows.push(target, _slot(block), pieces)
        return block, None

    def flush(self) -> None:
        for name, freed in list(self._freed.items()):
            if len(freed) >= FREED_MAX and self._knows(name):  # who has nothing to say says this
                with self._lock:
                    self._writing.setdefault(name, Writing()).waits = False
        super().flush()

    def learn(self, addresses: dict[str, str]) -> None:
        with self._lock:
            self.book.update(addresses)

    def drop(self, target: str, wait_s: float = 0.0) -> None:
        """Send a process no more: what it has not taken after `wait_s` is thrown away."""
        with self._lock:
            self.book.pop(target, None)
            self._parted.add(target)
        self._part(target, wait_s)

    def _break(self, target: str) -> None:
        """Part with a process because a connection with it has broken, and say so, once."""
        with self._lock:
            news = not self._closed and target not in self._parted
            self._parted.add(target)
        if news:
            self._part(target)
            self.put(target, None)

    def _part(self, target: str, wait_s: float = 0.0) -> None:
        with self._lock:
            self._writing.pop(target, None)
            outbox = self._out.pop(target, None)
            self._readers.discard(target)
            self._freed.pop(target, None)
            self._theirs.pop(target, None)
        if self._own is not None:
            self._own.give_up(target)
        if outbox is not None:
            outbox.end()
            outbox.close(wait_s)
        self._flows.forget(target)

    def close(self) -> None:
        """Close all connections, with a bounded wait for what is still to be sent."""
        self._closed = True
        self._front.close()
        self.flush()
        with self._lock:
            outboxes, self._out, self.book = list(self._out.values()), {}, {}
        for outbox in outboxes:
            outbox.end()
        until_s = time.monotonic() + FLUSH_S
        for outbox in outboxes:
            outbox.close(max(0.0, until_s - time.monotonic()))
        self._flows.close()
        for number in list(self._inlets):
            self._shut(number)
        if self._own is not None:
            self._own.close()
        self._poll.close()
        self._wake.close()

    def let_go(self) -> None:
        """Close our copies in a fork of this process, where no other thread has gone on."""
        self._poll.close()
        self._wake.let_go()

    def _outbox(self, target: str, address: str) -> Outbox:
        hello = PeerHello(worker=self.name, serial=1)

        def connect() -> Connection:
            until_s = time.monotonic() + DIAL_S
            while True:
                try:
                    return dial(address, self._secret, hello, to=target)
                except Refused:
                    raise
                except WireError:
                    if self._closed or target in self._parted or time.monotonic() > until_s:
                        raise
                    time.sleep(DIAL_WAIT_S)

        return Outbox(connect, lambda: self._break(target))

    def _receive(self, connection: Connection, hello: AnyMessage) -> None:
        """Take a connection over that another process has opened."""
        if not isinstance(hello, PeerHello):
            self._flows.welcome(connection, hello)
            return
        connection.probe()
        number = connection.fileno()
        self._inlets[number] = Inlet(hello.worker, connection)
        try:
            self._poll.register(number, select.EPOLLIN)
        except (OSError, ValueError):  # we are closed, or the connection is
            self._shut(number)

    # --- the thread that takes --------------------------------------------------------------------

    def put(self, sender: str, message: Message | None) -> None:
        super().put(sender, message)
        self._wake.notify_all()

    def take(self, wait_s: float = 0.0) -> tuple[str, Message | None] | None:
        """Return the next message, and wait a little for one if there is none."""
        until_s = time.monotonic() + wait_s if wait_s else 0.0
        while True:
            try:
                return self.inbox.get_nowait()
            except queue.Empty:
                left_s = max(0.0, until_s - time.monotonic()) if wait_s else 0.0
                if not self._read(left_s) or (wait_s and not left_s):
                    return None

    def _read(self, wait_s: float) -> bool:
        """Read what has come on all connections; return whether there was anything."""
        found = self._poll.poll(wait_s)
        for number, _ in found:
            if number == self._wake.number:
                self._wake.clear()
                for each, inlet in list(self._inlets.items()):
                    if inlet.coming:
                        self._guarded(each, self._deliver)
            else:
                self._guarded(number, self._read_from)
        return bool(found)

    def _guarded(self, number: int, act: Callable[[Inlet], None]) -> None:
        """Do something with a connection, which an error of it ends."""
        inlet = self._inlets.get(number)
        if inlet is None:
            return
        try:
            act(inlet)
        except WireError:  # the usual end
            self._shut(number)
            self._break(inlet.name)

    def _shut(self, number: int) -> None:
        inlet = self._inlets.pop(number, None)
        if inlet is not None:
            with contextlib.suppress(OSError, ValueError):
                self._poll.unregister(number)
            inlet.connection.close()

    def _read_from(self, inlet: Inlet) -> None:
        while (frame := inlet.connection.receive_some()) is not None:
            part, payload = frame
            if isinstance(part, Part):
                self._open(inlet, inlet.reading.letter(part.extra), payload)
            if not inlet.connection.has_early:
                return

    def _open(self, inlet: Inlet, letter: Letter, payload: memoryview) -> None:
        self._hear_of_memory(inlet.name, letter)
        for meta, rows, apart in _entries(letter, payload):
            if apart is None:
                inlet.coming.append(Coming(meta, rows, None))
            elif apart.there is not None:
                inlet.coming.append(Coming(meta, self._view(inlet.name, apart.there), None))
            else:
                into = room(apart.size)
                ticket = self._flows.land(inlet.name, _slot(apart.block), into)
                self._flows.meet(inlet.name, letter.address.encode())
                inlet.coming.append(Coming(meta, into, ticket))
        self._deliver(inlet)

    def _hear_of_memory(self, sender: str, letter: Letter) -> None:
        if letter.segment is not None and sender not in self._parted:
            with contextlib.suppress(OSError, ValueError):  # it is out of reach
                self._theirs[sender] = Theirs(letter.segment)
                self._freed[sender] = deque()
        if letter.reads:
            self._readers.add(sender)
        for there in letter.freed:
            if self._own is not None:
                self._own.free(sender, there)

    def _view(self, sender: str, there: Lying) -> memoryview:
        theirs, freed = self._theirs.get(sender), self._freed.get(sender)
        if theirs is None or freed is None:
            raise WireError(f"{sender} has no memory that can be read here")
        return theirs.view(there, freed.append)

    def _deliver(self, inlet: Inlet) -> None:
        """Put what is whole into the queue, in order."""
        while inlet.coming:
            meta, rows, ticket = inlet.coming[0]
            if ticket is not None and not ticket.done:
                if ticket.failed:
                    raise WireError(ticket.failed)
                return
            inlet.coming.popleft()
            self.inbox.put((inlet.name, inlet.reading.message(meta, rows)))


def _slot(block: int) -> Slot:
    return Slot(0, block, "rows", 0)
