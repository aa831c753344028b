"""Connections over TCP: small messages, each with its payload, sent and received without copies.

Both ends prove in a handshake that they know the same secret (`agent.net.handshake`), and every
frame after it has tags that only they can make (`agent.net.frames`). So of what a process between
the two changes, repeats, leaves out or invents, nothing is taken in: the connection breaks, and is
made again. Frames are not encrypted: whoever can read the network of a job can read its state.
"""

import contextlib
import fcntl
import os
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np

from agent import faults
from agent.checksum import Buffer
from agent.errors import Altered, Unsound, WireError
from agent.net.forks import let_go_in_forks
from agent.net.frames import HEAD_BYTES, ONE_CALL_BYTES, Tags, lengths_of
from agent.net.handshake import KEEPER, META_BYTES_MAX, Talk, decode, encode, job_of
from agent.protocol import AnyMessage, Challenge, Message
from cloud.ranges import explain, shown

PAYLOAD_BYTES_MAX = 1 << 36
MESSAGE_BYTES_MAX = 1 << 28  # from those who are let in: it names each tensor of a large model
DIAL_S = 8.0  # for the whole handshake, as the caller sees it
ALIGN_BYTES = 64  # where payloads begin in memory, as all that torch allocates does
PIECE_BYTES = 1 << 18  # summed while it is in the cache, and while more of it comes
PIECES_PER_SEND = 512  # below every system's IOV_MAX
AHEAD_BYTES = 1 << 13  # read at once where a frame begins
FREE_BYTES = 1 << 12  # every socket has room for this if nothing waits in it
UNHEARD_MAX = 4  # vain sends of the same bytes: 3 s on a quick network, more on a slow one

# How `struct tcp_info` begins: two states, then the vain retransmissions and the vain probes.
_TCP_INFO = struct.Struct("BBBB")
_PROBING = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}  # in seconds

Placer = Callable[[AnyMessage, int], memoryview | None]


def parse_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"address {address!r} is not host:port")
    return host, int(port)


