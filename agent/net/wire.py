"""Frames over TCP: a small message, then its payload, sent and received without copies.

    frame = meta bytes (u32) | payload bytes (u64) | crc32c of both (u32) | meta | payload

Both ends prove in the handshake that they know the job's secret (HMAC-SHA256 over both nonces and
the caller's hello), so no other process on the network is listened to. The caller has the last
word, because it may have given up meanwhile. The frames themselves are neither encrypted nor
signed: machines of one job belong on one private network.
"""

import contextlib
import fcntl
import hashlib
import hmac
import os
import socket
import struct
import termios
import threading
import weakref
from collections.abc import Callable

import msgspec
import numpy as np

from agent import faults
from agent.checksum import Buffer, crc32c
from agent.errors import Refused, Unsound, WireError
from agent.protocol import Accepted, AnyMessage, Challenge, Confirmed, Dismissal, Message, Proof
from cloud.ranges import explain, shown

META_BYTES_MAX = 1 << 24
PAYLOAD_BYTES_MAX = 1 << 36
HANDSHAKE_BYTES_MAX = 1 << 12
HANDSHAKE_S = 5.0
ALIGN_BYTES = 64  # where payloads begin in memory, as all that torch allocates does
PIECE_BYTES = 1 << 18  # summed while it is in the cache, and while more of it comes
PIECES_PER_SEND = 512  # below every system's IOV_MAX
FREE_BYTES = 1 << 12  # every socket has room for this if nothing waits in it
UNHEARD_MAX = 4  # vain sends of the same bytes: 3 s on a quick network, more on a slow one

_HEAD = struct.Struct("<IQI")
# How `struct tcp_info` begins: two states, then the vain retransmissions and the vain probes.
_TCP_INFO = struct.Struct("BBBB")
_PROBING = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}  # in seconds
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AnyMessage).decode

Placer = Callable[[AnyMessage, int], memoryview | None]


def job_secret(secret: str, job: str) -> str:
    """Return the secret of one job, derived from the deployment's: its workers know no other."""
    return hmac.new(secret.encode(), f"job {job}".encode(), hashlib.sha256).hexdigest()


def parse_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"address {address!r} is not host:port")
    return host, int(port)


