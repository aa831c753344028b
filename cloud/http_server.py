"""An HTTP server for ASGI applications that strangers can neither crowd out nor hold up.

It uses uvicorn's protocol only: the local cloud listens on many addresses at once, closes single
ones while it runs, and handles signals itself. uvicorn bounds neither how many connections there
are nor how long a request may be on its way, so this is done here, once for the whole process:

* a connection has `REQUEST_S_MAX` for each whole request, which has at most `HEAD_BYTES_MAX` and
  `BODY_BYTES_MAX`, and `STALL_S_MAX` to take an answer;
* with TLS, its handshake is part of the time for the first request;
* a process has at most `CONNECTIONS_MAX` of them. For a new one the connection goes that has waited
  longest for a request, so a peer that asks at once is served. If all are being answered, new ones wait
  in the system's queue.

A lack of files is waited out and not logged: at a full table asyncio logs a thousand lines a second.
"""

import asyncio
import errno
import socket
import ssl
from typing import Any

import h11
from starlette.types import ASGIApp
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

CONNECTIONS_MAX = 256
REQUEST_S_MAX = 10.0
KEEP_ALIVE_S = 2  # without a byte, between two requests
STALL_S_MAX = 10.0
HEAD_BYTES_MAX = 16_384
BODY_BYTES_MAX = 262_144
BACKLOG = 128
NO_FILES_S = 0.2  # between two looks whether another file can be opened
NO_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Crowd:
    """The connections of all servers that share it, of which there are never too many."""

    def __init__(self, connections_max: int = CONNECTIONS_MAX) -> None:
        self._connections_max = connections_max
        self._all: set[_Protocol] = set()
        self._waiting: dict[_Protocol, None] = {}  # those without a whole request, oldest first
        self._paused: set[Listener] = set()

    def __contains__(self, protocol: "_Protocol") -> bool:
        return protocol in self._all

    def has_room(self) -> bool:
        """Return whether one more may come; if not, close the one that has waited longest."""
        if len(self._all) < self._connections_max:
            return True
        if (oldest := next(iter(self._waiting), None)) is not None:
            oldest.abort()
        return False

    def is_busy(self) -> bool:
        """Return whether every connection is being answered."""
        return not self._waiting and len(self._all) >= self._connections_max

    def enter(self, protocol: "_Protocol") -> None:
        self._all.add(protocol)

    def wait(self, protocol: "_Protocol") -> None:
        self._waiting.setdefault(protocol)
        self._wake()

    def serve(self, protocol: "_Protocol") -> None:
        self._waiting.pop(protocol, None)

    def leave(self, protocol: "_Protocol") -> None:
        self._all.discard(protocol)
        self._waiting.pop(protocol, None)
        self._wake()

    def pause(self, listener: "Listener") -> None:
        self._paused.add(listener)

    def _wake(self) -> None:
        for listener in tuple(self._paused):
            self._paused.discard(listener)
            listener.resume()


CROWD = Crowd()


class Listener:
    """One address. `url` is known once it listens."""

    def __init__(
        self, app: ASGIApp, crowd: Crowd = CROWD, tls: ssl.SSLContext | None = None
    ) -> None:
        # What strangers send is worth no line in a log: "warning" has one for each bad request.
        self._config = Config(
            app,
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            http="h11",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        )
        self._config.load()
        self._state = ServerState()
        self._crowd = crowd
        self._tls = tls
        self._socket: socket.socket | None = None
        self._entering = set[asyncio.Task[Any]]()
        self.url = ""

    async def listen(self, host: str, port: int = 0) -> None:
        self.listen_on(bound(host, port))

    def listen_on(self, listening: socket.socket) -> None:
        """Serve on a socket that is bound; it is closed with this listener."""
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._socket = listening
        self.url = url_of(listening, "http" if self._tls is None else "https")
        self.resume()

    def close(self) -> None:
        """Stop listening and drop every connection, as a machine that is switched off."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        for entering in self._entering:  # a connection in its handshake is no connection yet
            entering.cancel()
        for connection in list(self._state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    def resume(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _pause(self) -> None:
        assert self._socket is not None
        asyncio.get_running_loop().remove_reader(self._socket)

    def _accept(self) -> None:
        """Take one connection; the loop calls again while more are waiting."""
        assert self._socket is not None
        if self._crowd.is_busy():
            self._pause()
            self._crowd.pause(self)
            return
        if not self._crowd.has_room():
            return  # the oldest one has gone when the loop calls again
        try:
            taken, _ = self._socket.accept()
        except OSError as error:
            if error.errno in NO_FILES:
                self._pause()
                asyncio.get_running_loop().call_later(NO_FILES_S, self.resume)
            return  # or the peer has gone, or it was an interrupt
        taken.setblocking(False)
        protocol = _Protocol(self._config, self._state, self._crowd)
        self._crowd.enter(protocol)
        task = asyncio.create_task(self._enter(protocol, taken))
        self._entering.add(task)
        task.add_done_callback(self._entering.discard)
        if self._tls is not None:
            protocol.entering = task
            self._crowd.wait(protocol)

    async def _enter(self, protocol: "_Protocol", taken: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        patience_s = None if self._tls is None else REQUEST_S_MAX
        try:
            await loop.connect_accepted_socket(
                lambda: protocol, taken, ssl=self._tls, ssl_handshake_timeout=patience_s
            )
        except (OSError, asyncio.CancelledError):  # or its place was given to a newer one
            taken.close()
            self._crowd.leave(protocol)


class _Protocol(H11Protocol):
    """A connection that has to send and take what it is there for within bounds."""

    def __init__(self, config: Config, state: ServerState, crowd: Crowd) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self._crowd = crowd
        self._body_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self.entering: asyncio.Task[None] | None = None  # as long as the handshake lasts

    def abort(self) -> None:
        if self.entering is not None:
            self.entering.cancel()
        elif self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.entering = None
        self._look()

    def data_received(self, data: bytes) -> None:
        self._body_bytes += len(data) if self.conn.their_state is h11.SEND_BODY else 0
        if self._body_bytes > BODY_BYTES_MAX:
            self.abort()
            return
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._crowd.leave(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def _look(self) -> None:
        """Note whether this connection waits for its peer; only then there is a deadline.

        Between two requests uvicorn's own timer runs, until the first byte of the next one.
        """
        if self not in self._crowd:  # the answer came after the end of the connection
            return
        closing = self.transport.is_closing()  # and what is left to send may be stuck
        stuck = closing or self.flow.write_paused
        if stuck or self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._crowd.wait(self)
            if self._deadline is None and self.timeout_keep_alive_task is None:
                after_s = STALL_S_MAX if stuck else REQUEST_S_MAX
                self._deadline = self.loop.call_later(after_s, self.abort)
        else:
            self._body_bytes = 0
            self._crowd.serve(self)
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that has the port, or raise OSError."""
    taken = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
        taken.listen(BACKLOG)
    except OSError:
        taken.close()
        raise
    return taken


def url_of(listening: socket.socket, scheme: str = "http") -> str:
    host, port = listening.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