class Connection:
    """One TCP connection. Any thread may send; one thread receives."""

    def __init__(
        self, sock: socket.socket, incoming: Tags | None = None, outgoing: Tags | None = None
    ) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._incoming, self._outgoing = incoming or Tags(), outgoing or Tags()
        self._until_s: float | None = None  # nothing is received after that
        self._sending = threading.Lock()  # tags are made in it, in the order of the frames
        self._early = memoryview(b"")  # what came with the bytes that were asked for
        self._partial: _Partial | None = None
        let_go_in_forks(self)
        self.bytes_in = 0  # grows with all that arrives: the sign of life that needs no message

    def probe(self) -> None:
        """Have the system ask the other machine for a sign of life while no message is sent."""
        with contextlib.suppress(OSError, AttributeError):  # closed already; or a different system
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, wanted in _PROBING.items():
                self._sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), wanted)

    @property
    def unheard(self) -> bool:
        """Whether the other machine has acknowledged nothing for some time.

        That is as far as the system says. A machine whose process reads nothing does acknowledge.
        """
        try:
            told = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except (OSError, AttributeError):  # closed, which others see; or a different system
            return False
        _, _, retransmits, probes = _TCP_INFO.unpack(told)
        return bool(max(retransmits, probes) >= UNHEARD_MAX)

    def send(self, message: Message, *payload: Buffer) -> None:
        meta = encode(message)
        pieces = [memoryview(piece).cast("B") for piece in payload if memoryview(piece).nbytes]
        with self._sending:
            try:
                pieces.insert(0, memoryview(self._outgoing.head(meta, pieces) + meta))
                if faults.trap is not None:
                    faults.trap.spring(message, self._sock, pieces)
                _send_all(self._sock, pieces)
                self._outgoing.next_frame()
            except (OSError, ValueError) as error:
                self.close()
                raise WireError(f"sending {type(message).__name__} failed: {error}") from error

    def frame(self, message: Message, payload: list[memoryview]) -> list[memoryview]:
        """Return the next frame in pieces, for `send_some`; until it is sent, send no other."""
        meta = encode(message)
        pieces = [memoryview(self._outgoing.head(meta, payload) + meta), *payload]
        self._outgoing.next_frame()
        if faults.trap is not None:
            try:
                faults.trap.spring(message, self._sock, pieces)
            except OSError as error:
                self.close()
                raise WireError(f"sending {type(message).__name__} failed: {error}") from error
        return pieces

    def send_some(self, pieces: list[memoryview]) -> bool:
        """Send what there is room for, and take it from `pieces`. Return whether nothing is left."""
        try:
            while pieces:
                sent = self._sock.sendmsg(pieces[:PIECES_PER_SEND], (), socket.MSG_DONTWAIT)
                _strike(pieces, sent)
        except BlockingIOError:
            return False
        except (OSError, ValueError) as error:
            self.close()
            raise WireError(f"sending failed: {error}") from error
        return True

    @property
    def has_early(self) -> bool:
        """Whether `receive_some` has read more than it has returned, which wakes nobody."""
        return self._early.nbytes > 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def hung_up(self) -> bool:
        """Return whether the other side has closed, although not all may be read that it sent."""
        look = select.poll()
        try:
            look.register(self._sock, select.POLLRDHUP)
        except (OSError, ValueError):  # it is closed on this side
            return True
        return bool(look.poll(0))

    def send_now(self, message: Message) -> bool:
        """Send a message if there is room for it, without waiting. Return whether it was sent."""
        meta = encode(message)
        if HEAD_BYTES + len(meta) > FREE_BYTES or faults.trap is not None:
            return False
        if not self._sending.acquire(blocking=False):
            return False
        try:
            if _unsent(self._sock):
                return False
            frame = self._outgoing.frame(meta)
            sent = self._sock.send(frame, socket.MSG_DONTWAIT)
            self._outgoing.next_frame()
            if sent < len(frame):
                self.close()  # half a message; there was room for all of it
        except (OSError, ValueError):
            return False  # the thread that sends or receives next gets the error as well
        finally:
            self._sending.release()
        return True

    def receive(
        self,
        place: Placer | None = None,
        meta_bytes_max: int = MESSAGE_BYTES_MAX,
        payload_bytes_max: int = PAYLOAD_BYTES_MAX,
    ) -> tuple[AnyMessage, memoryview]:
        """Return the next message, and its payload where `place` says or in a new buffer."""
        head = self._fill(memoryview(bytearray(HEAD_BYTES)))
        meta_bytes, payload_bytes, tag = self._lengths(head, meta_bytes_max, payload_bytes_max)
        meta = self._fill(memoryview(bytearray(meta_bytes)))
        message = self._message(head, meta, payload_bytes)
        target = place(message, payload_bytes) if place is not None and payload_bytes else None
        if target is None:
            target = self._room(message, payload_bytes)
        self._end(message, not payload_bytes or self._tag_as_filled(target) == tag)
        return message, target

    def _lengths(self, head: memoryview, meta_max: int, payload_max: int) -> tuple[int, int, bytes]:
        """Return how many bytes follow a head, message and payload, and the payload's tag."""
        meta_bytes, payload_bytes, tag = lengths_of(head)
        if meta_bytes > meta_max or payload_bytes > payload_max:
            self.close()
            raise WireError(f"a frame of {meta_bytes} + {payload_bytes} bytes is beyond the bounds")
        return meta_bytes, payload_bytes, tag

    def _message(self, head: memoryview, meta: memoryview, payload_bytes: int) -> AnyMessage:
        """Return the message of a frame that its sender made; of an unsound one, read no more."""
        if not self._incoming.is_genuine(head, meta):
            self.close()
            raise Altered("a frame was damaged, forged or repeated on its way")
        try:
            message: AnyMessage = decode(meta)
        except (ValueError, RecursionError) as error:
            if not payload_bytes and isinstance(error, msgspec.ValidationError):
                self._incoming.next_frame()
                raise _unsound(error, meta) from error
            self.close()
            raise WireError(f"a frame makes no sense: {error}") from error
        return message

    def _end(self, message: AnyMessage, intact: bool) -> None:
        """Count a frame whose payload has come, unless that is damaged."""
        if not intact:
            self.close()
            raise Altered(f"the payload of {type(message).__name__} was damaged on its way")
        self._incoming.next_frame()

    def _tag_as_filled(self, target: memoryview) -> bytes:
        """Fill `target`, and return the tag of it."""
        if target.nbytes <= ONE_CALL_BYTES:
            return self._incoming.of_pieces([self._fill(target)])
        tag = self._incoming.payload()
        for start in range(0, target.nbytes, PIECE_BYTES):
            # Summed as it comes, because summing it all at the end would look like silence.
            tag.add(self._fill(target[start : start + PIECE_BYTES]))
        return tag.result()

    def receive_some(self) -> tuple[AnyMessage, memoryview] | None:
        """Return the next message if all of it has come, without waiting; else None.

        A connection that is read so is never read by `receive`, and its frames are small enough
        for memory, because their sender is trusted with that.
        """
        while True:
            partial = self._partial
            if partial is None:
                self._partial = self._begun()
                if self._partial is None and not self._read_ahead():
                    return None
            elif partial.filled == partial.target.nbytes:
                self._partial = None
                count = partial.target.nbytes
                intact = not count or self._incoming.of_pieces([partial.target]) == partial.tag
                self._end(partial.message, intact)
                return partial.message, partial.target
            elif not (came := self._recv_now(partial.target[partial.filled :])):
                return None
            else:
                partial.filled += came

    def _begun(self) -> "_Partial | None":
        """Return the frame that begins with what came early, once its head and message are there."""
        early = self._early
        if early.nbytes < HEAD_BYTES:
            return None
        head = early[:HEAD_BYTES]
        meta_bytes, payload_bytes, tag = self._lengths(head, MESSAGE_BYTES_MAX, PAYLOAD_BYTES_MAX)
        end = HEAD_BYTES + meta_bytes
        if early.nbytes < end:
            return None
        self._early = early[end:]
        message = self._message(head, early[HEAD_BYTES:end], payload_bytes)
        target = self._room(message, payload_bytes)
        there = self._early[:payload_bytes]
        target[: there.nbytes] = there
        self._early = self._early[there.nbytes :]
        return _Partial(message, tag, target, there.nbytes)

    def _read_ahead(self) -> bool:
        """Read what has come, up to a bound, after what came early. Return whether there was any."""
        before = self._early
        lacks = lengths_of(before[:HEAD_BYTES])[0] if before.nbytes >= HEAD_BYTES else 0
        buffer = memoryview(bytearray(before.nbytes + max(lacks, AHEAD_BYTES)))
        buffer[: before.nbytes] = before
        came = self._recv_now(buffer[before.nbytes :])
        self._early = buffer[: before.nbytes + came]
        return came > 0

    def _recv_now(self, view: memoryview) -> int:
        try:
            count = self._sock.recv_into(view, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise WireError(f"receiving failed: {error}") from error
        if not count:
            raise WireError("the other side closed the connection")
        self.bytes_in += count
        return count

    def _room(self, message: AnyMessage, count: int) -> memoryview:
        try:
            return room(count)
        except MemoryError as error:
            self.close()  # the next bytes on it are the payload
            what = f"{count} bytes of {type(message).__name__}"
            raise WireError(f"there is no memory for {what}") from error

    def _fill(self, view: memoryview) -> memoryview:
        filled = 0
        while filled < view.nbytes:
            try:
                if self._until_s is not None:
                    self._sock.settimeout(_left(self._until_s))
                count = self._sock.recv_into(view[filled:])
            except OSError as error:
                raise WireError(f"receiving failed: {error}") from error
            if not count:
                raise WireError("the other side closed the connection")
            filled += count
            self.bytes_in += count
        return view

    def patience(self, wait_s: float | None) -> None:
        """Receive for so long in all from now on, or raise `WireError` if it is closed already."""
        self._until_s = None if wait_s is None else time.monotonic() + wait_s
        try:
            self._sock.settimeout(wait_s)
        except OSError as error:
            raise WireError(f"the connection is closed: {error}") from error

    def secure(self, talk: Talk) -> None:
        """Go over to the keys of this connection, because both sides have proved themselves."""
        self._incoming, self._outgoing = talk.tags("called"), talk.tags("caller")

    def close(self) -> None:
        """Close the connection for all, which wakes the threads that send or receive."""
        with contextlib.suppress(OSError):  # it was not connected any more
            self._sock.shutdown(socket.SHUT_RDWR)
        self.let_go()

    def let_go(self) -> None:
        """Close the socket in this process only; a process that shares it keeps it."""
        self._sock.close()


class _Partial:
    """A frame of which the payload has not come whole."""

    __slots__ = ("filled", "message", "tag", "target")

    def __init__(self, message: AnyMessage, tag: bytes, target: memoryview, filled: int) -> None:
        self.message, self.tag, self.target, self.filled = message, tag, target, filled


def _unsound(error: msgspec.ValidationError, meta: memoryview) -> Unsound:
    said: object = None
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        said = msgspec.msgpack.decode(meta)  # what comes after the flaw may make no sense at all
    kind = said.get("m") if isinstance(said, dict) else None
    return Unsound(f"{shown(kind)} was refused: {explain(error, said)}", said)


def room(count: int) -> memoryview:
    """Return aligned memory for a payload."""
    if not count:
        return memoryview(bytearray())  # as of most messages
    found = np.empty(count + ALIGN_BYTES, dtype=np.uint8)
    start = -found.__array_interface__["data"][0] % ALIGN_BYTES
    return found[start : start + count].data


def _unsent(sock: socket.socket) -> int:
    """Return how many bytes the other side has not acknowledged."""
    (count,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
    return int(count)


def _send_all(sock: socket.socket, pieces: list[memoryview]) -> None:
    start = 0
    while start < len(pieces):
        sent = sock.sendmsg(pieces[start : start + PIECES_PER_SEND])
        while start < len(pieces) and sent >= pieces[start].nbytes:
            sent -= pieces[start].nbytes
            start += 1
        if sent:
            pieces[start] = pieces[start][sent:]


def _strike(pieces: list[memoryview], sent: int) -> None:
    """Take the first so many bytes away."""
    whole = 0
    while whole < len(pieces) and sent >= pieces[whole].nbytes:
        sent -= pieces[whole].nbytes
        whole += 1
    del pieces[:whole]
    if sent:
        pieces[0] = pieces[0][sent:]


def _left(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("it took too long")
    return left_s


def dial(
    address: str, secret: str, hello: Message, to: str = KEEPER, wait_s: float = DIAL_S
) -> Connection:
    """Connect to `to`, prove who we are, and verify that the other side knows the secret as well."""
    until_s = time.monotonic() + wait_s
    try:
        sock = socket.create_connection(parse_address(address), timeout=wait_s)
        connection = Connection(sock)
    except OSError as error:
        raise WireError(f"no connection to {address}: {error}") from error
    try:
        connection.patience(max(0.0, until_s - time.monotonic()))
        _introduce(connection, address, Talk(secret, to, job_of(hello), b"", os.urandom(16)))
        connection.send(hello)
        connection.patience(None)
    except BaseException:
        connection.close()
        raise
    return connection


def _introduce(connection: Connection, address: str, talk: Talk) -> None:
    challenge, _ = connection.receive(None, META_BYTES_MAX, 0)
    if not isinstance(challenge, Challenge):
        raise WireError(f"{address} began with {type(challenge).__name__}, not a challenge")
    talk = talk._replace(challenge=challenge.nonce)
    connection.send(talk.proof())
    answer, _ = connection.receive(None, META_BYTES_MAX, 0)
    talk.verify_accepted(answer, address)
    connection.secure(talk)