class Connection:
    """One TCP connection. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._sending = threading.Lock()
        _here.add(self)
        self.bytes_in = 0  # grows with all that arrives: the sign of life that needs no message

    @property
    def local_host(self) -> str:
        return str(self._sock.getsockname()[0])

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
        meta = _encode(message)
        pieces = [memoryview(piece).cast("B") for piece in payload if memoryview(piece).nbytes]
        crc = crc32c(0, meta)
        for piece in pieces:
            crc = crc32c(crc, piece)
        head = _HEAD.pack(len(meta), sum(piece.nbytes for piece in pieces), crc)
        with self._sending:
            try:
                pieces.insert(0, memoryview(head + meta))
                if faults.trap is not None:
                    faults.trap.spring(message, self._sock, pieces)
                _send_all(self._sock, pieces)
            except (OSError, ValueError) as error:
                self.close()
                raise WireError(f"sending {type(message).__name__} failed: {error}") from error

    def send_now(self, message: Message) -> bool:
        """Send a message if there is room for it, without waiting. Return whether it was sent."""
        meta = _encode(message)
        frame = _HEAD.pack(len(meta), 0, crc32c(0, meta)) + meta
        if len(frame) > FREE_BYTES or faults.trap is not None:
            return False
        if not self._sending.acquire(blocking=False):
            return False
        try:
            if _unsent(self._sock):
                return False
            if self._sock.send(frame, socket.MSG_DONTWAIT) < len(frame):
                self.close()  # half a message; there was room for all of it
        except (OSError, ValueError):
            return False  # the thread that sends or receives next gets the error as well
        finally:
            self._sending.release()
        return True

    def receive(
        self, place: Placer | None = None, meta_bytes_max: int = META_BYTES_MAX
    ) -> tuple[AnyMessage, memoryview]:
        """Return the next message, and its payload where `place` says or in a new buffer."""
        meta_bytes, payload_bytes, crc = _HEAD.unpack(self._fill(memoryview(bytearray(_HEAD.size))))
        if meta_bytes > meta_bytes_max or payload_bytes > PAYLOAD_BYTES_MAX:
            self.close()
            raise WireError(f"a frame of {meta_bytes} + {payload_bytes} bytes is beyond the bounds")
        meta = self._fill(memoryview(bytearray(meta_bytes)))
        try:
            message = _decode(meta)
        except (msgspec.MsgspecError, RecursionError) as error:
            # Without a payload the checksum is of these bytes alone.
            whole = not payload_bytes and crc32c(0, meta) == crc
            if whole and isinstance(error, msgspec.ValidationError):
                raise _unsound(error, meta) from error
            self.close()
            raise WireError(f"a frame makes no sense: {error}") from error
        target = place(message, payload_bytes) if place is not None and payload_bytes else None
        if target is None:
            target = self._room(message, payload_bytes)
        found = crc32c(0, meta)
        for start in range(0, target.nbytes, PIECE_BYTES):
            # Summed as it comes, because summing it all at the end would look like silence.
            found = crc32c(found, self._fill(target[start : start + PIECE_BYTES]))
        if found != crc:
            self.close()
            raise WireError(f"{type(message).__name__} was damaged on its way (crc32c differs)")
        return message, target

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
                count = self._sock.recv_into(view[filled:])
            except OSError as error:
                raise WireError(f"receiving failed: {error}") from error
            if not count:
                raise WireError("the other side closed the connection")
            filled += count
            self.bytes_in += count
        return view

    def patience(self, wait_s: float | None) -> None:
        """Set how long to wait for data, or raise `WireError` if the connection was closed."""
        try:
            self._sock.settimeout(wait_s)
        except OSError as error:
            raise WireError(f"the connection is closed: {error}") from error

    def close(self) -> None:
        """Close the connection for all, which wakes the threads that send or receive."""
        with contextlib.suppress(OSError):  # it was not connected any more
            self._sock.shutdown(socket.SHUT_RDWR)
        self.let_go()

    def let_go(self) -> None:
        """Close the socket in this process only; a process that shares it keeps it."""
        self._sock.close()


def _unsound(error: msgspec.ValidationError, meta: memoryview) -> Unsound:
    said: object = None
    with contextlib.suppress(msgspec.DecodeError, ValueError, TypeError, RecursionError):
        said = msgspec.msgpack.decode(meta)  # what comes after the flaw may make no sense at all
    kind = said.get("m") if isinstance(said, dict) else None
    return Unsound(f"{shown(kind)} was refused: {explain(error, said)}", said)


_here: weakref.WeakSet[Connection] = weakref.WeakSet()


def _forked() -> None:
    """Close all connections in a process that a script has forked, because it is no worker.

    It would keep open what must break when its worker dies, and could send in the worker's name.
    """
    for connection in list(_here):
        connection.let_go()


os.register_at_fork(after_in_child=_forked)


def room(count: int) -> memoryview:
    """Return aligned memory for a payload."""
    found = np.empty(count + ALIGN_BYTES, dtype=np.uint8)
    start = -found.ctypes.data % ALIGN_BYTES
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


def _mac(secret: str, role: str, *parts: bytes) -> bytes:
    # Lengths go in as well, so that bytes cannot move from one part to the next.
    text = b"".join(struct.pack("<I", len(part)) + part for part in (role.encode(), *parts))
    return hmac.new(secret.encode(), text, hashlib.sha256).digest()


def dial(address: str, secret: str, hello: Message, wait_s: float = HANDSHAKE_S) -> Connection:
    """Connect, prove who we are, and verify that the other side knows the secret as well."""
    try:
        sock = socket.create_connection(parse_address(address), timeout=wait_s)
        connection = Connection(sock)
    except OSError as error:
        raise WireError(f"no connection to {address}: {error}") from error
    try:
        _introduce(connection, address, secret, hello)
    except BaseException:
        connection.close()
        raise
    return connection


def _introduce(connection: Connection, address: str, secret: str, hello: Message) -> None:
    challenge, _ = connection.receive(meta_bytes_max=HANDSHAKE_BYTES_MAX)
    if not isinstance(challenge, Challenge):
        raise WireError(f"{address} began with {type(challenge).__name__}, not a challenge")
    said, nonce = _encode(hello), os.urandom(16)
    mac = _mac(secret, "caller", challenge.nonce, nonce, said)
    connection.send(Proof(hello=said, nonce=nonce, mac=mac))
    answer, _ = connection.receive(meta_bytes_max=HANDSHAKE_BYTES_MAX)
    if isinstance(answer, Dismissal):
        raise Refused(f"{address} refused us: {answer.why}")
    expected = _mac(secret, "called", challenge.nonce, nonce, said)
    if not isinstance(answer, Accepted) or not hmac.compare_digest(answer.mac, expected):
        raise WireError(f"{address} does not know the job's secret")
    connection.send(Confirmed())
    connection.patience(None)


def accept(
    sock: socket.socket, secret_of: Callable[[AnyMessage], str | None]
) -> tuple[Connection, AnyMessage]:
    """Examine a caller that uses `dial`. `secret_of` returns the secret that it must know."""
    connection = Connection(sock)
    connection.patience(HANDSHAKE_S)
    try:
        hello = _examine(connection, secret_of)
    except msgspec.MsgspecError as error:
        connection.close()
        raise WireError(f"the caller's hello makes no sense: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection, hello


def _examine(connection: Connection, secret_of: Callable[[AnyMessage], str | None]) -> AnyMessage:
    nonce = os.urandom(16)
    connection.send(Challenge(nonce=nonce))
    proof, _ = connection.receive(meta_bytes_max=HANDSHAKE_BYTES_MAX)
    if not isinstance(proof, Proof):
        raise WireError(f"the caller sent {type(proof).__name__} instead of its proof")
    hello: AnyMessage = _decode(proof.hello)
    secret = secret_of(hello)
    if secret is None:
        connection.send(Dismissal(why="nobody here knows that job"))
        raise WireError("the caller asked for something that is not here")
    expected = _mac(secret, "caller", nonce, proof.nonce, proof.hello)
    if not hmac.compare_digest(proof.mac, expected):
        raise WireError("the caller does not know the job's secret")
    connection.send(Accepted(mac=_mac(secret, "called", nonce, proof.nonce, proof.hello)))
    # A caller that gave up meanwhile dials again. If it ends here, no connection is broken, because
    # nothing was sent on this one.
    confirmed, _ = connection.receive(meta_bytes_max=HANDSHAKE_BYTES_MAX)
    if not isinstance(confirmed, Confirmed):
        raise WireError(f"the caller sent {type(confirmed).__name__} before it confirmed")
    connection.patience(None)
    return hello
