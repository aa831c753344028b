"""Blocks over several TCP flows to each peer: the transport that works everywhere.

One flow is often held to a part of a link (5 of 25 Gbit/s on EC2). So a block is cut into chunks,
and each flow takes the next chunk when it has room: a slow flow takes fewer of them. Every chunk is
a frame with tags of its own (`agent.net.frames`), so nothing is taken in that its sender has not
made. If one flow breaks, its peer counts as broken.

Sending never waits. Whoever pushes hands the system as much as there is room for, and one thread
sends the rest. So a small block leaves without a change of threads. Each flow has a thread that
receives; it reads no further while the block that comes is not expected yet, which holds the
sender back.
"""

import contextlib
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from types import TracebackType
from typing import Protocol

import msgspec

from agent.errors import Altered, Refused, WireError
from agent.net.front import BACKLOG, Front
from agent.net.handshake import Door
from agent.net.wire import Connection, dial
from agent.protocol import AnyMessage, Chunk, FlowHello, Freed, Readable, Segment
from agent.store.memory import address_of
from agent.transport.landings import Berth, Landings
from agent.transport.remote import Reach, Remote
from agent.transport.segment import SLOT_BYTES, Own, Theirs
from agent.transport.transport import (
    BEGUN,
    CHUNK_BYTES,
    GONE,
    Broken,
    Outgoing,
    Slot,
    Ticket,
    chunks_of,
)

log = logging.getLogger(__name__)

FLOWS = 4
DIAL_S = 8.0  # the time in which a dialled peer must answer
DIAL_WAIT_S = 0.05
SILENT_S = 1.0  # without a byte of a chunk that is not wanted any more: its peer does not go on
LOOK_S = 1.0
SETTLE_S, SETTLE_LOOK_S = 2.0, 0.01
SHARED_BYTES_MIN = 1 << 16
DAMAGED = (
    "a block of {} is not taken, because {}: its connection is given up, and the step is done again without one of the "
    "two workers; if it happens again, the memory or the network of one of them is bad"
)
CHUNKS_PER_TURN = 4  # on one flow, before others have their turn


class Notified(Protocol):
    """A condition, as far as it is used here."""

    def __enter__(self) -> object: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

    def notify_all(self) -> None: ...


Piece = tuple[Outgoing | None, Chunk | Segment | Readable | Freed, list[memoryview]]


class Flow:
    """One connection; `sending` guards what is being sent on it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.sending = threading.Lock()
        self.rest: list[memoryview] = []  # of a frame that is sent in part
        self.block: Outgoing | None = None  # that this frame is of
        self.berth: Berth | None = None  # of the chunk that comes now, if it is wanted
        self.over = False


class Peer:
    """One meeting with a peer: its flows, and the chunks that none of them has taken yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.serial = 0  # of the one who dials
        self.narrow = True  # only the first flow was opened
        self.reads = False  # it reads our segment
        self.tries = False  # it was offered ours, and has not said yet whether it can be read
        self.tried = False  # its segment is, through NIXL, and whether it can be read is open
        self.segment: Theirs | Remote | None = None  # of the peer, if it can be read here
        self.unread: Segment | None = None  # of the peer, if it cannot
        self.flows: list[Flow] = []
        self.queue: deque[Piece] = deque()


class Landing:
    """What comes on one flow, on its way into the places where it is expected."""

    def __init__(self, landings: Landings, peer: Peer, flow: Flow) -> None:
        self._landings, self._peer, self._flow = landings, peer, flow
        self._unwanted = memoryview(b"")

    def place(self, message: AnyMessage, size: int) -> memoryview:
        """Return where the payload of a message goes; wait until it is expected."""
        if not isinstance(message, Chunk):
            raise WireError(f"{self._peer.name} sent {size} bytes with {type(message).__name__}")
        slot = Slot(message.generation, message.step, message.kind, message.block)
        self._flow.berth = self._landings.wait(self._peer.name, slot, self._is_gone)
        if self._flow.berth is not None:
            return self._flow.berth.span(message.offset, size, message.size)
        if self._unwanted.nbytes < size:
            self._unwanted = memoryview(bytearray(size))
        return self._unwanted[:size]

    def _is_gone(self) -> bool:
        """Return whether the peer has died while what it sent before waits for its place."""
        return self._flow.over or self._flow.connection.hung_up()

    def take(self, message: Chunk, size: int) -> None:
        """Take note of a chunk that has come."""
        if message.there is not None:
            size = message.there.count
            if size > SLOT_BYTES:
                raise WireError(f"{self._peer.name} has {size} bytes in one slot of its segment")
            into = self.place(message, size)
            if self._flow.berth is not None:
                if self._peer.segment is None:
                    raise WireError(f"{self._peer.name} has no segment")
                self._peer.segment.take(message.there, into, self._is_gone)
        elif not size:
            self.place(message, 0)
        berth, self._flow.berth = self._flow.berth, None
        if berth is not None:
            self._landings.take(berth, size, message.extra)

    def end(self) -> None:
        if self._flow.berth is not None:
            self._landings.leave(self._flow.berth)


