"""One front for every listening socket of ours: it lets in whoever proves to know the secret.

Everybody who can reach the port may connect, so a stranger must cost nothing that matters. One
thread examines all callers at once. Each has a short time for its whole handshake, and its bytes
are bounded before it has proved anything. There are places for so many callers in the handshake, in
all and for each address; if they are taken, the oldest caller loses its place, because a genuine one
needs its place for a few milliseconds. What is turned away is counted, and said once a minute.
"""

import contextlib
import errno
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from agent.net.forks import let_go_in_forks
from agent.net.handshake import Door, Examination
from agent.net.wire import Connection
from agent.protocol import AnyMessage
from cloud.open_files import Reserve, limit

log = logging.getLogger(__name__)

# A busy machine takes seconds; if places are lacking, the oldest caller goes anyhow.
HANDSHAKE_S = 8.0
PLACES_MAX = 512
RESERVED_FILES = 16
BACKLOG = 1024
ACCEPTS_PER_TURN = 64
PAUSE_S = 0.1  # in which nobody is let in, because there is no file left for it
SAID_EVERY_S = 60.0
LOOK_S = 1.0
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

Admit = Callable[[Connection, AnyMessage], None]


class Caller(NamedTuple):
    sock: socket.socket
    source: str
    until_s: float
    examination: Examination


class Turned:
    """Those turned away: said at once, then at most once a minute and with their number."""

    def __init__(self, name: str) -> None:
        self._name, self._count, self._next_s = name, 0, -SAID_EVERY_S

    def away(self, source: str, why: str) -> None:
        self._count += 1
        if time.monotonic() >= self._next_s:
            text = "%s: %d callers turned away, the newest from %s: %s"
            log.warning(text, self._name, self._count, source, why)
            self._count, self._next_s = 0, time.monotonic() + SAID_EVERY_S


class Front:
    """Callers of one listening socket; `admit` is called on a thread for each that is let in."""

    def __init__(self, listener: socket.socket, door: Door, admit: Admit) -> None:
        self._listener, self._door, self._admit = listener, door, admit
        self._places = min(PLACES_MAX, limit() // 4)
        self._places_each = max(1, self._places // 4)  # for one address
        self._waiting: dict[int, Caller] = {}  # by file number, the oldest first
        self._turned = Turned(door.name)
        self._reserve = Reserve(RESERVED_FILES)
        self._closed = threading.Event()
        self._paused_until_s = 0.0
        # Set while a thread is owed to a caller: without memory for one, its start waits for ever.
        self.owes_thread = False
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        let_go_in_forks(self)
        threading.Thread(target=self._run, name=f"front-{door.name}", daemon=True).start()

    def close(self) -> None:
        """Listen no more, and hang up on all that are in the handshake."""
        self._closed.set()
        with contextlib.suppress(OSError):  # it was not listening any more
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes our thread, too
        self._listener.close()

    def let_go(self) -> None:
        """Close everything in this process only, because it was forked from ours."""
        self._selector.close()  # and nothing else of it, because the kernel's set is shared
        self._listener.close()
        for caller in self._waiting.values():
            caller.sock.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(self._rest_s()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fd in self._waiting:  # it may have lost its place in this very turn
                    self._hear(self._waiting[key.fd])
            self._end_late()
        for caller in list(self._waiting.values()):
            self._drop(caller)
        self._selector.close()
        self._reserve.close()

    def _rest_s(self) -> float:
        now_s = time.monotonic()
        ends_s = [caller.until_s for caller in list(self._waiting.values())[:1]]
        if self._paused_until_s > now_s:
            ends_s.append(self._paused_until_s)
        return max(0.0, min([LOOK_S, *(end_s - now_s for end_s in ends_s)]))

    def _end_late(self) -> None:
        now_s = time.monotonic()
        for caller in list(self._waiting.values()):
            if caller.until_s > now_s:
                break
            self._turn_away(caller, "it took too long to prove that it knows the secret")
        if 0 < self._paused_until_s <= now_s:
            self._paused_until_s = 0.0
            with contextlib.suppress(OSError, ValueError, KeyError):  # closed meanwhile
                self._selector.register(self._listener, selectors.EVENT_READ)
        self._reserve.fill()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if self._closed.is_set():
                    return
                if error.errno in EXHAUSTED and not self._make_room(error):
                    return
                continue
            self._begin(sock, str(address[0]))

    def _make_room(self, error: OSError) -> bool:
        """Free a file for the next caller; if there is none to free, let nobody in for a moment."""
        if self._reserve.give():
            return True
        if self._waiting:
            self._turn_away(next(iter(self._waiting.values())), f"no file is left: {error}")
            return True
        self._turned.away("nobody yet", f"no file is left, so callers have to wait: {error}")
        self._paused_until_s = time.monotonic() + PAUSE_S
        self._selector.unregister(self._listener)
        return False

    def _begin(self, sock: socket.socket, source: str) -> None:
        same = [caller for caller in self._waiting.values() if caller.source == source]
        if len(same) >= self._places_each:
            self._turn_away(same[0], "too many callers from its address")
        elif len(self._waiting) >= self._places:
            self._turn_away(next(iter(self._waiting.values())), "too many callers")
        sock.setblocking(False)
        until_s = time.monotonic() + HANDSHAKE_S
        caller = Caller(sock, source, until_s, Examination(self._door))
        self._waiting[sock.fileno()] = caller
        try:
            self._selector.register(sock, selectors.EVENT_READ)
        except OSError as error:
            self._turn_away(caller, str(error))
        else:
            self._answer(caller, caller.examination.first)

    def _hear(self, caller: Caller) -> None:
        examination = caller.examination
        try:
            data = caller.sock.recv(examination.needs)
            answer = examination.take(data) if data else b""
        except BlockingIOError:
            return
        except Exception as error:  # whatever a stranger sends, this thread goes on
            self._turn_away(caller, str(error))
            return
        if not data:
            self._turn_away(caller, "it hung up")
        elif not self._answer(caller, answer):
            return
        elif examination.refusal:
            self._turn_away(caller, examination.refusal)
        elif examination.hello is not None:
            self._let_in(caller, examination.hello)

    def _answer(self, caller: Caller, answer: bytes) -> bool:
        """Send what is small enough for every empty socket, and return whether it was sent."""
        try:
            whole = not answer or caller.sock.send(answer) == len(answer)
        except OSError as error:
            self._turn_away(caller, str(error))
            return False
        if not whole:
            self._turn_away(caller, "it takes nothing")
        return whole

    def _let_in(self, caller: Caller, hello: AnyMessage) -> None:
        examination = caller.examination
        self._leave(caller)
        self.owes_thread = True
        try:
            caller.sock.setblocking(True)
            connection = Connection(caller.sock, examination.incoming, examination.outgoing)
            threading.Thread(
                target=self._admit,
                args=(connection, hello),
                name=f"caller-{self._door.name}",
                daemon=True,
            ).start()
        except OSError as error:  # it hung up just now
            self._turned.away(caller.source, str(error))
            caller.sock.close()
        except RuntimeError as error:  # no thread can be started now
            self._turned.away(caller.source, str(error))
            connection.close()
            return
        self.owes_thread = False

    def _turn_away(self, caller: Caller, why: str) -> None:
        self._turned.away(caller.source, why)
        self._drop(caller)

    def _drop(self, caller: Caller) -> None:
        self._leave(caller)
        caller.sock.close()

    def _leave(self, caller: Caller) -> None:
        del self._waiting[caller.sock.fileno()]
        with contextlib.suppress(OSError, KeyError, ValueError):  # not registered after an error
            self._selector.unregister(caller.sock)