class Tcp:
    """`changed` is notified of every ticket; `broken` hears of each peer that is lost."""

    def __init__(
        self,
        worker: str,
        secret: str,
        changed: Notified,
        broken: Broken,
        *,
        host: str = "",
        flows: int = FLOWS,
    ) -> None:
        """Listen at `host`; without one, set `address` to where a listener calls `welcome`.

        With `shares` (which is settable) workers of this host read blocks from our memory.
        """
        self._worker, self._secret = worker, secret
        self._changed, self._broken, self._flows = changed, broken, flows
        self._landings = Landings(self._notify)
        self._lock = threading.RLock()  # of all below
        self._peers: dict[str, Peer] = {}
        self._wanted: dict[str, int] = {}  # peers that are to be met, by the serial of that wish
        self._addresses = dict[str, str]()
        self._serials = count(1)
        self._oldest = dict[str, int]()  # the meeting with a peer that is not over yet
        self._closed = threading.Event()
        self._generation = -1
        self._front: Front | None = None
        self.address, self.shares = "", True
        self._segment: Own | None = None
        self._reach: Reach | None = None
        if host:
            listener = socket.create_server((host, 0), backlog=BACKLOG)
            self.address = f"{host}:{listener.getsockname()[1]}"
            self._front = Front(listener, Door(worker, lambda _: secret), self.welcome)
        # Flows that wait for room, by the number of their file; our thread begins with the first.
        self._poll, self._awaited, self._sends = (
            select.epoll(),
            dict[int, tuple[Peer, Flow]](),
            False,
        )

    # --- meeting ----------------------------------------------------------------------------------

    def reach(self) -> None:
        """Exchange blocks with workers of other hosts through NIXL, where they do so too."""
        try:
            with self._lock:
                own = self._segment = self._segment or Own()
            self._reach = Reach(self._worker, self._secret, own)
        except OSError as error:
            log.warning("%s: blocks go over sockets", error)
            return
        with self._lock:
            met = [(peer, peer.flows[0]) for peer in self._peers.values() if peer.flows]
        for peer, flow in met:  # meanwhile
            peer.tries = True
            self._answer(peer, flow, own.said)
            if peer.unread is not None:
                self._read(peer, flow, peer.unread)

    def offer(self) -> bytes:
        return self.address.encode()

    def meet(self, peer: str, offered: bytes) -> None:
        """Open the first flow; of two workers, the one with the smaller name does it.

        It opens the others with the first block that has something for them.
        """
        with self._lock:
            if self._closed.is_set() or peer in self._wanted:
                return
            self._wanted[peer] = serial = next(self._serials)
            self._addresses[peer] = offered.decode()
        if peer > self._worker:
            _start(f"meet-{peer}", self._meet, peer, serial)

    def welcome(self, connection: Connection, hello: AnyMessage) -> None:
        """Receive on a flow that a peer has opened."""
        if isinstance(hello, FlowHello):
            self._receive(hello.worker, connection, hello.serial)
        else:
            connection.close()

    def _meet(self, peer: str, serial: int) -> None:
        if self._dial(peer, serial, 0):
            return
        with self._lock:
            if self._closed.is_set() or self._wanted.get(peer) != serial:
                return
            ended = self._take_out(peer)
        self._end(ended, GONE.format(peer))
        self._broken(peer)

    def _open_others(self, peer: str, serial: int) -> None:
        for flow in range(1, self._flows):
            if not self._dial(peer, serial, flow):
                return  # there is at least one

    def _dial(self, peer: str, serial: int, flow: int) -> bool:
        until_s, attempt = time.monotonic() + DIAL_S, 0
        while time.monotonic() < until_s:
            attempt += 1
            if self._closed.is_set() or self._wanted.get(peer) != serial:
                return False
            try:
                hello = FlowHello(worker=self._worker, serial=serial, flow=flow)
                connection = dial(self._addresses[peer], self._secret, hello, to=peer)
            except Refused:
                return False
            except WireError:
                self._closed.wait(min(DIAL_WAIT_S * attempt, 1.0))
                continue
            _start(f"flow-{peer}", self._receive, peer, connection, serial)
            return True
        return False

    def _join(self, name: str, connection: Connection, serial: int) -> tuple[Peer, Flow] | None:
        """Add a connection to the flows of its peer, if it is of the newest meeting."""
        older = None
        with self._lock:
            if self._is_over(name, serial):
                return None
            if self._peer(name).serial not in (0, serial):
                wanted = self._wanted.get(name)
                older = self._take_out(name)
                if wanted is not None:
                    self._wanted[name] = wanted
            self._oldest[name] = serial
        if older is not None:
            self._end(older, f"{name} has connected again, and what was under way is lost")
        with self._lock:
            if self._is_over(name, serial):  # meanwhile
                return None
            peer, flow = self._peer(name), Flow(connection)
            peer.serial = serial
            peer.flows.append(flow)
            if self.shares and len(peer.flows) == 1:
                self._offer_segment(peer)
        connection.probe()
        self._pump(peer, flow)
        return peer, flow

    def _is_over(self, name: str, serial: int) -> bool:
        """Return whether this meeting with a peer takes no further connection."""
        given_up = name > self._worker and self._wanted.get(name) != serial
        return self._closed.is_set() or given_up or serial < self._oldest.get(name, 0)

    def _offer_segment(self, peer: Peer) -> None:
        try:
            self._segment = self._segment or Own()
        except OSError:
            self.shares = False  # the system has no such memory
        else:
            peer.tries = True
            peer.queue.appendleft((None, self._segment.said, []))

    def _peer(self, name: str) -> Peer:
        return self._peers.setdefault(name, Peer(name))

    # --- sending ----------------------------------------------------------------------------------

    def push(
        self, peer: str, slot: Slot, pieces: Sequence[memoryview], extra: bytes = b""
    ) -> Ticket:
        with self._lock:
            known = self._peer(peer)
            chunk_bytes = SLOT_BYTES if known.reads else CHUNK_BYTES
            chunks = chunks_of(slot, pieces, extra, chunk_bytes)
            block = Outgoing(slot, len(chunks))
            if slot.generation < self._generation or self._closed.is_set():
                block.ticket.fail(BEGUN.format(self._generation))
                return block.ticket
            known.queue.extend((block, *chunk) for chunk in chunks)
            flows = list(known.flows)
            dials = peer > self._worker and not known.reads
            widens = len(chunks) > 1 and known.narrow and dials and flows
            known.narrow &= not widens
        if widens:
            _start(f"meet-{peer}", self._open_others, peer, known.serial)
        for flow in flows:
            if known.queue:
                self._pump(known, flow)
        return block.ticket

    def _pump(self, peer: Peer, flow: Flow) -> None:
        """Send what there is room for, within bounds; our thread sends the rest."""
        while flow.sending.acquire(blocking=False):  # else who sends on it sees what is queued
            try:
                again, done = self._send_some(peer, flow)
            finally:
                flow.sending.release()
            if done:
                self._notify()
            if again:
                self._await_room(flow, peer)
                return
            if flow.over or not peer.queue:
                return

    def _send_some(self, peer: Peer, flow: Flow) -> tuple[bool, bool]:
        """Return whether there is more to send, and whether a block was completed."""
        done = False
        try:
            for _ in range(CHUNKS_PER_TURN):
                if flow.over or not (flow.rest or self._next(peer, flow)):
                    return False, done
                if not flow.connection.send_some(flow.rest):
                    return True, done
                done |= self._sent(flow)
        except WireError:
            flow.over = True  # the thread that receives sees it as well
            flow.connection.close()
            self._landings.wake()  # if it waits for a place, and reads nothing
            return False, done
        return True, done

    def _next(self, peer: Peer, flow: Flow) -> bool:
        with self._lock:
            if not peer.queue:
                return False
            flow.block, message, pieces = peer.queue.popleft()
        if isinstance(message, Chunk) and peer.reads and self._segment is not None:
            # Where no slot is free, the socket is the way.
            large = sum(piece.nbytes for piece in pieces) > SHARED_BYTES_MIN
            there = self._segment.put(peer.name, pieces, _name(message, pieces)) if large else None
            if there is not None:
                message, pieces = msgspec.structs.replace(message, there=there), []
        flow.rest = flow.connection.frame(message, pieces)
        return True

    def _sent(self, flow: Flow) -> bool:
        block, flow.block = flow.block, None
        if block is None:
            return False
        with self._lock:
            return block.sent()

    def _await_room(self, flow: Flow, peer: Peer) -> None:
        once = select.EPOLLOUT | select.EPOLLONESHOT
        with self._lock, contextlib.suppress(OSError, ValueError):  # closed, as its receiver sees
            number = flow.connection.fileno()
            known = self._awaited.get(number)
            self._awaited[number] = peer, flow
            if known is not None and known[1] is flow:
                self._poll.modify(number, once)
            else:
                self._poll.register(number, once)
            if not self._sends:
                self._sends = True
                _start("flows-send", self._send)

    def _send(self) -> None:
        while not self._closed.is_set():
            for number, _ in self._poll.poll(LOOK_S):
                found = self._awaited.get(number)
                if found is not None:
                    self._pump(*found)

    # --- receiving --------------------------------------------------------------------------------

    def land(self, peer: str, slot: Slot, into: memoryview) -> Ticket:
        return self._landings.expect(peer, slot, into.cast("B"))

    def _receive(self, name: str, connection: Connection, serial: int) -> None:
        """Receive everything that comes on a flow, until it ends."""
        joined = self._join(name, connection, serial)
        if joined is None:
            connection.close()
            return
        peer, flow = joined
        landing = Landing(self._landings, peer, flow)
        try:
            while True:
                message, payload = connection.receive(landing.place, payload_bytes_max=SLOT_BYTES)
                if isinstance(message, Chunk):
                    landing.take(message, payload.nbytes)
                    if message.there is not None:
                        self._answer(peer, flow, Freed(there=message.there))
                else:
                    self._hear(peer, flow, message)
        except Altered as error:
            log.warning(DAMAGED.format(name, error))
        except WireError:
            pass  # the usual end
        finally:
            flow.over = True
            landing.end()
            connection.close()
            self._lose(peer)

    def _hear(self, peer: Peer, flow: Flow, message: AnyMessage) -> None:
        match message:
            case Segment() if self.shares:
                self._read(peer, flow, message)
            case Readable():
                peer.reads, peer.tries = message.is_so, False
            case Freed() if self._segment is not None:
                self._segment.free(peer.name, message.there)
            case Segment():  # the socket is the way
                self._answer(peer, flow, Readable(is_so=False))
            case _:
                raise WireError(f"{peer.name} sent {type(message).__name__}")

    def _read(self, peer: Peer, flow: Flow, said: Segment) -> None:
        """Read the segment of a peer from now on, if it can be read."""
        peer.unread = said  # first, because `reach` looks for it when it is done
        try:
            self._use(peer, flow, Theirs(said))
        except (OSError, ValueError):  # it is of another host
            reach = self._reach
            if reach is None or not said.reach:
                self._answer(peer, flow, Readable(is_so=False))
                return
            peer.tried = True
            _start(f"reach-{peer.name}", self._reach_for, peer, flow, said, reach)

    def _reach_for(self, peer: Peer, flow: Flow, said: Segment, reach: Reach) -> None:
        try:
            self._use(
                peer, flow, reach.theirs(said, lambda: flow.over or flow.connection.hung_up())
            )
        except OSError as error:
            if not flow.over:
                log.warning("blocks from %s come over sockets: %s", peer.name, error)
            self._answer(peer, flow, Readable(is_so=False))
        finally:
            peer.tried = False

    def _use(self, peer: Peer, flow: Flow, segment: Theirs | Remote) -> None:
        peer.segment, peer.unread = segment, None
        if flow.over:  # what ended the meeting may have missed it
            segment.close()
        self._answer(peer, flow, Readable(is_so=True))

    def _answer(self, peer: Peer, flow: Flow, message: Segment | Readable | Freed) -> None:
        """Send a message that blocks do not hold up."""
        with self._lock:
            peer.queue.appendleft((None, message, []))
        self._pump(peer, flow)

    # --- ends -------------------------------------------------------------------------------------

    def enter(self, generation: int) -> None:
        with self._lock:
            self._generation = max(self._generation, generation)
            peers = list(self._peers.values())
        dropped = self._landings.enter(generation)
        for peer in peers:
            self._clear(peer, BEGUN.format(generation))
        self._notify()
        self._drain(dropped)

    def _drain(self, dropped: list[Berth]) -> None:
        """Wait for the rest of what has begun to come; end a meeting only if a flow is silent."""
        came = dict[Flow, int]()
        while not self._landings.unused(dropped, SILENT_S):
            before, came = came, {}
            with self._lock:
                flows = [(peer, flow) for peer in self._peers.values() for flow in peer.flows]
            for peer, flow in flows:
                if flow.berth in dropped:
                    came[flow] = flow.connection.bytes_in
                    if came[flow] == before.get(flow):
                        log.warning("%s has stopped in the middle of a block", peer.name)
                        self._lose(peer)

    def _clear(self, peer: Peer, why: str) -> None:
        """Drop what is queued of older generations; a frame that has begun is sent from a copy."""
        with self._lock:
            queued = list(peer.queue)
            peer.queue.clear()
            peer.queue.extend(each for each in queued if not self._is_old(each[0]))
            flows = list(peer.flows)
        for block, *_ in queued:
            if block is not None and self._is_old(block):
                block.ticket.fail(why)
        for flow in flows:
            with flow.sending:
                if flow.block is not None and self._is_old(flow.block):
                    flow.block.ticket.fail(why)
                    flow.rest = [memoryview(bytes(piece)) for piece in flow.rest]
            self._pump(peer, flow)

    def _is_old(self, block: Outgoing | None) -> bool:
        return block is not None and block.slot.generation < self._generation

    def forget(self, peer: str) -> None:
        with self._lock:
            ended = self._take_out(peer)
        self._end(ended, GONE.format(peer))

    def _lose(self, peer: Peer) -> None:
        """End a meeting whose connections have broken, and report it if it is wanted still."""
        with self._lock:
            if self._closed.is_set() or self._peers.get(peer.name) is not peer:
                return
            report = peer.name in self._wanted
            self._take_out(peer.name)
        self._end(peer, GONE.format(peer.name))
        if report:
            self._broken(peer.name)

    def _take_out(self, name: str) -> Peer:
        """Have no more meeting with a peer, nor the wish for one; the lock is held."""
        self._wanted.pop(name, None)
        peer = self._peers.pop(name, None) or Peer(name)
        if peer.serial:
            self._oldest[name] = peer.serial + 1
        for flow in peer.flows:
            flow.over = True
            self._awaited.pop(flow.connection.fileno(), None)
            flow.connection.close()
        return peer

    def _end(self, peer: Peer, why: str) -> None:
        """Fail what was under way in a meeting that has been taken out."""
        with self._lock:
            queued = list(peer.queue)
            peer.queue.clear()
        dropped = self._landings.forget(peer.name, why)
        for block, *_ in queued:
            if block is not None:
                block.ticket.fail(why)
        for flow in peer.flows:
            with flow.sending:
                flow.rest = []
                if flow.block is not None:
                    flow.block.ticket.fail(why)
        self._landings.unused(dropped)
        if peer.segment is not None:
            peer.segment.close()
        if self._segment is not None:
            self._segment.give_up(peer.name)
        self._notify()

    def _settle(self) -> None:
        """Wait a little for connections of NIXL that are still being made, by us or by a peer.

        UCX ends a process whose peer is gone amid that.
        """
        until_s = time.monotonic() + SETTLE_S
        while time.monotonic() < until_s:
            with self._lock:
                peers = list(self._peers.values())
            if not any((each.tries or each.tried) and each.flows for each in peers):
                return
            self._closed.wait(SETTLE_LOOK_S)

    def close(self) -> None:
        if self._reach is not None:
            self._settle()
        with self._lock:
            self._closed.set()
            peers = [self._take_out(name) for name in list(self._peers)]
        if self._front is not None:
            self._front.close()
        for peer in peers:
            self._end(peer, GONE.format(peer.name))
        if self._reach is not None:
            self._reach.close()
        if self._segment is not None:
            self._segment.close()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _name(chunk: Chunk, pieces: list[memoryview]) -> Hashable:
    """Return what is the same for a chunk that goes to several peers, and for no other."""
    where = tuple(address_of(piece) for piece in pieces)
    return (chunk.generation, chunk.step, chunk.kind, chunk.block, chunk.offset, *where)


def _start(name: str, run: Callable[..., None], *given: object) -> None:
    threading.Thread(target=run, args=given, name=name, daemon=True).start()
